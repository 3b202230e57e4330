"""Vocabularies both ways: the same ids for any text, and a refusal where GGUF cannot give them."""

import heapq
import itertools
import json
import mmap
import re
import unicodedata
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from export.errors import ArtifactError
from export.gguf_header import Header
from export.gguf_pretokenizers import PRE_TOKENIZERS, name_of, to_json
from export.gguf_vocabulary import merges_from_scores, read_vocabulary, write_vocabulary

TEXT = (
    "We the people, in order to form a more perfect union, don't hold these 1,234 truths self-evident: the the the\n\n"
)
SIZE = 300


def byte_level(name: str = "gpt-2", special: tuple[str, ...] = ("<s>", "</s>")) -> dict[str, bytes]:
    """The files of a tokenizer trained on a line, which cuts words as `name` does."""
    backend = Tokenizer(models.BPE(ignore_merges=PRE_TOKENIZERS[name].ignore_merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=SIZE - 6, special_tokens=list(special), initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator([TEXT] * 3, trainer)
    backend.add_tokens(["<tool_call>"])
    tokenizer = json.loads(backend.to_str())
    tokenizer["pre_tokenizer"] = to_json(PRE_TOKENIZERS[name])
    normalizer = PRE_TOKENIZERS[name].normalizer
    tokenizer["normalizer"] = None if normalizer is None else {"type": normalizer}
    config = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "pad_token": "</s>", "add_bos_token": True}
    return files(tokenizer, config)


def files(tokenizer: dict, config: dict | None = None, **more: dict) -> dict[str, bytes]:
    found = {"tokenizer.json": tokenizer, "tokenizer_config.json": config or {}, **more}
    return {name: json.dumps(value).encode() for name, value in found.items()}


def sentencepiece(*, prefix: bool) -> dict[str, bytes]:
    """The files of a tokenizer such as transformers makes from a SentencePiece model."""
    pieces = ["<unk>", "<s>", "</s>", *[f"<0x{byte:02X}>" for byte in range(256)], *"▁etaonh'"]
    pieces += ["th", "▁t", "he", "▁th", "▁the", "the", "▁▁", "at", "hat", "▁a", "an", "ta", "on", "aa", "aaa", "▁▁▁"]
    ids = {piece: i for i, piece in enumerate(pieces)}
    mark = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    prepend = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, mark]}
    model = {"type": "BPE", "vocab": ids, "merges": merges_from_scores(ids, -np.arange(len(ids), dtype=float))}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [{"id": i, "content": pieces[i], "special": True, **flags} for i in range(3)],
        "normalizer": prepend if prefix else mark,
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": None,
        "model": model | {"unk_token": "<unk>", "byte_fallback": True, "fuse_unk": True},
    }
    return files(tokenizer, {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "add_bos_token": True})


def header_of(keys: dict) -> Header:
    """The header that a file with these keys would have."""
    numeric = {
        key: np.array(value) if isinstance(value, list) and not isinstance(value[0], str) else value
        for key, value in keys.items()
    }
    return Header(Path("test.gguf"), numeric, {}, mmap.mmap(-1, 1))


def there_and_back(given_files: dict[str, bytes], **config) -> dict[str, bytes]:
    keys = write_vocabulary(given_files, {"vocab_size": SIZE, **config})
    return read_vocabulary(header_of(keys), SIZE)[0]


def backend_of(given_files: dict[str, bytes]) -> Tokenizer:
    return Tokenizer.from_str(given_files["tokenizer.json"].decode())


RULES = {rule: name for name, rule in reversed(PRE_TOKENIZERS.items())}
"""One name a rule."""
KINDS = {name: byte_level(name) for name in RULES.values()} | {
    "SentencePiece": sentencepiece(prefix=False),
    "SentencePiece with a space before": sentencepiece(prefix=True),
}
BACK = {name: there_and_back(given_files) for name, given_files in KINDS.items()}
texts = st.text(
    alphabet=st.one_of(st.sampled_from("the aon'  \n12<s>/▁é日"), st.characters(codec="utf-8")), max_size=40
)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=25)
@given(text=texts)
def test_a_vocabulary_there_and_back_gives_the_same_ids_for_any_text(kind, text):
    first, second = backend_of(KINDS[kind]), backend_of(BACK[kind])
    for literal in (False, True):
        first.encode_special_tokens = second.encode_special_tokens = literal
        ids = first.encode(text, add_special_tokens=False).ids
        assert second.encode(text, add_special_tokens=False).ids == ids
    assert second.decode(ids) == (unicodedata.normalize("NFC", text) if kind == "qwen2" else text)


