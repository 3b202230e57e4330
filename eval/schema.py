"""Dataclasses to JSON and back, strictly: what comes in is from strangers.

A field's type is its schema: a dataclass, list[T], dict[str, T], str, int, float, bool, or one of these or None.
"""

import dataclasses
import difflib
import json
import math
import sys
import types
import typing
from collections.abc import Iterable
from typing import Any

from eval.errors import EvidenceError

MAX_BYTES = 64 << 20
MAX_ITEMS = 1_000_000
MAX_STRING = 1 << 20


def encode(value: Any) -> Any:
    """A dataclass as plain JSON values. NaN and infinities become null; half surrogates become '?'."""
    if dataclasses.is_dataclass(value):
        return {field.name: encode(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {_clean(str(key)): encode(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [encode(item) for item in value]
    if isinstance(value, str):
        return _clean(value)
    if value is None or isinstance(value, bool | int):
        return value
    number = float(value)  # NumPy scalars too
    return number if math.isfinite(number) else None


def parse(text: str | bytes, source: str) -> Any:
    """Read JSON of at most MAX_BYTES, without NaN, Infinity, doubled keys or deep nesting.

    Raises:
      EvidenceError: naming `source` and the place.
    """
    if len(text) > MAX_BYTES:
        raise EvidenceError(f"{source}: {len(text)} bytes; at most {MAX_BYTES} are read")
    try:
        if isinstance(text, bytes):
            text = text.decode("utf-8")
        return json.loads(text, parse_constant=_constant, object_pairs_hook=_object)
    except RecursionError:
        raise EvidenceError(f"{source}: nested too deeply to be a report") from None
    except json.JSONDecodeError as error:
        raise EvidenceError(f"{source}:{error.lineno}: not JSON: {error.msg} (column {error.colno})") from None
    except ValueError as error:
        raise EvidenceError(f"{source}: {error}") from None


def decode(kind: Any, value: Any, where: str) -> Any:
    """Build `kind` from plain JSON values.

    Raises:
      EvidenceError: for an unknown or missing key, a wrong type, or more than MAX_ITEMS; `where` says where.
    """
    origin = typing.get_origin(kind)
    if origin in (types.UnionType, typing.Union):
        if value is None:
            return None
        (kind,) = (part for part in typing.get_args(kind) if part is not type(None))
        return decode(kind, value, where)
    if dataclasses.is_dataclass(kind):
        return _dataclass(kind, value, where)
    if origin is list:
        _expect(isinstance(value, list), where, "a list", value)
        _expect(len(value) <= MAX_ITEMS, where, f"at most {MAX_ITEMS} items", len(value))
        (item,) = typing.get_args(kind)
        return [decode(item, element, f"{where}[{i}]") for i, element in enumerate(value)]
    if origin is dict:
        _expect(isinstance(value, dict), where, "an object", value)
        item = typing.get_args(kind)[1]
        return {_clean(key): decode(item, element, f"{where}.{key}"[:200]) for key, element in value.items()}
    return _scalar(kind, value, where)


def did_you_mean(word: str, words: Iterable[str]) -> str:
    """'; did you mean 'limit'?', or the choices if none is near."""
    choices = list(words)
    near = difflib.get_close_matches(word[:100], choices, n=1)
    return f"; did you mean '{near[0]}'?" if near else f"; there are: {', '.join(choices)}"


def _dataclass(kind: Any, value: Any, where: str) -> Any:
    _expect(isinstance(value, dict), where, "an object", value)
    hints = typing.get_type_hints(kind)
    fields = {field.name: field for field in dataclasses.fields(kind)}
    for key in value:
        if key not in fields:
            raise EvidenceError(f"{where}: no key '{key[:100]}'{did_you_mean(key, fields)}")
    required = [
        name
        for name, field in fields.items()
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    ]
    missing = [name for name in required if name not in value]
    if missing:
        raise EvidenceError(f"{where}: missing {', '.join(missing)}")
    return kind(**{key: decode(hints[key], element, f"{where}.{key}") for key, element in value.items()})


def _scalar(kind: Any, value: Any, where: str) -> Any:
    if kind is str:
        _expect(isinstance(value, str), where, "a string", value)
        _expect(len(value) <= MAX_STRING, where, f"a string of at most {MAX_STRING} characters", len(value))
        return _clean(value)
    if kind is bool:
        _expect(isinstance(value, bool), where, "true or false", value)
        return value
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if kind is int:
        _expect(is_number and isinstance(value, int) and abs(value) < 1 << 63, where, "an integer", value)
        return value
    if kind is float:
        _expect(is_number and abs(value) <= sys.float_info.max, where, "a finite number (or null)", value)
        return float(value)
    raise TypeError(f"{where}: no schema for {kind}")


def _expect(holds: bool, where: str, wanted: str, got: Any) -> None:
    if not holds:
        shown = "null" if got is None else repr(got)[:60]
        raise EvidenceError(f"{where}: expected {wanted}, not {shown}")


def _constant(name: str) -> float:
    raise ValueError(f"{name} is not a number; a value that could not be measured is null")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        seen: set[str] = set()
        doubled = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"key '{doubled[:100]}' is doubled")
    return out


def _clean(text: str) -> str:
    """Text that UTF-8 can hold: JSON's escapes can spell half a surrogate pair."""
    return text.encode("utf-8", "replace").decode("utf-8")
