"""Keys that the tables of all training stages have."""

import dataclasses
from dataclasses import field

from compress.errors import RecipeError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Training:
    """How long to train, on how much at a time, and how fast."""

    sequence_length: int = field(default=512, metadata={"help": "Tokens in a row.", "min": 2, "max": 2**20})
    global_batch: int = field(default=8, metadata={"help": "Rows in an optimizer step.", "min": 1})
    per_device_batch: int | None = field(
        default=None,
        metadata={"help": "Rows that a device holds at once; all of its share if not given.", "min": 1, "layout": True},
    )
    steps: int | None = field(default=None, metadata={"help": "Optimizer steps; instead of epochs.", "min": 1})
    epochs: float | None = field(
        default=None, metadata={"help": "Passes over the data; 1 if steps are not given either.", "above": 0}
    )
    learning_rate: float | None = field(default=None, metadata={"help": "Peak of the cosine schedule.", "above": 0})
    warmup: int = field(default=100, metadata={"help": "Steps to the peak, a fifth of all at most.", "min": 0})
    weight_decay: float = field(default=0.01, metadata={"help": "AdamW's.", "min": 0})
    max_grad_norm: float = field(
        default=10.0, metadata={"help": "Gradient norm above which the gradient is scaled down to it.", "above": 0}
    )
    valid_every: int = field(default=100, metadata={"help": "Steps between validations.", "min": 1})
    save_every: int = field(
        default=100, metadata={"help": "Steps between checkpoints; no effect on the result.", "min": 1, "layout": True}
    )
    rebound: float = field(
        default=0.05,
        metadata={"help": "Rise of the loss that brings back a checkpoint; 0 is never.", "min": 0},
    )
    remat: bool = field(
        default=True,
        metadata={
            "help": "Compute a block's insides again in the backward pass instead of keeping them.",
            "layout": True,
        },
    )

    def __post_init__(self):
        if self.steps is not None and self.epochs is not None:
            raise RecipeError("steps and epochs are both given; keep one of them")
