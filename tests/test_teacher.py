"""The embedded teacher: the committed folder, the speeches beside it, and the script that trained it."""

import argparse
import importlib.util
import json
import math
from pathlib import Path

import jinja2
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from compress.models import read_config
from compress.models.decoder import init, shapes, stack
from export.checkpoint import read
from export.errors import ArtifactError

RECIPES = Path(__file__).parents[1] / "recipes"
FOLDER, DATA = RECIPES / "quickstart" / "teacher", RECIPES / "quickstart" / "data"
TOKENIZER = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))

spec = importlib.util.spec_from_file_location("train_teacher", RECIPES / "teacher" / "train.py")
script = importlib.util.module_from_spec(spec)
spec.loader.exec_module(script)


def test_the_teacher_is_a_llama_of_at_most_six_megabytes():
    checkpoint = read(FOLDER)
    config = read_config(checkpoint.config)
    assert checkpoint.config["model_type"] == "llama"
    assert (FOLDER / "model.safetensors").stat().st_size <= 6_000_000
    assert {name: value.shape for name, value in checkpoint.weights.items()} == shapes(config)
    assert {value.dtype.name for value in checkpoint.weights.values()} == {"bfloat16"}
    assert TOKENIZER.get_vocab_size() == config.vocab_size


def test_groups_of_64_divide_every_input_dimension():
    assert all(value.shape[-1] % 64 == 0 for value in read(FOLDER).weights.values())


def test_the_speeches_take_at_most_three_megabytes_and_do_not_overlap():
    files = [DATA / "train.jsonl", DATA / "valid.jsonl"]
    assert sum(path.stat().st_size for path in files) <= 3_000_000
    train, valid = ([json.loads(line) for line in path.read_text().splitlines()] for path in files)
    assert max(row["year"] for row in train) < min(row["year"] for row in valid)
    assert not {row["text"] for row in train} & {row["text"] for row in valid}


def test_the_teacher_needs_at_most_1_8_bits_per_byte_of_speeches_that_it_never_saw():
    texts = script.read_texts([DATA / "valid.jsonl"])
    assert script.bits_per_byte(*script.load_model(FOLDER), texts[::3]) <= 1.8


def test_speech_with_its_words_shuffled_costs_the_teacher_more():
    text = script.read_texts([DATA / "valid.jsonl"])[0][:8000]
    words = np.random.default_rng(0).permutation(text.split(" "))
    model = script.load_model(FOLDER)
    assert script.bits_per_byte(*model, [" ".join(words)]) > 1.2 * script.bits_per_byte(*model, [text])


@given(st.text())
def test_every_text_survives_the_tokenizer(text):
    assert TOKENIZER.decode(TOKENIZER.encode(text).ids, skip_special_tokens=False) == text


def test_the_tokenizer_adds_no_token_and_knows_its_special_ones():
    settings = json.loads((FOLDER / "tokenizer_config.json").read_text())
    assert TOKENIZER.encode("").ids == []
    assert [TOKENIZER.token_to_id(token) for token in script.SPECIAL] == [0, 1, 2, 3, 4]
    assert TOKENIZER.token_to_id(settings["eos_token"]) == read(FOLDER).config["eos_token_id"]
    assert TOKENIZER.token_to_id(settings["pad_token"]) == read(FOLDER).config["pad_token_id"]
    assert settings["eos_token"] != settings["pad_token"]


def test_the_chat_template_marks_turns_with_single_tokens():
    template = json.loads((FOLDER / "tokenizer_config.json").read_text())["chat_template"]
    turns = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Friends"}]
    text = jinja2.Template(template).render(messages=turns, add_generation_prompt=True)
    assert text == "<|user|>Hello<|end|><|assistant|>Friends<|end|><|assistant|>"
    assert [i for i in TOKENIZER.encode(text).ids if i < 5] == [1, 3, 2, 3, 2]


