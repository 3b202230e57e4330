"""What packing and windows may never do to a document."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compress.data.batch import CHOSEN, REJECTED, Batch, PairBatch
from compress.data.examples import Example, fit, fit_pair
from compress.data.pack import batch_of, pack, pair_batch_of, pieces, shared_length
from compress.data.windows import windows
from compress.errors import RecipeError
from tests import tiny_training as tiny


def text(first, length):
    return Example(np.arange(first, first + length, dtype=np.int32), np.arange(length) > 0)


lengths = st.lists(st.integers(1, 40), min_size=1, max_size=30)


def samples(sizes):
    """Texts of these lengths, of which no two share a token."""
    starts = np.cumsum([0, *sizes])
    return [text(int(start), size) for start, size in zip(starts, sizes)]


@settings(max_examples=100, deadline=None)
@given(sizes=lengths, length=st.integers(2, 24))
def test_packing_neither_loses_nor_doubles_a_token(sizes, length):
    cut = [piece for sample in samples(sizes) for piece in pieces(sample, length)]
    rows = pack([len(piece) for piece in cut], length)
    batch = batch_of([[cut[i] for i in row] for row in rows], len(rows) + 1, length, pad_id=7)
    assert sorted(batch.tokens[batch.segments > 0]) == list(range(sum(sizes)))


@settings(max_examples=100, deadline=None)
@given(sizes=lengths, length=st.integers(2, 24))
def test_a_segment_is_a_run_of_one_document_with_positions_from_zero(sizes, length):
    made = samples(sizes)
    owner = np.concatenate([np.full(len(s), i) for i, s in enumerate(made)])
    cut = [piece for sample in made for piece in pieces(sample, length)]
    rows = pack([len(piece) for piece in cut], length)
    batch = batch_of([[cut[i] for i in row] for row in rows], len(rows), length)
    for tokens, segments, positions, mask in zip(batch.tokens, batch.segments, batch.positions, batch.mask):
        ids = segments[segments > 0]
        assert np.array_equal(segments, np.pad(ids, (0, length - len(ids))))  # padding is at the end only
        assert np.all(np.diff(ids) >= 0) and (len(ids) == 0 or ids[0] == 1)
        for segment in range(1, ids.max(initial=0) + 1):
            at = np.flatnonzero(segments == segment)
            assert len(set(owner[tokens[at]])) == 1
            assert np.array_equal(tokens[at], tokens[at[0]] + np.arange(len(at)))
            assert np.array_equal(positions[at], np.arange(len(at)))
            assert mask[at[0]] == 0 and np.all(mask[at[1:]] == 1)
        assert not mask[segments == 0].any()


@settings(max_examples=100, deadline=None)
@given(sizes=st.lists(st.integers(1, 24), max_size=60))
def test_best_fit_never_leaves_two_rows_that_would_go_into_one(sizes):
    rows = pack(sizes, 24)
    assert sorted(i for row in rows for i in row) == list(range(len(sizes)))
    full = sorted(sum(sizes[i] for i in row) for row in rows)
    assert all(total <= 24 for total in full)
    assert len(full) < 2 or full[0] + full[1] > 24


def test_best_fit_takes_the_fullest_row_that_has_room():
    assert pack([6, 5, 3, 4], 9) == [[0, 2], [1, 3]]
    with pytest.raises(ValueError, match="does not go into"):
        pack([10], 9)


def test_padding_is_told_by_segments_where_its_id_is_that_of_eos():
    batch = batch_of([[Example(np.array([5, 9, 9], np.int32), np.array([False, True, True]))]], 1, 5, pad_id=9)
    assert batch.tokens.tolist() == [[5, 9, 9, 9, 9]]
    assert batch.segments.tolist() == [[1, 1, 1, 0, 0]]
    assert batch.mask.tolist() == [[0, 1, 1, 0, 0]]


def test_a_pair_s_row_has_the_prompt_once_and_its_last_token_in_front_of_each_answer():
    prompt = [5, 6, 7]
    pair = [Example(np.array([*prompt, *own], np.int32), np.arange(3 + len(own)) > 2, 3) for own in ([8, 9], [8])]
    rows = pair_batch_of([tuple(pair)], 2, 10, pad_id=1).rows
    assert rows.tokens.tolist() == [[5, 6, 7, 8, 9, 7, 8, 1, 1, 1], [1] * 10]
    assert rows.branches[0].tolist() == [0, 0, *[CHOSEN] * 3, *[REJECTED] * 2, 0, 0, 0]
    assert rows.positions[0].tolist() == [0, 1, 2, 3, 4, 2, 3, 0, 0, 0]
    assert rows.mask[0].tolist() == [0, 0, 0, 1, 1, 0, 1, 0, 0, 0]
    assert rows.segments.tolist() == [[1] * 7 + [0] * 3, [0] * 10]


ids = st.lists(st.integers(0, 2), min_size=1, max_size=12)


@settings(max_examples=200, deadline=None)
@given(
    shared=st.lists(st.integers(0, 2), max_size=8), own=st.tuples(ids, ids), starts=st.tuples(*[st.integers(0, 9)] * 2)
)
def test_each_branch_with_the_trunk_is_its_example_however_much_they_share(shared, own, starts):
    """Prompts of unequal length or content too: only what no answer learns is shared."""
    pair = []
    for tail, start in zip(own, starts):
        start = min(start, len(shared) + len(tail) - 1)
        tokens = np.array([*shared, *tail], np.int32)
        pair.append(Example(tokens, np.arange(len(tokens)) >= max(start, 1), start))
    length = shared_length(*pair)
    batch = pair_batch_of([tuple(pair)], 1, length)
    assert length <= sum(map(len, pair)) and batch.rows.segments.all()
    for branch, sample in ((CHOSEN, pair[0]), (REJECTED, pair[1])):
        found, wanted = tiny.alone(batch.rows, branch), batch_of([[sample]], 1, length)
        for name in ("tokens", "segments", "positions", "mask"):
            np.testing.assert_array_equal(getattr(found, name), getattr(wanted, name))
        mine = np.flatnonzero(batch.rows.branches[0] == branch)
        np.testing.assert_array_equal(batch.rows.positions[0, mine], len(sample) - len(mine) + np.arange(len(mine)))


def test_batches_go_through_jit_and_take_any_leaves():
    batch = pair_batch_of([(text(1, 3), text(10, 2))], 1, 6)
    doubled = jax.jit(lambda b: jax.tree.map(lambda x: 2 * x, b))(batch)
    assert isinstance(doubled, PairBatch) and isinstance(doubled.rows, Batch)
    assert doubled.rows.tokens.tolist() == [[2, 4, 6, 20, 22, 0]]
    assert jax.tree.map(lambda _: "leaf", batch).rows.mask == "leaf"
    names = [".tokens", ".segments", ".positions", ".mask"]
    plain = batch_of([[text(1, 3)]], 1, 4)
    for kind, found in ((batch.rows, [*names, ".branches"]), (plain, names)):
        assert [str(path[-1]) for path, _ in jax.tree_util.tree_leaves_with_path(kind)] == found


def answered(prompt, completion, bos=None):
    """An example whose prompt is 100, 101, … and whose completion 500, 501, …."""
    ids = [*([bos] if bos is not None else []), *range(100, 100 + prompt), *range(500, 500 + completion)]
    start = len(ids) - completion
    return Example(np.array(ids, np.int32), np.arange(len(ids)) >= start, start)


@settings(max_examples=200, deadline=None)
@given(
    prompt=st.integers(1, 30), completion=st.integers(1, 30), length=st.integers(2, 40), bos=st.sampled_from([None, 1])
)
def test_a_prompt_loses_its_beginning_and_a_completion_only_its_end(prompt, completion, length, bos):
    whole = answered(prompt, completion, bos)
    cut = fit(whole, length, bos_id=bos)
    assert len(cut) == min(len(whole), length)
    before, after = cut.tokens[: cut.start], cut.tokens[cut.start :]
    assert np.array_equal(after, np.arange(500, 500 + len(after)))
    own = before[1:] if bos is not None else before
    assert np.array_equal(own, np.arange(100 + prompt - len(own), 100 + prompt))
    assert bos is None or before[0] == bos
    assert len(after) == completion or len(before) <= max(length // 2, 1)
    assert np.array_equal(cut.mask, np.arange(len(cut)) >= cut.start)


def test_a_completion_that_is_cut_away_leaves_nothing():
    assert fit(answered(20, 5), 8, room=8) is None
    assert fit_pair(answered(20, 5), answered(20, 3), 8, room=8) is None


@settings(max_examples=100, deadline=None)
@given(prompt=st.integers(1, 30), one=st.integers(1, 30), other=st.integers(1, 30), length=st.integers(2, 40))
def test_both_sides_of_a_pair_keep_the_same_prompt(prompt, one, other, length):
    chosen, rejected = fit_pair(answered(prompt, one, 1), answered(prompt, other, 1), length, bos_id=1)
    assert np.array_equal(chosen.tokens[: chosen.start], rejected.tokens[: rejected.start])
    assert chosen.tokens[0] == 1 and max(len(chosen), len(rejected)) <= length


def everything(found):
    """(token, document) of every scored token, and what came with it."""
    scored = []
    for batch, owners in found:
        for tokens, owner, mask, segments in zip(batch.tokens, owners, batch.mask, batch.segments):
            scored += [(int(t), int(o)) for t, o, m in zip(tokens, owner, mask) if m]
            assert np.all((owner == -1) == (segments == 0))
    return scored


@settings(max_examples=100, deadline=None)
@given(sizes=lengths, window=st.integers(3, 16), part=st.integers(1, 16), bos=st.booleans(), joined=st.booleans())
def test_windows_score_each_token_at_most_once_and_name_its_document(sizes, window, part, bos, joined):
    made = [Example(s.tokens, np.ones(len(s), bool)) for s in samples(sizes)]
    stride = min(part, window - bos)
    found = windows(made, window, stride=stride, bos_id=10_000 if bos else None, joined=joined, size=3)
    owner = {int(t): i for i, s in enumerate(made) for t in s.tokens}
    scored = everything(found)
    assert len(set(scored)) == len(scored) == found.convention.scored
    assert all(owner[token] == document for token, document in scored)
    if bos:
        assert len(scored) == sum(sizes)
    elif stride < window:
        assert len(scored) == (sum(sizes) - 1 if joined else sum(size - 1 for size in sizes))
    assert everything(found) == scored  # a second pass gives the same


def test_the_simple_protocol_scores_all_but_the_first_of_each_window():
    found = windows([Example(np.arange(24, dtype=np.int32), np.ones(24, bool))], 8, joined=True, size=2)
    batches = list(found)
    assert batches[0][0].tokens.tolist() == [list(range(8)), list(range(8, 16))]
    assert [batch.mask.sum() for batch, _ in batches] == [14, 7]
    assert (found.convention.tokens, found.convention.scored, found.convention.stride) == (24, 21, 8)


def test_a_smaller_stride_gives_later_tokens_more_context():
    found = windows([Example(np.arange(8, dtype=np.int32), np.ones(8, bool))], 4, stride=2, size=4)
    batch, _ = next(iter(found))
    assert batch.tokens.tolist() == [[0, 1, 2, 3], [2, 3, 4, 5], [4, 5, 6, 7], [0, 0, 0, 0]]
    assert batch.mask.tolist() == [[0, 1, 1, 1], [0, 0, 1, 1], [0, 0, 1, 1], [0, 0, 0, 0]]


@pytest.mark.parametrize(("window", "stride"), [(1, None), (8, 9), (8, 0)])
def test_a_window_that_cannot_score_is_refused(window, stride):
    with pytest.raises(RecipeError, match="window"):
        windows([text(0, 20)], window, stride=stride)
