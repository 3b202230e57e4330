"""Rows of JSONL, Parquet and plain-text files: streamed, checked, and counted.

A row's kind is told by its columns:

    preference   prompt, chosen, rejected   strings, or lists of messages; prompt may be left out of lists
    messages     messages                   a conversation
    completion   prompt, completion         strings, or lists of messages
    targets      tokens, mask               token ids, and 1 for each that is to be learned
    tokens       tokens                     token ids
    text         text

Where pairs alone are wanted, an `id` names one: a row that repeats an earlier row's is a bad one.
"""

import codecs
import dataclasses
import difflib
import functools
import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from compress.data.columns import CHECKS
from compress.data.parquet import PARQUET, check_parquet, parquet_rows
from compress.errors import DataError, RecipeError

KINDS = {
    "preference": ("prompt", "chosen", "rejected"),
    "messages": ("messages",),
    "completion": ("prompt", "completion"),
    "targets": ("tokens", "mask"),
    "tokens": ("tokens",),
    "text": ("text",),
}
COLUMNS = {column: column for columns in KINDS.values() for column in columns} | {"id": "id"}
START = (0, 0, 1)
JSONL = {".jsonl", ".ndjson", ".json"}
PLAIN = {".txt", ".text", ".md", ".rst", ""}
MAX_LINE = 64 << 20  # bytes of a line
MAX_TEXT = 64 << 20  # bytes of a row of plain text; a longer file is cut after a line
MAX_LISTED = 10_000
QUARANTINE = "quarantine.jsonl"
SHOWN = 20  # skipped rows that a result lists


@dataclasses.dataclass(frozen=True)
class Row:
    """One row: `values` by the canonical column names; `where` is file:line; `after` is where the next one starts.

    `after` is (index of the file, byte offset, line); in Parquet a row is a line, and the offset stays 0.
    """

    kind: str
    values: dict[str, Any]
    where: str
    after: tuple[int, int, int]


@dataclasses.dataclass
class Quarantine:
    """What became of the rows: read = kept + skipped. `listed` holds (file:line, reason) of the first skipped."""

    read: int = 0
    skipped: int = 0
    listed: list[tuple[str, str]] = dataclasses.field(default_factory=list)
    reasons: Counter[str] = dataclasses.field(default_factory=Counter)

    @property
    def kept(self) -> int:
        return self.read - self.skipped

    def counts(self) -> dict[str, Any]:
        """What a result says of it: read = kept + skipped."""
        return {"read": self.read, "kept": self.kept, "skipped": self.skipped, "reasons": dict(self.reasons)}

    def skip(self, where: str, reason: str) -> None:
        self.skipped += 1
        self.reasons[reason] += 1
        if len(self.listed) < MAX_LISTED:
            self.listed.append((where, reason))


