"""Click parameters from a settings dataclass, so that flag, recipe key and documentation are one thing."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import click

from compress.keys import Key, keys, kind_of


def options_for(schema: type) -> list[click.Parameter]:
    """A flag for every key: `group_size` is --group-size, a bool --x/--no-x, a list a flag that may come again."""
    return [_argument(key) if key.metadata.get("argument") else option_for(key) for key in keys(schema).values()]


def flag_of(key: Key) -> str:
    """The flag as the user types it; an argument's name in capitals."""
    return key.name.upper() if key.metadata.get("argument") else f"--{key.name.replace('_', '-')}"


def given_flags(schema: type, table: str, parameters: Mapping[str, Any]) -> dict[str, tuple[str, Any]]:
    """What the user typed, as `compress.recipe.load` takes it: dotted key -> (flag, value)."""
    prefix = f"{table}." if table else ""
    given = {}
    for name, key in keys(schema).items():
        value = parameters.get(name)
        if value is None or value == ():
            continue
        if get_origin(kind_of(key.hint)) is dict:
            value = dict(_pair(flag_of(key), item) for item in value)
        given[prefix + name] = (flag_of(key), value)
    return given


def _argument(key: Key) -> click.Argument:
    return click.Argument([key.name], required=False, metavar=key.name.upper())


def option_for(key: Key) -> click.Option:
    """The flag of one key."""
    kind = kind_of(key.hint)
    several = get_origin(kind) in (tuple, dict)
    item = get_args(kind)[-1 if get_origin(kind) is dict else 0] if several else kind
    name = flag_of(key)
    if item is bool:
        name = f"{name}/--{key.metadata.get('off', f'no-{key.name}').replace('_', '-')}"
    return click.Option(
        [name],
        type=_type(item),
        multiple=several,
        default=None,  # what was not typed must not override the recipe
        metavar="COLUMN=NAME" if get_origin(kind) is dict else "MODEL" if key.metadata.get("model") else None,
        help=_help(key, several),
    )


def _type(item: Any) -> click.ParamType | None:
    if get_origin(item) is Literal:
        return click.Choice(get_args(item))
    if item is Path:
        return click.Path(path_type=Path)
    return {bool: None, int: click.INT, float: click.FLOAT, str: click.STRING}[item]


def _help(key: Key, several: bool) -> str:
    said = [key.help]
    if several:
        said.append("May be given several times.")
    default = key.default
    if isinstance(default, bool):
        on = key.name if default else key.metadata.get("off", f"no-{key.name}")
        said.append(f"[default: {on.replace('_', '-')}]")
    elif default is not None and default not in ((), {}):
        said.append(f"[default: {', '.join(map(str, default)) if isinstance(default, tuple) else default}]")
    elif key.required:
        said.append("[required here or in the recipe]")
    return " ".join(said)


def _pair(flag: str, text: str) -> tuple[str, str]:
    column, equals, name = text.partition("=")
    if not equals:
        raise click.BadParameter(f"{flag} {text}: expected COLUMN=NAME")
    return column, name
