"""Tunix's DPOTrainer with Qwix's LoRA on every linear; each step computes the reference too. Prints JSON."""

import argparse
import json

import jax.numpy as jnp
import numpy as np
import optax
import qwix
from flax import nnx
from tunix.sft.dpo.dpo_trainer import DPOTrainer, DPOTrainingConfig, TrainingInput
from tunix_llama import llama, shape, timed

LINEARS = ".*(q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj)"

parser = argparse.ArgumentParser()
parser.add_argument("--pairs", type=int)
parser.add_argument("--prompt", type=int)
parser.add_argument("--answer", type=int)
parser.add_argument("--rank", type=int)
parser.add_argument("--alpha", type=float)
parser.add_argument("--steps", type=int)
arguments = parser.parse_args()

reference = llama(0)
adapters = qwix.LoraProvider(module_path=LINEARS, rank=arguments.rank, alpha=arguments.alpha)
policy = qwix.apply_lora_to_model(llama(0), adapters, **reference.get_model_input(), rngs=nnx.Rngs(0))
config = DPOTrainingConfig(eval_every_n_steps=1 + arguments.steps)
trainer = DPOTrainer(policy, reference, optax.adamw(1e-5), config)
ids = shape.tokens(arguments.pairs, arguments.prompt + 2 * arguments.answer)
batch = {}
for name, part in zip(
    ("prompt", "chosen", "rejected"), np.split(ids, [arguments.prompt, arguments.prompt + arguments.answer], 1)
):
    batch |= {f"{name}_ids": jnp.asarray(part), f"{name}_mask": jnp.ones(part.shape, jnp.int32)}
clock = shape.Clock()
trainer.train(timed(TrainingInput(**batch), arguments.steps, policy, clock))
print(json.dumps(clock.figures()))
