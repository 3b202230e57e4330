"""Which platform jax runs on, which dtype suits it, and what it keeps and needs there."""

import os
import resource
import sys
from pathlib import Path

from compress.errors import RecipeError
from compress.progress import Progress

COMPILED = 2 << 30  # bytes of compiled programs to keep
# host:port of process 0, how many processes there are, and which this one is, from 0.
LAUNCH = ("COMPRESS_COORDINATOR", "COMPRESS_PROCESSES", "COMPRESS_PROCESS")
FAREWELL = 30  # seconds that a process which ends waits for the others to end too


def join_processes(distributed: bool) -> int:
    """Make one run of the processes that were started on all hosts, and return which of them this is, from 0.

    `distributed` asks for it, and JAX finds the others by itself under SLURM and Open MPI and on TPU pods.
    The variables of `LAUNCH` ask for it too, and say where they are. Call it before `choose_device`.

    Raises:
      RecipeError: the variables are incomplete or wrong, nothing says where the others are, or they did not come.
    """
    given = {name: os.environ[name] for name in LAUNCH if os.environ.get(name)}
    if not distributed and not given:
        return 0
    import jax

    if missing := [name for name in LAUNCH if given and name not in given]:
        raise RecipeError(f"{', '.join(given)} without {', '.join(missing)}; set all or none")
    coordinator, *numbers = given.values() if given else (None,) * len(LAUNCH)
    try:
        count, own = (None if number is None else int(number) for number in numbers)
        # SIGTERM is ours: it would take the signal, and tell nobody but itself.
        jax.config.update("jax_enable_preemption_service", False)
        jax.distributed.initialize(coordinator, count, own, shutdown_timeout_seconds=FAREWELL)
    except (ValueError, RuntimeError) as error:
        raise RecipeError(f"cannot join the other processes: {error}; see {', '.join(LAUNCH)}") from error
    return jax.process_index()


def choose_device(device: str, progress: Progress) -> str:
    """Make jax use `device` and return its name: cpu, gpu or tpu; auto takes the best there is and says which.

    Call it before any array exists: jax starts its platforms once in a process.

    Raises:
      RecipeError: jax has no such device here.
    """
    import jax

    if device == "auto":
        found = jax.default_backend()
        progress.say(f"device: {jax.device_count()} x {found}")
        if found == "cpu" and (extra := _unused_accelerator()):
            progress.warn(f"falling back to cpu: jax cannot use the accelerator here; install compress-lm[{extra}]")
        return found
    before = jax.config.values["jax_platforms"]
    jax.config.update("jax_platforms", {"cpu": "cpu", "gpu": "cuda,cpu", "tpu": "tpu,cpu"}[device])
    try:
        found = jax.default_backend()
    except RuntimeError:
        found = "none"
    if found != device:
        jax.config.update("jax_platforms", before)
        extra = {"gpu": "cuda13"}.get(device, device)
        need = "jax started on another one" if device == "cpu" else f"is compress-lm[{extra}] installed?"
        raise RecipeError(f"device {device}: jax cannot use it here ({need}); --device auto takes what there is")
    return device


def choose_dtype(dtype: str, device: str) -> str:
    """Resolve auto: bfloat16 on accelerators, float32 on a CPU."""
    if dtype != "auto":
        return dtype
    return "float32" if device == "cpu" else "bfloat16"


def keep_compiled() -> None:
    """Keep compiled programs in the user's cache folder, so that the same command compiles once.

    JAX_COMPILATION_CACHE_DIR names another folder, or none if it is empty.
    """
    import jax

    if "JAX_COMPILATION_CACHE_DIR" in os.environ:
        return
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "compress" / "jax"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return  # a home that cannot be written to costs the time alone
    if os.access(folder, os.W_OK):
        jax.config.update("jax_compilation_cache_dir", str(folder))
        jax.config.update("jax_compilation_cache_max_size", COMPILED)


def peak_memory() -> int:
    """The most bytes that were in use at a time so far: of the first device, or of the process where that is a CPU."""
    import jax

    told = jax.local_devices()[0].memory_stats() or {}
    kibibytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(told.get("peak_bytes_in_use") or kibibytes * (1 if sys.platform == "darwin" else 1024))


def _unused_accelerator() -> str | None:
    """The extra that an accelerator of this machine would need, judged by its device files."""
    if Path("/dev/nvidiactl").exists():
        return "cuda13"
    return "tpu" if Path("/dev/accel0").exists() else None