def join_best_first(text: str, scores: dict[str, float]) -> list[str]:
    """SentencePiece's algorithm, https://arxiv.org/abs/1808.06226: join the best pair, the leftmost of equals."""
    parts: list[str | None] = list(text)
    while True:
        kept = [i for i, part in enumerate(parts) if part is not None]
        joined = {(i, j): parts[i] + parts[j] for i, j in itertools.pairwise(kept)}
        pairs = [(-scores[piece], i, j) for (i, j), piece in joined.items() if piece in scores]
        if not pairs:
            return [part for part in parts if part is not None]
        _, i, j = heapq.nsmallest(1, pairs)[0]
        parts[i], parts[j] = parts[i] + parts[j], None


@settings(max_examples=200)
@given(
    st.lists(st.text("abc", min_size=2, max_size=4), unique=True, max_size=12), st.text("abc", max_size=12), st.data()
)
def test_merges_from_scores_give_what_joining_by_scores_gives(pieces, text, data):
    order = data.draw(st.permutations(["a", "b", "c", *pieces]))
    ids = {piece: i for i, piece in enumerate(order)}
    scores = -np.arange(len(order), dtype=float)
    backend = Tokenizer(models.BPE(vocab=ids, merges=merges_from_scores(ids, scores)))
    want = join_best_first(text, {piece: scores[i] for piece, i in ids.items()})
    got = backend.encode(text).tokens
    # Where a text repeats itself, two pairs can make the same token from overlapping letters.
    periodic = re.search(r"(.)\1\1|(..)\2|(...)\3", text)
    assert got == want or periodic


@pytest.mark.parametrize("name", PRE_TOKENIZERS)
def test_a_pre_tokenizer_is_found_by_its_structure(name):
    found = name_of(json.loads(byte_level(name)["tokenizer.json"]))
    assert PRE_TOKENIZERS[found].steps == PRE_TOKENIZERS[name].steps


def test_smollm_splits_digits_one_by_one():
    rule = to_json(PRE_TOKENIZERS["smollm"])
    assert [step["type"] for step in rule["pretokenizers"]] == ["Digits", "ByteLevel"]
    assert rule["pretokenizers"][0]["individual_digits"] is True
    assert rule["pretokenizers"][1]["add_prefix_space"] is False


def test_tokens_are_padded_to_the_models_vocabulary_and_the_padding_is_dropped_on_reading():
    keys = write_vocabulary(KINDS["gpt-2"], {"vocab_size": SIZE})
    tokens, types = keys["tokenizer.ggml.tokens"], keys["tokenizer.ggml.token_type"]
    real = backend_of(KINDS["gpt-2"]).get_vocab_size()
    assert real < SIZE == len(tokens)
    assert tokens[real:] == [f"[PAD{i}]" for i in range(real, SIZE)]
    assert types[real:] == [5] * (SIZE - real)
    assert types[:2] == [3, 3]
    assert types[tokens.index("<tool_call>")] == 4
    assert backend_of(BACK["gpt-2"]).get_vocab() == backend_of(KINDS["gpt-2"]).get_vocab()


def test_the_chat_template_and_the_ends_go_along():
    template = "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}"
    source = byte_level(special=("<s>", "</s>", "<|im_end|>"))
    source["chat_template.jinja"] = template.encode()
    source["generation_config.json"] = json.dumps({"eos_token_id": [1, 2]}).encode()
    keys = write_vocabulary(source, {"vocab_size": SIZE})
    assert keys["tokenizer.chat_template"] == template
    assert (keys["tokenizer.ggml.bos_token_id"], keys["tokenizer.ggml.eos_token_id"]) == (0, 1)
    assert keys["tokenizer.ggml.eot_token_id"] == 2
    found = there_and_back(source)
    assert found["chat_template.jinja"].decode() == template
    assert json.loads(found["generation_config.json"])["eos_token_id"] == [1, 2]
    config = json.loads(found["tokenizer_config.json"])
    assert (config["bos_token"], config["eos_token"], config["pad_token"]) == ("<s>", "</s>", "</s>")
    assert config["add_bos_token"] is True


