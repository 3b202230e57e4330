"""A stage's result for a person and for a program."""

import json
import math
from collections.abc import Iterable, Mapping
from typing import Any


def to_json(result: Mapping[str, Any], indent: int | None = 2) -> str:
    """The result as strict JSON: a number that is not finite becomes null, which no reader takes for a good one."""
    return json.dumps(_finite(result), indent=indent, ensure_ascii=False, default=_fallback, allow_nan=False)


def show(result: Mapping[str, Any]) -> None:
    """Print the result: mappings under one heading as a table, a mapping or plain values as lines, text as it is."""
    from rich.console import Console

    console = Console(highlight=False, markup=False, soft_wrap=True)
    for name, value in result.items():
        if isinstance(value, list) and value and all(isinstance(row, Mapping) for row in value):
            console.print(_table(name, value))
        elif isinstance(value, Mapping) and value and all(isinstance(row, Mapping) for row in value.values()):
            console.print(_table(name, [{"": key, **row} for key, row in _upright(value).items()]))
        else:
            console.print(f"{name}: {_cell(value)}")


def _upright(rows: Mapping[str, Mapping[str, Any]]) -> Mapping[str, Mapping[str, Any]]:
    """The mappings with keys and names exchanged where that makes a table narrower."""
    names = dict.fromkeys(name for row in rows.values() for name in row)
    if len(names) <= len(rows):
        return rows
    return {name: {key: row.get(name) for key, row in rows.items()} for name in names}


def _table(title: str, rows: list[Mapping[str, Any]]) -> Any:
    from rich.box import SIMPLE
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, title_justify="left", box=SIMPLE, show_edge=False, pad_edge=False)
    columns = list(dict.fromkeys(name for row in rows for name in row))
    for name in columns:
        numeric = all(isinstance(row.get(name), int | float | None) for row in rows)
        table.add_column(Text(name), justify="right" if numeric else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(_cell(row.get(name))) for name in columns))
    return table


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, Mapping):
        return ", ".join(
            f"{name} {'none' if item is None else _cell(item)}" for name, item in value.items() if item != {}
        )
    if isinstance(value, list | tuple):
        return ", ".join(_cell(item) for item in value)
    return str(value)


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(name): _finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, float) or (hasattr(value, "item") and getattr(value, "ndim", 1) == 0):
        number = value if isinstance(value, float) else value.item()
        return None if isinstance(number, float) and not math.isfinite(number) else number
    return value


def _fallback(value: Any) -> Any:
    return value.tolist() if isinstance(value, Iterable) and hasattr(value, "tolist") else str(value)
