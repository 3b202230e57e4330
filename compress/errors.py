"""What ends a command that is no bug; the CLI prints each as one line, without a traceback."""


class RecipeError(ValueError):
    """A flag or a recipe key is wrong (exit code 2)."""


class DataError(ValueError):
    """A data file or a row of it is wrong (exit code 4)."""


class Preempted(Exception):
    """A signal ended the training; its checkpoint is saved, and the same command goes on from there (exit code 75)."""


def is_out_of_device_memory(error: Exception) -> bool:
    """Whether jax could not find room on its device; told by the name, so that jax need not be imported."""
    said = str(error).lower()
    return type(error).__name__ == "JaxRuntimeError" and ("out of memory" in said or "resource_exhausted" in said)
