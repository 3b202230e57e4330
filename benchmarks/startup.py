"""How fast things start: `compress --help`, and the compiler on 30 layers against 2.

    python benchmarks/startup.py

Both are medians of several runs. The compile times are those of a training step's forward and backward pass of a
SmolLM2-135M sized model, from its traced program to the executable, with no compilation cache.
"""

import dataclasses
import os
import statistics
import subprocess
import sys
import time
from functools import partial

# What was compiled in an earlier run must not count; jax reads this when it is imported.
os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"

import jax
import jax.numpy as jnp
from smollm2_shape import CONFIG as SMOLLM2

from compress.models import decoder, read_config

HELP_GOAL = 0.3
RATIO_GOAL = 1.5
RUNS = 5


def time_help() -> float:
    """Seconds that `compress --help` takes, start of the interpreter included."""
    start = time.perf_counter()
    subprocess.run([sys.executable, "-m", "compress", "--help"], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def time_compile(layers: int) -> float:
    """Seconds from function to executable for the gradient of a model of this many layers."""
    config = dataclasses.replace(read_config(SMOLLM2), num_hidden_layers=layers)
    weights = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in decoder.shapes(config).items()}
    stacked = jax.eval_shape(partial(decoder.stack, config), weights)

    def loss(stacked, tokens):
        hidden = decoder.hidden_states(config, stacked, tokens, remat=True)
        return jnp.mean(jax.nn.logsumexp(decoder.logits(config, stacked, hidden), axis=-1))

    jax.clear_caches()
    start = time.perf_counter()
    jax.jit(jax.grad(loss)).lower(stacked, jax.ShapeDtypeStruct((4, 256), jnp.int32)).compile()
    return time.perf_counter() - start


def main() -> int:
    time_help(), time_compile(2)  # The first of each reads files and loads libraries.
    helps = [time_help() for _ in range(RUNS)]
    few, many = [], []
    for _ in range(RUNS):  # In turns, so that a busy machine slows both alike.
        few.append(time_compile(2))
        many.append(time_compile(30))
    print("compress --help, s:", *(f"{seconds:.3f}" for seconds in helps))
    print("compile 2 layers, s:", *(f"{seconds:.3f}" for seconds in few))
    print("compile 30 layers, s:", *(f"{seconds:.3f}" for seconds in many))
    help_time = statistics.median(helps)
    ratio = statistics.median(many) / statistics.median(few)
    print(f"compress --help in seconds: {help_time:.3f}, goal {HELP_GOAL}")
    print(f"compile time of 30 layers over that of 2: {ratio:.2f}, goal {RATIO_GOAL}")
    return 0 if help_time <= HELP_GOAL and ratio <= RATIO_GOAL else 1


if __name__ == "__main__":
    sys.exit(main())
