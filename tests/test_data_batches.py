"""Streams of batches: the same by seed, and resumable anywhere."""

import itertools
import json
from functools import partial

import jax
import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from compress.align.settings import Align
from compress.data.batch import CHOSEN, REJECTED
from compress.data.batches import Batches, PairBatches
from compress.data.rows import Rows
from compress.data.split import training_and_held_out
from compress.data.windows import documents, windows
from compress.errors import DataError
from compress.tokenizer import Tokenizer
from compress.train import course
from tests import tiny_training as tiny


@pytest.fixture(scope="module")
def byte_tokenizer():
    """One token a byte, and `</s>`."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=257, special_tokens=["</s>"], initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator([], trainer)
    return Tokenizer.from_files(
        {
            "tokenizer.json": backend.to_str().encode(),
            "tokenizer_config.json": b'{"eos_token": "</s>", "pad_token": "</s>"}',
        }
    )


def write(folder, found, name="data.jsonl"):
    path = folder / name
    path.write_text("".join(json.dumps(row) + "\n" for row in found))
    return path


@pytest.fixture
def texts(tmp_path):
    return write(tmp_path, [{"text": chr(65 + i) * (3 + i % 7)} for i in range(26)])


def equal(one, other):
    return all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True))


def content(batches):
    """The tokens that are not padding, sorted."""
    return sorted(int(t) for batch in batches for t in batch.tokens[batch.segments > 0])


@pytest.mark.parametrize("buffer", [40, 1 << 20])
def test_an_epoch_holds_every_token_once(texts, byte_tokenizer, buffer):
    whole = sorted(t for row in Rows(texts) for t in byte_tokenizer.encode(row.values["text"]))
    stream = Batches(Rows(texts), byte_tokenizer, size=2, length=12, epochs=2, buffer=buffer)
    steps = stream.steps_per_epoch()
    found = list(stream)
    assert len(found) == 2 * steps
    assert content(found[:steps]) == content(found[steps:]) == whole
    assert stream.tokens == 2 * len(whole) and stream.slots == len(found) * 24
    assert stream.efficiency == stream.tokens / stream.slots


@pytest.mark.parametrize("buffer", [40, 1 << 20])
def test_the_order_is_that_of_seed_and_epoch(texts, byte_tokenizer, buffer):
    def made(seed):
        return list(Batches(Rows(texts), byte_tokenizer, size=2, length=12, seed=seed, epochs=2, buffer=buffer))

    one, again, other = made(1), made(1), made(2)
    assert all(equal(a, b) for a, b in zip(one, again, strict=True))
    assert not all(equal(a, b) for a, b in zip(one, other))
    half = len(one) // 2
    assert not all(equal(a, b) for a, b in zip(one[:half], one[half:]))


@pytest.mark.parametrize("buffer", [40, 1 << 20])
def test_a_stream_continues_exactly_after_any_batch(texts, byte_tokenizer, buffer):
    def made():
        return Batches(Rows(texts), byte_tokenizer, size=2, length=12, seed=3, epochs=2, buffer=buffer)

    whole = list(made())
    for steps in range(len(whole) + 1):
        first, second = made(), made()
        for _ in itertools.islice(first, steps):
            pass
        second.restore(json.loads(json.dumps(first.state())))
        rest = list(second)
        assert len(rest) == len(whole) - steps
        assert all(equal(a, b) for a, b in zip(rest, whole[steps:]))
        assert second.rows.quarantine.read in (0, 26)


@pytest.mark.parametrize("buffer", [40, 1 << 20])
@pytest.mark.parametrize("shuffle", [True, False])
def test_a_sample_is_a_share_of_each_epoch_drawn_anew_and_resumable(texts, byte_tokenizer, buffer, shuffle):
    def made(sample):
        options = {"size": 2, "length": 12, "seed": 3, "epochs": 2, "buffer": buffer, "shuffle": shuffle}
        return Batches(Rows(texts), byte_tokenizer, sample=sample, **options)

    def rows(batches):
        """The rows of single letters that the batches hold."""
        found = [batch.tokens[b, batch.segments[b] == s] for batch in batches for b in range(2) for s in range(1, 5)]
        return [byte_tokenizer.decode(ids) for ids in found if len(ids)]

    stream = made(0.5)
    steps = stream.steps_per_epoch()
    whole = list(stream)
    epochs = rows(whole[:steps]), rows(whole[steps:])
    every = {row.values["text"] for row in Rows(texts)}
    for epoch in epochs:
        assert set(epoch) < every and len(set(epoch)) == len(epoch)  # without replacement
        assert len(epoch) == pytest.approx(13, abs=0 if buffer > 40 else 3)  # a buffer rounds
    assert set(epochs[0]) != set(epochs[1])
    for at in range(len(whole) + 1):
        first, second = made(0.5), made(0.5)
        list(itertools.islice(first, at))
        second.restore(json.loads(json.dumps(first.state())))
        rest = list(second)
        assert len(rest) == len(whole) - at and all(equal(a, b) for a, b in zip(rest, whole[at:]))
    with pytest.raises(DataError, match="sample changed"):
        made(0.6).restore(stream.state())


def test_a_state_of_other_settings_or_data_is_refused(texts, byte_tokenizer, tmp_path):
    state = Batches(Rows(texts), byte_tokenizer, size=2, length=12).state()
    other = write(tmp_path, [{"text": "abc"}], "other.jsonl")
    with pytest.raises(DataError, match="length, seed, data changed"):
        Batches(Rows(other), byte_tokenizer, size=2, length=13, seed=1).restore(state)


def test_rows_that_leave_no_target_are_skipped_and_counted(tmp_path, byte_tokenizer):
    path = write(
        tmp_path,
        [
            {"prompt": "ab", "completion": "cd"},
            {"prompt": "a" * 30, "completion": "cd"},
            {"text": ""},
            {"text": "a" * 30},
            {"tokens": [9999]},
        ],
    )
    with pytest.raises(DataError, match=r"data.jsonl:5: token id 9999"):
        list(Batches(Rows(path), byte_tokenizer, size=2, length=8, room=8, epochs=1))
    rows = Rows(path, bad_rows="skip")
    found = list(Batches(rows, byte_tokenizer, size=2, length=8, room=8, epochs=1))
    assert sum(int((batch.segments > 0).sum()) for batch in found) == 5 + 30
    assert (rows.quarantine.read, rows.quarantine.kept, rows.quarantine.skipped) == (5, 2, 3)
    assert rows.quarantine.reasons["no target left in 8 tokens"] == 2


def test_a_data_set_of_which_nothing_is_of_use_is_refused(tmp_path, byte_tokenizer):
    path = write(tmp_path, [{"text": ""}])
    with pytest.raises(DataError, match="none of the 1 rows is of use"):
        next(Batches(Rows(path), byte_tokenizer, size=2, length=8))


def test_pairs_stand_side_by_side_and_cut_ones_are_counted(tmp_path, byte_tokenizer):
    path = write(tmp_path, [{"prompt": "x" * i, "chosen": "a" * i, "rejected": "b"} for i in range(1, 9)])
    rows = Rows(path, kinds=["preference"])
    found = list(PairBatches(rows, byte_tokenizer, size=3, length=8, epochs=1, room=7))
    assert rows.quarantine.skipped == 0 and len(found) == 3
    for batch in found:
        for i in np.flatnonzero(batch.rows.segments[:, 0]):
            text = [byte_tokenizer.decode(tiny.alone(batch.rows, side).tokens[i]) for side in (CHOSEN, REJECTED)]
            assert text[0].split("a")[0] == text[1].split("b")[0]
    rows = Rows(path, kinds=["preference"])
    list(PairBatches(rows, byte_tokenizer, size=3, length=8, epochs=1, room=8))
    assert rows.quarantine.reasons == {"no target left in 8 tokens": 1}


@pytest.mark.parametrize(
    ("prompt", "rejected", "length", "wanted"),
    [
        (10, "b", 64, 40),  # 9 of the prompt, then 21 and 3 tokens, rounded up
        (0, "b" * 30, 10, 20),  # nothing shared: two answers of 10
    ],
)
def test_rows_are_as_long_as_the_buffer_s_longest_pair_whatever_is_sampled(
    tmp_path, byte_tokenizer, prompt, rejected, length, wanted
):
    path = write(tmp_path, [{"prompt": "p" * prompt, "chosen": "a" * i, "rejected": rejected} for i in range(1, 20)])
    batches = PairBatches(Rows(path), byte_tokenizer, size=2, length=length, sample=0.2, epochs=3)
    assert {batch.rows.tokens.shape for batch in batches} == {(2, wanted)}
    assert batches.slots == wanted * 2 * 6 and 0 < batches.efficiency < 1


BAD_PAIRS = [
    {"prompt": "p", "chosen": "a", "rejected": "b", "id": 1},
    {"prompt": "p", "chosen": "a", "rejected": "a"},
    {"prompt": "p", "chosen": "", "rejected": "b"},
    {"prompt": "p", "chosen": "a", "rejected": " \n"},
    {"prompt": "p", "chosen": "a", "rejects": "b"},
    {"prompt": "p", "chosen": "c", "rejected": "d", "id": 1},
    {"prompt": "x" * 40, "chosen": "a", "rejected": "b", "id": 2},
    {"prompt": "p", "chosen": "a" * 20 + "b", "rejected": "a" * 20},
    {"prompt": "p", "chosen": "e", "rejected": "f", "id": "1"},
]
TWO = [{"role": "assistant", "content": text} for text in ("yes", " ")]


def test_every_bad_pair_is_listed_with_its_reason_and_the_counts_add_up(tmp_path, byte_tokenizer):
    path = write(tmp_path, BAD_PAIRS)
    path.write_bytes(path.read_bytes() + b'{"prompt": "p", "chosen": "\xff", "rejected": "b"}\n')
    rows = Rows(path, kinds=["preference"], bad_rows="skip")
    found = list(PairBatches(rows, byte_tokenizer, size=4, length=8, epochs=1, shuffle=False))
    quarantine = rows.quarantine
    assert (quarantine.read, quarantine.kept, quarantine.skipped) == (10, 3, 7)
    assert sum(int((batch.rows.mask.sum(1) > 0).sum()) for batch in found) == 3
    reasons = {int(where.rpartition(":")[2]): reason for where, reason in quarantine.listed}
    said = {
        2: "'chosen' and 'rejected' are equal",
        3: "'chosen' is an empty answer",
        4: "'rejected' is an empty answer",
        5: "lacks column 'rejected'",
        6: "'id' repeats that of an earlier row",
        8: "both answers are the same in 8 tokens",
        10: "not UTF-8",
    }
    assert reasons.keys() == said.keys()
    assert all(said[line] in reason for line, reason in reasons.items())
    # The prompt of line 7 is too long: it keeps its end, and the answer is whole.
    chosen = tiny.alone(found[0].rows, CHOSEN)
    assert byte_tokenizer.decode(chosen.tokens[1]).rstrip("</s>") == "x" * 6 + "a"


@pytest.mark.parametrize("line", [2, 3, 4, 5, 6])
def test_a_bad_pair_stops_the_reading_by_default(tmp_path, byte_tokenizer, line):
    path = write(tmp_path, [BAD_PAIRS[0], BAD_PAIRS[line - 1]])
    with pytest.raises(DataError, match=r"data.jsonl:2: .*--bad-rows skip"):
        list(PairBatches(Rows(path, kinds=["preference"]), byte_tokenizer, size=2, length=8, epochs=1))


@pytest.mark.parametrize(
    ("answers", "said"), [((TWO[0], TWO[0]), "are equal"), ((TWO[0], TWO[1]), "'rejected' is an empty")]
)
def test_answers_that_are_messages_are_two_answers_too(tmp_path, answers, said):
    path = write(tmp_path, [{"prompt": "p", "chosen": answers[:1], "rejected": answers[1:]}])
    with pytest.raises(DataError, match=said):
        list(Rows(path, kinds=["preference"]))


@pytest.mark.parametrize("buffer", [30, 1 << 20])
def test_pairs_with_an_id_twice_are_the_same_ones_after_a_restart(tmp_path, byte_tokenizer, buffer):
    made_of = [{"prompt": "p", "chosen": f"a{i}", "rejected": "b", "id": i % 9} for i in range(20)]
    path = write(tmp_path, made_of)

    def made():
        rows = Rows(path, kinds=["preference"], bad_rows="skip")
        return PairBatches(rows, byte_tokenizer, size=2, length=8, seed=3, epochs=2, buffer=buffer)

    whole = list(made())
    assert len(whole) == 2 * made().steps_per_epoch()
    assert sum(int((batch.rows.mask.sum(1) > 0).sum()) for batch in whole) == 18
    for at in range(len(whole)):
        first, second = made(), made()
        list(itertools.islice(first, at))
        second.restore(first.state())
        assert all(equal(a, b) for a, b in zip(second, whole[at:], strict=True))
        assert (second.rows.quarantine.read, second.rows.quarantine.skipped) == (20, 11)


def test_a_column_of_another_name_may_be_the_id(tmp_path):
    path = write(tmp_path, [{"prompt": "p", "chosen": "a", "rejected": "b", "id": 1, "row": i} for i in range(2)])
    assert len(list(Rows(path, kinds=["preference"], columns={"id": "row"}))) == 2
    assert len(list(Rows(path))) == 2  # where other rows than pairs may come, an id is a column like any other


def test_documents_are_rows_or_blocks_of_1024_tokens(tmp_path, byte_tokenizer):
    path = tmp_path / "a.txt"
    path.write_text("a" * 2500)
    found = documents(Rows(path), byte_tokenizer)
    assert [len(d) for d in found] == [1024, 1024, 452] and all(d.mask.all() for d in found)
    assert [len(d) for d in documents(Rows(path), byte_tokenizer, tokens=1500)] == [1024, 476]
    path = write(tmp_path, [{"text": "abc"}, {"text": "d" * 1025}, {"prompt": "x", "completion": "y"}])
    found = documents(Rows(path), byte_tokenizer)
    assert [len(d) for d in found] == [3, 1024, 1, 3] and found[3].mask.tolist() == [False, True, True]
    convention = windows(found, 512, joined=True).convention
    assert (convention.documents, convention.tokens) == (4, 1031)


HELD_OUT = 6  # a line that is


@pytest.mark.parametrize(
    ("before", "said"),
    [("\n", "all rows: held out; give more data"), ('{"tokens": [5]}\n', "data.jsonl:1: no target left in 8 tokens")],
)
def test_a_stream_without_end_of_no_training_row_is_refused(tmp_path, byte_tokenizer, before, said):
    path = tmp_path / "data.jsonl"
    path.write_text(before * (HELD_OUT - 1) + '{"tokens": [5, 6, 7]}\n')
    rows, held = training_and_held_out([path], ())
    assert len(list(Batches(held, byte_tokenizer, size=1, length=8, epochs=1))) == 1
    with pytest.raises(DataError, match=f"no row is left to train on; .*{said}"):
        next(Batches(rows, byte_tokenizer, size=1, length=8))


@pytest.mark.parametrize(
    ("last", "said"),
    [("", "validate on; give more"), ('{"tokens": [5]}', r"validate on \(.*:6: no target left in 8 tokens\)")],
)
def test_no_held_out_row_of_use_says_why(tmp_path, byte_tokenizer, last, said):
    path = tmp_path / "data.jsonl"
    path.write_text('{"tokens": [5, 6, 7]}\n' * (HELD_OUT - 1) + last)
    _, held = training_and_held_out([path], ())
    with pytest.raises(DataError, match=said):
        course.held_out(
            partial(Batches, held, byte_tokenizer, size=1, length=8), Align(data=(), global_batch=1, sequence_length=8)
        )
