"""Rows of Parquet files: the same as those of JSONL, wherever reading starts; and files that are broken."""

import json
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compress.data.batches import Batches
from compress.data.parquet import BATCH
from compress.data.rows import Rows
from compress.errors import DataError, RecipeError
from compress.tokenizer import Tokenizer
from tests import tiny_run

TALK = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
SAYS_NO = [TALK[0], {"role": "assistant", "content": "no"}]


def write(path, rows, *, group=None, schema=None):
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), path, row_group_size=group)
    return path


@pytest.mark.parametrize(
    "row",
    [
        {"text": "a", "id": 3},
        {"messages": TALK},
        {"prompt": "a", "completion": "b"},
        {"prompt": TALK[:1], "completion": TALK[1:]},
        {"prompt": "a", "chosen": "b", "rejected": "c"},
        {"chosen": TALK, "rejected": SAYS_NO},
        {"tokens": [1, 2]},
    ],
    ids="+".join,
)
def test_a_row_is_what_it_is_in_jsonl(tmp_path, row):
    (tmp_path / "a.jsonl").write_text(json.dumps(row) + "\n")
    (expected,) = Rows(tmp_path / "a.jsonl")
    (found,) = Rows(write(tmp_path / "a.parquet", [row]))
    assert (found.kind, found.values) == (expected.kind, expected.values)
    assert found.where == f"{tmp_path / 'a.parquet'}:1"


def test_kinds_may_be_mixed_and_a_null_is_a_column_or_field_left_out(tmp_path):
    rows = [{"text": "a"}, {"messages": [TALK[0], {**TALK[1], "name": "bot"}]}]
    schema = pa.schema(
        {
            "text": pa.dictionary(pa.int8(), pa.string()),
            "messages": pa.list_(pa.struct({"role": pa.string(), "content": pa.large_string(), "name": pa.string()})),
        }
    )
    text, talk = Rows(write(tmp_path / "a.parquet", rows, schema=schema))
    assert text.values == {"text": "a"}
    assert talk.values == rows[1]  # "hi" has no name, not one that is null


@settings(deadline=None, max_examples=25)
@given(st.lists(st.text(max_size=3), min_size=1, max_size=12), st.integers(1, 5), st.data())
def test_reading_goes_on_after_any_row(tmp_path_factory, texts, group, data):
    folder = tmp_path_factory.mktemp("parquet")
    path = write(folder / "a.parquet", [{"text": text} for text in texts], group=group)
    (folder / "b.jsonl").write_text('{"text": "last"}\n')
    rows = Rows([path, folder / "b.jsonl"])
    whole = list(rows)
    assert [row.values["text"] for row in whole] == [*texts, "last"]
    assert [row.where for row in whole[:-1]] == [f"{path}:{i + 1}" for i in range(len(texts))]
    stop = data.draw(st.integers(0, len(texts)))
    assert list(rows.read(whole[stop].after)) == whole[stop + 1 :]


def test_a_row_group_larger_than_what_is_decoded_at_once_is_read_whole(tmp_path):
    rows = Rows(write(tmp_path / "a.parquet", [{"text": str(i)} for i in range(2 * BATCH + 3)]))
    assert [row.values["text"] for row in rows] == [str(i) for i in range(2 * BATCH + 3)]
    assert next(rows.read((0, 0, BATCH + 7))).values["text"] == str(BATCH + 6)


def test_batches_continue_where_they_stopped(tmp_path):
    tokenizer = Tokenizer.from_files(tiny_run.tokenizer_files())
    path = write(tmp_path / "a.parquet", [{"text": text} for text in tiny_run.rows(40, 0)], group=7)
    make = lambda: Batches(Rows(path), tokenizer, size=2, length=16, buffer=200)  # noqa: E731
    stream = make()
    for _ in range(9):
        next(stream)
    other = make()
    other.restore(json.loads(json.dumps(stream.state())))
    for _ in range(9):
        assert (next(stream).tokens == next(other).tokens).all()


@pytest.mark.parametrize(
    ("column", "says"),
    [
        (pa.array([None], pa.string()), "column 'text' must be a string, not null"),
        (pa.array([3]), "column 'text' must be a string, not a number"),
        (pa.array([b"a"]), "column 'text' must be a string, not bytes"),
        (pa.array([[{"role": "user"}]]), "column 'text' must be a string, not a list"),
        (pa.array([b"\xff"]).cast(pa.string(), safe=False), "not UTF-8"),
        (pa.array([2**62], pa.timestamp("ms")), "a value that cannot be read"),
    ],
    ids=["null", "number", "bytes", "list", "encoding", "date"],
)
def test_a_bad_row_names_its_place_and_can_be_skipped(tmp_path, column, says):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": column}), path)
    (tmp_path / "b.jsonl").write_text('{"text": "good"}\n')
    with pytest.raises(DataError, match=rf"a\.parquet:1: .*{says}"):
        list(Rows(path))
    rows = Rows([path, tmp_path / "b.jsonl"], bad_rows="skip")
    assert [row.values["text"] for row in rows] == ["good"]
    assert (rows.quarantine.read, rows.quarantine.skipped) == (2, 1)


def test_a_column_that_is_not_there_is_named(tmp_path):
    path = write(tmp_path / "a.parquet", [{"prompt": "a", "body": "b"}])
    with pytest.raises(DataError, match=r"a\.parquet:1: lacks column 'completion' of a completion row"):
        list(Rows(path, kinds=["completion"]))
    (row,) = Rows(path, columns={"text": "body"})
    assert row.values == {"text": "b"}


def test_a_file_without_rows_is_an_empty_data_set(tmp_path):
    path = write(tmp_path / "a.parquet", [], schema=pa.schema({"text": pa.string()}))
    with pytest.raises(DataError, match="no rows"):
        list(Rows(path))


@pytest.mark.parametrize("spoil", [lambda b: b"", lambda b: b'{"text": "a"}\n', lambda b: b[:-3], lambda b: b[-40:]])
def test_a_file_that_is_none_is_refused_before_it_is_read(tmp_path, spoil):
    path = write(tmp_path / "a.parquet", [{"text": "a"}])
    path.write_bytes(spoil(path.read_bytes()))
    with pytest.raises(DataError, match=r"a\.parquet: not a Parquet file, or a truncated one"):
        Rows(path)


def test_a_damaged_page_stops_even_where_bad_rows_are_skipped(tmp_path):
    path = tmp_path / "a.parquet"
    table = pa.table({"text": [f"row {i}" for i in range(300)]})
    pq.write_table(table, path, row_group_size=150, compression="NONE", write_page_checksum=True)
    spoiled = bytearray(path.read_bytes())
    spoiled[spoiled.index(b"row 200")] ^= 1
    path.write_bytes(spoiled)
    with pytest.raises(DataError, match=r"a\.parquet: damaged in row group 1, after row 150: .*CRC"):
        list(Rows(path, bad_rows="skip"))


def test_without_pyarrow_the_message_says_what_to_install(tmp_path, monkeypatch):
    path = write(tmp_path / "a.parquet", [{"text": "a"}])
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(RecipeError, match=r"a\.parquet: Parquet needs pyarrow; pip install 'compress-lm\[parquet\]'"):
        Rows(path)
