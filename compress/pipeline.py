"""`compress run`: the stages of a recipe in order, each in a folder of its own, skipped where it is done.

A stage's key is the hash of its settings and of the contents of the files that it reads. `stage.json` is written last,
so its presence means that the stage is done, and its key that nothing has changed since.
"""

import contextlib
import copy
import dataclasses
import hashlib
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from compress import gate
from compress.align import stage as align
from compress.artifact import check_of, read_json, write_artifact
from compress.data.rows import QUARANTINE, Rows, keep_quarantine
from compress.display import to_json
from compress.distill import cache_stage
from compress.distill import stage as distill
from compress.distill.settings import CacheTeacher
from compress.distill.student import initial_student
from compress.errors import RecipeError
from compress.evaluate import measure, open_windows, retention, summary
from compress.generate.sampling import GREEDY
from compress.generate.stage import continue_texts
from compress.keys import keys
from compress.locate import located
from compress.models.folder import Model, load
from compress.preflight import preflight
from compress.quantize import stage as quantize
from compress.quantize.account import read_quantization
from compress.recipe import to_dict, to_toml
from compress.record import RECORD, TRACE, VERSION, contents_of, hash_of, read_record
from compress.release import put, release, withdraw, write_reports
from compress.schema import Recipe
from compress.settings import Common, Data, Eval, Export
from compress.train.mesh import mesh_of_devices
from compress.train.processes import first_says, is_first, meet
from compress.train.trace import tell
from eval import metrics
from eval.gate import Verdict, judge
from eval.preference import PairScores
from eval.report import Curve, ErrorRow, Event, Generation, Report, from_json
from eval.report import to_json as report_to_json
from export.atomic import atomic_folder
from export.errors import OutputExists

EVENTS = "events.jsonl"
# What a run writes, beside a folder for each stage.
WRITTEN = ("recipe.toml", "report.json", "report.html", "report.md", "artifact", QUARANTINE)
# The stages that all processes work on; the others are the first one's.
TRAINING: dict[str, Callable[..., dict[str, Any]]] = {"distill": distill.run, "align": align.run}
STAGES = ("cache_teacher", "distill", "align", "quantize", "export", "eval")
# What [cache_teacher] has of [distill].
SHARED = ("teacher", "data", "valid", "sequence_length", "temperature")
PROMPTS = 3
PROMPT_WORDS = 12


def run(recipe: Recipe, common: Common) -> dict[str, Any]:
    """Run every stage of the recipe that isn't done, judge the result, and release it if it passes.

    Raises:
      RecipeError: the recipe lacks what a stage needs; before any stage runs.
      OutputExists: the folder is not a run's, and holds what a run would replace.
    """
    assert common.out is not None
    work = Run(recipe, common)
    if not is_first():
        return work.assist()
    work.claim()
    put(common.out / "recipe.toml", to_toml(recipe))
    for name in work.stages:
        work.run_stage(name)
    work.gather_quarantines()
    result = work.judge()
    meet()  # JAX ends processes whose first is gone, and those that have ended before it
    return result


