"""llama.cpp and transformers give text the ids that we give it, and read the same special tokens and chat template."""

import dataclasses
import json
from pathlib import Path

import llama_cpp
import numpy as np
import pytest
from transformers import AutoTokenizer

from compress.tokenizer import Tokenizer
from export import FORMATS
from export.gguf_pretokenizers import PRE_TOKENIZERS
from export.gguf_vocabulary import merges_from_scores
from tests.readers.examples import TEMPLATE, TEXTS, checkpoint, tokenizer_files

CHAT = [{"role": "user", "content": "Is it  so?"}, {"role": "assistant", "content": "It is.\n"}]


def assert_same(files: dict[str, bytes], folder: Path) -> None:
    """The files as they are, and as they are read back from GGUF, mean the same to both engines and to us."""
    given = dataclasses.replace(checkpoint("llama"), files=files)
    FORMATS["gguf"].write(given, folder)
    model = llama_cpp.Llama(str(folder / "model.gguf"), vocab_only=True, verbose=False)
    for name, source in {"given": given, "read back": FORMATS["gguf"].read(folder)}.items():
        FORMATS["safetensors"].write(source, folder / name)
        ours, theirs = Tokenizer.from_files(source.files), AutoTokenizer.from_pretrained(folder / name)
        for text in TEXTS:
            assert model.tokenize(text.encode(), add_bos=False, special=False) == ours.encode(text)
            assert theirs.encode(text, add_special_tokens=False) == ours.encode(text, special=True)
        if theirs.chat_template:
            assert theirs.apply_chat_template(CHAT, tokenize=False) == ours.chat(CHAT)
    assert theirs.encode("x") == model.tokenize(b"x", add_bos=True) == ours.with_bos(ours.encode("x"))


RULES = {rule: name for name, rule in reversed(PRE_TOKENIZERS.items())}  # one name a rule


@pytest.mark.parametrize("name", RULES.values())
def test_engines_cut_and_merge_text_as_we_do(name, tmp_path):
    assert_same(tokenizer_files(name), tmp_path)


@pytest.mark.parametrize("prefix", [False, True])
def test_engines_give_a_sentencepiece_tokenizers_ids(prefix, tmp_path):
    pieces = ["<unk>", "<s>", "</s>", *[f"<0x{byte:02X}>" for byte in range(256)], *"▁etaoinsrhldu'"]
    pieces += ["th", "▁t", "▁th", "▁the", "he", "re", "in", "▁s", "st", "▁▁", "on", "▁re", "ate", "at", "te"]
    ids = {piece: i for i, piece in enumerate(pieces)}
    scores = -np.arange(len(pieces), dtype=np.float64)
    mark = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    prepend = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, mark]}
    model = {"type": "BPE", "vocab": ids, "merges": merges_from_scores(ids, scores), "unk_token": "<unk>"}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [
            {"id": i, "content": piece, "special": True, "normalized": False}
            | {"single_word": False, "lstrip": False, "rstrip": False}
            for i, piece in enumerate(pieces[:3])
        ],
        "normalizer": prepend if prefix else mark,
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": None,
        "model": model | {"byte_fallback": True, "fuse_unk": True},
    }
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
    }
    files = {"tokenizer.json": tokenizer, "tokenizer_config.json": settings}
    assert_same({name: json.dumps(content).encode() for name, content in files.items()}, tmp_path)


def test_llama_cpp_reads_special_tokens_and_the_chat_template(tmp_path):
    files = tokenizer_files()
    FORMATS["gguf"].write(dataclasses.replace(checkpoint("llama"), files=files), tmp_path)
    model = llama_cpp.Llama(str(tmp_path / "model.gguf"), vocab_only=True, verbose=False)
    assert model.tokenize(b"<s>x</s>", add_bos=True, special=True)[:2] == [0, 0]
    assert model.token_eos() == 1
    assert model.metadata["tokenizer.chat_template"] == TEMPLATE
