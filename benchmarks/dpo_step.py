"""How fast a DPO step is: pairs a second of a model of SmolLM2-135M's shape on this machine, beside other libraries.

    python benchmarks/dpo_step.py --peer "TRL=/envs/trl/bin/python trl_dpo.py"

Weights and tokens are random, adapters of rank 16 are on every linear and nothing is dropped; the base is packed in 4
bits, then in float32, and all arithmetic is float32. A step is forward, backward and AdamW; the reference is computed
once a pair and kept, so that of E epochs a step's share of it is 1 / E. Seconds are medians after a first step that
compiles; memory is what XLA's buffer assignment says that the step holds at once.

A peer is a command that trains on pairs of the same shape and prints lines "seconds per step: X" and "CPU seconds per
step: X", its reference included. The goal is a ratio to the fastest of them, each in float32 on the float32 base.
"""

import argparse
import dataclasses
import re
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from smollm2_shape import CONFIG as SMOLLM2

from compress.align.loss import answer_log_probabilities, preference_loss
from compress.align.settings import Align
from compress.align.stage import quantized_base
from compress.data.batch import PairBatch
from compress.data.batches import ROUND
from compress.data.examples import Example
from compress.data.pack import pair_batch_of, shared_length
from compress.models import decoder, read_config
from compress.models.folder import Model
from compress.models.lora import init_adapters, is_adapter
from compress.train.step import FitSettings, make_step

PAIRS, PROMPT, ANSWER, RANK, ALPHA = 4, 128, 128, 16, 32.0
EPOCHS = (1, 3)
GOAL = 3.0
BASES = ("4-bit", "float32")


@dataclasses.dataclass(frozen=True)
class Seconds:
    """Of a step, on the clock and of all cores."""

    wall: float
    cpu: float

    def __add__(self, other: "Seconds") -> "Seconds":
        return Seconds(self.wall + other.wall, self.cpu + other.cpu)

    def __truediv__(self, number: float) -> "Seconds":
        return Seconds(self.wall / number, self.cpu / number)

    def __str__(self) -> str:
        return f"{self.wall:.2f} s a step ({self.cpu:.2f} CPU s), {PAIRS / self.wall:.3f} pairs/s"


def batch() -> PairBatch:
    """Pairs of random tokens in rows as long as training makes them."""
    draw = np.random.default_rng(0)
    learnt = np.arange(PROMPT + ANSWER) >= PROMPT

    def one() -> tuple[Example, Example]:
        ids = draw.integers(0, SMOLLM2["vocab_size"], PROMPT + 2 * ANSWER, dtype=np.int32)
        chosen, rejected = ids[: PROMPT + ANSWER], np.delete(ids, np.s_[PROMPT : PROMPT + ANSWER])
        return Example(chosen, learnt, PROMPT), Example(rejected, learnt, PROMPT)

    pairs = [one() for _ in range(PAIRS)]
    return pair_batch_of(pairs, PAIRS, -(-shared_length(*pairs[0]) // ROUND) * ROUND)


def median(run: Callable[[], Any], steps: int) -> Seconds:
    """Of so many runs, each from call to result."""
    marks = []
    for _ in range(steps):
        began = time.perf_counter(), time.process_time()
        jax.block_until_ready(run())
        marks.append((time.perf_counter() - began[0], time.process_time() - began[1]))
    return Seconds(*map(statistics.median, zip(*marks)))


def ours(base: str, steps: int) -> tuple[Seconds, Seconds]:
    """A step, and the reference's pass over its pairs."""
    config = read_config(SMOLLM2)
    model = Model(SMOLLM2, config, decoder.init(config, jax.random.key(0)), {})
    if base != "float32":
        model = quantized_base(model, Align(data=()))
    adapters = init_adapters(config, jax.random.key(1), RANK)
    trained, frozen = decoder.partition(decoder.stack(config, model.weights | adapters), is_adapter)
    pairs, settings = jax.tree.map(jax.numpy.asarray, batch()), FitSettings(100, 1e-5, global_batch=PAIRS)
    step, optimizer = make_step(preference_loss(config, ALPHA / RANK), settings, None)
    number, scale = np.int32(1), np.float32(1)
    state = optimizer.init(trained)
    compiled = step.lower(trained, state, frozen, pairs, number, scale).compile()
    reference = jax.jit(lambda frozen, rows: answer_log_probabilities(config, frozen, rows))
    memory = compiled.memory_analysis()
    held = memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes
    print(f"{base} base: rows of {pairs.rows.tokens.shape[1]}, a step holds", end=" ")
    print(f"{(held - memory.alias_size_in_bytes) / 1e9:.2f} GB", flush=True)

    def train():
        nonlocal trained, state
        trained, state, sums = compiled(trained, state, frozen, pairs, number, scale)
        return sums

    median(train, 1), median(lambda: reference(frozen, pairs.rows), 1)  # The first compiles, and takes its memory.
    return median(train, steps), median(lambda: reference(frozen, pairs.rows), steps)


def peer(command: str) -> Seconds:
    """What a peer's command prints of itself."""
    done = subprocess.run(shlex.split(command), check=False, capture_output=True, text=True)
    names = ("seconds per step", "CPU seconds per step")
    found = [re.search(rf"^{name}: ([\d.]+)$", done.stdout, re.MULTILINE) for name in names]
    if done.returncode or None in found:
        raise SystemExit(f"{command}: exit {done.returncode}, no seconds per step\n{done.stdout}{done.stderr}")
    return Seconds(*(float(match[1]) for match in found if match))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=5, help="to take the median of (%(default)s)")
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=COMMAND", help="another library")
    arguments = parser.parse_args()
    print(f"{PAIRS} pairs a step: prompts of {PROMPT} tokens, answers of {ANSWER}")
    found = {}
    for base in BASES:
        step, reference = ours(base, arguments.steps)
        print(f"{base} base, policy: {step}\n{base} base, reference: {reference}")
        for epochs in EPOCHS:
            found[base, epochs] = step + reference / epochs
            print(f"{base} base, of {epochs} epochs: {found[base, epochs]}", flush=True)
    goal = f"pairs/s in {EPOCHS[-1]} epochs over the fastest peer's"
    peers = {}
    for name, _, command in (given.partition("=") for given in arguments.peer):
        peers[name] = peer(command)
        print(f"{name}: {peers[name]}", flush=True)
    if not peers:
        print(f"no ratio was measured, as no peer was given\n{goal}: none, goal {GOAL:g}")
        return 1
    mine = found["float32", EPOCHS[-1]]
    print(f"CPU seconds, least of the peers' over ours: {min(p.cpu for p in peers.values()) / mine.cpu:.2f}")
    ratio = min(p.wall for p in peers.values()) / mine.wall
    print(f"{goal}: {ratio:.2f}, goal {GOAL:g}")
    return 0 if ratio >= GOAL else 1


if __name__ == "__main__":
    sys.exit(main())