class Run:
    """A run folder and the stages that fill it."""

    def __init__(self, recipe: Recipe, common: Common):
        """Chain the stages: what one writes, the next reads.

        Raises:
          RecipeError: there is nothing to do, a stage has no model to read, or the mesh does not fit the devices.
        """
        assert common.out is not None
        progress = copy.copy(common.progress)
        progress.listener = self.hear if is_first() else None
        self.recipe, self.folder = recipe, common.out
        self.common = dataclasses.replace(common, progress=progress)
        self.began = time.monotonic()
        self.stages = [name for name in STAGES if getattr(recipe, name)]
        if not self.stages:
            raise RecipeError("the recipe has no stage; give it a table such as [distill], [quantize] or [eval]")
        self.settings: dict[str, Any] = {}
        before: str | None = None
        for name in self.stages:
            settings = located(self.own_settings(name))
            if hasattr(settings, "model") and settings.model is None:
                if before is None:
                    raise RecipeError(f"[{name}] needs a model, since no stage before it makes one")
                settings = dataclasses.replace(settings, model=str(self.folder / before))
            self.settings[name] = settings
            before = name if name not in ("cache_teacher", "eval") else before
        if "export" in self.stages and "eval" in self.stages:
            # The gate's metrics are those of the exported files.
            first = self.settings["export"].format[0]
            self.settings["eval"] = dataclasses.replace(self.settings["eval"], model=str(self.export_folder(first)))
        preflight(self.settings, recipe.data, self.policy_file)
        mesh_of_devices(common.mesh)  # of all stages the evaluation, the last one, may be the first to need it

    def own_settings(self, name: str) -> Any:
        """A stage's table; [cache_teacher] reads what [distill] reads, which learns from what it writes.

        Raises:
          RecipeError: the two tables do not go together, or there are several processes.
        """
        cache, distillation = self.recipe.cache_teacher, self.recipe.distill
        if cache is None or name not in ("cache_teacher", "distill"):
            return getattr(self.recipe, name)
        if distillation is None or distillation.teacher_cache is not None:
            why = "there is no [distill]" if distillation is None else "teacher_cache in [distill] names one"
            raise RecipeError(f"[cache_teacher] makes a cache for [distill], and {why}; leave it out")
        if jax.process_count() > 1:
            raise RecipeError(
                "[cache_teacher] works in one process; make the cache with compress cache-teacher, and name it as "
                "teacher_cache in [distill]"
            )
        if name == "distill":
            return dataclasses.replace(distillation, teacher_cache=self.folder / "cache_teacher")
        shared = {key: value for key in SHARED if (value := getattr(distillation, key)) is not None}
        for key, value in shared.items():
            if getattr(cache, key) not in (value, keys(CacheTeacher)[key].default):
                there = ", ".join(map(str, value)) if isinstance(value, tuple) else value
                raise RecipeError(f"[cache_teacher] {key}: in a run it is that of [distill], {there}; leave it out")
        return dataclasses.replace(cache, **shared)

    @property
    def policy_file(self) -> Path | None:
        """The policy that the recipe names; None stands for the built-in one."""
        return self.recipe.gate.policy if self.recipe.gate else None

    def export_folder(self, name: str) -> Path:
        """Where one exported format lies."""
        return self.folder / "export" / name

    def claim(self) -> None:
        """Make the folder, or take it where an earlier run has left its events: a run replaces without asking.

        Raises:
          OutputExists: it holds something of somebody else's that the run would replace.
        """
        events = self.folder / EVENTS
        if not events.exists():
            taken = [name for name in (*self.stages, *WRITTEN) if os.path.lexists(self.folder / name)]
            if taken:
                raise OutputExists(f"{self.folder}: holds {', '.join(taken)}, and no run's events; give another --out")
            self.folder.mkdir(parents=True, exist_ok=True)
            events.touch()

    def run_stage(self, name: str) -> None:
        """Run a stage, unless it is done and nothing that it reads has changed."""
        folder = self.folder / name
        key = self.key(name)
        done = not self.common.force and self.record(name).get("key") == key
        if first_says(done) if name in TRAINING else done:
            self.common.progress.say(f"{name}: done already, {folder}")
            self.event(name, "skipped")
            return
        self.common.progress.say(f"{name}: {folder}")
        self.event(name, "started")
        began = time.monotonic()
        common = dataclasses.replace(self.common, out=folder, force=True)
        steps: dict[str, Callable[..., dict[str, Any]]] = {
            "cache_teacher": cache_stage.run,
            **TRAINING,
            "quantize": quantize.run,
            "export": self.export,
            "eval": self.evaluate,
        }
        try:
            result = steps[name](self.settings[name], common)
        except BaseException as error:
            with contextlib.suppress(OSError):  # where the disk is full, the event is not what to report
                self.event(name, "stopped", error=type(error).__name__)
            raise
        took = round(time.monotonic() - began, 3)
        put(folder / RECORD, to_json({"key": key, "version": VERSION, "seconds": took, "result": result}) + "\n")
        for row in self.trace(name).get("validations", ()):
            self.event(name, "validated", **row)
        for row in self.trace(name).get("events", ()):
            self.event(name, row["event"], **{key: value for key, value in row.items() if key != "event"})
        self.event(name, "finished", took=took)

    def assist(self) -> dict[str, Any]:
        """What a process does that is not the first: its share of the stages that train."""
        for name, stage in TRAINING.items():
            if name in self.stages and not first_says(False):
                stage(self.settings[name], dataclasses.replace(self.common, out=self.folder / name, force=True))
        meet()
        return {"run": str(self.folder)}

    def record(self, name: str) -> dict[str, Any]:
        """A stage's stage.json; empty if it isn't done."""
        return read_record(self.folder / name / RECORD)

    def trace(self, name: str) -> dict[str, Any]:
        """The steps and validations of a stage that trains."""
        path = self.folder / name / TRACE
        return read_json(path) if path.exists() else {}

    def key(self, name: str) -> str:
        """Hash of all that decides what a stage writes."""
        settings = self.settings[name]
        inputs: dict[str, Any] = {"dtype": self.common.dtype}
        if name != "cache_teacher":  # what a teacher says is not drawn
            inputs["seed"] = self.common.seed
        inputs["data"] = to_dict(self.recipe.data)
        if name == "eval":
            # The report tells of every stage, so it is as old as the oldest of them.
            inputs["stages"] = {stage: self.record(stage).get("key") for stage in self.stages if stage != "eval"}
            inputs["generate"] = to_dict(self.recipe.generate) if self.recipe.generate else None
            # It is about the exported files of all formats, and any of them may have been touched since.
            inputs["exported"] = hash_of(self.folder / "export") if "export" in self.stages else None
        text = json.dumps([name, VERSION, contents_of(settings), inputs], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def event(self, stage: str, what: str, **facts: Any) -> None:
        """Append a line to events.jsonl."""
        line = {"seconds": round(time.monotonic() - self.began, 3), "stage": stage, "event": what, **facts}
        with (self.folder / EVENTS).open("a", encoding="utf-8") as file:
            file.write(to_json(line, indent=None) + "\n")

    def hear(self, stage: str, done: int, total: int, **figures: float) -> None:
        """A step of a stage is a line of events.jsonl."""
        self.event(stage, "step", step=done, of=total, **figures)

    def gather_quarantines(self) -> None:
        """Put the rows that any stage skipped, with the stage's name, into the run's quarantine.jsonl."""
        lines = []
        for name in self.stages:
            path = self.folder / name / QUARANTINE
            if path.exists():
                rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
                lines += [json.dumps({"stage": name, **row}, ensure_ascii=False) + "\n" for row in rows]
        put(self.folder / QUARANTINE, "".join(lines))
        if lines:
            self.common.progress.warn(f"{len(lines)} rows skipped; {self.folder / QUARANTINE} lists them")

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
        held_out = open_windows(models, settings, common)
        evidence: dict[str, Any] = {}
        if "align" in self.stages:
            evidence["preference"] = self.preference()
            if "quantize" in self.stages:
                landed = models[metrics.CANDIDATE]
                evidence["retention"] = retention(load(self.folder / "align"), landed, held_out, common)
        story = self.story(models, settings)
        report = measure(models, held_out, common, name=self.recipe.name or "run", evidence=evidence, **story)
        with atomic_folder(common.out, force=True) as folder:
            (folder / "report.json").write_text(report_to_json(report), encoding="utf-8")
            skipped = keep_quarantine(folder, held_out.rows)
        return {**summary(report), "rows": held_out.rows.quarantine.counts(), **skipped}

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
            source = self.settings["distill"].teacher
            whole = found[metrics.TEACHER] if teacher == source else load(source).merged().dequantized()
            found[metrics.CUT] = initial_student(self.settings["distill"], self.common, whole)
            found[metrics.DISTILLED] = load(self.folder / "distill")
        return found

    def preference(self) -> dict[str, PairScores]:
        """What the align stage has kept of its held-out pairs; nothing of other rows."""
        pairs = self.folder / "align" / align.PAIRS
        if not pairs.exists():
            return {}
        columns = read_json(pairs)
        beta = columns.pop("beta")
        return {"aligned": PairScores(**{name: np.asarray(values) for name, values in columns.items()}, beta=beta)}

    def story(self, models: dict[str, Model], settings: Eval) -> dict[str, Any]:
        """What else the report tells: curves, layer errors, generations, the artifacts' checks."""
        curves = []
        for name in ("distill", "align"):
            if name in self.stages:
                curves += curves_of(name, self.trace(name))
        layers, record = [], None
        if "quantize" in self.stages:
            record = read_quantization(self.folder / "quantize")
            layers = [ErrorRow(**row) for row in read_json(self.folder / "quantize" / quantize.LAYERS)]
        formats = self.settings["export"].format if "export" in self.stages else ()
        return {
            "curves": curves,
            "layers": layers,
            "record": record,
            "checks": [check_of(self.export_folder(name)) for name in formats],
            "generations": self.generations(models, settings),
            "stages": [*self.stages],
        }

    def generations(self, models: dict[str, Model], settings: Eval) -> list[Generation]:
        """Each model's continuation of the recipe's prompts, or of the held-out text's first words."""
        table = self.recipe.generate
        prompts = list(table.prompt) if table else first_words(settings.data, self.recipe.data)
        if not prompts:
            return []
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
        verdict = judge(report, gate.read_policy(self.policy_file))
        write_reports(self.folder, report, verdict)
        self.event("gate", verdict.status)
        return {
            **summary(report),
            **gate.facts(verdict),
            "report": str(self.folder / "report.html"),
            "artifact": self.release(report, verdict),
            "seconds": round(time.monotonic() - self.began, 1),
        }

    def release(self, report: Report, verdict: Verdict) -> str:
        """Release the exported files if and only if the gate has passed them; says where, or why not."""
        artifact = self.folder / "artifact"
        if verdict.exit_code or "export" not in self.stages:
            withdraw(artifact)
            return "none: the gate did not pass" if verdict.exit_code else "none: the recipe has no [export]"
        # Left alone where it is what this report and verdict have released before.
        told = json.dumps([self.record("export").get("key"), self.record("eval").get("key"), gate.facts(verdict)])
        key = hashlib.sha256(told.encode()).hexdigest()
        if read_record(artifact / RECORD).get("key") != key:
            release(self.folder / "export", artifact, report, verdict)
            put(artifact / RECORD, to_json({"key": key, "version": VERSION, "verdict": verdict.status}) + "\n")
        return str(artifact)


def curves_of(stage: str, trace: dict[str, Any]) -> list[Curve]:
    """Training loss with what the guards did, validation loss, and what else a preference stage validates."""
    rows = {"loss": trace["steps"], "validation loss": trace["validations"]}
    curves = [
        Curve(stage, name, [int(row["step"]) for row in kept], [row["loss"] for row in kept])
        for name, kept in rows.items()
    ]
    curves[0].events.extend(Event(event["step"], tell(event)) for event in trace["events"])
    for name in ("accuracy", "margin", "kl_to_reference"):
        kept = [row for row in trace["validations"] if name in row]
        if kept:
            curves.append(Curve(stage, name, [int(row["step"]) for row in kept], [row[name] for row in kept]))
    return curves


def first_words(paths: tuple[Path, ...], data: Data) -> list[str]:
    """Beginnings of the first rows of held-out text, as prompts; none where the rows are not text."""
    texts = []
    for row in Rows(paths, columns=data.columns, bad_rows=data.bad_rows):
        words = str(row.values.get("text", "")).split()
        if words:
            texts.append(" ".join(words[:PROMPT_WORDS]))
        if len(texts) == PROMPTS:
            break
    return texts
