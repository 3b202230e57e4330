"""What reading costs a process: each process of a run reads and tokenizes all rows, and keeps a buffer of them.

    python benchmarks/reading.py

The rows are the quickstart's conversations, again and again, in its tokenizer, packed into rows of 512 tokens. Memory
is by how much the process has grown once a buffer is read, shuffled and packed; seconds are of the processor.
"""

import argparse
import itertools
import tempfile
import time
from pathlib import Path

from compress.data.batches import BUFFER, Batches
from compress.data.rows import Rows
from compress.machine import resident_bytes
from compress.models.folder import load

QUICKSTART = Path(__file__).parent.parent / "recipes" / "quickstart"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=100_000, help="to read (%(default)s)")
    count = parser.parse_args().rows
    tokenizer = load(str(QUICKSTART / "teacher")).tokenizer
    lines = (QUICKSTART / "data" / "chats-train.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.jsonl"
        path.write_text("".join(itertools.islice(itertools.cycle(lines), count)), encoding="utf-8")
        batches = Batches(Rows((path,)), tokenizer, size=8, length=512, buffer=BUFFER)
        before, began = resident_bytes(), time.process_time()
        next(batches)
        seconds, grown = time.process_time() - began, resident_bytes() - before
        read = batches.rows.quarantine.read
        tokens = sum(map(len, batches.examples())) / count
    print(f"{read} rows of {tokens:.0f} tokens: {seconds:.1f} s, {grown / 1e6:.0f} MB")
    full = grown / (read * tokens) * BUFFER / 1e6
    print(f"a million rows: {seconds / read * 1e6:.0f} s; a full buffer of {BUFFER / 1e6:.1f}M tokens: {full:.0f} MB")


if __name__ == "__main__":
    main()
