"""Rows of Parquet files, streamed row group by row group (https://parquet.apache.org/docs/file-format).

The footer says how many rows each row group has, so a row's number alone tells where to go on.
"""

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from compress.errors import DataError, RecipeError

PARQUET = {".parquet", ".pq"}
BATCH = 256  # rows that are decoded at once


def check_parquet(path: Path) -> None:
    """Read the footer of a Parquet file.

    Raises:
      RecipeError: pyarrow is not installed.
      DataError: the file is none, is truncated, or lies about its size.
    """
    with path.open("rb") as file:
        _open(file, path)


def parquet_rows(
    file: BinaryIO, path: Path, row: int, columns: Collection[str]
) -> Iterator[tuple[str, Any, tuple[int, int]]]:
    """Rows from number `row` (from 1) on: (file:row, values or the DataError of a bad one, where the next starts).

    A null is a column that the row leaves out, and a field that a message leaves out; a row of nulls keeps them.

    Args:
      columns: those to decode, where the file has any of them.

    Raises:
      DataError: the file is damaged; a row alone is not to blame, so it is not skipped.
    """
    import pyarrow as pa

    parquet, names = _open(file, path)
    wanted = [name for name in names if name in columns] or None
    first = 1
    for group in range(parquet.num_row_groups):
        count = parquet.metadata.row_group(group).num_rows
        if row < first + count:
            at = first
            try:
                for batch in parquet.iter_batches(BATCH, [group], wanted):
                    for index in range(max(0, row - at), batch.num_rows):
                        yield f"{path}:{at + index}", _values(batch, index), (0, at + index + 1)
                    at += batch.num_rows
            except (pa.ArrowException, OSError) as error:
                raise DataError(f"{path}: damaged in row group {group}, after row {at - 1}: {error}") from error
        first += count


def _open(file: BinaryIO, path: Path) -> tuple[Any, list[str]]:
    """The file by its footer, and the names of its columns."""
    try:
        import pyarrow as pa
        from pyarrow.parquet import ParquetFile
    except ImportError:
        raise RecipeError(f"{path}: Parquet needs pyarrow; pip install 'compress-lm[parquet]'") from None
    try:
        parquet = ParquetFile(file, page_checksum_verification=True)
        return parquet, parquet.schema_arrow.names
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: not a Parquet file, or a truncated one: {error}") from error


def _values(batch: Any, index: int) -> Any:
    """A row as JSON would have it, or the DataError that says what is wrong with it."""
    try:
        row = {name: column[index].as_py() for name, column in zip(batch.schema.names, batch.columns, strict=True)}
    except UnicodeDecodeError as error:
        return DataError(f"not UTF-8 (byte {error.start} of a column): {error.reason}")
    except (ValueError, OverflowError) as error:  # a date that Python cannot hold
        return DataError(f"a value that cannot be read: {error}")
    return _present(row) or row


def _present(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _present(item) for name, item in value.items() if item is not None}
    return [_present(item) for item in value] if isinstance(value, list) else value
