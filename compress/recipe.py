"""TOML, environment, `--set` and flags to frozen dataclasses; it knows no stage (see `compress.keys` for the types)."""

import dataclasses
import os
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from compress.errors import RecipeError
from compress.keys import Key, convert, did_you_mean, from_text, keys, plain, show

Schema = TypeVar("Schema")

PREFIX = "COMPRESS_"


@dataclasses.dataclass(frozen=True)
class Given:
    """A raw value, what to say of it in a message, and the folder that its relative paths start from."""

    value: Any
    said: str
    base: Path
    is_text: bool = False


def load(
    schema: type[Schema],
    path: Path | None = None,
    *,
    sets: Iterable[str] = (),
    environment: Mapping[str, str] | None = None,
    flags: Mapping[str, tuple[str, Any]] | None = None,
) -> Schema:
    """Fill `schema`: defaults, then the recipe at `path`, then COMPRESS_TABLE__KEY, then `--set` and flags.

    Paths in a recipe start from the recipe's folder, all others from the current one. The environment changes tables,
    but never brings an absent one to life, since that would add a stage.

    Args:
      schema: a dataclass as in `compress.keys`.
      path: the recipe, if there is one.
      sets: texts `table.key=value`; the value is TOML, or plain text where the key takes text.
      environment: `os.environ` if None.
      flags: dotted key -> (the flag as the user typed it, value); a table's own key, with {}, brings it to life.

    Raises:
      RecipeError: an unknown key, a wrong type or bound, a missing key, or a key given by --set and by its flag.
    """
    file = _from_file(schema, path) if path else {}
    said = _from_sets(schema, sets)
    for name, (flag, value) in (flags or {}).items():
        if name in said:
            raise RecipeError(f"{name} is given both by {flag} and by --set {name}; keep one of them")
        said[name] = Given(value, f"{flag} {show(value)}", Path.cwd())
    alive = {table for name in said for table in _tables(name)} | file.keys() | said.keys()
    ambient = _from_environment(schema, os.environ if environment is None else environment)
    ambient = {name: given for name, given in ambient.items() if not _sleeps(schema, name, alive)}
    return _build(schema, "", file | ambient | said, path)


def to_dict(settings: Any) -> dict[str, Any]:
    """The settings as TOML and JSON can hold them: no None, paths as text, absent tables left out."""
    values = {name: getattr(settings, name) for name in keys(type(settings))}
    return plain({name: to_dict(value) if dataclasses.is_dataclass(value) else value for name, value in values.items()})


def to_toml(settings: Any) -> str:
    """The settings as a recipe that, loaded, gives the same settings again."""
    import tomli_w

    return tomli_w.dumps(to_dict(settings))


def _from_file(schema: type, path: Path) -> dict[str, Given]:
    try:
        tree = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise RecipeError(f"{path}: no such recipe") from None
    except IsADirectoryError:
        raise RecipeError(f"{path}: a folder, not a recipe") from None
    except (ValueError, RecursionError) as error:  # of ValueErrors: no UTF-8, no TOML, a number of 5000 digits
        raise RecipeError(f"{path}: not valid TOML: {error}") from None
    given: dict[str, Given] = {}

    def walk(schema: type, tree: dict[str, Any], prefix: str) -> None:
        where = f"{path} [{prefix[:-1]}]" if prefix else str(path)
        for name, value in tree.items():
            key = _find(schema, name, where)
            said = f"{where}: {name} = {show(value)}"
            given[prefix + name] = Given(value, said, path.absolute().parent)
            if key.table and not isinstance(value, dict):
                raise RecipeError(f"{said}: expected a table [{prefix}{name}]")
            if key.table:
                walk(key.table, value, f"{prefix}{name}.")

    walk(schema, tree, "")
    return given


def _from_sets(schema: type, sets: Iterable[str]) -> dict[str, Given]:
    given = {}
    for text in sets:
        name, equals, value = (part.strip() for part in text.partition("="))
        if not equals:
            raise RecipeError(f"--set {text}: expected table.key=value")
        _check_name(schema, name, f"--set {name}")
        given[name] = Given(value, f"--set {name}={value}", Path.cwd(), is_text=True)
    return given


def _from_environment(schema: type, environment: Mapping[str, str]) -> dict[str, Given]:
    given = {}
    for variable, value in environment.items():
        if variable.startswith(PREFIX):
            name = variable.removeprefix(PREFIX).lower().replace("__", ".")
            _check_name(schema, name, variable)
            given[name] = Given(value, f"{variable}={value}", Path.cwd(), is_text=True)
    return given


def _find(schema: type, name: str, where: str) -> Key:
    known = keys(schema)
    if name not in known:
        raise RecipeError(f"{where}: no key {name!r}{did_you_mean(name, known)}")
    return known[name]


def _check_name(schema: type, name: str, where: str) -> None:
    """Raise unless the dotted name leads through tables to a key that is none."""
    owners = [f"{around}.{name}" for around, key in keys(schema).items() if key.table and name in keys(key.table)]
    if owners and name not in keys(schema):
        raise RecipeError(f"{where}: no key {name!r}; did you mean {' or '.join(owners)}?")
    table: type | None = schema
    for part in name.split("."):
        if table is None:
            raise RecipeError(f"{where}: no table is called {name.rpartition('.')[0]!r}")
        table = _find(table, part, where).table
    if table is not None:
        raise RecipeError(f"{where}: [{name}] is a table; name one of its keys: {', '.join(keys(table))}")


def _tables(name: str) -> list[str]:
    """The tables around a dotted name, outermost first."""
    parts = name.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts))]


def _sleeps(schema: type, name: str, alive: set[str]) -> bool:
    """Whether the name lies in a table that may be absent and that nothing has asked for."""
    table: type | None = schema
    for around in _tables(name):
        assert table is not None  # _check_name has been there
        key = keys(table)[around.rpartition(".")[2]]
        if key.optional and around not in alive:
            return True
        table = key.table
    return False


def _build(schema: type[Schema], prefix: str, given: Mapping[str, Given], path: Path | None) -> Schema:
    values: dict[str, Any] = {}
    where = f"{path or ''} [{prefix[:-1]}]".strip() if prefix else str(path or "recipe")
    for name, key in keys(schema).items():
        full = prefix + name
        if key.table:
            if not key.optional or any(other == full or other.startswith(f"{full}.") for other in given):
                values[name] = _build(key.table, f"{full}.", given, path)
        elif full in given:
            values[name] = _value(given[full], key)
        elif key.required:
            cure = "" if path else f"; pass --{name.replace('_', '-')}"
            raise RecipeError(f"{where}: {name} is missing ({key.help}){cure}")
    try:
        return schema(**values)
    except RecipeError as error:  # a schema's own __post_init__, on keys that do not go together
        raise RecipeError(f"{where}: {error}") from None


def _value(given: Given, key: Key) -> Any:
    try:
        return convert(from_text(given.value, key) if given.is_text else given.value, key, given.base)
    except ValueError as error:
        raise RecipeError(f"{given.said}: {error}") from None
