"""HTML and SVG elements as text that is escaped by construction: a string is text, only Markup is markup."""

import html


class Markup(str):
    """Text that is markup already."""


def escape(value: object) -> Markup:
    """Markup as it is; anything else as the text it shows, without control characters except newlines."""
    if isinstance(value, Markup):
        return value
    shown = "".join(c if c.isprintable() or c == "\n" else " " for c in str(value))
    return Markup(html.escape(shown))


def tag(name: str, *children: object, **attributes: object) -> Markup:
    """An element. An attribute's trailing underscore is dropped and others become hyphens: class_, stroke_width."""
    given = "".join(f' {k.rstrip("_").replace("_", "-")}="{escape(v)}"' for k, v in attributes.items())
    return Markup(f"<{name}{given}>{join(children)}</{name}>")


def join(children) -> Markup:
    """Elements one after the other."""
    return Markup("".join(escape(child) for child in children))
