"""Eight simulated devices for every test, and one compilation cache for all of them."""

import os

# XLA reads this once, when jax first looks for devices.
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()
os.environ["JAX_PLATFORMS"] = "cpu"


def pytest_configure(config):
    """Share compiled functions between tests, workers and runs, when there is a cache folder to keep them in."""
    if hasattr(config, "cache"):
        os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(config.cache.mkdir("jax")))
        os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.2")
        # With a size limit, jax locks the folder: workers never read what another is still writing.
        os.environ.setdefault("JAX_COMPILATION_CACHE_MAX_SIZE", str(1 << 30))
