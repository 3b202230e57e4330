"""What the Tunix scripts share: its Llama at SmolLM2-135M's shape, and a batch that is given again and again."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
from flax import nnx
from tunix.models.llama3.model import Llama3, ModelConfig

sys.path.insert(0, str(Path(__file__).parents[1]))
import smollm2_shape as shape


def llama(seed: int) -> Llama3:
    """A model with random weights in float32."""
    names = {
        "num_layers": "num_hidden_layers",
        "vocab_size": "vocab_size",
        "embed_dim": "hidden_size",
        "hidden_dim": "intermediate_size",
        "num_heads": "num_attention_heads",
        "num_kv_heads": "num_key_value_heads",
        "norm_eps": "rms_norm_eps",
        "rope_theta": "rope_theta",
        "weight_tying": "tie_word_embeddings",
    }
    config = {name: shape.CONFIG[theirs] for name, theirs in names.items()}
    width = shape.CONFIG["hidden_size"] // shape.CONFIG["num_attention_heads"]
    return Llama3(ModelConfig(**config, head_dim=width), rngs=nnx.Rngs(seed))


def timed(batch: Any, steps: int, model: nnx.Module, clock: shape.Clock) -> Iterator[Any]:
    """`batch` for a first step and `steps` more; the clock is marked when the step before has changed the model."""
    for _ in range(1 + steps):
        clock.mark()
        yield batch
        jax.block_until_ready(nnx.state(model))
    clock.mark()
