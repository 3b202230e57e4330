"""`compress run`: the stages of a recipe in order, each in a folder of its own, skipped where it is done.

A stage's key is the hash of its settings and of the contents of the files that it reads. `stage.json` is written last,
so its presence means that the stage is done, and its key that nothing has changed since.
"""

import dataclasses
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from compress import gate
from compress.align import stage as align
from compress.artifact import read_json, write_artifact
from compress.distill import stage as distill
from compress.distill.student import make_student
from compress.errors import RecipeError
from compress.evaluate import measure, retention, summary
from compress.generate.sampling import GREEDY
from compress.generate.stage import continue_texts
from compress.keys import plain
from compress.locate import located
from compress.models.folder import Model, load
from compress.quantize import stage as quantize
from compress.recipe import to_toml
from compress.schema import Recipe
from compress.settings import Common, Eval, Export
from eval import metrics
from eval.gate import Policy, judge
from eval.html import to_html
from eval.markdown import to_markdown
from eval.preference import PairScores
from eval.report import Check, Curve, ErrorRow, Generation, Report, from_json, to_json
from export.atomic import atomic_file, atomic_folder

# Raised when a stage's files change their meaning, so that old ones are made anew.
VERSION = 1
RECORD = "stage.json"
PROMPTS = 3
PROMPT_WORDS = 12


def run(recipe: Recipe, common: Common) -> dict[str, Any]:
    """Run every stage of the recipe that isn't done, judge the result, and release it if it passes.

    Raises:
      RecipeError: the recipe lacks what a stage needs; before any stage runs.
    """
    assert common.out is not None
    work = Run(recipe, common)
    common.out.mkdir(parents=True, exist_ok=True)
    with atomic_file(common.out / "recipe.toml", force=True) as path:
        path.write_text(to_toml(recipe), encoding="utf-8")
    for name in work.stages:
        work.run_stage(name)
    return work.judge()


