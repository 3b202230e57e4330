"""A checkpoint of 13.5 GB through `compress quantize`, disk to disk: memory, and bytes a second beside those of `cp`.

    python benchmarks/stream_7b.py --folder scratch

In the folder, which needs 31 GB, a checkpoint of Llama 7B's shapes is made once, random and seeded, in bfloat16. It is
copied with `cp`, and rounded to nearest in 4 bits and groups of 128, from caches that hold none of it to files that are
on the disk (fsync). The memory is the peak of what is resident, mapped files included (VmHWM). Bytes a second are those
of the checkpoint over the seconds of the whole command. What was written, but for the checkpoint, is removed.
"""

import argparse
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import ml_dtypes
import numpy as np

from compress.models import read_config
from compress.models.decoder import shapes
from export.checkpoint import Checkpoint, read_files, write_config
from export.safetensors import write_tensors

TOKENIZER = Path(__file__).parents[1] / "recipes" / "quickstart" / "teacher"
MEMORY_GOAL, SPEED_GOAL = 1.5, 0.5
SHARD = 1 << 30
CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}


def make(folder: Path, layers: int) -> None:
    """Write the checkpoint."""
    config = CONFIG | {"num_hidden_layers": layers}
    rng = np.random.default_rng(0)
    drawn = (0.02 * rng.standard_normal(1 << 24, np.float32)).astype(ml_dtypes.bfloat16)

    def tensors() -> Iterator[tuple[str, np.ndarray]]:
        for name, shape in shapes(read_config(config)).items():
            size = int(np.prod(shape))
            start = int(rng.integers(len(drawn)))
            yield name, np.resize(np.roll(drawn, start), size).reshape(shape)

    half = folder.with_name(f"{folder.name}.half")
    shutil.rmtree(half, ignore_errors=True)
    half.mkdir(parents=True)
    write_tensors(half, tensors(), SHARD)
    write_config(Checkpoint(config, {}, read_files(TOKENIZER)), half, "bfloat16")
    half.rename(folder)


def forget(folder: Path) -> None:
    """Put a folder's files on the disk, and out of the page cache."""
    for path in [*folder.rglob("*"), folder]:
        handle = os.open(path, os.O_RDONLY)
        os.fsync(handle)
        if path.is_file():
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)


def peak_of(process: subprocess.Popen) -> int:
    """Wait for a process; the most bytes that were resident, as the kernel counted until it was last asked."""
    peak = 0
    while process.poll() is None:
        try:
            said = Path(f"/proc/{process.pid}/status").read_text()
        except (FileNotFoundError, ProcessLookupError):
            said = ""
        peak = max([peak, *(1024 * int(line.split()[1]) for line in said.splitlines() if line.startswith("VmHWM"))])
        time.sleep(0.02)
    if process.returncode:
        raise SystemExit(f"{process.args}: exit code {process.returncode}")
    return peak


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--layers", type=int, default=32, help="fewer, to try it (%(default)s)")
    arguments = parser.parse_args()
    model, copy, out = (arguments.folder / f"{name}-{arguments.layers}" for name in ("model", "copy", "out"))
    if not model.exists():
        make(model, arguments.layers)
    size = sum(path.stat().st_size for path in model.iterdir())
    print(f"{size / 1e9:.2f} GB", flush=True)

    forget(model)
    began = time.perf_counter()
    subprocess.run(["cp", "-r", model, copy], check=True)
    forget(copy)
    copied = size / (time.perf_counter() - began)
    shutil.rmtree(copy)
    print(f"cp: {copied / 1e6:.0f} MB/s", flush=True)

    forget(model)
    command = [sys.executable, "-m", "compress", "quantize", "--model", str(model), "--method", "rtn"]
    command += ["--group-size", "128", "--out", str(out)]
    began = time.perf_counter()
    peak = peak_of(subprocess.Popen(command, stdout=subprocess.DEVNULL))
    seconds = time.perf_counter() - began
    shutil.rmtree(out)
    print(f"compress quantize: {seconds:.1f} s, {size / seconds / 1e6:.0f} MB/s", flush=True)
    share = size / seconds / copied
    print(f"peak resident memory in GB: {peak / 1e9:.2f}, goal {MEMORY_GOAL}")
    print(f"bytes a second over those of cp: {share:.2f}, goal {SPEED_GOAL}")
    return 0 if peak < MEMORY_GOAL * 1e9 and share >= SPEED_GOAL else 1


if __name__ == "__main__":
    sys.exit(main())
