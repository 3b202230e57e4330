"""The keys of a settings dataclass: what may be said for each, and how a raw value becomes the right type.

A field is a key, or a table where its type is a dataclass (or a dataclass or None: such a table may be absent). Types
are bool, int, float, str, Path, Literal, `tuple[T, ...]`, `dict[str, T]`, and any of them or None. Field metadata:

    help        one line for `--help` and the schema
    min, max    inclusive bounds of a number; `above` is an exclusive lower one. An integer has at most 31 bits, where
                no max says otherwise, and a float is finite.
    model       the text names a model: a path if there is one at that place, and otherwise left alone
    unless      a regular expression: text that matches it names no model after all
    chained     in a run the stage before provides it; a command by itself must be given it
    argument    a command takes it without a flag
    off         the name of the flag that turns a bool off, where `--no-…` reads badly
"""

import dataclasses
import difflib
import json
import math
import os
import tomllib
import types
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

LARGEST = 2**31 - 1


@dataclasses.dataclass(frozen=True)
class Key:
    """One field of a settings dataclass."""

    name: str
    hint: Any
    field: dataclasses.Field

    @property
    def metadata(self) -> Mapping[Any, Any]:
        """What the field says of itself."""
        return self.field.metadata

    @property
    def help(self) -> str:
        """One line on what the key does."""
        return self.field.metadata.get("help", "")

    @property
    def table(self) -> type | None:
        """The dataclass of a table, None for a plain key."""
        kind = kind_of(self.hint)
        return kind if isinstance(kind, type) and dataclasses.is_dataclass(kind) else None

    @property
    def optional(self) -> bool:
        """Whether None is a value."""
        return type(None) in alternatives(self.hint)

    @property
    def required(self) -> bool:
        """Whether there is no default."""
        return self.field.default is dataclasses.MISSING and self.field.default_factory is dataclasses.MISSING

    @property
    def default(self) -> Any:
        """The default, or None if there is none."""
        if self.field.default_factory is not dataclasses.MISSING:
            return self.field.default_factory()
        return None if self.required else self.field.default


def keys(schema: type) -> dict[str, Key]:
    """The keys of a settings dataclass by name, in order: its own, then those that it inherits."""
    hints, inherited = typing.get_type_hints(schema), typing.get_type_hints(schema.__bases__[0])
    fields = sorted(dataclasses.fields(schema), key=lambda field: field.name in inherited)
    return {field.name: Key(field.name, hints[field.name], field) for field in fields}


def alternatives(hint: Any) -> tuple[Any, ...]:
    """`int | None` as (int, NoneType); any other type alone."""
    return typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)


def kind_of(hint: Any) -> Any:
    """The type without its None."""
    return next(option for option in alternatives(hint) if option is not type(None))


def convert(value: Any, key: Key, base: Path) -> Any:
    """`value` as the key's type; relative paths start from `base`.

    A lone item stands for a list of one, and an integer for a float.

    Raises:
      ValueError: it is of another type, or out of bounds; the message says what would be right.
    """
    try:
        found = _convert(value, key.hint, base, bool(key.metadata.get("model")))
    except OverflowError:  # an integer of 400 digits as a float
        raise ValueError("must be finite") from None
    except TypeError:
        hope = did_you_mean(value, _choices(kind_of(key.hint))) if isinstance(value, str) else ""
        raise ValueError(f"expected {expected(kind_of(key.hint))}{hope}") from None
    if found == () and key.default != ():
        raise ValueError("expected at least one item")
    for number in found if isinstance(found, tuple) else (found,):
        if isinstance(number, int | float):
            _check_bounds(number, key.metadata)
    return found


def from_text(text: str, key: Key) -> Any:
    """The raw value that `--set` or an environment variable spells: TOML, or plain text where the key takes text."""
    if key.optional and text.lower() in ("none", ""):
        return None
    kind = kind_of(key.hint)
    if kind in (str, Path) or isinstance(next(iter(_choices(kind)), None) if _is_literal(kind) else None, str):
        return text
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        return text


def expected(kind: Any) -> str:
    """A type in words."""
    words = {bool: "true or false", int: "an integer", float: "a number", str: "text", Path: "a path"}
    arguments = typing.get_args(kind)
    if _is_literal(kind):
        said = [show(choice) for choice in arguments]
        return f"{', '.join(said[:-1])} or {said[-1]}" if said[1:] else said[0]
    if typing.get_origin(kind) is tuple:
        return f"a list, each item {expected(arguments[0])}"
    if typing.get_origin(kind) is dict:
        return f"a table, each value {expected(arguments[1])}"
    return words[kind]