class Run:
    """A run folder and the stages that fill it."""

    def __init__(self, recipe: Recipe, common: Common):
        """Chain the stages: what one writes, the next reads.

        Raises:
          RecipeError: there is nothing to do, or a stage has no model to read.
        """
        assert common.out is not None
        self.recipe, self.common, self.folder = recipe, common, common.out
        self.began = time.monotonic()
        self.stages = [name for name in ("distill", "align", "quantize", "export", "eval") if getattr(recipe, name)]
        if not self.stages:
            raise RecipeError("the recipe has no stage; give it a table such as [distill], [quantize] or [eval]")
        self.settings: dict[str, Any] = {}
        before: str | None = None
        for name in self.stages:
            settings = located(getattr(recipe, name))
            if hasattr(settings, "model") and settings.model is None:
                if before is None:
                    raise RecipeError(f"[{name}] needs a model, since no stage before it makes one")
                settings = dataclasses.replace(settings, model=str(self.folder / before))
            self.settings[name] = settings
            before = name if name != "eval" else before
        if "export" in self.stages and "eval" in self.stages:
            # The gate's metrics are those of the exported files.
            first = self.settings["export"].format[0]
            self.settings["eval"] = dataclasses.replace(self.settings["eval"], model=str(self.export_folder(first)))

    def export_folder(self, name: str) -> Path:
        """Where one exported format lies."""
        return self.folder / "export" / name

    def run_stage(self, name: str) -> None:
        """Run a stage, unless it is done and nothing that it reads has changed."""
        folder = self.folder / name
        key = self.key(name)
        if not self.common.force and self.record(name).get("key") == key:
            self.common.progress.say(f"{name}: done already, {folder}")
            self.event(name, "skipped")
            return
        self.common.progress.say(f"{name}: {folder}")
        self.event(name, "started")
        began = time.monotonic()
        common = dataclasses.replace(self.common, out=folder, force=True)
        steps: dict[str, Callable[..., dict[str, Any]]] = {
            "distill": distill.run,
            "align": align.run,
            "quantize": quantize.run,
            "export": self.export,
            "eval": self.evaluate,
        }
        result = steps[name](self.settings[name], common)
        seconds = round(time.monotonic() - began, 3)
        record = {"key": key, "version": VERSION, "seconds": seconds, "result": result}
        with atomic_file(folder / RECORD, force=True) as path:
            path.write_text(json.dumps(record, indent=2, default=str) + "\n", encoding="utf-8")
        self.event(name, "finished", seconds=seconds)

    def record(self, name: str) -> dict[str, Any]:
        """A stage's stage.json; empty if it isn't done."""
        path = self.folder / name / RECORD
        try:
            return read_json(path)
        except (FileNotFoundError, json.JSONDecodeError):
            return {}

    def key(self, name: str) -> str:
        """Hash of all that decides what a stage writes."""
        settings = self.settings[name]
        inputs = {"seed": self.common.seed, "dtype": self.common.dtype, "data": plain(self.recipe.data)}
        if name == "eval":
            # The report tells of every stage, so it is as old as the oldest of them.
            inputs["stages"] = {stage: self.record(stage).get("key") for stage in self.stages if stage != "eval"}
            inputs["generate"] = plain(self.recipe.generate)
        files = {str(path): hash_of(path) for path in paths_in(settings)}
        text = json.dumps([name, VERSION, plain(settings), inputs, files], sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()

    def event(self, stage: str, what: str, **facts: Any) -> None:
        """Append a line to events.jsonl."""
        line = {"seconds": round(time.monotonic() - self.began, 3), "stage": stage, "event": what, **facts}
        with (self.folder / "events.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def export(self, settings: Export, common: Common) -> dict[str, Any]:
        """Every format in a folder of its own, reloaded and compared."""
        assert common.out is not None and settings.model is not None
        model = load(settings.model)
        with atomic_folder(common.out, force=True) as folder:
            formats = {}
            for name in settings.format:
                common.progress.say(f"export: {name}")
                formats[name] = write_artifact(model, name, folder / name, settings, self.recipe.name or "model")
        return {"out": str(common.out), "formats": formats}

    def evaluate(self, settings: Eval, common: Common) -> dict[str, Any]:
        """The report on the exported files, written as report.json."""
        assert common.out is not None and settings.model is not None
        models = self.models(settings)
        parts: dict[str, Any] = {"evidence": {}}
        if "align" in self.stages and "quantize" in self.stages:
            kept = retention(load(self.folder / "align"), models[metrics.CANDIDATE], settings, common)
            parts["evidence"]["retention"] = kept
            pairs = self.folder / "align" / align.PAIRS
            if pairs.exists():
                columns = read_json(pairs)
                beta = columns.pop("beta")
                scores = {name: np.asarray(values) for name, values in columns.items()}
                parts["evidence"]["preference"] = {"aligned": PairScores(**scores, beta=beta)}
        report = measure(
            models, settings, common, name=self.recipe.name or "run", **parts, **self.story(models, settings)
        )
        with atomic_folder(common.out, force=True) as folder:
            (folder / "report.json").write_text(to_json(report), encoding="utf-8")
        return summary(report)

    def models(self, settings: Eval) -> dict[str, Model]:
        """The models to compare, by their names in `eval.metrics`, and further exported formats by theirs."""
        assert settings.model is not None
        found = {metrics.CANDIDATE: load(settings.model)}
        for name in self.settings["export"].format[1:] if "export" in self.stages else ():
            found[name] = load(self.export_folder(name))
        parent = settings.baseline or (self.settings["quantize"].model if "quantize" in self.stages else None)
        if parent:
            found[metrics.PARENT] = load(parent).merged().dequantized()
        teacher = settings.teacher or (self.settings["distill"].teacher if "distill" in self.stages else None)
        if teacher:
            found[metrics.TEACHER] = load(teacher).merged().dequantized()
        if "distill" in self.stages:
            spec = self.settings["distill"].student
            found[metrics.CUT] = make_student(spec, found[metrics.TEACHER], seed=self.common.seed)
            found[metrics.DISTILLED] = load(self.folder / "distill")
        return found

    def story(self, models: dict[str, Model], settings: Eval) -> dict[str, Any]:
        """What else the report tells: curves, layer errors, generations, the artifacts' checks."""
        curves = []
        for name in ("distill", "align"):
            if name in self.stages:
                curves += curves_of(name, read_json(self.folder / name / distill.TRACE))
        layers = []
        if "quantize" in self.stages:
            layers = [ErrorRow(**row) for row in read_json(self.folder / "quantize" / quantize.LAYERS)]
        checks = []
        for name, facts in self.record("export").get("result", {}).get("formats", {}).items():
            detail = f"reloaded logits differ by at most {facts['logit_difference']:.3g}; {facts['bytes']:,} bytes"
            checks.append(Check(name, True, detail))
        return {
            "curves": curves,
            "layers": layers,
            "checks": checks,
            "generations": self.generations(models, settings),
            "stages": [*self.stages],
        }

    def generations(self, models: dict[str, Model], settings: Eval) -> list[Generation]:
        """Each model's continuation of the recipe's prompts, or of the held-out text's first words."""
        table = self.recipe.generate
        prompts = list(table.prompt) if table else first_words(settings.data[0])
        shown = [name for name in (metrics.TEACHER, metrics.PARENT, metrics.CANDIDATE) if name in models]
        texts = {
            name: continue_texts(
                models[name],
                prompts,
                max_tokens=table.max_tokens if table else 40,
                sampling=GREEDY,
                seed=self.common.seed,
            )
            for name in shown
        }
        return [Generation(prompt, {name: texts[name][i] for name in shown}) for i, prompt in enumerate(prompts)]

    def judge(self) -> dict[str, Any]:
        """Judge the report, write it for people, and release the artifact if it passes."""
        if "eval" not in self.stages:
            return {"run": str(self.folder), "stages": self.stages}
        report = from_json((self.folder / "eval" / "report.json").read_bytes())
        policy_file = self.recipe.gate.policy if self.recipe.gate else None
        policy = gate.read_policy(policy_file)
        verdict = judge(report, policy)
        write_reports(self.folder, report, verdict, policy)
        self.event("gate", verdict.status)
        released = self.release(verdict.exit_code == 0)
        return {
            **summary(report),
            "rules": [{"rule": o.subject, "status": o.status, "why": o.why} for o in verdict.outcomes],
            "verdict": verdict.sentence(),
            "report": str(self.folder / "report.html"),
            "artifact": str(released) if released else "none: the gate did not pass",
            "seconds": round(time.monotonic() - self.began, 1),
            "exit_code": verdict.exit_code,
        }

    def release(self, passed: bool) -> Path | None:
        """`artifact/` holds the exported files if and only if the gate has passed them."""
        artifact, exported = self.folder / "artifact", self.folder / "export"
        if artifact.exists():
            shutil.rmtree(artifact)
        if not passed or "export" not in self.stages:
            return None
        with atomic_folder(artifact) as folder:
            for source in sorted(exported.rglob("*")):
                target = folder / source.relative_to(exported)
                if source.is_dir():
                    target.mkdir(parents=True, exist_ok=True)
                elif source.name != RECORD:
                    link(source, target)
        return artifact


def link(source: Path, target: Path) -> None:
    """The same file under another name; a copy where the file system has no links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def write_reports(folder: Path, report: Report, verdict: Any, policy: Policy) -> None:
    """report.json, report.html and report.md beside each other."""
    texts = {"json": to_json(report), "html": to_html(report, verdict), "md": to_markdown(report, verdict)}
    for ending, text in texts.items():
        with atomic_file(folder / f"report.{ending}", force=True) as path:
            path.write_text(text, encoding="utf-8")


def curves_of(stage: str, trace: dict[str, Any]) -> list[Curve]:
    """Training loss, validation loss, and what else a preference stage validates."""
    rows = {"loss": trace["steps"], "validation loss": trace["validations"]}
    curves = [
        Curve(stage, name, [int(row["step"]) for row in kept], [row["loss"] for row in kept])
        for name, kept in rows.items()
    ]
    for name in ("accuracy", "margin", "kl_to_reference"):
        kept = [row for row in trace["validations"] if name in row]
        if kept:
            curves.append(Curve(stage, name, [int(row["step"]) for row in kept], [row[name] for row in kept]))
    return curves


def first_words(path: Path) -> list[str]:
    """Beginnings of the first rows of held-out text, as prompts."""
    from compress.data.rows import Rows

    texts = []
    for row in Rows([path], bad_rows="skip"):
        text = row.values.get("text")
        if isinstance(text, str):
            texts.append(" ".join(text.split()[:PROMPT_WORDS]))
        if len(texts) == PROMPTS:
            break
    return texts


def paths_in(settings: Any) -> list[Path]:
    """Files and folders that the settings name and that exist."""
    found: list[Path] = []
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        for item in value if isinstance(value, tuple) else (value,):
            if isinstance(item, str | Path) and str(item) and Path(item).exists():
                found.append(Path(item))
    return found


def hash_of(path: Path) -> str:
    """SHA-256 of a file, or of all files of a folder; what a stage writes of its own course is left out."""
    digest = hashlib.sha256()
    for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
        if file.is_file() and file.name not in (RECORD, distill.TRACE):
            digest.update(str(file.relative_to(path)).encode() + b"\0")
            with file.open("rb") as stream:
                digest.update(hashlib.file_digest(stream, "sha256").digest())
    return digest.hexdigest()
