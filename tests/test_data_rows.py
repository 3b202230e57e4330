"""Rows of files, good and bad."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compress.data import rows as rows_module
from compress.data.rows import Rows
from compress.errors import DataError, RecipeError

TALK = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
SAYS_NO = [TALK[0], {"role": "assistant", "content": "no"}]


def write(folder, *lines, name="data.jsonl"):
    path = folder / name
    path.write_bytes(b"".join(line if isinstance(line, bytes) else json.dumps(line).encode() + b"\n" for line in lines))
    return path


@pytest.mark.parametrize(
    ("row", "kind"),
    [
        ({"text": "a", "id": 3}, "text"),
        ({"messages": TALK}, "messages"),
        ({"prompt": "a", "completion": "b"}, "completion"),
        ({"prompt": TALK[:1], "completion": TALK[1:]}, "completion"),
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, "preference"),
        ({"tokens": [1, 2]}, "tokens"),
    ],
)
def test_the_columns_tell_the_kind(tmp_path, row, kind):
    (found,) = Rows(write(tmp_path, row))
    assert found.kind == kind
    assert found.values == {name: value for name, value in row.items() if name != "id"}


@pytest.mark.parametrize("prompt", [{}, {"prompt": "hi"}, {"prompt": TALK[:1]}])
def test_answers_that_repeat_the_prompt_are_told_from_it(tmp_path, prompt):
    (found,) = Rows(write(tmp_path, {**prompt, "chosen": TALK, "rejected": SAYS_NO}))
    assert found.values == {"prompt": TALK[:1], "chosen": TALK[1:], "rejected": SAYS_NO[1:]}


def test_a_column_mapping_merges_with_the_defaults(tmp_path):
    path = write(tmp_path, {"body": "a"}, {"prompt": "a", "answer": "b"}, {"messages": TALK})
    found = list(Rows(path, columns={"text": "body", "completion": "answer"}))
    assert [row.kind for row in found] == ["text", "completion", "messages"]
    with pytest.raises(RecipeError, match="did you mean 'completion'"):
        Rows(path, columns={"completions": "answer"})


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (b'{"text": "a"\n', "broken JSON"),
        (b'{"text": "\xff"}\n', "not UTF-8"),
        (b'{"text": "\\ud800"}\n', "lone surrogate"),
        (b"[1]\n", "must be a JSON object"),
        (b'"a"\n', "must be a JSON object"),
        (b"[" * 100_000 + b"\n", "nested too deeply"),
        ({"txt": "a"}, "no column that makes a row"),
        ({"prompt": "a"}, "lacks column 'completion'"),
        ({"prompt": "a", "chosen": "b"}, "lacks column 'rejected'"),
        ({"text": 3}, "'text' must be a string, not a number"),
        ({"text": None}, "'text' must be a string, not null"),
        ({"messages": []}, "'messages' must be a list"),
        ({"messages": [{"role": "user"}]}, r"messages\[0\].content' must be a string"),
        ({"messages": [{"content": "a"}]}, "role and content"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "not text"),
        ({"tokens": [1, -1]}, "list of token ids"),
        ({"tokens": [True]}, "list of token ids"),
        ({"tokens": []}, "list of token ids"),
        ({"prompt": "a", "completion": TALK}, "'prompt' must be a list"),
        ({"chosen": TALK, "rejected": [{"role": "user", "content": "x"}] * 2}, "share no messages"),
        ({"prompt": TALK[:1], "chosen": TALK, "rejected": TALK[:1] * 2}, "no message of role 'assistant'"),
    ],
)
def test_a_bad_row_is_named_by_file_and_line_or_skipped_and_counted(tmp_path, line, says):
    path = write(tmp_path, {"text": "a"}, b"\n", line, {"text": "b"})
    with pytest.raises(DataError, match=says) as caught:
        list(Rows(path))
    assert str(caught.value).startswith(f"{path}:3: ") and "\n" not in str(caught.value)
    skipping = Rows(path, bad_rows="skip")
    assert [row.values["text"] for row in skipping] == ["a", "b"]
    assert (skipping.quarantine.read, skipping.quarantine.kept, skipping.quarantine.skipped) == (3, 2, 1)
    assert skipping.quarantine.listed[0][0] == f"{path}:3"


def test_text_parts_of_a_message_are_joined(tmp_path):
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    (row,) = Rows(write(tmp_path, {"messages": [{"role": "user", "content": parts}]}))
    assert row.values["messages"] == [{"role": "user", "content": "ab"}]


@settings(max_examples=40, deadline=None)
@given(good=st.lists(st.booleans(), min_size=1, max_size=20))
def test_rows_read_are_rows_kept_and_rows_skipped(tmp_path_factory, good):
    path = write(tmp_path_factory.mktemp("rows"), *({"text": "a"} if g else b"{\n" for g in good))
    found = Rows(path, bad_rows="skip")
    if not any(good):
        with pytest.raises(DataError, match="is of use"):
            list(found)
    else:
        assert len(list(found)) == len(list(found)) == sum(good) == found.quarantine.kept
    assert found.quarantine.read == len(good)
    assert found.quarantine.skipped == len(found.quarantine.listed) == good.count(False)


@pytest.mark.parametrize("content", [b"", b"\n\n", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("name", ["a.jsonl", "a.txt"])
def test_an_empty_data_set_is_refused(tmp_path, content, name):
    with pytest.raises(DataError):
        list(Rows(write(tmp_path, content, name=name)))


def test_a_row_of_a_kind_that_is_of_no_use_is_a_bad_one(tmp_path):
    with pytest.raises(DataError, match="need prompt\\+chosen\\+rejected"):
        list(Rows(write(tmp_path, {"text": "a"}), kinds=["preference"]))
    with pytest.raises(DataError, match="plain text has no columns"):
        list(Rows(write(tmp_path, b"a", name="a.txt"), kinds=["preference"]))


def test_a_byte_order_mark_is_passed_over(tmp_path):
    (row,) = Rows(write(tmp_path, b'\xef\xbb\xbf{"text": "a"}\n'))
    assert row.values == {"text": "a"}
    (row,) = Rows(write(tmp_path, b"\xef\xbb\xbfa\n", name="a.txt"))
    assert row.values == {"text": "a\n"}


def test_a_plain_text_file_is_one_row_with_its_line_ends(tmp_path):
    path = write(tmp_path, b"a\r\n\n  b", name="a.txt")
    assert [(row.kind, row.values, row.where) for row in Rows(path)] == [("text", {"text": "a\r\n\n  b"}, f"{path}:1")]
    with pytest.raises(DataError, match=":2: not UTF-8"):
        list(Rows(write(tmp_path, b"a\n\xff\n", name="b.txt")))


def test_long_lines_and_long_texts_are_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(rows_module, "MAX_LINE", 20)
    monkeypatch.setattr(rows_module, "MAX_TEXT", 8)
    found = Rows(write(tmp_path, {"text": "a" * 100}, {"text": "b"}), bad_rows="skip")
    assert [row.where.rpartition(":")[2] for row in found] == ["2"]
    assert found.quarantine.listed[0][1] == "longer than 20 bytes"
    path = write(tmp_path, b"abc\ndef\nghi\n", name="a.txt")
    assert [row.values["text"] for row in Rows(path)] == ["abc\ndef\n", "ghi\n"]


@pytest.mark.parametrize("name", ["a.jsonl", "a.txt"])
def test_reading_continues_after_any_row(tmp_path, monkeypatch, name):
    monkeypatch.setattr(rows_module, "MAX_TEXT", 8)
    lines = [{"text": "a"}, b"\n", {"text": "b"}, {"text": "c"}] if name == "a.jsonl" else [b"abc\nde\n", b"fgh\nij"]
    paths = [write(tmp_path, *lines, name=name), write(tmp_path, *lines, name=f"2{name}")]
    found = list(Rows(paths))
    for i, row in enumerate(found):
        assert list(Rows(paths).read(row.after)) == found[i + 1 :]


@pytest.mark.parametrize(("name", "says"), [("none.jsonl", "no such file"), ("a.csv", "cannot read .csv")])
def test_a_file_that_cannot_be_read_is_named(tmp_path, name, says):
    (tmp_path / "a.csv").write_bytes(b"text")
    with pytest.raises(DataError, match=says):
        Rows(tmp_path / name)
    with pytest.raises(DataError, match="is a folder"):
        Rows(tmp_path)


def test_the_hash_is_that_of_the_bytes(tmp_path):
    path = write(tmp_path, b"abc", name="a.txt")
    assert Rows(path).sha256 == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
