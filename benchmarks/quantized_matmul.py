"""Products with 4-bit weights, against those with the same weights in floats, on the device that is there.

    python benchmarks/quantized_matmul.py

The floats are bfloat16, and on a CPU, which has no fast product of these, float32. A time is the least of many; the
ratio is that of the packed product to the one in floats, so that below 1 the packed one is faster.
"""

import argparse
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np

from compress.models.flash import device_kind
from compress.models.quantized_matmul import dequantized, path_for, quantized_matmul
from export.quantized import QuantizedTensor, QuantSpec, pack

SHAPES = ((576, 1536), (4096, 4096))
BATCHES = (1, 16, 128)


def best(function, seconds: float, *arguments) -> float:
    """Seconds of the fastest call."""
    run = jax.jit(function)
    run(*arguments).block_until_ready()
    found, until = float("inf"), time.perf_counter() + seconds
    while (began := time.perf_counter()) < until:
        run(*arguments).block_until_ready()
        found = min(found, time.perf_counter() - began)
    return found


def drawn(shape: tuple[int, int], spec: QuantSpec) -> QuantizedTensor:
    """Random codes and scales on the device."""
    draw = np.random.default_rng(0)
    groups = (shape[0], shape[1] // spec.group_size)
    codes = draw.integers(0, spec.levels, shape, np.uint8)
    zero = None if spec.symmetric else draw.integers(0, spec.levels, groups, np.uint8)
    weight = QuantizedTensor(pack(codes, spec.bits), draw.uniform(0.01, 0.02, groups).astype(jnp.bfloat16), zero, spec)
    return jax.tree.map(jnp.asarray, weight)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=0.5, help="to time each product for (%(default)s)")
    parser.add_argument("--group-size", type=int, default=64)
    arguments = parser.parse_args()
    dtype = jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16
    print(f"{jax.devices()[0].device_kind}, {jnp.dtype(dtype).name}, 4 bits, groups of {arguments.group_size}")
    print("outputs x inputs, symmetric, rows: path, floats ms, packed / floats, dequantized whole / floats")
    worst = 0.0
    for shape in SHAPES:
        for symmetric in (True, False):
            weight = drawn(shape, QuantSpec(4, arguments.group_size, symmetric))
            floats = weight.dequantize(dtype)
            for rows in BATCHES:
                x = jnp.ones((rows, shape[1]), dtype)
                path = path_for(*device_kind(), x.dtype, rows, shape, weight.spec)
                plain = best(lambda x, w: x @ w.T, arguments.seconds, x, floats)
                ours, whole = (best(f, arguments.seconds, x, weight) / plain for f in (quantized_matmul, dequantized))
                print(f"{shape}, {symmetric}, {rows}: {path}, {1e3 * plain:.3f}, {ours:.2f}, {whole:.2f}", flush=True)
                worst = max(worst, ours / whole)
    print(f"largest ratio to the weight dequantized whole: {worst:.2f}, goal 1")
    return 0 if worst <= 1 else 1


if __name__ == "__main__":
    sys.exit(main())
