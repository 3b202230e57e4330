"""A distillation step at SmolLM2-135M's shape against a plain torch loop and Tunix.

    .venv-readers/bin/python benchmarks/distill_step.py --tunix /envs/tunix/bin/python

Teacher and student have that shape and random weights; a step is 4 rows of 256 tokens, KL over the whole vocabulary,
all of the student's weights trained with AdamW, float32 on all sides. Each program runs in a process of its own.
torch runs with OMP_WAIT_POLICY=passive and without; the better counts. The goals are ratios to the best peer, for
speed and memory each. The ratio to torch in bfloat16, weights included, is told too.
"""

import argparse
import json
import sys
from pathlib import Path

import smollm2_shape as shape

SPEED_GOAL, MEMORY_GOAL = 1.5, 0.5
ROWS, LENGTH = 4, 256
PEERS = Path(__file__).parent / "peers"


def ours(steps: int, chunk: int | None = None) -> dict[str, float]:
    """A step of `compress distill`, with `chunk` tokens of the loss at a time, or as many as by default."""
    import jax
    import jax.numpy as jnp

    from compress.data.batch import Batch
    from compress.distill.loss import distillation_loss
    from compress.distill.settings import Distill
    from compress.models import decoder, read_config
    from compress.train.step import FitSettings, make_step

    config = read_config(shape.CONFIG)
    teacher, student = (decoder.stack(config, decoder.init(config, jax.random.key(seed))) for seed in (0, 1))
    defaults = Distill(teacher="", data=())
    options = {"chunk": chunk or defaults.chunk, "remat": defaults.remat}
    loss = distillation_loss(config, config, temperature=1.0, alpha=1.0, **options)
    step, optimizer = make_step(loss, FitSettings(steps=100, learning_rate=1e-5, global_batch=ROWS), None)
    state = optimizer.init(student)
    ids = shape.tokens(ROWS, LENGTH)
    positions = jnp.broadcast_to(jnp.arange(LENGTH), ids.shape)
    batch = Batch(ids, jnp.ones_like(positions), positions, jnp.ones(ids.shape, jnp.float32))

    def run() -> None:
        nonlocal student, state
        student, state, sums = step(student, state, teacher, batch, jnp.int32(1), jnp.float32(1))
        jax.block_until_ready(sums)

    return shape.time_steps(run, steps)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=5, help="timed steps after the first (%(default)s)")
    parser.add_argument("--tunix", metavar="PYTHON", help="of an environment with Tunix")
    parser.add_argument("--cpu", action="store_true", help="compare processor seconds, for a machine that is not idle")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        print(json.dumps(ours(arguments.steps)))
        return 0
    key = "cpu" if arguments.cpu else "best"
    common = ["--rows", str(ROWS), "--length", str(LENGTH), "--steps", str(arguments.steps)]
    found = {"compress": shape.in_a_process([__file__, "--child", "--steps", str(arguments.steps)])}
    for dtype in ("float32", "bfloat16"):
        script = [str(PEERS / "torch_distill.py"), "--dtype", dtype, *common]
        found[f"torch {dtype}"] = shape.with_torch(script, sys.executable, key)
    if arguments.tunix:
        found["Tunix"] = shape.in_a_process([str(PEERS / "tunix_distill.py"), *common], arguments.tunix)
    for name, run in found.items():
        speed = ROWS * LENGTH / run["best"]
        print(
            f"{name}: {speed:.0f} tokens/s at best, {ROWS * LENGTH / run['median']:.0f} in the median, "
            f"{run['cpu']:.1f} CPU s a step, first step {run['first']:.1f} s, peak {run['peak_gib']:.2f} GiB"
        )
    mine, half = found.pop("compress"), found.pop("torch bfloat16")
    print(f"tokens/s over torch's in bfloat16: {half[key] / mine[key]:.2f}")
    peers = " and ".join(found)
    memory = mine["peak_gib"] / min(run["peak_gib"] for run in found.values())
    speed = min(run[key] for run in found.values()) / mine[key]
    print(f"peak memory over the least of {peers}: {memory:.2f}, goal {MEMORY_GOAL}")
    print(f"tokens/s over the most of {peers}: {speed:.2f}, goal {SPEED_GOAL}")
    return 0 if speed >= SPEED_GOAL and memory <= MEMORY_GOAL else 1


if __name__ == "__main__":
    sys.exit(main())
