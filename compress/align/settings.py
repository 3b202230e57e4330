"""Keys of the recipe's [align] table."""

import dataclasses
from dataclasses import field
from pathlib import Path
from typing import Any, Literal

from compress.errors import RecipeError
from compress.quantize.settings import require_nf4_form
from compress.train.settings import Training

# The keys that are a method's own, and their defaults; `compress.align.preference` has the formulas.
OWN: dict[str, dict[str, Any]] = {
    "dpo": {"beta": 0.1, "reference_free": False},
    "cdpo": {"beta": 0.1, "reference_free": False, "label_smoothing": 0.1},
    "robust": {"beta": 0.1, "reference_free": False, "label_smoothing": 0.1},
    "ipo": {"beta": 0.1, "reference_free": False},
    "hinge": {"beta": 0.1, "reference_free": False, "margin": 1.0},
    "kto": {"beta": 0.1},
    "orpo": {"beta": 0.1},
    "simpo": {"beta": 2.0, "margin": 1.0},
    "sft": {},
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Align(Training):
    """Train low-rank adapters on a frozen 4-bit base, on completions (sft) or on preferences (all other methods)."""

    data: tuple[Path, ...] = field(
        metadata={"help": "Rows, JSONL or Parquet: completions for sft, preference pairs for the others."}
    )
    model: str | None = field(
        default=None,
        metadata={"help": "Model folder or GGUF file; a quantized folder is a base as it is.", "model": True}
        | {"chained": True},
    )
    valid: tuple[Path, ...] = field(
        default=(), metadata={"help": "Held-out rows; part of the training rows if not given."}
    )
    method: Literal["dpo", "cdpo", "robust", "ipo", "hinge", "kto", "orpo", "simpo", "sft"] = field(
        default="dpo", metadata={"help": "Loss: of preference pairs, or of completions (sft)."}
    )
    rank: int = field(default=16, metadata={"help": "Rank of the adapters.", "min": 1})
    alpha: float = field(default=32.0, metadata={"help": "How much adapters count; see scaling.", "above": 0})
    scaling: Literal["lora", "rslora"] = field(
        default="lora", metadata={"help": "Adapters count alpha / rank, or alpha / sqrt(rank)."}
    )
    dora: bool = field(
        default=False, metadata={"help": "Learn the lengths of the weights' rows apart from their directions (DoRA)."}
    )
    landing: Literal["none", "fake_quantize"] = field(
        default="none", metadata={"help": "Train on the merged weights as they are, or as rtn will round them."}
    )
    dropout: float = field(default=0.05, metadata={"help": "Share of adapter inputs dropped.", "min": 0, "max": 0.99})
    beta: float | None = field(
        default=None,
        metadata={"help": "Scale of rewards, a pull to the reference; 0.1 if not given, 2 for simpo.", "above": 0},
    )
    label_smoothing: float | None = field(
        default=None,
        metadata={"help": "Share of preferences held to be flipped (cdpo, robust); 0.1 if not given.", "min": 0}
        | {"max": 0.49},
    )
    margin: float | None = field(
        default=None,
        metadata={"help": "Reward that chosen is to have over rejected (hinge, simpo); 1 if not given.", "min": 0},
    )
    reference_free: bool = field(
        default=False,
        metadata={"help": "Take the reference's log-probabilities as zero (dpo, cdpo, robust, ipo, hinge)."},
    )
    kl_limit: float | None = field(
        default=None,
        metadata={
            "help": "Largest KL to the reference, nats a token; 0 is any; if not given 0.02, for methods that have one."
        }
        | {"min": 0},
    )
    on_kl: Literal["stop", "raise_beta"] = field(
        default="stop", metadata={"help": "What a larger one does: stop there, or double beta and go on."}
    )
    sft_weight: float = field(
        default=0.0, metadata={"help": "Adds so much of the chosen answer's NLL a token to a pair's loss.", "min": 0}
    )
    mix: Literal["none", "staged"] = field(
        default="none",
        metadata={"help": "staged: begin with SFT on chosen answers; pairs weigh more while the win rate holds."},
    )
    sample: float = field(
        default=1.0,
        metadata={"help": "Share of the examples used an epoch, drawn anew for each.", "above": 0, "max": 1},
    )
    base: Literal["rtn", "hqq", "nf4"] = field(
        default="rtn",
        metadata={"help": "A float model becomes the base by rounding to nearest, by HQQ, or as 4-bit NormalFloat."},
    )
    bits: Literal[4, 8] = field(default=4, metadata={"help": "Bits of the base's weights."})
    group_size: int = field(default=64, metadata={"help": "Inputs that share a scale in the base.", "min": 2})
    max_prompt: int | None = field(
        default=None,
        metadata={"help": "Tokens kept of a prompt, its last ones; half the sequence length if not given.", "min": 1},
    )
    global_batch: int = field(default=8, metadata={"help": "Rows or pairs in an optimizer step.", "min": 1})
    learning_rate: float = field(default=1e-5, metadata={"help": "Peak of the cosine schedule.", "above": 0})

    def __post_init__(self):
        super().__post_init__()
        for key in ("beta", "label_smoothing", "margin", "reference_free"):
            value = getattr(self, key)
            if key not in OWN[self.method] and value is not None and value is not False:
                takers = ", ".join(method for method, keys in OWN.items() if key in keys)
                raise RecipeError(
                    f"{key} = {value}: method {self.method!r} has no such key; leave it out, or take {takers}"
                )
        if self.method == "sft" and (self.sft_weight or self.mix != "none"):
            raise RecipeError("sft_weight and mix weigh a preference loss against SFT, and method 'sft' has none")
        if self.method == "kto" and self.per_device_batch is not None:
            raise RecipeError("per_device_batch cuts the batch, of which kto's reference point is a mean; leave it out")
        require_nf4_form(self.base, self.bits, self.group_size)
        if self.landing != "none" and self.dora:
            raise RecipeError(f'dora = true: landing = "{self.landing}" has no magnitudes; leave one of them out')
        if self.landing != "none" and self.dropout:
            raise RecipeError(
                f"dropout = {self.dropout}: rounded with the base, adapters have no input of their own to drop; "
                f'set dropout = 0 with landing = "{self.landing}"'
            )

    @property
    def kl_bound(self) -> float:
        """The KL to the reference, nats a token, at which a validation ends the training; 0 is none."""
        unbound = self.method in ("orpo", "simpo", "sft")
        return self.kl_limit if self.kl_limit is not None else 0.0 if unbound else 0.02

    @property
    def own(self) -> dict[str, Any]:
        """The method's own keys: as given, or their defaults."""
        given = {key: getattr(self, key) for key in OWN[self.method]}
        return OWN[self.method] | {key: value for key, value in given.items() if value is not None}
