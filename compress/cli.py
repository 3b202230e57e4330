"""The command line: resolve settings, call the stage, print what it returns. Work is imported only where it is done."""

import contextlib
import errno
import json
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

if TYPE_CHECKING:
    from compress.schema import Recipe
    from compress.settings import Common

# A bug is not a verdict: 1 says that the gate failed, so a traceback exits with sysexits' EX_SOFTWARE.
BUG = 70
TRY_AGAIN = 75  # EX_TEMPFAIL: what is saved stands, and the same command goes on from it
_NO_PLACE = (errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP)


class Stage(NamedTuple):
    """A command that runs one stage.

    Attributes:
      function: `module:function`, called with (settings, common); what it returns is printed, and an `exit_code` in
        it becomes the exit code.
      out: what --out names; None where there is no --out.
      needs_out: whether a run without --out is refused.
      help: what the command does; its first sentence stands in the list of commands.
      examples: command lines for the end of the help.
    """

    function: str
    out: str | None
    needs_out: bool
    help: str
    examples: tuple[str, ...]


STAGES = {
    "cache-teacher": Stage(
        "compress.distill.cache_stage:run",
        "DIR",
        True,
        "Keep what the teacher says of a data set, to distill from later.",
        (
            "compress cache-teacher --teacher teacher/ --data text.jsonl --out cache/",
            "compress cache-teacher --teacher teacher/ --data text.jsonl --top-k 0 --out cache/",
            "compress cache-teacher --teacher student/ --logits rows/ --out cache/",
        ),
    ),
    "distill": Stage(
        "compress.distill.stage:run",
        "DIR",
        True,
        "Teach a smaller model to predict as its teacher does.",
        (
            "compress distill --teacher teacher/ --student half --data text.jsonl --out student/",
            "compress distill --teacher model.gguf --student layers:15 --data text.jsonl --steps 500 --out student/",
            "compress distill --teacher teacher/ --teacher-cache cache/ --data text.jsonl --out student/",
            "compress distill --teacher teacher/ --data chats.jsonl --on-policy 0.5 --temperature 1 --out student/",
        ),
    ),
    "align": Stage(
        "compress.align.stage:run",
        "DIR",
        True,
        "Train adapters on a frozen 4-bit base, by SFT or on preferences.",
        (
            "compress align --model student/ --data pairs.jsonl --method dpo --out aligned/",
            "compress align --model student/ --data chats.jsonl --method sft --base nf4 --dora --out aligned/",
        ),
    ),
    "quantize": Stage(
        "compress.quantize.stage:run",
        "DIR",
        True,
        "Round the weights to 3 to 8 bits.",
        ("compress quantize --model aligned/ --bits 4 --group-size 64 --calibration text.jsonl --out small/",),
    ),
    "eval": Stage(
        "compress.evaluate:run",
        "FILE",
        False,
        "Measure a model against its parent and the teacher.",
        ("compress eval --model small/ --baseline aligned/ --data heldout.jsonl --out report.json",),
    ),
    "gate": Stage(
        "compress.gate:run",
        None,
        False,
        "Judge a report by a policy. Exits 0 on a pass, 1 on a fail, 3 where the evidence does not suffice.",
        ("compress gate report.json --policy gate.toml",),
    ),
    "export": Stage(
        "compress.artifact:export",
        "DIR",
        True,
        "Write a model in a format that other engines load.",
        (
            "compress export --model small/ --format gguf --out artifact/",
            "compress export --model aligned/ --format compressed-tensors --adapters keep --out artifact/",
        ),
    ),
    "verify": Stage(
        "compress.artifact:verify",
        None,
        False,
        "Reload exported files and compare logits with their source.",
        ("compress verify artifact/",),
    ),
    "generate": Stage(
        "compress.generate.stage:run",
        None,
        False,
        "Continue prompts.",
        ("compress generate --model small/ --prompt 'Fellow citizens' --max-tokens 40",),
    ),
}

TRAINING = ("distill", "align")  # the stages that several processes share
SPREAD = (*TRAINING, "eval")  # the stages that spread over a mesh
MESH_FLAGS = ("fsdp", "tensor")
COMMON_FLAGS = ("seed", "dtype", "device", "distributed")

