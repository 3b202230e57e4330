"""What a device holds of the trained weights and AdamW's state under fsdp = 8, against one device; and what it gathers.

    python benchmarks/mesh_memory.py

A distillation step of SmolLM2-135M's shape from a teacher of the same shape is compiled for one simulated device and
for eight; no weight exists. The bytes are those that the compiler reports for the arguments that a step replaces, the
weights and the optimizer's state. The compiled program of a mesh must not gather logits: no all-gather may give an
array of the whole vocabulary but the head itself and its gradient, [V, D] or [D, V].
"""

import argparse
import math
import os
import re
import sys
import time
from functools import partial

# XLA reads this once, when jax first looks for devices.
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from smollm2_shape import CONFIG as SMOLLM2

from compress.data.pack import batch_of
from compress.distill.loss import distillation_loss
from compress.models import decoder, read_config
from compress.train.mesh import batch_sharding, make_mesh, weight_shardings
from compress.train.step import FitSettings, make_step

GOAL = 1 / 7
ROWS = 8
CONFIG = read_config(SMOLLM2)
# `f32[64,49152]{1,0} all-gather(`, or a tuple of such, as an asynchronous one has.
GATHER = re.compile(r"= (.*?) all-gather(?:-start)?\(")
shape_of = jax.ShapeDtypeStruct


def compiled_step(mesh: Mesh | None, length: int) -> jax.stages.Compiled:
    """A step over `ROWS` rows of `length` tokens, compiled for shapes alone."""
    settings = FitSettings(steps=1, learning_rate=1e-3, global_batch=ROWS)
    step, optimizer = make_step(distillation_loss(CONFIG, CONFIG), settings, mesh)
    floats = {name: shape_of(shape, jnp.float32) for name, shape in decoder.shapes(CONFIG).items()}
    weights = jax.eval_shape(partial(decoder.stack, CONFIG), floats)
    trees = weights, jax.eval_shape(optimizer.init, weights), weights
    batch = batch_of([], ROWS, length)
    if mesh is not None:
        put = lambda leaf, sharding: shape_of(leaf.shape, leaf.dtype, sharding=sharding)  # noqa: E731
        trees = tuple(jax.tree.map(put, tree, weight_shardings(mesh, tree)) for tree in trees)
        batch = jax.tree.map(lambda leaf: put(leaf, batch_sharding(mesh)), batch)
    scalars = shape_of((), jnp.int32), shape_of((), jnp.float32)
    # Code that never runs need not be fast.
    return step.lower(*trees, batch, *scalars).compile(compiler_options={"xla_backend_optimization_level": 0})


def gathered(compiled: jax.stages.Compiled) -> list[tuple[int, ...]]:
    """The shapes that the program's all-gathers give."""
    found = re.findall(r"\w+\[([\d,]*)\]", " ".join(GATHER.findall(compiled.as_text())))
    return sorted({tuple(map(int, shape.split(","))) for shape in found if shape}, key=math.prod)


def holds_logits(shape: tuple[int, ...]) -> bool:
    """Whether an array has the whole vocabulary, and is not the head."""
    wide = [length for length in shape if length != 1]
    return CONFIG.vocab_size in wide and sorted(wide) != sorted([CONFIG.vocab_size, CONFIG.hidden_size])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=512, help="tokens of a row (%(default)s)")
    arguments = parser.parse_args()
    meshes = {"one device": None, "fsdp = 8": make_mesh(fsdp=8), "fsdp = 4, tensor = 2": make_mesh(fsdp=4, tensor=2)}
    held, logits = {}, []
    for name, mesh in meshes.items():
        began = time.perf_counter()
        compiled = compiled_step(mesh, arguments.length)
        memory = compiled.memory_analysis()
        held[name] = memory.alias_size_in_bytes
        shapes = gathered(compiled)
        logits += [shape for shape in shapes if holds_logits(shape)]
        print(
            f"{name}: weights and optimizer {held[name] / 1e6:.1f} MB, all arguments "
            f"{memory.argument_size_in_bytes / 1e6:.1f} MB, temporaries {memory.temp_size_in_bytes / 1e6:.1f} MB; "
            f"compiled in {time.perf_counter() - began:.0f} s",
            flush=True,
        )
        print("  gathers:", ", ".join(map(str, shapes)) or "nothing")
    share = held["fsdp = 8"] / held["one device"]
    print(f"gathers of logits: {len(logits)} {logits or ''}, goal 0".replace("  ", " "))
    print(f"share of weights and optimizer on each of 8 devices: {share:.4f}, goal {GOAL:.4f}")
    return 0 if share <= GOAL and not logits else 1


if __name__ == "__main__":
    sys.exit(main())