@pytest.mark.parametrize("kind", ["gpt-2", "SentencePiece"])
@pytest.mark.parametrize("wanted", [False, True])
def test_the_bos_is_put_where_the_tokenizer_wants_one(kind, wanted):
    source = dict(KINDS[kind])
    config = json.loads(source["tokenizer_config.json"]) | {"add_bos_token": wanted}
    source["tokenizer_config.json"] = json.dumps(config).encode()
    found = backend_of(there_and_back(source))
    bos = found.token_to_id("<s>")
    assert (found.encode("the").ids[:1] == [bos]) == wanted
    assert bos not in found.encode("the", add_special_tokens=False).ids


def test_without_a_flag_the_post_processor_says_whether_a_bos_is_wanted():
    source = dict(BACK["gpt-2"])
    config = json.loads(source["tokenizer_config.json"])
    del config["add_bos_token"]
    source["tokenizer_config.json"] = json.dumps(config).encode()
    assert write_vocabulary(source, {"vocab_size": SIZE})["tokenizer.ggml.add_bos_token"] is True


def test_a_model_without_a_tokenizer_is_written_without_one():
    keys = write_vocabulary({}, {"vocab_size": SIZE})
    assert keys == {"tokenizer.ggml.model": "none"}
    assert read_vocabulary(header_of(keys), SIZE) == ({}, {})


def changed(**changes) -> dict[str, bytes]:
    """The plain tokenizer with parts of its tokenizer.json replaced; `model__x` stands for the model's x."""
    tokenizer = json.loads(KINDS["gpt-2"]["tokenizer.json"])
    for name, value in changes.items():
        if name.startswith("model__"):
            tokenizer["model"][name[7:]] = value
        else:
            tokenizer[name] = value
    return files(tokenizer)


BAD = {
    "no GGUF pre-tokenizer equals": changed(normalizer={"type": "Lowercase"}),
    "the pre-tokenizer Whitespace": changed(
        pre_tokenizer={
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Whitespace"},
                {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True},
            ],
        }
    ),
    "without a prefix space": changed(
        pre_tokenizer={"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True}
    ),
    "a WordLevel model has no form": files({"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}}),
    "no merges": changed(model__merges=[]),
    "beyond the model's vocabulary": changed(model__vocab={"a": SIZE}, model__merges=[]),
    "cannot be read": changed(model__vocab={"a": 7}),
    "tokenizer.json, which is missing": {"tokenizer.model": b"x"},
    "not valid JSON": {"tokenizer.json": b"{"},
}


@pytest.mark.parametrize("reason", BAD)
def test_a_tokenizer_without_a_gguf_form_is_refused_with_the_reason(reason):
    with pytest.raises(ArtifactError, match=re.escape(reason)):
        write_vocabulary(BAD[reason], {"vocab_size": SIZE})


def test_a_tokenizer_that_lacks_merges_which_llama_cpp_would_do_is_refused():
    tokenizer = json.loads(KINDS["SentencePiece"]["tokenizer.json"])
    tokenizer["model"]["merges"] = [merge for merge in tokenizer["model"]["merges"] if merge != ["t", "he"]]
    with pytest.raises(ArtifactError, match=r"llama\.cpp would merge 't' and 'he'"):
        write_vocabulary(files(tokenizer), {"vocab_size": SIZE})


def with_keys(**changes) -> Header:
    keys = write_vocabulary(KINDS["gpt-2"], {"vocab_size": SIZE})
    return header_of(keys | {f"tokenizer.ggml.{name}": value for name, value in changes.items()})


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"pre": "made-up"}, "pre-tokenizer 'made-up' is not supported"),
        ({"model": "bert"}, "tokenizer 'bert' is not supported"),
        ({"tokens": ["a"] * SIZE}, "the token 'a' has two ids"),
        ({"tokens": ["a"] * (SIZE + 1)}, "301 tokens for an embedding of 300 rows"),
        ({"merges": ["a nosuch"]}, "the merge 'a nosuch'"),
        ({"merges": ["ab"]}, "the merge 'ab'"),
        ({"token_type": [1]}, "token_type is not an array of 300"),
        ({"add_bos_token": 1}, "add_bos_token = 1: must be a boolean"),
        ({"bos_token_id": "x"}, "bos_token_id = x: must be an integer"),
    ],
)
def test_a_broken_vocabulary_is_refused_with_the_reason(changes, reason):
    with pytest.raises(ArtifactError, match=re.escape(reason)):
        read_vocabulary(with_keys(**changes), SIZE)
