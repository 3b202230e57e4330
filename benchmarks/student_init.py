"""What a student starts from: fresh weights, an even cut, the important layers, or the important channels.

    python benchmarks/student_init.py

Students of about one size are distilled from the quickstart's teacher with the quickstart's settings, on the same
batches, and scored on its held-out speeches: the KL of the teacher to each, before distillation and after.
"""

import argparse
import dataclasses
import json
import sys
import tempfile
import time
from pathlib import Path

from compress.data.split import training_and_held_out
from compress.distill.stage import distill
from compress.distill.student import initial_student
from compress.evaluate import chunks, open_windows
from compress.models.folder import Model, load, parameter_count
from compress.recipe import load as read_recipe
from compress.schema import Recipe
from compress.settings import Common, Eval
from eval import divergence
from eval.metrics import CANDIDATE, TEACHER
from eval.scores import score

RECIPE = Path(__file__).parent.parent / "recipes" / "quickstart.toml"
FRESH = "fresh weights"
CUTS = ("layers:3", "cut:layers=3@importance", "cut:hidden=144,ffn=320")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", type=Path, default=RECIPE)
    parser.add_argument("--steps", type=int, default=60, help="of distillation (%(default)s)")
    parser.add_argument("--tokens", type=int, default=8192, help="held-out tokens to score (%(default)s)")
    parser.add_argument("--students", nargs="+", default=CUTS, help="cuts to compare with a fresh student")
    arguments = parser.parse_args()
    settings = read_recipe(Recipe, arguments.recipe).distill
    assert settings is not None
    settings = dataclasses.replace(settings, steps=arguments.steps, epochs=None, valid_every=arguments.steps)
    teacher = load(settings.teacher).merged().dequantized()
    models: dict[str, Model] = {TEACHER: teacher}
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "config.json"
        config.write_text(json.dumps(teacher.hf | {"num_hidden_layers": teacher.config.num_hidden_layers // 2}))
        for name in (FRESH, *arguments.students):
            began = time.perf_counter()
            spec = str(config) if name == FRESH else name
            start = initial_student(dataclasses.replace(settings, student=spec), Common(), teacher)
            made = time.perf_counter() - began
            rows, valid = training_and_held_out(settings.data, settings.valid)
            trained, _, facts = distill(teacher, start, rows, valid, settings=settings, common=Common())
            models |= {f"{name}, before": start, f"{name}, after": trained}
            print(
                f"{name}: made in {made:.1f} s, distilled on {facts['tokens']:,} tokens "
                f"in {time.perf_counter() - began - made:.0f} s",
                flush=True,
            )
    scored = Eval(data=settings.valid, window=settings.sequence_length, max_tokens=arguments.tokens)
    held_out = open_windows({CANDIDATE: teacher}, scored, Common())
    names = [name for name in models if name != TEACHER]
    scores = score(chunks(models, held_out.windows, Common(), "eval"), [(TEACHER, name) for name in names])
    kl = {name: divergence.kl_mean(scores[name], TEACHER).value for name in names}
    print(f"{'student':28} {'parameters':>10} {'KL before':>10} {'KL after':>10}")
    for name in (FRESH, *arguments.students):
        size = parameter_count(models[f"{name}, after"])
        print(f"{name:28} {size:10,} {kl[f'{name}, before']:10.4f} {kl[f'{name}, after']:10.4f}")
    ratio = min(kl[f"{name}, after"] for name in arguments.students) / kl[f"{FRESH}, after"]
    print(f"held-out KL to the teacher, best cut over fresh weights: {ratio:.3f}, goal below 1")
    return 0 if ratio < 1 else 1


if __name__ == "__main__":
    sys.exit(main())