RUN_HELP = "Run a recipe's stages, but none that is done and unchanged."
RUN_EXAMPLES = (
    "compress run recipes/quickstart.toml",
    "compress run recipe.toml --set quantize.bits=8 --set distill.steps=500",
    "COMPRESS_DISTILL__STEPS=500 compress run recipe.toml",
)
PLAN_HELP = (
    "Tell what a recipe takes of memory, disk and time, and run nothing. Exits 0 if it fits this machine, 1 if not."
)
PLAN_EXAMPLES = (
    "compress plan recipe.toml",
    "compress plan recipe.toml --set distill.per_device_batch=2 --json",
)


class LazyCommand(click.Command):
    """A command whose parameters are made when first asked for, so that listing commands imports no settings."""

    def __init__(self, name: str, parameters: Callable[[], list[click.Parameter]], **rest: Any):
        """Take a function for the parameters, and the rest as click does."""
        super().__init__(name, **rest)
        self._parameters: Callable[[], list[click.Parameter]] | None = parameters

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """As click's, after making them."""
        if self._parameters:
            self.params, self._parameters = self._parameters(), None
        return super().get_params(ctx)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="compress-lm")
def commands() -> None:
    """Turn a teacher language model into a small, aligned, 4-bit one, and say whether it may be released.

    Every flag is also a key of the command's table in a recipe: --group-size is group_size in [quantize].
    """


@commands.command()
def schema() -> None:
    """Print the JSON Schema of a recipe."""
    from compress.keys import json_schema
    from compress.schema import Recipe

    dialect = {"$schema": "https://json-schema.org/draft/2020-12/schema"}
    click.echo(json.dumps(dialect | json_schema(Recipe), indent=2, ensure_ascii=False))


def table_of(command: str) -> str:
    """The recipe's table of a command, spelled as keys are."""
    return command.replace("-", "_")


def _stage_parameters(name: str) -> list[click.Parameter]:
    from compress.keys import keys
    from compress.options import options_for
    from compress.schema import Recipe

    stage, table = STAGES[name], keys(Recipe)[table_of(name)].table
    assert table is not None
    said = f"Recipe whose [{table_of(name)}] table to use."
    recipe = click.Option(["--recipe"], type=click.Path(path_type=Path), help=said)
    beside = [*_data_parameters(name), *_mesh_parameters(name), *_log_parameters(name), *_out_parameters(stage.out)]
    return [*options_for(table), *beside, recipe, *_common_parameters(trains=name in TRAINING)]


def _plan_parameters() -> list[click.Parameter]:
    return [option for option in _run_parameters() if option.name not in ("force", "distributed")]


def _run_parameters() -> list[click.Parameter]:
    recipe = click.Argument(["recipe"], type=click.Path(path_type=Path), required=True, metavar="RECIPE")
    out = click.Option(["--out"], type=click.Path(path_type=Path), metavar="DIR", help="[default: runs/NAME]")
    force = click.Option(["--force"], is_flag=True, help="Run every stage again.")
    return [recipe, out, force, *_common_parameters(trains=True)]


def _data_parameters(name: str) -> list[click.Parameter]:
    from compress.options import options_for
    from compress.settings import Data

    return options_for(Data) if name in ("cache-teacher", "distill", "align", "quantize", "eval") else []


def _mesh_parameters(name: str) -> list[click.Parameter]:
    """The axes of the mesh but `data`, which is what is left of the devices, and whose flag names files."""
    from compress.keys import keys
    from compress.options import option_for
    from compress.settings import MeshShape

    return [option_for(keys(MeshShape)[axis]) for axis in MESH_FLAGS] if name in SPREAD else []


def _log_parameters(name: str) -> list[click.Parameter]:
    from compress.options import options_for
    from compress.settings import Log

    return options_for(Log) if name in TRAINING else []


def _out_parameters(metavar: str | None) -> list[click.Parameter]:
    if metavar is None:
        return []
    out = click.Option(["--out"], type=click.Path(path_type=Path), metavar=metavar, help="What to write.")
    return [out, click.Option(["--force"], is_flag=True, help="Replace --out if it exists.")]


def _common_parameters(trains: bool) -> list[click.Parameter]:
    from compress.keys import keys
    from compress.options import option_for
    from compress.schema import Recipe

    return [
        click.Option(["sets", "--set"], multiple=True, metavar="TABLE.KEY=VALUE", help="Override a key of the recipe."),
        *(option_for(keys(Recipe)[name]) for name in COMMON_FLAGS if trains or name != "distributed"),
        click.Option(["as_json", "--json"], is_flag=True, help="Print the result as JSON."),
    ]


