"""Kill a distillation at any moment, run it again, and compare what it ends in with a run that was never killed.

    python benchmarks/kills.py --count 100

A child distils a small student from the quickstart's teacher and saves often. It is stopped at a moment drawn
uniformly between its first step and its end; whether a checkpoint is half-written then is seen in its folder; then it
is killed (SIGKILL) and started again. What is compared, bit for bit: the weights that are kept, and the last
checkpoint's weights, optimizer state, cursor in the data and trace. Randomness comes from seed, step and row, so it
has no state of its own.
"""

import argparse
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp

from compress.data.rows import Rows
from compress.distill.settings import Distill
from compress.distill.stage import distill
from compress.distill.student import make_student
from compress.models.folder import load
from compress.progress import Progress
from compress.settings import Common
from compress.train.course import open_checkpoints

QUICKSTART = Path(__file__).parents[1] / "recipes" / "quickstart"
STEPS, SAVE_EVERY = 60, 3
WRITING_GOAL = 0.3  # of the kills, inside a checkpoint write
STARTED, ENDED = "training", "digest"


def child(folder: Path) -> None:
    """Distil, and print a digest of all that the run ended in."""
    teacher = load(QUICKSTART / "teacher").merged().dequantized()
    student = make_student("layers:2", teacher, seed=0)
    text = (QUICKSTART / "data" / "train.jsonl",)
    settings = Distill(
        teacher="", data=text, sequence_length=32, global_batch=2, steps=STEPS, valid_every=20, save_every=SAVE_EVERY
    )
    progress = Progress(quiet=True)
    progress.listener = lambda stage, done, total, **figures: print(STARTED, done, flush=True)
    common = Common(out=folder / "student", progress=progress)
    rows, valid = Rows(text), Rows(QUICKSTART / "data" / "valid.jsonl")
    checkpoints = open_checkpoints(settings, common)
    trained, _, _ = distill(teacher, student, rows, valid, settings, common, checkpoints)
    last = checkpoints.steps()[-1]
    about = checkpoints.about(last)
    checkpoints.close()
    for rows_of in (about["trace"]["steps"], about["trace"]["validations"]):
        for row in rows_of:
            row.pop("seconds", None)
    with ocp.StandardCheckpointer() as checkpointer:
        arrays = checkpointer.restore(checkpoints.folder / "steps" / str(last) / "arrays")
    digest = hashlib.sha256(json.dumps([last, about], sort_keys=True).encode())
    for path, leaf in [*jax.tree_util.tree_leaves_with_path(arrays), *sorted(trained.weights.items())]:
        digest.update(f"{path}{leaf.dtype}{leaf.shape}".encode() + np.asarray(leaf).tobytes())
    print(ENDED, digest.hexdigest(), flush=True)


def start(folder: Path) -> subprocess.Popen:
    """A child, training in that folder."""
    return subprocess.Popen(
        [sys.executable, __file__, "--child", str(folder)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def line(process: subprocess.Popen, word: str) -> str:
    """Read until a line that begins with the word; the rest of that line."""
    for text in process.stdout:
        if text.startswith(word):
            return text[len(word) :].strip()
    raise SystemExit(process.stderr.read())


def whole(folder: Path) -> tuple[str, float]:
    """A run that is left alone: its digest, and the seconds from its first step to its end."""
    process = start(folder)
    line(process, STARTED)
    began = time.monotonic()
    digest = line(process, ENDED)
    took = time.monotonic() - began
    process.wait()
    return digest, took


def killed(folder: Path, after: float) -> tuple[str, bool] | None:
    """A run killed so many seconds after its first step, and run again: its digest; whether a save was cut short.

    None where it had ended by then: it may be faster than the one that was timed.
    """
    process = start(folder)
    line(process, STARTED)
    time.sleep(after)
    if process.poll() is not None:
        return None
    process.send_signal(signal.SIGSTOP)
    writing = any(folder.glob("student.checkpoints/steps/*tmp*"))
    process.kill()
    process.wait()
    again = start(folder)
    digest = line(again, ENDED)
    again.wait()
    return digest, writing


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100, help="kills (%(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        child(arguments.child)
        return 0
    draw, began = random.Random(arguments.seed), time.monotonic()
    same = writing = 0
    with tempfile.TemporaryDirectory() as scratch:
        os.environ["JAX_COMPILATION_CACHE_DIR"] = str(Path(scratch) / "compiled")
        whole(Path(scratch) / "warm-up")
        expected, seconds = whole(Path(scratch) / "whole")
        print(f"{STEPS} steps, a checkpoint every {SAVE_EVERY}: {seconds:.1f} s from the first step to the end")
        for number in range(1, arguments.count + 1):
            found = None
            while found is None:
                folder = Path(tempfile.mkdtemp(dir=scratch))
                found = killed(folder, draw.uniform(0, seconds))
            digest, inside = found
            same, writing = same + (digest == expected), writing + inside
            print(f"kill {number}: {'the same' if digest == expected else 'ANOTHER'} end", flush=True)
    print(f"kills inside a checkpoint write: {writing}, goal {round(WRITING_GOAL * arguments.count)}")
    print(f"seconds: {time.monotonic() - began:.0f}")
    print(f"identical endings: {same}, goal {arguments.count}")
    return 0 if same == arguments.count and writing >= WRITING_GOAL * arguments.count else 1


if __name__ == "__main__":
    sys.exit(main())
