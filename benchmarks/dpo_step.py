"""How fast a DPO step is: pairs a second of a model of SmolLM2-135M's shape, beside TRL and Tunix.

    python benchmarks/dpo_step.py --trl /envs/trl/bin/python --tunix /envs/tunix/bin/python

Weights and tokens are random, adapters of rank 16 are on every linear and nothing is dropped; the base is packed in 4
bits, then in float32, and all arithmetic is float32. A step is forward, backward and AdamW; the reference is computed
once a pair and kept, so that of E epochs a step's share of it is 1 / E. Each program runs in a process of its own.

TRL and Tunix compute the reference in each step; TRL also runs with precompute_ref_log_probs, which computes it once as
we do. Both are in float32, TRL also in bfloat16, weights included, and each runs with OMP_WAIT_POLICY=passive and
without; the fastest counts. The goals are ratios to it, of our float32 on the float32 base.
"""

import argparse
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import smollm2_shape as shape

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

PAIRS, PROMPT, ANSWER, RANK, ALPHA = 4, 128, 128, 16, 32
EPOCHS = (1, 3)
GOAL, HALF_GOAL = 3.0, 1.5
BASES = ("4-bit", "float32")
OURS = BASES[-1]
PEERS = Path(__file__).parent / "peers"
HALF = "TRL in bfloat16, precomputed"
TRL = {"TRL": [], "TRL, precomputed": ["--precompute"], HALF: ["--precompute", "--dtype", "bfloat16"]}


def batch() -> PairBatch:
    """Pairs of random tokens in rows as long as training makes them."""
    learnt = np.arange(PROMPT + ANSWER) >= PROMPT

    def one(ids: np.ndarray) -> tuple[Example, Example]:
        chosen, rejected = ids[: PROMPT + ANSWER], np.delete(ids, np.s_[PROMPT : PROMPT + ANSWER])
        return Example(chosen, learnt, PROMPT), Example(rejected, learnt, PROMPT)

    pairs = [one(ids) for ids in shape.tokens(PAIRS, PROMPT + 2 * ANSWER)]
    return pair_batch_of(pairs, PAIRS, -(-shared_length(*pairs[0]) // ROUND) * ROUND)


def ours(base: str, steps: int) -> dict[str, Any]:
    """The figures of a step of `compress align`, and of the reference's pass over its pairs."""
    config = read_config(shape.CONFIG)
    model = Model(shape.CONFIG, config, decoder.init(config, jax.random.key(0)), {})
    if base != "float32":
        model = quantized_base(model, Align(data=()))
    adapters = init_adapters(config, jax.random.key(1), RANK)
    trained, frozen = decoder.partition(decoder.stack(config, model.weights | adapters), is_adapter)
    pairs, settings = jax.tree.map(jnp.asarray, batch()), FitSettings(100, 1e-5, global_batch=PAIRS)
    loss = preference_loss(config, ALPHA / RANK, remat=Align(data=()).remat)
    step, optimizer = make_step(loss, settings, None)
    number, scale = np.int32(1), np.float32(1)
    state = optimizer.init(trained)
    compiled = step.lower(trained, state, frozen, pairs, number, scale).compile()
    reference = jax.jit(lambda frozen, rows: answer_log_probabilities(config, frozen, rows))
    memory = compiled.memory_analysis()
    held = memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes

    def train() -> None:
        nonlocal trained, state
        trained, state, sums = compiled(trained, state, frozen, pairs, number, scale)
        jax.block_until_ready(sums)

    figures = shape.time_steps(lambda: jax.block_until_ready(reference(frozen, pairs.rows)), steps)
    planned = (held - memory.alias_size_in_bytes) / 2**30
    return shape.time_steps(train, steps) | {"reference": figures, "planned_gib": planned}


def of_epochs(run: dict[str, Any], epochs: int, key: str) -> float:
    """Seconds of a step with its share of the reference, unless that is in each step already."""
    return run[key] + (run["reference"][key] / epochs if "reference" in run else 0)


def tell(name: str, run: dict[str, Any]) -> None:
    """Print the figures of a program."""
    for part, figures in {"a step": run, "reference": run.get("reference")}.items():
        if figures:
            print("{}, {}: {median:.2f} s, {best:.2f} at best, {cpu:.2f} CPU s".format(name, part, **figures))
    speeds = ", ".join(f"{PAIRS / of_epochs(run, epochs, 'median'):.3f} in {epochs}" for epochs in EPOCHS)
    planned = f", of which a step is planned to hold {run['planned_gib']:.2f}" if "planned_gib" in run else ""
    print(f"{name}, pairs/s by epochs: {speeds}; peak {run['peak_gib']:.2f} GiB{planned}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl", metavar="PYTHON", help="of an environment with TRL and PEFT")
    parser.add_argument("--tunix", metavar="PYTHON", help="of an environment with Tunix")
    parser.add_argument("--steps", type=int, default=3, help="timed steps after the first (%(default)s)")
    parser.add_argument("--cpu", action="store_true", help="compare processor seconds, for a machine that is not idle")
    parser.add_argument("--child", choices=BASES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        print(json.dumps(ours(arguments.child, arguments.steps)))
        return 0
    key, steps = "cpu" if arguments.cpu else "median", ["--steps", str(arguments.steps)]
    sizes = {"pairs": PAIRS, "prompt": PROMPT, "answer": ANSWER, "rank": RANK, "alpha": ALPHA}
    common = [*steps, *(word for name, size in sizes.items() for word in (f"--{name}", str(size)))]
    print(f"{PAIRS} pairs a step: prompts of {PROMPT} tokens, answers of {ANSWER}")
    found, peers = {}, {}
    for base in BASES:
        found[base] = shape.in_a_process([__file__, "--child", base, *steps])
        tell(f"compress, {base} base", found[base])
    if arguments.tunix:
        script = [str(PEERS / "tunix_dpo.py"), *common]
        peers["Tunix"] = shape.in_a_process(script, arguments.tunix)
        tell("Tunix", peers["Tunix"])
    for name, options in TRL.items() if arguments.trl else ():
        script = [str(PEERS / "trl_dpo.py"), *common, *options]
        peers[name] = shape.with_torch(script, arguments.trl, key)
        tell(name, peers[name])
    if not peers:
        print(f"no peer was given, and no ratio measured: none, goal {GOAL:g}")
        return 1

    def ratio(names: Iterable[str], epochs: int) -> float:
        """The least time of these peers over ours."""
        return min(of_epochs(peers[name], epochs, key) for name in names) / of_epochs(found[OURS], epochs, key)

    whole, (once, often) = [name for name in peers if name != HALF], EPOCHS
    memory = found[OURS]["peak_gib"] / min(peers[name]["peak_gib"] for name in whole)
    print(f"peak memory over the least of the peers': {memory:.2f}")
    print(f"pairs/s in {once} epoch over the fastest peer's: {ratio(whole, once):.2f}")
    reached = ratio(whole, often) >= GOAL
    if HALF in peers:
        reached &= ratio([HALF], often) >= HALF_GOAL
        print(f"pairs/s in {often} epochs over TRL's in bfloat16: {ratio([HALF], often):.2f}, goal {HALF_GOAL:g}")
    print(f"pairs/s in {often} epochs over the fastest peer's: {ratio(whole, often):.2f}, goal {GOAL:g}")
    return 0 if reached else 1


if __name__ == "__main__":
    sys.exit(main())
