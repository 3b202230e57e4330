"""Train the small teacher of the quickstart: a Llama of 2.75 million weights on State of the Union speeches.

    python recipes/teacher/train.py --data sotu-train.jsonl --out DIR
    python recipes/teacher/train.py --evaluate DIR

Letters: B batch, T time.
"""

import argparse
import json
import math
import time
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int
from optax.contrib import MuonDimensionNumbers, muon
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from compress.models import read_config
from compress.models.config import DecoderConfig
from compress.models.decoder import Stacked, hidden_states, init, logits, stack, unstack
from export import FORMATS
from export.atomic import atomic_file, atomic_folder, check_output
from export.checkpoint import Checkpoint
from export.errors import ArtifactError

DATA = Path(__file__).parents[1] / "quickstart" / "data"
SPECIAL = ["<|endoftext|>", "<|user|>", "<|assistant|>", "<|end|>", "<|pad|>"]
END_OF_TEXT, PAD = 0, 4
WARM_UP = 16  # steps
SCORED = 512  # tokens in a window, where bits per byte are measured
ARCHITECTURE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 2048,
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_hidden_layers": 6,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "mlp_bias": False,
    "initializer_range": 0.02,
    "bos_token_id": None,
    "eos_token_id": END_OF_TEXT,
    "pad_token_id": PAD,
}
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def read_texts(paths: list[Path]) -> list[str]:
    """The documents of JSONL files with a column `text`. A file named twice counts twice."""
    return [json.loads(line)["text"] for path in paths for line in path.read_text(encoding="utf-8").splitlines()]


def train_tokenizer(texts: list[str]) -> Tokenizer:
    """Byte-level BPE, pre-tokenized as GPT-2 does: no text is out of its vocabulary, and none needs normalizing."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    size = ARCHITECTURE["vocab_size"]
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != size:
        raise SystemExit(f"the data yield {tokenizer.get_vocab_size()} tokens, {size} are wanted; give more text")
    return tokenizer


def encode(tokenizer: Tokenizer, texts: list[str]) -> list[np.ndarray]:
    """Token ids of each document, with the end-of-text token before it: the first token too has a context."""
    return [np.array([END_OF_TEXT, *encoding.ids], np.int32) for encoding in tokenizer.encode_batch(texts)]


def nll(config: DecoderConfig, stacked: Stacked, window: Int[Array, "B T"]) -> Float[Array, "B T-1"]:
    """Negative log-likelihood in nats of all tokens of each row but its first."""
    scores = logits(config, stacked, hidden_states(config, stacked, window[:, :-1]))
    return optax.softmax_cross_entropy_with_integer_labels(scores, window[:, 1:])


def bits_per_byte(config: DecoderConfig, stacked: Stacked, tokenizer: Tokenizer, texts: list[str]) -> float:
    """Bits that the model needs for the documents over their UTF-8 bytes.

    A document is cut into windows of `SCORED` tokens without overlap. Every token counts: the first of a document is
    predicted from the end-of-text token, the first of a later window from the one token before it.
    """
    score = jax.jit(partial(nll, config))
    total = 0.0
    for ids in encode(tokenizer, texts):
        count = len(ids) - 1
        starts = np.arange(0, count, 8 * SCORED)  # eight windows at once bound the memory that logits take
        padded = np.pad(ids, (0, starts[-1] + 8 * SCORED - count), constant_values=PAD)
        for start in starts:
            windows = padded[start + SCORED * np.arange(8)[:, None] + np.arange(SCORED + 1)]
            nats = np.asarray(score(stacked, windows), np.float64).reshape(-1)
            total += nats[: count - start].sum()
    return total / math.log(2) / sum(len(text.encode()) for text in texts)


def batch_at(tokens: np.ndarray, step: int, *, rows: int, length: int, seed: int) -> np.ndarray:
    """The windows of a step, [rows, length + 1].

    Starts follow the golden-ratio sequence: without any state it covers the text evenly, and each batch is spread over
    all of it.
    """
    turn = (np.arange(step * rows, (step + 1) * rows) + 0.5 + seed * 1_000_003) * ((math.sqrt(5) - 1) / 2) % 1.0
    starts = (turn * (len(tokens) - length - 1)).astype(np.int64)
    return tokens[starts[:, None] + np.arange(length + 1)]


def dimension_numbers(params: Stacked) -> Stacked:
    """Which weights Muon takes: the blocks' matrices, whose first axis here is the layer."""
    layers = [
        {name: MuonDimensionNumbers(2, 1) if name.endswith("proj.weight") else None for name in segment}
        for segment in params.layers
    ]
    return Stacked(dict.fromkeys(params.rest), layers)


def make_optimizer(steps: int, rate: float, adam_rate: float) -> optax.GradientTransformation:
    """Muon (https://kellerjordan.github.io/posts/muon) on the blocks' matrices, AdamW on embedding and norms.

    Both rates warm up, stay, and fall linearly to zero over the last 60% of the steps.
    """

    def schedule(peak: float) -> optax.Schedule:
        down = max(1, steps * 3 // 5)
        rise, stay = optax.linear_schedule(0.0, peak, WARM_UP), optax.constant_schedule(peak)
        return optax.join_schedules([rise, stay, optax.linear_schedule(peak, 0.0, down)], [WARM_UP, steps - down])

    return optax.chain(
        optax.clip_by_global_norm(1.0),
        muon(
            schedule(rate),
            adam_learning_rate=schedule(adam_rate),
            weight_decay=0.1,
            adam_b2=0.98,
            muon_weight_dimension_numbers=dimension_numbers,
            consistent_rms=0.2,
        ),
    )


def make_step(config: DecoderConfig, optimizer: optax.GradientTransformation):
    """A jitted (params, state, windows) -> (params, state, mean nll in nats)."""

    @partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, windows):
        loss, gradient = jax.value_and_grad(lambda p: nll(config, p, windows).mean())(params)
        updates, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state, loss

    return step


