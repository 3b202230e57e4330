"""What every command takes, and the tables of a recipe that belong to no training or quantizing stage."""

import dataclasses
from dataclasses import field
from pathlib import Path
from typing import Literal

from compress.progress import Progress

Device = Literal["auto", "cpu", "gpu", "tpu"]
Dtype = Literal["auto", "float32", "bfloat16"]


@dataclasses.dataclass(frozen=True)
class Data:
    """How rows of a data file are read."""

    columns: dict[str, str] = field(
        default_factory=dict,
        metadata={"help": "Column mapping, merged with the defaults: text, messages, prompt, completion, chosen, …"},
    )
    bad_rows: Literal["error", "skip"] = field(
        default="error",
        metadata={"help": "What a broken line or a missing column does: stop there, or skip the row and count it."},
    )


@dataclasses.dataclass(frozen=True)
class MeshShape:
    """How many devices training and scoring spread over, along each axis of the mesh."""

    data: int | None = field(
        default=None, metadata={"help": "Devices that each see other rows; what is left if not given.", "min": 1}
    )
    fsdp: int = field(
        default=1, metadata={"help": "Devices that see other rows and hold a share of every weight.", "min": 1}
    )
    tensor: int = field(default=1, metadata={"help": "Devices that share heads and channels of a row.", "min": 1})


@dataclasses.dataclass(frozen=True)
class Log:
    """Where training stages send their figures, beside the files that they write."""

    tensorboard: Path | None = field(default=None, metadata={"help": "Folder for TensorBoard's event files."})
    wandb: str | None = field(
        default=None, metadata={"help": "Project of Weights & Biases; WANDB_MODE=offline sends nothing."}
    )


@dataclasses.dataclass(frozen=True)
class Common:
    """What a stage is told beside its settings.

    Attributes:
      seed: everything random comes from it.
      dtype: of weights and activations: resolved, never "auto".
      device: platform that jax runs on: resolved, never "auto".
      out: folder or file to write; None where a command has none.
      force: whether `out` may be replaced.
      progress: where a stage tells how far it is.
      data: how rows are read.
      mesh: how the devices are used in training and scoring.
      process: which this is of the processes that train together; the first, 0, writes and prints.
    """

    seed: int = 0
    dtype: str = "float32"
    device: str = "cpu"
    out: Path | None = None
    force: bool = False
    progress: Progress = field(default_factory=Progress)
    data: Data = field(default_factory=Data)
    mesh: MeshShape = field(default_factory=MeshShape)
    process: int = 0


@dataclasses.dataclass(frozen=True)
class Eval:
    """Measure a model against its parent and the teacher."""

    model: str | None = field(
        default=None, metadata={"help": "Model to measure: folder or GGUF file.", "model": True, "chained": True}
    )
    baseline: str | None = field(
        default=None, metadata={"help": "Its parent: the model before quantization.", "model": True}
    )
    teacher: str | None = field(default=None, metadata={"help": "The teacher.", "model": True})
    data: tuple[Path, ...] = field(metadata={"help": "Held-out text: JSONL, Parquet or plain text."}, kw_only=True)
    window: int = field(
        default=512, metadata={"help": "Tokens that a prediction may look back on.", "min": 2, "max": 2**20}
    )
    stride: int | None = field(default=None, metadata={"help": "Step between windows; the window if not given."})
    bos: bool = field(default=False, metadata={"help": "Put a BOS token before each window."})
    max_tokens: int | None = field(default=None, metadata={"help": "Stop after so many tokens.", "min": 1})


@dataclasses.dataclass(frozen=True)
class Gate:
    """Judge a report by a policy."""

    report: Path | None = field(
        default=None, metadata={"help": "The report.json to judge.", "chained": True, "argument": True}
    )
    policy: Path | None = field(default=None, metadata={"help": "A gate.toml; the built-in policy if not given."})


@dataclasses.dataclass(frozen=True)
class Export:
    """Write a model in a format that other engines load."""

    model: str | None = field(default=None, metadata={"help": "Model folder.", "model": True, "chained": True})
    format: tuple[Literal["compressed-tensors", "bitsandbytes", "gguf", "safetensors", "orbax"], ...] = field(
        default=("compressed-tensors",), metadata={"help": "Format to write; several are written side by side."}
    )
    gguf_type: Literal["auto", "F16", "Q8_0", "Q5_0", "Q5_1", "Q4_0", "Q4_1"] = field(
        default="auto",
        metadata={"help": "GGUF tensor type; auto keeps 4 and 5 bits as Q4 or Q5, 8 bits as Q8_0, floats as F16."},
    )
    adapters: Literal["merge", "keep"] = field(
        default="merge",
        metadata={"help": "Adapters of the model: in its weights (safetensors), or beside its base as PEFT has them."},
    )


@dataclasses.dataclass(frozen=True)
class Verify:
    """Reload exported files and compare logits with the model that they came from."""

    model: str | None = field(
        default=None,
        metadata={"help": "Exported folder or file.", "model": True, "chained": True, "argument": True},
    )
    reference: str | None = field(
        default=None, metadata={"help": "Model that it came from; the recorded one if not given.", "model": True}
    )


@dataclasses.dataclass(frozen=True)
class Generate:
    """Continue prompts."""

    model: str | None = field(
        default=None, metadata={"help": "Model folder or GGUF file.", "model": True, "chained": True}
    )
    prompt: tuple[str, ...] = field(metadata={"help": "Text to continue."}, kw_only=True)
    max_tokens: int = field(default=64, metadata={"help": "Tokens to generate at most.", "min": 1})
    temperature: float = field(default=0.0, metadata={"help": "0 takes the likeliest token.", "min": 0})
    top_p: float = field(default=1.0, metadata={"help": "Sample from this share of the mass.", "above": 0, "max": 1})
    top_k: int = field(default=0, metadata={"help": "Sample from so many tokens; 0 is all.", "min": 0})
    kv_cache: Literal["float", "int8"] = field(
        default="float", metadata={"help": "Keep keys and values as computed, or in 8 bits a number."}
    )
