"""What the machine has: memory and disk that are free, and the rate at which it multiplies matrices."""

import os
import shutil
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

PROBE_SECONDS = 0.3
PROBE_ROWS = 2048


def resident_bytes() -> int:
    """Bytes of RAM that this process holds; 0 where the system has no /proc."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def free_memory() -> int:
    """Bytes of RAM that this process may still take: the machine's, or its control group's where that has less."""
    try:
        lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        free = int(lines["MemAvailable"].split()[0]) << 10
    except OSError:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    group = Path("/sys/fs/cgroup")
    try:
        limit, used = (int((group / name).read_text()) for name in ("memory.max", "memory.current"))
        return min(free, limit - used)
    except (OSError, ValueError):  # no control group, or one without a limit ("max")
        return free


def free_device_memory() -> int | None:
    """Bytes that JAX may take of an accelerator; None where the device is the CPU."""
    stats = jax.local_devices()[0].memory_stats() if jax.default_backend() != "cpu" else None
    return stats["bytes_limit"] - stats["bytes_in_use"] if stats else None


def free_disk(folder: Path) -> int:
    """Bytes that are free where a folder is to be made."""
    return shutil.disk_usage(next(path for path in folder.absolute().parents if path.exists())).free


def matmul_rate(inputs: int, outputs: int, dtype: Any) -> float:
    """Operations a second of a linear layer's product, timed for PROBE_SECONDS."""
    x, w = jnp.ones((PROBE_ROWS, inputs), dtype), jnp.ones((inputs, outputs), dtype)
    product = jax.jit(jnp.matmul)
    product(x, w).block_until_ready()
    count, began = 0, time.perf_counter()
    while (took := time.perf_counter() - began) < PROBE_SECONDS:
        product(x, w).block_until_ready()
        count += 1
    return 2.0 * x.size * outputs * count / took
