"""Keys of the recipe's [align] table."""

import dataclasses
from dataclasses import field
from pathlib import Path
from typing import Literal

from compress.errors import RecipeError


@dataclasses.dataclass(frozen=True)
class Align:
    """Train low-rank adapters on a frozen 4-bit base, on completions (sft) or on preferences (dpo)."""

    data: tuple[Path, ...] = field(metadata={"help": "JSONL: completions for sft, preference pairs for dpo."})
    model: str | None = field(
        default=None,
        metadata={"help": "Model folder or GGUF file; a quantized folder is a base as it is.", "model": True}
        | {"chained": True},
    )
    valid: tuple[Path, ...] = field(
        default=(), metadata={"help": "Held-out rows; part of the training rows if not given."}
    )
    method: Literal["dpo", "sft"] = field(default="dpo", metadata={"help": "What to learn from."})
    rank: int = field(default=16, metadata={"help": "Rank of the adapters.", "min": 1})
    alpha: float = field(default=32.0, metadata={"help": "Adapters count alpha / rank.", "above": 0})
    dropout: float = field(default=0.05, metadata={"help": "Share of adapter inputs dropped.", "min": 0, "max": 0.99})
    beta: float = field(default=0.1, metadata={"help": "DPO's pull to the reference.", "above": 0})
    bits: Literal[4, 8] = field(default=4, metadata={"help": "Bits of the base's weights."})
    group_size: int = field(default=64, metadata={"help": "Inputs that share a scale in the base.", "min": 2})
    sequence_length: int = field(default=512, metadata={"help": "Tokens in a row.", "min": 2, "max": 2**20})
    max_prompt: int | None = field(
        default=None,
        metadata={"help": "Tokens kept of a prompt, its last ones; half the sequence length if not given.", "min": 1},
    )
    global_batch: int = field(default=8, metadata={"help": "Rows or pairs in an optimizer step.", "min": 1})
    per_device_batch: int | None = field(
        default=None,
        metadata={"help": "Rows that a device holds at once; all of its share if not given.", "min": 1, "layout": True},
    )
    steps: int | None = field(default=None, metadata={"help": "Optimizer steps; instead of epochs.", "min": 1})
    epochs: float | None = field(
        default=None, metadata={"help": "Passes over the data; 1 if steps are not given either.", "above": 0}
    )
    learning_rate: float = field(default=1e-5, metadata={"help": "Peak of the cosine schedule.", "above": 0})
    warmup: int = field(default=100, metadata={"help": "Steps to the peak.", "min": 0})
    weight_decay: float = field(default=0.01, metadata={"help": "AdamW's.", "min": 0})
    valid_every: int = field(default=100, metadata={"help": "Steps between validations.", "min": 1})
    save_every: int = field(
        default=100, metadata={"help": "Steps between checkpoints; no effect on the result.", "min": 1, "layout": True}
    )
    rebound: float = field(
        default=0.05,
        metadata={"help": "Rise of the loss that brings back a checkpoint; 0 is never.", "min": 0},
    )

    def __post_init__(self):
        if self.steps is not None and self.epochs is not None:
            raise RecipeError("steps and epochs are both given; keep one of them")
