"""What computing the distillation loss in chunks of tokens saves, and what it costs.

    python benchmarks/loss_memory.py

The loss at the head of SmolLM2-135M's shape, on 4 rows of 256 tokens: forward and the gradients of hidden states and
head. Memory is XLA's: the temporary buffers of the program. The cost is that of a whole step, chunked over unchunked.
"""

import argparse
import json
import sys
from functools import partial

import jax
import jax.numpy as jnp
import smollm2_shape as shape
from distill_step import LENGTH, ROWS, ours

from compress.distill.loss import token_loss
from compress.distill.settings import Distill
from compress.models import read_config
from compress.models.decoder import project
from compress.train.divergences import DIVERGENCES
from compress.train.head import HeadLoss, head_sum

MEMORY_GOAL, TIME_GOAL = 1 / 8, 1.05
CHUNK = Distill(teacher="", data=()).chunk


def temporary_bytes(chunk: int) -> int:
    """Bytes of the temporary buffers of the loss and its gradients."""
    config = read_config(shape.CONFIG)
    head = HeadLoss(
        project=partial(project, config),
        loss=partial(token_loss, divergence=DIVERGENCES["forward_kl"].at(None), alpha=0.9),
        context=lambda frozen, inputs: (project(config, inputs[0], frozen), inputs[1], jnp.maximum(inputs[2], 1)),
        chunk=chunk,
    )

    def loss(hidden, weight, frozen, inputs, mask):
        return head_sum(head, hidden, weight, frozen, inputs, mask)[0]

    kind = jax.ShapeDtypeStruct
    tokens = (ROWS, LENGTH - 1)
    hidden = kind((*tokens, config.hidden_size), jnp.float32)
    weight = kind((config.vocab_size, config.hidden_size), jnp.float32)
    inputs = (hidden, kind(tokens, jnp.int32), kind(tokens, jnp.float32))
    step = jax.jit(jax.grad(loss, argnums=(0, 1)))
    program = step.lower(hidden, weight, weight, inputs, kind(tokens, jnp.float32)).compile()
    return program.memory_analysis().temp_size_in_bytes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=4, help="timed steps after the first (%(default)s)")
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        print(json.dumps(ours(arguments.steps, arguments.child)))
        return 0
    whole, chunked = temporary_bytes(ROWS * LENGTH), temporary_bytes(CHUNK)
    print(f"temporary memory of the loss: {chunked / 2**20:.0f} MiB in chunks of {CHUNK}, {whole / 2**20:.0f} whole")
    seconds = {}
    for chunk in (CHUNK, ROWS * LENGTH):
        run = shape.in_a_process([__file__, "--steps", str(arguments.steps), "--child", str(chunk)])
        seconds[chunk] = run["best"]
        print(f"a step in chunks of {chunk}: {run['best']:.2f} s, peak {run['peak_gib']:.2f} GiB")
    time_ratio, memory_ratio = seconds[CHUNK] / seconds[ROWS * LENGTH], chunked / whole
    print(f"time of a step, chunked over whole: {time_ratio:.3f}, goal {TIME_GOAL}")
    print(f"memory of the loss, chunked over whole: {memory_ratio:.3f}, goal {MEMORY_GOAL}")
    return 0 if memory_ratio <= MEMORY_GOAL and time_ratio <= TIME_GOAL else 1


if __name__ == "__main__":
    sys.exit(main())