def save_state(path: Path, tree) -> None:
    """Keep all leaves of a training state, to go on from."""
    with atomic_file(path, force=True) as temporary, open(temporary, "wb") as file:
        np.savez(file, *map(np.asarray, jax.tree.leaves(tree)))


def load_state(path: Path, like):
    """A training state of the structure of `like`."""
    with np.load(path, allow_pickle=False) as arrays:
        return jax.tree.unflatten(jax.tree.structure(like), [jnp.asarray(arrays[name]) for name in arrays.files])


def save_model(config: DecoderConfig, params: Stacked, tokenizer: Tokenizer, out: Path) -> None:
    """Write the model as a Hugging Face folder in bfloat16."""
    described = {"eos_token_id": END_OF_TEXT, "pad_token_id": PAD}
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": False,
        "add_eos_token": False,
        "bos_token": None,
        "eos_token": SPECIAL[END_OF_TEXT],
        "pad_token": SPECIAL[PAD],
        "clean_up_tokenization_spaces": False,
        "model_max_length": ARCHITECTURE["max_position_embeddings"],
        "chat_template": CHAT_TEMPLATE,
    }
    files = {
        "tokenizer.json": tokenizer.to_str(pretty=False).encode(),
        "tokenizer_config.json": (json.dumps(tokenizer_config, indent=2) + "\n").encode(),
        "generation_config.json": (json.dumps(described, indent=2) + "\n").encode(),
    }
    with atomic_folder(out, force=True) as folder:
        FORMATS["safetensors"].write(Checkpoint(ARCHITECTURE, unstack(config, params), files), folder)


def load_model(folder: Path) -> tuple[DecoderConfig, Stacked, Tokenizer]:
    """A folder's model, computing in float32, and its tokenizer."""
    checkpoint = FORMATS["safetensors"].read(folder)
    config = read_config(checkpoint.config)
    params = stack(config, {name: np.asarray(value, np.float32) for name, value in checkpoint.weights.items()})
    return config, params, Tokenizer.from_str(checkpoint.files["tokenizer.json"].decode())


def longer(progress: float) -> int:
    """By how much windows grow: short ones cost less attention, and a few long ones at the end teach far positions."""
    return 1 if progress < 0.6 else 2 if progress < 0.85 else 4


def train(args: argparse.Namespace) -> None:
    """Train, say how it goes, and write the model now and then."""
    resumed = bool(args.state and args.state.exists())
    check_output(args.out, force=args.force or resumed)
    texts, valid = read_texts(args.data), read_texts(args.valid)
    tokenizer = train_tokenizer(texts)
    tokens = np.concatenate(encode(tokenizer, texts))
    config = read_config(ARCHITECTURE)
    params = stack(config, init(config, jax.random.key(args.seed)))
    optimizer = make_optimizer(args.steps, args.rate, args.adam_rate)
    state, start = optimizer.init(params), 0
    if resumed:
        params, state, start = load_state(args.state, (params, state, 0))
    step = make_step(config, optimizer)
    weights = sum(leaf.size for leaf in jax.tree.leaves(params))
    print(f"{len(texts)} documents, {len(tokens)} tokens, {weights} weights, from step {start}", flush=True)
    begun, losses = time.monotonic(), []
    for index in range(int(start), args.steps):
        long = longer(index / args.steps)
        windows = batch_at(tokens, index, rows=args.rows // long, length=args.length * long, seed=args.seed)
        params, state, loss = step(params, state, windows)
        losses.append(float(loss))
        if (index + 1) % args.log_every == 0:
            rate = len(losses) / (time.monotonic() - begun) * args.rows * args.length
            print(f"step {index + 1}: loss {np.mean(losses[-args.log_every :]):.3f}, {rate:.0f} tokens/s", flush=True)
        if (index + 1) % args.save_every == 0 or index + 1 == args.steps:
            if args.state:
                save_state(args.state, (params, state, index + 1))
            save_model(config, params, tokenizer, args.out)
            score = bits_per_byte(config, params, tokenizer, valid[:1])
            print(f"step {index + 1}: {score:.4f} bits per byte on the first document of --valid", flush=True)
    print(f"{bits_per_byte(*load_model(args.out), valid):.4f} bits per byte", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument(
        "--data", type=Path, nargs="+", default=[DATA / "train.jsonl"], help="named twice, counts twice"
    )
    parser.add_argument("--valid", type=Path, nargs="+", default=[DATA / "valid.jsonl"])
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--out", type=Path, help="the folder to write")
    where.add_argument("--evaluate", type=Path, metavar="DIR", help="print the bits per byte of a folder on --valid")
    parser.add_argument("--force", action="store_true", help="replace --out if it exists")
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--rate", type=float, default=0.008, help="Muon's, of the blocks' matrices")
    parser.add_argument("--adam-rate", type=float, default=0.004, help="AdamW's, of embedding and norms")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--state", type=Path, help="keep the training state here, and go on from it")
    parser.add_argument("--log-every", type=int, default=20)
    parser.add_argument("--save-every", type=int, default=100)
    args = parser.parse_args()
    try:
        if args.evaluate:
            print(f"{bits_per_byte(*load_model(args.evaluate), read_texts(args.valid)):.4f} bits per byte")
        else:
            train(args)
    except ArtifactError as error:
        raise SystemExit(f"error: {error}") from error


if __name__ == "__main__":
    main()
