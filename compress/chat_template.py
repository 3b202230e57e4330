"""Chat templates: Jinja written by strangers, so rendered in a sandbox with bounded loops, calls and output."""

import datetime
import functools
import json
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jinja2
import jinja2.nodes
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

from compress.errors import DataError
from export.errors import ArtifactError

MAX_STEPS = 200_000  # of one rendering: a loop's iteration is one, a call is CALL of them
CALL = 4
MAX_NUMBER = 1_000_000  # that may be handed to a function, such as range
MAX_CHARACTERS = 1 << 26  # of one rendering, and of any string that a template builds on the way
MAX_EXPONENT = 64
MAX_INDENT = 64  # of tojson
# Methods that write many characters from few, and that no template needs.
GROWING = ("expandtabs", "format_map", "translate")


class ChatTemplate:
    """A compiled chat template.

    Raises:
      ArtifactError: it does not compile, leaves the sandbox, or runs out of its bounds.
      DataError: it refuses the messages (`raise_exception`), or they lack what it reads.
    """

    def __init__(self, source: str):
        self._sandbox = Sandbox()
        try:
            tree = self._sandbox.parse(source)
            self._template = self._sandbox.from_string(_bounded(tree))
        except (jinja2.TemplateError, RecursionError, MemoryError) as error:
            raise ArtifactError(f"chat template: does not compile: {error}") from None

    def render(self, variables: dict[str, Any], now: datetime.datetime | None = None) -> str:
        """Render with `variables`; `now` is what `strftime_now` formats, the clock if not given."""
        self._sandbox.start()
        moment = now or datetime.datetime.now()
        parts, length = [], 0
        try:
            for part in self._template.generate(raise_exception=_refuse, strftime_now=moment.strftime, **variables):
                length += len(part)
                if length > MAX_CHARACTERS:
                    raise _OutOfBounds(f"its output exceeds {MAX_CHARACTERS} characters")
                parts.append(part)
        except DataError:
            raise
        except (_OutOfBounds, jinja2.exceptions.SecurityError, RecursionError, MemoryError, OverflowError) as error:
            reason = str(error) or type(error).__name__
            raise ArtifactError(f"chat template: stopped: {reason}; replace chat_template.jinja") from None
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
            raise DataError(f"chat template: cannot render these messages: {error}") from None
        return "".join(parts)


class _OutOfBounds(Exception):
    pass


class _Generation(Extension):
    """`{% generation %}…{% endgeneration %}` marks an assistant's words in some templates; it renders as its body."""

    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller):
        return caller()


class Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's immutable sandbox plus a budget of steps, and a bound on strings and powers."""

    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def __init__(self):
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation])
        self.filters.update(tojson=_tojson, bounded_loop=self._loop, bounded_text=self._text)
        self.filters.update({name: _bounded_filter(self.filters[name], size) for name, size in GROWTH.items()})
        self.filters["join"] = _bounded_join(self.filters["join"])
        del self.globals["lipsum"]
        self.steps = 0

    def start(self) -> None:
        self.steps = 0

    def _step(self, cost: int = 1) -> None:
        self.steps += cost
        if self.steps > MAX_STEPS:
            raise _OutOfBounds(f"it takes more than {MAX_STEPS} steps")

    def _loop(self, items: Iterable) -> Iterator:
        for item in items:
            self._step()
            yield item

    def _text(self, parts: list) -> str:
        return _short("".join(_short(str(part)) for part in parts))

    def is_safe_attribute(self, obj, attr, value):
        return attr not in GROWING and super().is_safe_attribute(obj, attr, value)

    def call(self, context, obj, /, *args, **kwargs):
        self._step(CALL)
        receiver, name = getattr(obj, "__self__", None), getattr(obj, "__name__", "")
        if name == "join" and isinstance(receiver, str) and args:
            args = (_joinable(args[0], receiver), *args[1:])
        elif isinstance(receiver, str) and name in ("replace", "format"):
            _fits(GROWTH[name](receiver, *args, **kwargs))
        if any(isinstance(value, int) and value > MAX_NUMBER for value in (*args, *kwargs.values())):
            raise _OutOfBounds(f"it passes a number above {MAX_NUMBER} to a function")
        result = super().call(context, obj, *args, **kwargs)
        return _short(result) if isinstance(result, str) else result

    def call_binop(self, context, operator, left, right):
        if operator == "**" and not (abs(left) < 1 << 32 and abs(right) <= MAX_EXPONENT):
            raise _OutOfBounds("it raises to too high a power")
        if operator == "*":
            for one, other in ((left, right), (right, left)):
                if hasattr(one, "__len__") and isinstance(other, int) and len(one) * other > MAX_CHARACTERS:
                    raise _OutOfBounds(f"it builds more than {MAX_CHARACTERS} items")
        if operator == "%" and isinstance(left, str):
            _fits(_format_size(left, *(right if isinstance(right, tuple) else (right,))))
        result = super().call_binop(context, operator, left, right)
        return _short(result) if isinstance(result, str | list) else result


