"""What 4 bits cost a distilled student: rounded after distillation, rounded in each step of it, and with adapters.

    python benchmarks/qad.py

The quickstart's student is distilled twice, with the same steps on the same batches: as floats, which are then rounded
to nearest, and with `landing = "fake_quantize"`. Then adapters are distilled on the rounded student, with as many steps
again. Scored is the KL of the teacher to each on held-out speeches.
"""

import argparse
import dataclasses
import sys
import time
from pathlib import Path

from compress.data.split import training_and_held_out
from compress.distill.form import spec_of
from compress.distill.stage import distill
from compress.distill.student import initial_student
from compress.evaluate import chunks, open_windows
from compress.models.folder import load
from compress.quantize.base import packed_base
from compress.recipe import load as read_recipe
from compress.schema import Recipe
from compress.settings import Common, Eval
from eval import divergence
from eval.metrics import CANDIDATE, TEACHER
from eval.scores import score

RECIPE = Path(__file__).parent.parent / "recipes" / "quickstart.toml"
FLOATS, ROUNDED, QAD, ADAPTERS = (
    "floats",
    "floats, rounded to nearest",
    "rounded in each step",
    "adapters on the rounded",
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", type=Path, default=RECIPE)
    parser.add_argument("--steps", type=int, default=100, help="of each distillation (%(default)s)")
    parser.add_argument("--bits", type=int, choices=(4, 8), default=4)
    parser.add_argument("--group-size", type=int, default=32)
    parser.add_argument("--asymmetric", action="store_true")
    parser.add_argument("--tokens", type=int, default=16384, help="held-out tokens to score (%(default)s)")
    arguments = parser.parse_args()
    plain = read_recipe(Recipe, arguments.recipe).distill
    assert plain is not None
    plain = dataclasses.replace(plain, steps=arguments.steps, epochs=None, valid_every=arguments.steps)
    grid = {"bits": arguments.bits, "group_size": arguments.group_size, "symmetric": not arguments.asymmetric}
    qad = dataclasses.replace(plain, landing="fake_quantize", **grid)
    teacher = load(plain.teacher).merged().dequantized()
    start = initial_student(plain, Common(), teacher)
    models = {TEACHER: teacher}

    def train(name, student, settings):
        began = time.perf_counter()
        rows, valid = training_and_held_out(settings.data, settings.valid)
        models[name], trace, _ = distill(teacher, student, rows, valid, settings, Common())
        took = time.perf_counter() - began
        print(f"{name}: validation loss {trace.best['loss']:.4f}, {took:.0f} s", flush=True)

    train(FLOATS, start, plain)
    models[ROUNDED] = packed_base(models[FLOATS], spec_of(qad))
    train(QAD, start, qad)
    train(ADAPTERS, models[ROUNDED], dataclasses.replace(plain, rank=16))
    scored = Eval(data=plain.valid, window=plain.sequence_length, max_tokens=arguments.tokens)
    held_out = open_windows({CANDIDATE: teacher}, scored, Common())
    names = [name for name in models if name != TEACHER]
    scores = score(chunks(models, held_out.windows, Common(), "eval"), [(TEACHER, name) for name in names])
    kl = {name: divergence.kl_mean(scores[name], TEACHER).value for name in names}
    for name in names:
        print(f"{name:28} KL {kl[name]:.4f}")
    print(f"held-out KL to the teacher, {QAD} over {ROUNDED}: {kl[QAD] / kl[ROUNDED]:.3f}, goal below 1")
    return 0 if kl[QAD] < kl[ROUNDED] else 1


if __name__ == "__main__":
    sys.exit(main())
