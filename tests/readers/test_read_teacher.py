"""The embedded teacher in 4 bits, exported by the command line: engines rank first the tokens that we rank first."""

import json
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer

from benchmarks.engines import llama_cpp, llama_cpp_ids, transformers
from compress.cli import main
from compress.models.folder import load
from tests.readers.examples import ours

QUICKSTART = Path(__file__).parent.parent.parent / "recipes" / "quickstart"
LENGTH = 256
CHAT = [{"role": "user", "content": "What of the economy?"}]


@pytest.fixture(scope="module")
def artifact(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("teacher")
    words = f"--model {QUICKSTART / 'teacher'} --bits 4 --group-size 32 --method rtn --out {folder / 'q4'} --device cpu"
    assert main(["quantize", *words.split()]) == 0
    words = f"--model {folder / 'q4'} --format compressed-tensors --format gguf --out {folder / 'out'} --device cpu"
    assert main(["export", *words.split()]) == 0
    return folder / "out"


@pytest.fixture(scope="module")
def texts() -> list[str]:
    lines = (QUICKSTART / "data" / "valid.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["text"] for line in lines[:3]]


def test_engines_rank_first_what_we_rank_first_on_real_text(artifact, texts):
    model = load(artifact / "compressed-tensors")
    tokens = np.stack([model.tokenizer.encode(text)[:LENGTH] for text in texts])
    best = np.stack([ours(model.checkpoint, row).argmax(-1) for row in tokens])
    by_transformers = transformers(artifact / "compressed-tensors")
    by_llama_cpp = llama_cpp(artifact / "gguf" / "model.gguf", LENGTH)
    assert np.array_equal([by_transformers(row).argmax(-1) for row in tokens], best)
    # llama.cpp rounds activations to 8 bits.
    assert np.mean([by_llama_cpp(row).argmax(-1) for row in tokens] == best) > 0.97


def test_engines_give_real_text_our_token_ids(artifact, texts):
    ours = load(artifact / "gguf").tokenizer
    theirs = AutoTokenizer.from_pretrained(artifact / "compressed-tensors")
    for text in texts:
        assert llama_cpp_ids(artifact / "gguf" / "model.gguf", text) == ours.encode(text)
        assert theirs.encode(text, add_special_tokens=False) == ours.encode(text)
    rendered = theirs.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    assert rendered == ours.chat(CHAT, add_generation_prompt=True)