def did_you_mean(word: str, known: Iterable[Any]) -> str:
    """The end of a message on an unknown word: the closest known one, if any is close."""
    close = difflib.get_close_matches(word, [str(name) for name in known], n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def show(value: Any) -> str:
    """A value as a message quotes it."""
    return json.dumps(value, default=str, ensure_ascii=False)


def plain(value: Any) -> Any:
    """The value as TOML and JSON can hold it: no None, lists for tuples, paths as text."""
    if isinstance(value, dict):
        return {name: plain(item) for name, item in value.items() if item is not None}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def json_schema(schema: type) -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of a settings dataclass, with every key's help and default."""
    properties = {}
    for name, key in keys(schema).items():
        entry = json_schema(key.table) if key.table else _json_type(kind_of(key.hint))
        if key.help:
            entry["description"] = key.help
        bounds = {"min": "minimum", "max": "maximum", "above": "exclusiveMinimum"}
        entry |= {word: key.metadata[bound] for bound, word in bounds.items() if bound in key.metadata}
        if key.default is not None and not key.table:
            entry["default"] = plain(key.default)
        properties[name] = entry
    needed = [name for name, key in keys(schema).items() if key.required]
    return {"type": "object", "properties": properties, "required": needed, "additionalProperties": False}


def _convert(value: Any, hint: Any, base: Path, model: bool) -> Any:
    if value is None and type(None) in alternatives(hint):
        return None
    kind = kind_of(hint)
    arguments = typing.get_args(kind)
    if _is_literal(kind):
        if any(value == choice and type(value) is type(choice) for choice in arguments):
            return value
    elif typing.get_origin(kind) is tuple:
        items = value if isinstance(value, list | tuple) else [value]
        return tuple(_convert(item, arguments[0], base, model) for item in items)
    elif typing.get_origin(kind) is dict and isinstance(value, dict):
        return {name: _convert(item, arguments[1], base, model) for name, item in value.items()}
    elif kind is Path and isinstance(value, str | Path) and str(value):
        return base / _expanded(value)
    elif kind is float and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    elif kind in (bool, int, str) and type(value) is kind:
        return _placed(value, base) if model and kind is str else value
    raise TypeError


def _placed(model: str, base: Path) -> str:
    place = base / _expanded(model)
    surely_a_path = model.endswith(".gguf") or model.count("/") > 1  # so that an error says where it was looked for
    return str(place) if model and (place.exists() or surely_a_path) else model


def _expanded(path: str | Path) -> Path:
    if "\0" in str(path):
        raise ValueError("a path cannot hold a NUL character")
    return Path(os.path.expanduser(path))  # unlike Path's own, it leaves the ~ of a user who is not known


def _check_bounds(number: int | float, metadata: Mapping[Any, Any]) -> None:
    low, high, above = (metadata.get(bound) for bound in ("min", "max", "above"))
    high = LARGEST if high is None and isinstance(number, int) else high
    if low is not None and not number >= low:
        raise ValueError(f"must be at least {low}")
    if high is not None and not number <= high:
        raise ValueError(f"must be at most {high}")
    if above is not None and not number > above:
        raise ValueError(f"must be above {above}")
    if not math.isfinite(number):
        raise ValueError("must be finite")


def _is_literal(kind: Any) -> bool:
    return typing.get_origin(kind) is Literal


def _choices(kind: Any) -> tuple[Any, ...]:
    if typing.get_origin(kind) is tuple:
        return _choices(typing.get_args(kind)[0])
    return typing.get_args(kind) if _is_literal(kind) else ()


def _json_type(kind: Any) -> dict[str, Any]:
    words = {bool: "boolean", int: "integer", float: "number", str: "string", Path: "string"}
    arguments = typing.get_args(kind)
    if _is_literal(kind):
        return {"enum": list(arguments)}
    if typing.get_origin(kind) is tuple:
        return {"type": "array", "items": _json_type(arguments[0])}
    if typing.get_origin(kind) is dict:
        return {"type": "object", "additionalProperties": _json_type(arguments[1])}
    return {"type": words[kind]}
