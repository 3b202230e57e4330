"""GPTQ on SmolLM2-135M against what llm-compressor's GPTQ reaches: time, memory, perplexity and KL.

    python benchmarks/gptq_smollm2.py --model offgrid.gguf --calibration calib.txt --held-out heldout.txt

`compress quantize` is run as a user runs it, once symmetric and once asymmetric, 4 bits in groups of 32, on 32 x 512
tokens. Scored are the first 16,384 tokens of the held-out text in windows of 512 joined end to end, no BOS, 511 scored
tokens a window; KL is that of the float model to the quantized one. llm-compressor's figures were measured that way.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from compress.evaluate import chunks, open_windows
from compress.models.folder import load
from compress.settings import Common, Eval
from eval import divergence, perplexity
from eval.metrics import CANDIDATE, PARENT
from eval.scores import score

KL_GOALS = {"symmetric": 0.190, "asymmetric": 0.086}
WINDOW, TOKENS = 512, 16384


class Cost(NamedTuple):
    """What a command took: seconds of wall and of both cores' time, and the most memory it held, in GiB."""

    wall: float
    cpu: float
    memory: float


def quantize(arguments: argparse.Namespace, scheme: str, out: Path) -> Cost:
    """Run `compress quantize`, its loading and writing included."""
    command = [sys.executable, "-m", "compress", "quantize", "--model", str(arguments.model), "--out", str(out)]
    command += ["--bits", "4", "--group-size", str(arguments.group_size), "--method", arguments.method]
    command += ["--calibration", str(arguments.calibration), "--calibration-tokens", str(arguments.calibration_tokens)]
    command += ["--sequence-length", str(WINDOW), f"--{scheme}", "--heal-passes", str(arguments.heal_passes)]
    began = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)}: exit code {process.returncode}")
    return Cost(time.perf_counter() - began, used.ru_utime + used.ru_stime, used.ru_maxrss / (1 << 20))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="model folder or GGUF file, not on a 4-bit grid")
    parser.add_argument("--calibration", type=Path, required=True)
    parser.add_argument("--held-out", type=Path, required=True)
    parser.add_argument("--method", choices=("gptq", "autoround", "awq", "rtn"), default="gptq")
    parser.add_argument("--heal-passes", type=int, default=3, help="%(default)s")
    parser.add_argument("--group-size", type=int, default=32)
    parser.add_argument("--calibration-tokens", type=int, default=32 * WINDOW)
    parser.add_argument("--tokens", type=int, default=TOKENS, help="of the held-out text (%(default)s)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        models = {PARENT: load(arguments.model).merged().dequantized()}
        for scheme in KL_GOALS:
            cost = quantize(arguments, scheme, Path(folder) / scheme)
            print(
                f"{scheme} {arguments.method}, groups of {arguments.group_size}: {cost.wall:.0f} s "
                f"({cost.cpu:.0f} s of processor time), peak {cost.memory:.2f} GiB",
                flush=True,
            )
            models[scheme] = load(Path(folder) / scheme)
        settings = Eval(data=(arguments.held_out,), window=WINDOW, max_tokens=arguments.tokens)
        held_out = open_windows(models | {CANDIDATE: models[PARENT]}, settings, Common())
        scores = score(chunks(models, held_out.windows, Common(), "eval"), [(PARENT, scheme) for scheme in KL_GOALS])
    convention = held_out.convention
    print(f"{convention.name}, {convention.tokens:,} tokens of {convention.data}")
    print(f"before: perplexity {perplexity.perplexity(scores[PARENT]).value:.3f}")
    found = {}
    for scheme in KL_GOALS:
        ours = scores[scheme]
        found[scheme] = divergence.kl_mean(ours, PARENT).value
        print(
            f"{scheme}: perplexity {perplexity.perplexity(ours).value:.3f}, KL {found[scheme]:.4f}, "
            f"top-1 agreement {divergence.top1_agreement(ours, PARENT).value:.4f}"
        )
    for scheme, goal in KL_GOALS.items():
        print(f"{scheme} KL in nats: {found[scheme]:.4f}, goal {goal}")
    return 0 if all(found[scheme] <= goal for scheme, goal in KL_GOALS.items()) else 1


if __name__ == "__main__":
    sys.exit(main())
