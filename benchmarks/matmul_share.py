"""The share of the machine's own float32 matrix-product rate that a distillation step reaches.

    python benchmarks/matmul_share.py

Teacher and student have SmolLM2-135M's shape; a step is 4 rows of 256 tokens. What counts is the arithmetic that the
mathematics needs: of a token the teacher's forward pass and three times the student's, attention to the tokens before
it alone, nothing for what is computed twice. The machine's rate is the best over the products of the step's own
shapes, forward and backward, timed in the same process before the step.
"""

import argparse
import sys
import time

import jax
import jax.numpy as jnp
import smollm2_shape as shape
from distill_step import LENGTH, ROWS, ours

GOAL = 0.6


def operations() -> float:
    """Floating-point operations of a step."""
    width, inner, heads = shape.CONFIG["hidden_size"], shape.CONFIG["intermediate_size"], 9 * 64
    kv = shape.CONFIG["num_key_value_heads"] * 64
    layer = width * (2 * heads + 2 * kv + 3 * inner)
    weights = shape.CONFIG["num_hidden_layers"] * layer + shape.CONFIG["vocab_size"] * width
    attention = shape.CONFIG["num_hidden_layers"] * 2 * heads * (LENGTH + 1) / 2
    return 4 * 2 * (weights + attention) * ROWS * LENGTH


def best_rate(seconds: float) -> float:
    """Operations a second of the fastest product, each tried for so many seconds."""
    width, inner, vocabulary = (shape.CONFIG[name] for name in ("hidden_size", "intermediate_size", "vocab_size"))
    tokens = ROWS * LENGTH
    found = 0.0
    shapes = ((width, width, tokens), (width, inner, tokens), (inner, width, tokens), (width, vocabulary, 128))
    for inputs, outputs, rows in shapes:
        x, w, dy = (jnp.ones(sides) for sides in ((rows, inputs), (outputs, inputs), (rows, outputs)))
        for product, operands in (
            (lambda x, w: x @ w.T, (x, w)),
            (lambda dy, w: dy @ w, (dy, w)),
            (lambda dy, x: dy.T @ x, (dy, x)),
        ):
            run = jax.jit(product)
            run(*operands).block_until_ready()
            until = time.perf_counter() + seconds
            while (began := time.perf_counter()) < until:
                run(*operands).block_until_ready()
                found = max(found, 2 * rows * inputs * outputs / (time.perf_counter() - began))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=5, help="timed steps after the first (%(default)s)")
    arguments = parser.parse_args()
    rate = best_rate(1.0)
    step = ours(arguments.steps)
    reached = operations() / step["best"]
    print(f"best product: {rate / 1e9:.0f} GFLOP/s; step: {reached / 1e9:.0f} GFLOP/s, {step['best']:.2f} s")
    print(f"share of the machine's matmul rate: {reached / rate:.3f}, goal {GOAL}")
    return 0 if reached >= GOAL * rate else 1


if __name__ == "__main__":
    sys.exit(main())
