"""What ends a command that is no bug; the CLI prints each as one line, without a traceback."""

import re


class RecipeError(ValueError):
    """A flag or a recipe key is wrong (exit code 2)."""


class DataError(ValueError):
    """A data file or a row of it is wrong (exit code 4)."""


class Preempted(Exception):
    """A signal ended the training; its checkpoint is saved, and the same command goes on from there (exit code 75)."""


# How the transports between processes, and JAX's coordination service, begin to tell that the other end is gone.
EXCHANGE = re.compile(r"gloo|nccl|barrier|coordination service|distributed service", re.IGNORECASE)


def is_lost_peer(error: Exception) -> bool:
    """Whether an exchange with the other processes of a run failed; jax has no class of error for that."""
    return type(error).__name__ in ("JaxRuntimeError", "ValueError") and bool(EXCHANGE.search(str(error)))


def is_out_of_device_memory(error: Exception) -> bool:
    """Whether jax could not find room on its device; told by the name, so that jax need not be imported."""
    said = str(error).lower()
    return type(error).__name__ == "JaxRuntimeError" and ("out of memory" in said or "resource_exhausted" in said)
