"""GPTQ on SmolLM2-135M beside llm-compressor's: seconds and memory, everything included.

    python benchmarks/gptq_time.py --model offgrid.gguf --calibration calib.txt --llmcompressor peer/bin/python

Both quantize the same weights to 4 bits in groups of 32, symmetric, on the same 32 x 512 tokens. `compress quantize` is
run as a user runs it; its time is that of the whole command: start, compilation, reading and writing. The peer has its
own Python; it reads the model as a float folder that is made here, and its time is that of its calibration and rounding
alone, without loading or saving. The memory is the peak of what was resident.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from gptq_smollm2 import WINDOW, quantize

from compress.data.rows import Rows
from compress.models.folder import load, parameter_count
from compress.quantize.settings import Quantize
from compress.quantize.stage import calibration_batches
from export.safetensors import write

PEER = Path(__file__).parent / "peers" / "llmcompressor_gptq.py"
TIME_GOAL, MEMORY_GOAL = 0.5, 1.5


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="model folder or GGUF file")
    parser.add_argument("--calibration", type=Path, required=True, help="plain text")
    parser.add_argument("--llmcompressor", type=Path, help="a Python that has it; without, ours alone is run")
    parser.add_argument("--calibration-tokens", type=int, default=32 * WINDOW)
    arguments = parser.parse_args()
    arguments.method, arguments.group_size, arguments.heal_passes = "gptq", 32, 0
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        ours = quantize(arguments, "symmetric", folder / "ours")
        print(f"compress: {ours.wall:.1f} s ({ours.cpu:.0f} s of processor time), {ours.memory:.2f} GiB", flush=True)
        model = load(arguments.model).merged().dequantized()
        memory = ours.memory * (1 << 30) / (4 * parameter_count(model))
        time_held, share = True, ""
        if arguments.llmcompressor is not None:
            write(model.checkpoint, folder / "float", dtype="float32")
            settings = Quantize(sequence_length=WINDOW)
            tokens = arguments.calibration_tokens
            batches = calibration_batches(model, Rows(arguments.calibration), tokens, settings, 0)
            np.save(folder / "ids.npy", np.concatenate([batch.tokens for batch in batches]).astype(np.int64))
            command = [str(arguments.llmcompressor), str(PEER), str(folder / "float"), str(folder / "ids.npy")]
            said = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
            theirs = json.loads(said.splitlines()[-1])
            print(
                f"llm-compressor: {theirs['wall']:.1f} s ({theirs['cpu']:.0f} s), {theirs['memory']:.2f} GiB",
                flush=True,
            )
            time_held = ours.wall <= TIME_GOAL * theirs["wall"]
            share = f"seconds over those of llm-compressor: {ours.wall / theirs['wall']:.2f}, goal {TIME_GOAL}"
    print(f"peak memory over the float32 model's size: {memory:.2f}, goal {MEMORY_GOAL}")
    if share:
        print(share)
    return 0 if time_held and memory <= MEMORY_GOAL else 1


if __name__ == "__main__":
    sys.exit(main())
