"""Bytes on disk, both ways: quantized tensors, checkpoints and the formats that engines load.

`FORMATS` is the registry. A format's module is imported when it is first used, so that importing this package costs
nothing.
"""

import dataclasses
import importlib
from collections.abc import Callable
from typing import Any


@dataclasses.dataclass(frozen=True)
class Format:
    """A format: the functions `read` and `write` of a module."""

    module: str

    @property
    def read(self) -> Callable[..., Any]:
        """From a path to a `Checkpoint`, whose weights are read on access."""
        return importlib.import_module(self.module).read

    @property
    def write(self) -> Callable[..., None]:
        """From a `Checkpoint` and a path, for a folder format an empty folder or none yet; options are the format's."""
        return importlib.import_module(self.module).write


FORMATS = {
    "safetensors": Format("export.safetensors"),
    "compressed-tensors": Format("export.compressed_tensors"),
    "bitsandbytes": Format("export.bitsandbytes"),
    "gguf": Format("export.gguf"),
    "orbax": Format("export.orbax"),
}
