"""A model of SmolLM2-135M's shape with random weights: what speed and memory are measured on."""

import json
import resource
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


def time_steps(step: Callable[[], Any], count: int) -> dict[str, float]:
    """Seconds of `count` calls after a first one, and the process's peak memory; `step` blocks until it is done."""
    began = time.perf_counter()
    step()
    first = time.perf_counter() - began
    seconds = []
    for _ in range(count):
        began = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - began)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return {"first": first, "best": min(seconds), "median": float(np.median(seconds)), "peak_gib": peak}


def in_a_process(arguments: list[str], environment: dict[str, str], python: str = sys.executable) -> dict[str, Any]:
    """Run a script that prints a JSON object last, in a process of its own, so that its memory is its own."""
    done = subprocess.run([python, *arguments], env=environment, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(arguments)}: exit code {done.returncode}")
    return json.loads(done.stdout.splitlines()[-1])