class Rows:
    """The rows of `paths`, in order; iterating again reads again and counts anew in `quarantine`.

    Args:
      columns: canonical name -> the file's column, for those that differ.
      kinds: the kinds that are of use; all if not given. A row of another kind is a bad one.
      bad_rows: "error" stops at a bad row; "skip" lists and counts it.
    Raises:
      DataError: no such file, a bad row (naming file:line) unless they are skipped, or no row at all.
    """

    def __init__(
        self,
        paths: str | Path | Sequence[str | Path],
        *,
        columns: Mapping[str, str] | None = None,
        kinds: Sequence[str] | None = None,
        bad_rows: str = "error",
    ):
        self.paths = [Path(p) for p in ([paths] if isinstance(paths, str | Path) else paths)]
        self.columns = COLUMNS | dict(columns or {})
        for name in self.columns.keys() - COLUMNS.keys():
            close = difflib.get_close_matches(name, COLUMNS, 1)
            hint = f"; did you mean {close[0]!r}?" if close else f"; there are {', '.join(COLUMNS)}"
            raise RecipeError(f"columns: no column {name!r}{hint}")
        if bad_rows not in ("error", "skip"):
            raise RecipeError(f"bad_rows = {bad_rows!r}: must be 'error' or 'skip'")
        self.kinds = tuple(kinds or KINDS)
        self.bad_rows = bad_rows
        self.quarantine = Quarantine()
        self._ids: dict[str | float, tuple[int, int, int]] = {}  # and the `after` of the row that has each
        self._known = START  # the ids of all rows before this are known
        if not self.paths:
            raise DataError("no data file was given")
        for path in self.paths:
            _check_path(path)

    def __iter__(self) -> Iterator[Row]:
        self.quarantine = Quarantine()
        yield from self.read()
        self.require_some()

    def require_some(self) -> None:
        """Raise the DataError of an empty data set, if no row that was read is of use."""
        if not self.quarantine.read:
            raise DataError(f"{', '.join(map(str, self.paths))}: no rows: the data set is empty")
        if not self.quarantine.kept:
            where, reason = (self.quarantine.listed or [("earlier", "see the list of skipped rows")])[0]
            raise DataError(f"none of the {self.quarantine.read} rows is of use; {where}: {reason}")

    def read(self, start: tuple[int, int, int] = START) -> Iterator[Row]:
        """Rows from `start`, the `after` of an earlier row, on; counts go on too."""
        pairs_alone = self.kinds == ("preference",)
        # Rows before `start` are read again where their ids are not known, and do not count.
        for where, values, after in self._values(min(start, self._known) if pairs_alone else start):
            counts = after > start
            self.quarantine.read += counts
            try:
                kind, checked = self._check(values)
                if pairs_alone:
                    self._require_new(values, after)
            except DataError as error:
                if counts:
                    self.reject(where, str(error))
                continue
            if counts:
                yield Row(kind, checked, where, after)

    def _values(self, start: tuple[int, int, int]) -> Iterator[tuple[str, Any, tuple[int, int, int]]]:
        """What the files hold from `start` on, unchecked: where it stands, the value, where the next one starts."""
        index, offset, line = start
        for number in range(index, len(self.paths)):
            path = self.paths[number]
            suffix = path.suffix.lower()
            read = self._json_rows if suffix in JSONL else self._parquet_rows if suffix in PARQUET else self._text_rows
            with path.open("rb") as file:
                file.seek(offset)
                for where, values, after in read(file, path, line):
                    yield where, values, (number, *after)
            offset, line = 0, 1

    def reject(self, where: str, reason: str) -> None:
        """A row that was read is a bad one: stop or count it, as `bad_rows` says."""
        if self.bad_rows == "error":
            raise DataError(f"{where}: {reason}; mend it, or pass bad_rows = 'skip' (--bad-rows skip) to leave it out")
        self.quarantine.skip(where, reason)

    @functools.cached_property
    def sha256(self) -> str:
        """Hash of the files' bytes, one after the other."""
        digest = hashlib.sha256()
        for path in self.paths:
            with path.open("rb") as file:
                while block := file.read(1 << 20):
                    digest.update(block)
        return digest.hexdigest()

    def _json_rows(self, file: BinaryIO, path: Path, line: int) -> Iterator[tuple[str, Any, tuple[int, int]]]:
        for raw in _lines(file):
            if raw is None or raw.strip():
                yield f"{path}:{line}", _parse(raw, first=line == 1), (file.tell(), line + 1)
            line += 1

    def _parquet_rows(self, file: BinaryIO, path: Path, row: int) -> Iterator[tuple[str, Any, tuple[int, int]]]:
        return parquet_rows(file, path, row, set(self.columns.values()))

    def _text_rows(self, file: BinaryIO, path: Path, line: int) -> Iterator[tuple[str, Any, tuple[int, int]]]:
        held: list[bytes] = []
        size, first, bad = 0, line, None
        for raw in _lines(file):
            if size and size + len(raw or b"") > MAX_TEXT:
                yield f"{path}:{bad or first}", _joined(held, bad, first == 1), (file.tell() - len(raw or b""), line)
                held, size, first, bad = [], 0, line, None
            held.append(raw or b"")
            size += len(raw or b"")
            if bad is None and (raw is None or not _is_utf8(raw)):
                bad = line
            line += 1
        if bad or any(part.removeprefix(codecs.BOM_UTF8).strip() for part in held):
            yield f"{path}:{bad or first}", _joined(held, bad, first == 1), (file.tell(), line)

    def _check(self, values: Any) -> tuple[str, dict[str, Any]]:
        if isinstance(values, DataError):
            raise values
        if isinstance(values, str):  # a piece of a plain-text file
            if "text" not in self.kinds:
                raise DataError(
                    f"plain text has no columns, and {' or '.join(self.kinds)} rows are needed; give .jsonl"
                )
            return "text", {"text": values}
        if not isinstance(values, dict):
            raise DataError("a row must be a JSON object")
        for kind in KINDS:
            found = {c: values[self.columns[c]] for c in KINDS[kind] if self.columns[c] in values}
            if kind in self.kinds and self._complete(kind, found):
                return kind, CHECKS[kind](found)
        raise DataError(self._missing(values))

    def _require_new(self, values: dict[str, Any], after: tuple[int, int, int]) -> None:
        self._known = max(self._known, after)
        name = values.get(self.columns["id"])
        if isinstance(name, str | int | float) and self._ids.setdefault(name, after) != after:
            raise DataError(f"column {self.columns['id']!r} repeats that of an earlier row")

    def _complete(self, kind: str, found: dict) -> bool:
        if kind == "preference" and "prompt" not in found:
            return all(isinstance(found.get(c), list) for c in ("chosen", "rejected"))
        return len(found) == len(KINDS[kind])

    def _missing(self, values: dict) -> str:
        """The column that the likeliest kind lacks."""
        has = {kind: sum(self.columns[c] in values for c in KINDS[kind]) for kind in self.kinds}
        kind = max(self.kinds, key=lambda k: has[k] / len(KINDS[k]))
        lacking = [repr(self.columns[c]) for c in KINDS[kind] if self.columns[c] not in values]
        there = ", ".join(map(repr, list(values)[:8])) or "none"
        if has[kind]:
            return f"lacks column {' and '.join(lacking)} of a {kind} row (it has {there})"
        wanted = " | ".join("+".join(self.columns[c] for c in KINDS[k]) for k in self.kinds)
        return f"no column that makes a row: need {wanted} (it has {there}); map them with columns"


