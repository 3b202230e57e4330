"""Tunix's DistillationTrainer: KL(teacher || student) over the whole vocabulary, all weights trained. Prints JSON."""

import argparse
import json

import jax
import jax.numpy as jnp
import optax
from tunix.distillation.distillation_trainer import DistillationTrainer, TrainingConfig, TrainingInput
from tunix.distillation.strategies.logit import LogitStrategy
from tunix.sft.utils import build_positions_from_mask, make_causal_attn_mask
from tunix_llama import llama, shape, timed

parser = argparse.ArgumentParser()
parser.add_argument("--rows", type=int)
parser.add_argument("--length", type=int)
parser.add_argument("--steps", type=int)
arguments = parser.parse_args()


def forward(model, input_tokens, input_mask):
    logits, _ = model(input_tokens, build_positions_from_mask(input_mask), None, make_causal_attn_mask(input_mask))
    return logits


def labels(input_tokens, input_mask):
    return jax.nn.one_hot(jnp.roll(input_tokens, -1, 1), shape.CONFIG["vocab_size"])


teacher, student = llama(0), llama(1)
loss = LogitStrategy(forward, forward, labels, temperature=1.0, alpha=1.0)
config = TrainingConfig(eval_every_n_steps=1 + arguments.steps)
trainer = DistillationTrainer(student, teacher, loss, optax.adamw(1e-5), config)
ids = jnp.asarray(shape.tokens(arguments.rows, arguments.length))
batch = TrainingInput(input_tokens=ids, input_mask=jnp.ones(ids.shape, bool))
clock = shape.Clock()
trainer.train(timed(batch, arguments.steps, student, clock))
print(json.dumps(clock.figures()))
