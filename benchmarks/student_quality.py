"""Tokens that `compress distill` needs, as it comes, for the student that a plain torch loop makes.

    .venv-readers/bin/python benchmarks/student_quality.py

The torch loop (peers/torch_student.py) distils every second layer of the quickstart's teacher by the KL over the whole
vocabulary at temperature 2, with AdamW at 3e-4 on a cosine. `compress distill` is given the teacher, the text and a
number of steps, and nothing else; batches and rows are as large. Both are scored by `compress` on the same held-out
tokens. For each seed, ever larger shares of the torch loop's tokens are tried until the student is as near to the
teacher, each share a run of its own.
"""

import argparse
import dataclasses
import json
import math
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from compress.data.examples import example
from compress.data.rows import Rows
from compress.distill.settings import Distill
from compress.evaluate import chunks, open_windows
from compress.models.folder import Model, load
from compress.settings import Common, Eval
from eval import divergence
from eval.metrics import CANDIDATE, TEACHER
from eval.scores import score

QUICKSTART = Path(__file__).parent.parent / "recipes" / "quickstart"
PEER = Path(__file__).parent / "peers" / "torch_student.py"
DEFAULTS = Distill(teacher="", data=())
SHARES = (1 / 4, 3 / 8, 1 / 2, 1.0)
GOAL = 0.5


def run(command: list[str]) -> str:
    """A command's standard output."""
    done = subprocess.run([sys.executable, *command], stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: exit code {done.returncode}")
    return done.stdout


def torch_student(arguments: argparse.Namespace, ids: Path, seed: int, out: Path) -> Model:
    """What the torch loop makes, with the tokenizer that it did not need."""
    settings = {
        "teacher": arguments.teacher,
        "ids": ids,
        "rows": DEFAULTS.global_batch,
        "length": DEFAULTS.sequence_length,
        "steps": arguments.steps,
        "warmup": arguments.steps // 5,  # the share that `compress` takes of a run this short
        "learning-rate": arguments.learning_rate,
        "temperature": 2.0,
        "seed": seed,
        "out": out,
    }
    run([str(PEER), *(str(word) for name, value in settings.items() for word in (f"--{name}", value))])
    return dataclasses.replace(load(out), files=load(arguments.teacher).files)


def our_student(arguments: argparse.Namespace, steps: int, seed: int, out: Path) -> tuple[Model, int]:
    """What `compress distill` makes by default, and the tokens that it learned from."""
    command = ["-m", "compress", "distill", "--teacher", str(arguments.teacher), "--data", *map(str, arguments.data)]
    told = run([*command, "--steps", str(steps), "--seed", str(seed), "--out", str(out), "--json"])
    return load(out), json.loads(told)["tokens"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--teacher", type=Path, default=QUICKSTART / "teacher", help="a Llama folder")
    parser.add_argument("--data", type=Path, nargs="+", default=[QUICKSTART / "data" / "train.jsonl"])
    parser.add_argument("--held-out", type=Path, nargs="+", default=[QUICKSTART / "data" / "valid.jsonl"])
    parser.add_argument("--tokens", type=int, default=16384, help="held-out tokens to score (%(default)s)")
    parser.add_argument("--steps", type=int, default=64, help="of the torch loop (%(default)s)")
    parser.add_argument("--learning-rate", type=float, default=3e-4, help="of the torch loop (%(default)s)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    arguments = parser.parse_args()
    teacher = load(arguments.teacher)
    scored = Eval(data=tuple(arguments.held_out), window=DEFAULTS.sequence_length, max_tokens=arguments.tokens)
    windows = open_windows({CANDIDATE: teacher}, scored, Common()).windows

    def kl(student: Model) -> float:
        models = {TEACHER: teacher, CANDIDATE: student}
        scores = score(chunks(models, windows, Common(), "eval"), [(TEACHER, CANDIDATE)])
        return divergence.kl_mean(scores[CANDIDATE], TEACHER).value

    needed = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        text = [example(row, teacher.tokenizer).tokens for row in Rows(arguments.data)]
        np.save(folder / "ids.npy", np.concatenate(text))
        for seed in arguments.seeds:
            goal = kl(torch_student(arguments, folder / "ids.npy", seed, folder / f"torch-{seed}"))
            theirs = arguments.steps * DEFAULTS.global_batch * DEFAULTS.sequence_length
            print(f"seed {seed}, torch loop: {theirs:,} tokens, held-out KL {goal:.4f}", flush=True)
            needed.append(math.inf)
            for share in SHARES:
                steps = max(1, int(share * arguments.steps))
                student, tokens = our_student(arguments, steps, seed, folder / f"ours-{seed}-{steps}")
                found = kl(student)
                print(f"seed {seed}, compress: {tokens:,} tokens, held-out KL {found:.4f}", flush=True)
                if found <= goal:
                    needed[-1] = tokens / theirs
                    break
    worst = max(needed)
    print(f"tokens to the torch loop's held-out KL, over its own: {worst:.3f}, goal {GOAL}")
    return 0 if worst <= GOAL else 1


if __name__ == "__main__":
    sys.exit(main())