def _run_stage(name: str, /, **given: Any) -> int:
    from compress.keys import keys
    from compress.locate import check_apart, inputs, located
    from compress.options import flag_of, given_flags
    from compress.schema import Recipe

    stage, own = STAGES[name], table_of(name)
    table = keys(Recipe)[own].table
    assert table is not None
    flags = {own: (f"compress {name}", {})} | given_flags(table, own, given) | _beside_flags(name, given)
    recipe = _load(given["recipe"], given, flags)
    settings = getattr(recipe, own)
    for key in keys(table).values():
        if key.metadata.get("chained") and getattr(settings, key.name) is None:
            raise click.UsageError(f"{flag_of(key)} is missing: {key.help}")
    if stage.needs_out and given["out"] is None:
        raise click.UsageError(f"--out is missing: the {stage.out} to write")
    settings, out, force = located(settings), given.get("out"), given.get("force", False)
    if out:
        from export.atomic import check_output

        check_output(out, force)
        check_apart(out, [*inputs(settings), *([given["recipe"]] if given["recipe"] else [])])
    common = _common(recipe, out, force, uses_jax=name != "gate", trains=name in TRAINING)
    return _finish(_function(stage.function)(settings, common), given["as_json"], common)


def _run_recipe(function: str, /, **given: Any) -> int:
    import dataclasses

    from compress.errors import RecipeError

    path = given["recipe"]
    recipe = _load(path, given, {})
    name = recipe.name or path.stem
    if Path(name).name != name:
        raise RecipeError(f"{path}: name = {name!r} is the name of a folder in runs/, not a path; --out takes a path")
    recipe = dataclasses.replace(recipe, name=name)
    out, trains = given["out"] or Path("runs") / name, "distributed" in given
    common = _common(recipe, out, given.get("force", False), trains=trains)
    return _finish(_function(function)(recipe, common), given["as_json"], common)


def _beside_flags(name: str, given: dict[str, Any]) -> dict[str, tuple[str, Any]]:
    """What was typed of the tables [data], [mesh] and [log]."""
    from compress.options import given_flags
    from compress.settings import Data, Log, MeshShape

    flags = given_flags(Data, "data", given) if _data_parameters(name) else {}
    flags |= given_flags(Log, "log", given)
    return flags | given_flags(MeshShape, "mesh", {axis: given.get(axis) for axis in MESH_FLAGS})


def _load(path: Path | None, given: dict[str, Any], flags: dict[str, tuple[str, Any]]) -> "Recipe":
    from compress.device import LAUNCH
    from compress.recipe import load
    from compress.schema import Recipe

    top = {key: (f"--{key}", given[key]) for key in COMMON_FLAGS if given.get(key) is not None}
    # Which of the processes this is, is no matter of the recipe.
    environment = {name: value for name, value in os.environ.items() if name not in LAUNCH}
    return load(Recipe, path, sets=given["sets"], environment=environment, flags=flags | top)


def _common(recipe: "Recipe", out: Path | None, force: bool, *, uses_jax: bool = True, trains: bool) -> "Common":
    from compress.progress import Progress
    from compress.settings import Common

    progress = Progress()
    device, dtype, process = "cpu", "float32", 0
    if uses_jax:
        from compress.device import choose_device, choose_dtype, join_processes, keep_compiled

        keep_compiled()
        process = join_processes(recipe.distributed) if trains else 0
        progress = Progress(quiet=process > 0)
        if trains and not process:
            from compress.log import open_sinks

            progress.sinks = open_sinks(recipe.log)
        device = choose_device(recipe.device, progress)
        dtype = choose_dtype(recipe.dtype, device)
    return Common(recipe.seed, dtype, device, out, force, progress, recipe.data, recipe.mesh, process)


def _function(name: str) -> Callable[..., dict[str, Any]]:
    module, _, function = name.partition(":")
    return getattr(import_module(module), function)