def skipped_rows(*sources: Rows) -> list[dict[str, str]]:
    """The rows that were skipped, each once: where it stands and why."""
    found = dict(item for rows in sources for item in rows.quarantine.listed)
    return [{"row": where, "reason": reason} for where, reason in found.items()]


def keep_quarantine(folder: Path, *sources: Rows) -> dict[str, Any]:
    """List what was skipped in the folder's quarantine.jsonl, if anything was; what a result says of it."""
    skipped = skipped_rows(*sources)
    if skipped:
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in skipped)
        (folder / QUARANTINE).write_text(text, encoding="utf-8")
    return {"skipped_rows": skipped[:SHOWN]} if skipped else {}


def _check_path(path: Path) -> None:
    if path.is_dir():
        raise DataError(f"{path}: is a folder; name the files in it")
    if not path.is_file():
        raise DataError(f"{path}: no such file")
    if path.suffix.lower() not in JSONL | PARQUET | PLAIN:
        raise DataError(f"{path}: cannot read {path.suffix} files; give .jsonl, .parquet or .txt")
    if path.suffix.lower() in PARQUET:
        check_parquet(path)


def _lines(file: BinaryIO) -> Iterator[bytes | None]:
    """Lines with their line ends; None for one that is longer than MAX_LINE, which is passed over."""
    while raw := file.readline(MAX_LINE + 1):
        if len(raw) > MAX_LINE and not raw.endswith(b"\n"):
            while (rest := file.readline(MAX_LINE)) and not rest.endswith(b"\n"):
                pass
            yield None
        else:
            yield raw


def _parse(raw: bytes | None, *, first: bool) -> Any:
    """The JSON value of a line, or the DataError that says what is wrong with it."""
    if raw is None:
        return DataError(f"longer than {MAX_LINE} bytes")
    try:
        value = json.loads(raw.decode("utf-8-sig" if first else "utf-8"))
    except UnicodeDecodeError as error:
        return DataError(f"not UTF-8 (byte {error.start} of the line): {error.reason}")
    except RecursionError:
        return DataError("broken JSON: nested too deeply")
    except ValueError as error:
        hint = " (a JSON array over several lines? give one object a line)" if raw.strip() in (b"[", b"{") else ""
        return DataError(f"broken JSON: {error}{hint}")
    return DataError("a row must be a JSON object, not a string") if isinstance(value, str) else value


def _joined(held: list[bytes], bad: int | None, first: bool) -> Any:
    if bad is not None:
        return DataError(f"not UTF-8, or a line longer than {MAX_LINE} bytes")
    return b"".join(held).decode("utf-8-sig" if first else "utf-8")


def _is_utf8(raw: bytes) -> bool:
    try:
        raw.decode()
    except UnicodeDecodeError:
        return False
    return True