def test_a_model_that_knows_nothing_needs_the_logarithm_of_its_vocabulary_a_token():
    config = read_config(script.ARCHITECTURE | {"num_hidden_layers": 1})
    blank = stack(config, {name: np.zeros(shape, np.float32) for name, shape in shapes(config).items()})
    texts = ["A short one.", "Länger. " * 700]
    tokens = sum(len(TOKENIZER.encode(text).ids) for text in texts)
    size = sum(len(text.encode()) for text in texts)
    assert script.bits_per_byte(config, blank, TOKENIZER, texts) == pytest.approx(11 * tokens / size, rel=1e-5)


def test_bits_per_byte_is_what_its_definition_says():
    config = read_config(script.ARCHITECTURE)
    params = stack(config, init(config, script.jax.random.key(1)))
    text = " ".join(str(number) for number in range(700))
    ids = script.encode(TOKENIZER, [text])[0]
    nats = 0.0
    for start in range(0, len(ids) - 1, 512):
        window = ids[start : start + 513]
        scores = script.logits(config, params, script.hidden_states(config, params, window[None, :-1]))[0]
        scores = np.asarray(scores, np.float64)
        nats += (np.log(np.exp(scores).sum(-1)) - scores[np.arange(len(window) - 1), window[1:]]).sum()
    measured = script.bits_per_byte(config, params, TOKENIZER, [text])
    assert len(ids) > 1025
    assert measured == pytest.approx(nats / math.log(2) / len(text), rel=1e-5)


@given(st.integers(0, 10_000), st.integers(0, 3))
def test_a_batch_holds_whole_windows_spread_over_the_text(step, seed):
    tokens = np.arange(10_000)
    windows = script.batch_at(tokens, step, rows=16, length=128, seed=seed)
    assert windows.shape == (16, 129)
    assert (np.diff(windows) == 1).all()
    starts = np.sort(windows[:, 0])
    assert np.diff(starts).max() < 3 * 10_000 / 16


@pytest.fixture
def tiny(monkeypatch):
    small = {"vocab_size": 288, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    monkeypatch.setattr(script, "ARCHITECTURE", script.ARCHITECTURE | small | heads)


def arguments(tmp_path, out, **given):
    text = tmp_path / "text.jsonl"
    text.write_text(json.dumps({"text": "Four score and seven years ago our fathers brought forth. " * 40}) + "\n")
    defaults = {"data": [text], "valid": [text], "out": tmp_path / out, "steps": 6, "rows": 4, "length": 16}
    rates = {
        "rate": 0.01,
        "adam_rate": 0.004,
        "seed": 0,
        "state": None,
        "log_every": 1,
        "save_every": 3,
        "force": False,
    }
    return argparse.Namespace(**defaults | rates | given)


def test_training_learns_and_going_on_gives_what_one_run_gives(tiny, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(script, "longer", lambda progress: 1)  # one compilation
    monkeypatch.setattr(script, "SCORED", 16)
    script.train(arguments(tmp_path, "whole"))
    losses = [float(line.split()[3][:-1]) for line in capsys.readouterr().out.splitlines() if "loss" in line]
    assert losses[-1] < losses[0] - 0.1

    batch_at = script.batch_at

    def power_cut(tokens, step, **given):
        if step == 4:
            raise KeyboardInterrupt
        return batch_at(tokens, step, **given)

    halves = arguments(tmp_path, "halves", state=tmp_path / "state.npz")
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(script, "batch_at", power_cut)
        script.train(halves)
    script.train(halves)
    whole, halves = read(tmp_path / "whole").weights, read(tmp_path / "halves").weights
    assert all(np.array_equal(whole[name], halves[name]) for name in whole)


def test_a_folder_that_stood_before_is_not_replaced_unasked(tiny, tmp_path):
    (tmp_path / "precious").mkdir()
    with pytest.raises(ArtifactError, match="precious: exists already"):
        script.train(arguments(tmp_path, "precious"))
