"""A teacher of random weights, a few rows of text, and a recipe that takes both through every stage in seconds."""

import json
from functools import cache
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from compress.models import decoder, read_config
from export.checkpoint import Checkpoint
from export.safetensors import write

CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1000.0,
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
SUBJECTS = ("the union", "our nation", "this Congress", "the people", "every citizen", "the treasury")
VERBS = ("asks for", "rests upon", "is the work of", "must not forget", "owes much to")

RECIPE = """\
name = "tiny"
device = "cpu"

[distill]
teacher = "teacher"
student = "half"
data = ["train.jsonl"]
valid = ["valid.jsonl"]
sequence_length = 32
global_batch = 8
steps = 16
learning_rate = 3e-3
warmup = 2
valid_every = 8

[align]
method = "sft"
data = ["train.jsonl"]
valid = ["valid.jsonl"]
rank = 4
alpha = 8
sequence_length = 32
global_batch = 8
steps = 16
learning_rate = 2e-2
warmup = 2
valid_every = 8
group_size = 32

[quantize]
method = "rtn"
group_size = 32
calibration = ["train.jsonl"]
calibration_tokens = 128
sequence_length = 32

[export]
format = ["compressed-tensors", "gguf"]

[eval]
data = ["valid.jsonl"]
window = 32

[generate]
prompt = ["the union"]
max_tokens = 4
"""


def rows(count: int, seed: int) -> list[str]:
    """Sentences of one grammar, of unequal length."""
    draw = np.random.default_rng(seed)
    sentence = lambda: f"{draw.choice(SUBJECTS)} {draw.choice(VERBS)} {draw.choice(SUBJECTS)}."  # noqa: E731
    return [" ".join(sentence() for _ in range(draw.integers(2, 6))) for _ in range(count)]


@cache
def tokenizer_files(marker: str = "</s>") -> dict[str, bytes]:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=310,
        special_tokens=["<s>", marker],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(rows(50, 0), trainer)
    config = {"bos_token": "<s>", "eos_token": marker, "add_bos_token": True}
    return {"tokenizer.json": backend.to_str().encode(), "tokenizer_config.json": json.dumps(config).encode()}


def weights(config: dict = CONFIG, seed: int = 0) -> dict[str, np.ndarray]:
    """Random weights whose rows differ in size, as those of a trained model do."""
    draw = np.random.default_rng(seed)
    found = {}
    for name, shape in decoder.shapes(read_config(config)).items():
        if len(shape) == 1:
            found[name] = np.ones(shape, np.float32)
        else:
            sizes = np.exp(draw.normal(0, 0.5, (shape[0], 1))) * (0.15 if name == decoder.EMBEDDING else 0.1)
            found[name] = (draw.normal(0, 1, shape) * sizes).astype(np.float32)
    return found


def write_model(folder: Path, config: dict = CONFIG, *, seed: int = 0, marker: str = "</s>") -> Path:
    folder.mkdir(parents=True)
    write(Checkpoint(config, weights(config, seed), tokenizer_files(marker)), folder, dtype="float32")
    return folder


def write_jsonl(path: Path, values: list) -> Path:
    path.write_text("".join(json.dumps(value) + "\n" for value in values), encoding="utf-8")
    return path


def write_world(folder: Path) -> Path:
    """The recipe with all that it names; returns the recipe's path."""
    write_model(folder / "teacher")
    write_jsonl(folder / "train.jsonl", [{"text": text} for text in rows(120, 1)])
    write_jsonl(folder / "valid.jsonl", [{"text": text} for text in rows(24, 2)])
    (folder / "recipe.toml").write_text(RECIPE, encoding="utf-8")
    return folder / "recipe.toml"