def _bounded(tree: jinja2.nodes.Template) -> jinja2.nodes.Template:
    """Send every loop and every `~` through the sandbox's counters."""
    for loop in list(tree.find_all(jinja2.nodes.For)):
        loop.iter = jinja2.nodes.Filter(loop.iter, "bounded_loop", [], [], None, None, lineno=loop.lineno)
    return _replace_concatenations(tree)


def _replace_concatenations(node):
    for name, value in node.iter_fields():
        if isinstance(value, list):
            value[:] = [_replace_concatenations(v) if isinstance(v, jinja2.nodes.Node) else v for v in value]
        elif isinstance(value, jinja2.nodes.Node):
            setattr(node, name, _replace_concatenations(value))
    if isinstance(node, jinja2.nodes.Concat):
        parts = jinja2.nodes.List(node.nodes, lineno=node.lineno)
        return jinja2.nodes.Filter(parts, "bounded_text", [], [], None, None, lineno=node.lineno)
    return node


def _short(value):
    if len(value) > MAX_CHARACTERS:
        raise _OutOfBounds(f"it builds more than {MAX_CHARACTERS} characters")
    return value


def _fits(size: int) -> None:
    if size > MAX_CHARACTERS:
        raise _OutOfBounds(f"it builds more than {MAX_CHARACTERS} characters")


def _bounded_filter(function: Callable, size: Callable[..., int]) -> Callable:
    """A filter of Jinja's that first asks how much would come out, by the arguments behind Jinja's own."""
    own = 1 if hasattr(function, "jinja_pass_arg") else 0

    @functools.wraps(function)
    def bounded(*args, **kwargs):
        _fits(size(*args[own:], **kwargs))
        return function(*args, **kwargs)

    return bounded


def _bounded_join(function: Callable) -> Callable:
    @functools.wraps(function)
    def bounded(context, value, d="", attribute=None):
        return function(context, _joinable(value, str(d)), d, attribute)

    return bounded


def _joinable(items: Iterable, separator: str) -> list:
    """The items, of which the joined text fits."""
    found, length = [], 0
    for item in items:
        found.append(item)
        length += len(str(item)) + len(separator)
        _fits(length)
    return found


def _format_size(text: Any, *values: Any, **named: Any) -> int:
    """The widest field that a format asks for, in its text or by a value."""
    fields = re.findall(r"%(?:\([^)]*\))?[-#0 +]*[\d.]*|\{[^{}]*\}", str(text))
    widths = [int(digits[:19]) for field in fields for digits in re.findall(r"\d+", field)]
    starred = [value for value in (*values, *named.values()) if isinstance(value, int)] if "*" in str(text) else []
    return max([*widths, *starred], default=0)


def _indent_size(text: Any, width: Any = 4, *_: Any, **__: Any) -> int:
    return str(text).count("\n") * (width if isinstance(width, int) else len(width)) + len(str(text))


def _replace_size(text: Any, old: Any = "", new: Any = "", *_: Any, **__: Any) -> int:
    return len(str(text)) + str(text).count(str(old)) * len(str(new))


# Filters by name: the characters, or items, that come out at most.
GROWTH: dict[str, Callable[..., int]] = {
    "batch": lambda items, linecount=1, *_, **__: linecount,
    "center": lambda text, width=80: width,
    "format": _format_size,
    "indent": _indent_size,
    "replace": _replace_size,
    "slice": lambda items, slices=1, *_, **__: slices,
    "wordwrap": lambda text, *rest, wrapstring=None, **__: len(text) * len(wrapstring or "\n"),
}


def _refuse(message: str) -> None:
    raise DataError(f"chat template: {message}")


def _tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    # Jinja's own filter escapes for HTML, which no model was trained on.
    if isinstance(indent, int) and indent > MAX_INDENT:
        raise _OutOfBounds(f"it indents by more than {MAX_INDENT}")
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
