"""A model of SmolLM2-135M's shape with random weights: what speed and memory are measured on."""

import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000.0,
    "tie_word_embeddings": True,
}


def tokens(rows: int, length: int, seed: int = 0) -> np.ndarray:
    """Random token ids [rows, length]."""
    return np.random.default_rng(seed).integers(3, CONFIG["vocab_size"], (rows, length), dtype=np.int32)


class Clock:
    """Marks before, between and after steps of training, and what lies between them."""

    def __init__(self):
        self.marks: list[tuple[float, float]] = []

    def mark(self) -> None:
        """A step ends, the next one begins."""
        self.marks.append((time.perf_counter(), time.process_time()))

    def figures(self) -> dict[str, float]:
        """Seconds of the first step and of those after it, processor seconds (`cpu`, the median) and peak memory."""
        (first, *wall), (_, *cpu) = np.diff(self.marks, axis=0).T.tolist()
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        median = {"median": statistics.median(wall), "cpu": statistics.median(cpu)}
        return {"first": first, "best": min(wall), **median, "peak_gib": peak}


def time_steps(step: Callable[[], Any], count: int) -> dict[str, float]:
    """The figures of `count` calls after a first one; `step` blocks until it is done."""
    clock = Clock()
    clock.mark()
    for _ in range(1 + count):
        step()
        clock.mark()
    return clock.figures()


def in_a_process(
    arguments: list[str], python: str = sys.executable, environment: dict[str, str] | None = None
) -> dict[str, Any]:
    """Run a script that prints a JSON object last, in a process of its own, so that its memory is its own."""
    done = subprocess.run([python, *arguments], env=environment, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(arguments)}: exit code {done.returncode}")
    return json.loads(done.stdout.splitlines()[-1])


def with_torch(arguments: list[str], python: str, key: str) -> dict[str, Any]:
    """`in_a_process` with OMP_WAIT_POLICY=passive and without; the run with the less of `key`."""
    plain = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    runs = [in_a_process(arguments, python, plain | policy) for policy in ({}, {"OMP_WAIT_POLICY": "passive"})]
    return min(runs, key=lambda run: run[key])