def _finish(result: dict[str, Any], as_json: bool, common: "Common") -> int:
    """Print the result on standard output, once for all processes, and return the exit code."""
    from compress.display import show, to_json

    code = result.pop("exit_code", 0)
    if common.process:
        return code
    try:
        click.echo(to_json(result)) if as_json else show(result)
        sys.stdout.flush()
    except BrokenPipeError:  # `| head` has read enough; the exit code still tells the verdict
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())  # where the interpreter's last flush goes
        os.close(nowhere)
    return code


def _examples(lines: Sequence[str]) -> str:
    return "\b\nExamples:\n" + "\n".join(f"  {line}" for line in lines)


def _add_commands() -> None:
    for name, stage in STAGES.items():
        command = LazyCommand(
            name,
            partial(_stage_parameters, name),
            callback=partial(_run_stage, name),
            help=stage.help,
            epilog=_examples(stage.examples),
        )
        commands.add_command(command)
    for name, parameters, function, text, examples in (
        ("plan", _plan_parameters, "compress.plan:run", PLAN_HELP, PLAN_EXAMPLES),
        ("run", _run_parameters, "compress.pipeline:run", RUN_HELP, RUN_EXAMPLES),
    ):
        callback = partial(_run_recipe, function)
        commands.add_command(LazyCommand(name, parameters, callback=callback, help=text, epilog=_examples(examples)))


_add_commands()


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit code; a user's mistake is one line, a bug keeps its traceback."""
    try:
        with _stopped_by_sigterm():
            code = commands.main(args=argv, prog_name="compress", standalone_mode=False)
        return code if isinstance(code, int) else 0
    except click.ClickException as error:
        error.show()
        return 2
    except (click.Abort, KeyboardInterrupt):
        click.echo("interrupted", err=True)
        return 130
    except Exception as error:
        from compress.errors import is_lost_peer

        code = exit_code(error)
        if code == BUG:
            traceback.print_exc()
        else:
            click.echo(f"error: {_line(_said(error))}", err=True)
        if is_lost_peer(error):
            os._exit(code)  # at the interpreter's end JAX would wait for the process that is gone, and then abort
        return code


@contextlib.contextmanager
def _stopped_by_sigterm() -> Iterator[None]:
    """A scheduler's SIGTERM ends the command as Ctrl-C does, so that nothing half-written is left."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may be told of signals
        return
    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _line(text: str) -> str:
    """A message on one line, without what would steer the terminal: it may quote a stranger's file."""
    return " ".join("".join(mark if mark.isprintable() else " " for mark in text).split())


def _said(error: Exception) -> str:
    """What is wrong, where, and what to do."""
    from compress.errors import Preempted, is_lost_peer, is_out_of_device_memory

    if isinstance(error, Preempted):
        return f"{error}; run the same command again to go on from there"
    if is_lost_peer(error):
        why = str(error).partition("\n")[0]
        cure = "if one has died, start all again to go on from the last checkpoint"
        return f"an exchange between the processes of this run failed ({why}); {cure}"
    if is_out_of_device_memory(error):
        return f"{str(error).rpartition(': ')[2]} Lower --per-device-batch, --sequence-length or --window"
    if not isinstance(error, OSError) or not error.strerror:
        return str(error) or type(error).__name__
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    cure = "; make room and run it again, what stood there is as it was" if full else ""
    return f"{f'{error.filename}: ' if error.filename else ''}{error.strerror}{cure}"


def exit_code(error: Exception) -> int:
    """The exit code that an error stands for; `BUG` where it is no mistake of the user's."""
    from compress.errors import DataError, Preempted, RecipeError, is_lost_peer, is_out_of_device_memory
    from eval.errors import EvidenceError
    from export.errors import ArtifactError, OutputExists

    if isinstance(error, RecipeError | OutputExists):
        return 2
    if isinstance(error, Preempted) or is_lost_peer(error):
        return TRY_AGAIN
    if isinstance(error, ArtifactError | DataError | EvidenceError):
        return 4
    if isinstance(error, MemoryError) or is_out_of_device_memory(error):
        return 5
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return 5
    # A folder that may not be read or written is the user's to mend, and the message names it.
    if isinstance(error, OSError) and error.filename and error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return 4
    # So is a path that leads through a file, or that is too long for one.
    if isinstance(error, OSError) and error.filename and error.errno in _NO_PLACE:
        return 2
    return BUG


if __name__ == "__main__":
    sys.exit(main())
