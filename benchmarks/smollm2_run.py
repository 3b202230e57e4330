"""recipes/smollm2.toml for real, and whether what comes of it is what was promised.

    .venv-readers/bin/python benchmarks/smollm2_run.py --out runs/smollm2
    .venv-readers/bin/python benchmarks/smollm2_run.py --run runs/smollm2     # judge a finished run

The recipe's data must be there (recipes/smollm2/prepare.py). `compress run` is started as a user starts it; a run
that was interrupted goes on. Then report.json and the stages' records are read, and both artifacts are loaded by
transformers and by llama.cpp and compared with compress on the recipe's held-out text. llama.cpp rounds activations to
8 bits where weights are quantized, so it is held to a looser bound.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import engines
import jax
import numpy as np

from compress.align.loss import answer_log_probabilities
from compress.data.batches import PairBatches
from compress.data.rows import Rows
from compress.evaluate import open_windows
from compress.models.decoder import stack
from compress.models.folder import Model, load
from compress.recipe import load as read_recipe
from compress.schema import Recipe
from compress.settings import Common, Eval
from eval.gate import Policy, judge
from eval.metrics import CANDIDATE
from eval.preference import PairScores, preference_accuracy, preference_accuracy_gain
from eval.report import Measurement, Report, from_json

MINUTES, TOKENS, KL_RATIO = 90, 500_000, 0.5
ARTIFACTS = {
    "compressed-tensors": ("transformers", 0.995, 1e-4),
    "gguf": ("llama.cpp", 0.93, 2e-2),
}
RECIPE = Path(__file__).parents[1] / "recipes" / "smollm2.toml"


class Figure(NamedTuple):
    """A measured value, its goal in words, and whether the goal holds."""

    name: str
    value: str
    goal: str
    holds: bool


def run(recipe: Path, out: Path) -> None:
    """Run the recipe; a gate that does not pass is for the figures to tell."""
    command = [sys.executable, "-m", "compress", "run", str(recipe), "--out", str(out)]
    code = subprocess.run(command, check=False).returncode
    print(f"compress run: exit code {code}", flush=True)
    if not (out / "report.json").exists():
        raise SystemExit(code or 1)


def stage(folder: Path, name: str) -> dict:
    """What a stage recorded."""
    return json.loads((folder / name / "stage.json").read_text(encoding="utf-8"))


def measured(report: Report, name: str, model: str = CANDIDATE, baseline: str | None = None) -> Measurement:
    """The one measurement of that name."""
    (found,) = report.find(name, model, baseline)
    print(f"{name} of {model}{f' against {baseline}' if baseline else ''}: {found.value} [{found.low}, {found.high}]")
    return found


def judge_run(folder: Path, report: Report) -> list[Figure]:
    """The figures that the run itself recorded."""
    found = {path.parent.name: stage(folder, path.parent.name) for path in folder.glob("*/stage.json")}
    records = {name: record for name, record in found.items() if "seconds" in record}  # a release has none
    seconds = {name: record["seconds"] for name, record in records.items()}
    print("seconds by stage:", ", ".join(f"{name} {value:.0f}" for name, value in seconds.items()))
    minutes = sum(seconds.values()) / 60
    tokens = records["distill"]["result"]["tokens"]
    kl = {model: measured(report, "kl_mean", model, "teacher").value for model in ("cut", "distilled", CANDIDATE)}
    for name in ("perplexity_increase", "kl_mean", "quantization_error"):
        measured(report, name, CANDIDATE, "parent")
    for name in ("size_ratio", "adapter_retained", "adapter_residual"):
        measured(report, name)
    ratio = kl["distilled"] / kl["cut"] if kl["distilled"] is not None and kl["cut"] else np.nan
    measured(report, "preference_accuracy", "aligned")
    gain = measured(report, "preference_accuracy_gain", "aligned")
    low = np.nan if gain.low is None else gain.low
    verdict = judge(report, Policy.built_in())
    print(verdict.sentence())
    return [
        Figure("minutes of all stages", f"{minutes:.1f}", f"at most {MINUTES}", minutes <= MINUTES),
        Figure("distilled tokens", f"{tokens:,}", f"at least {TOKENS:,}", tokens >= TOKENS),
        Figure(
            "held-out KL to the teacher, student over undistilled cut",
            f"{ratio:.3f}",
            f"at most {KL_RATIO}",
            ratio <= KL_RATIO,
        ),
        Figure("lower end of the gain in held-out preference accuracy", f"{low:.4f}", "above 0", low > 0),
        Figure("gate under the built-in policy", verdict.status, "pass", verdict.exit_code == 0),
    ]


def artifact_prefers(model: Model, recipe: Recipe, aligned: dict) -> None:
    """Tell the preference accuracy of the artifact: what quantizing left of the alignment."""
    assert recipe.align is not None
    settings = recipe.align
    batches = PairBatches(
        Rows(settings.valid, kinds=("preference",)),
        model.tokenizer,
        size=settings.global_batch,
        length=settings.sequence_length,
        room=settings.max_prompt,
        epochs=1,
        shuffle=False,
    )
    stacked = stack(model.config, model.weights)
    score = jax.jit(lambda stacked, rows: answer_log_probabilities(model.config, stacked, rows))
    found: dict[str, list] = {"chosen": [], "rejected": []}
    for pairs in batches:
        real = np.asarray(pairs.rows.mask.sum(1) > 0)
        for side, values in zip(found, np.asarray(score(stacked, pairs.rows))):
            found[side].extend(values[real])
    count = len(aligned["chosen"])
    reference = {name: np.asarray(aligned[name]) for name in ("reference_chosen", "reference_rejected")}
    scores = PairScores(**{side: np.asarray(values[:count]) for side, values in found.items()}, **reference)
    accuracy, gain = preference_accuracy(scores), preference_accuracy_gain(scores)
    print(
        f"preference accuracy of the artifact: {accuracy.value:.4f} [{accuracy.low:.4f}, {accuracy.high:.4f}]; "
        f"gain over the model before DPO {gain.value:.4f} [{gain.low:.4f}, {gain.high:.4f}]"
    )


def read_back(folder: Path, settings: Eval) -> list[Figure]:
    """Both artifacts in the engines that they are for."""
    figures = []
    for kind, (engine, top1, kl) in ARTIFACTS.items():
        files = folder / kind
        model = load(files)
        held_out = open_windows({CANDIDATE: model}, settings, Common()).windows
        start: dict[str, Callable[[], engines.Engine]] = {
            "transformers": lambda files=files: engines.transformers(files),
            "llama.cpp": lambda files=files: engines.llama_cpp(next(files.glob("*.gguf")), settings.window),
        }
        found = engines.agreement(model, start[engine](), held_out)
        print(f"{kind} in {engine}: {found}", flush=True)
        figures += [
            Figure(
                f"{kind}, top-1 agreement with {engine}", f"{found.top1:.4f}", f"at least {top1}", found.top1 >= top1
            ),
            Figure(f"{kind}, mean KL to {engine}", f"{found.kl:.3g}", f"at most {kl:g}", found.kl <= kl),
        ]
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--out", type=Path, default=Path("runs/smollm2"), help="where to run (%(default)s)")
    where.add_argument("--run", type=Path, help="judge this finished run instead")
    parser.add_argument("--recipe", type=Path, default=RECIPE)
    parser.add_argument("--tokens", type=int, default=4096, help="held-out tokens to compare engines on (%(default)s)")
    arguments = parser.parse_args()
    folder = arguments.run or arguments.out
    if not arguments.run:
        run(arguments.recipe, folder)
    recipe = read_recipe(Recipe, folder / "recipe.toml")
    assert recipe.eval is not None
    report = from_json((folder / "report.json").read_bytes())
    figures = judge_run(folder, report)
    aligned = json.loads((folder / "align" / "preference.json").read_text(encoding="utf-8"))
    artifact = folder / "artifact" if (folder / "artifact").exists() else folder / "export"
    artifact_prefers(load(artifact / "compressed-tensors"), recipe, aligned)
    settings = Eval(data=recipe.eval.data, window=recipe.eval.window, max_tokens=arguments.tokens)
    figures += read_back(artifact, settings)
    for figure in figures:
        print(f"{figure.name}: {figure.value}, goal {figure.goal}")
    return 0 if all(figure.holds for figure in figures) else 1


if __name__ == "__main__":
    sys.exit(main())
