"""Keys of the recipe's [quantize] table."""

import dataclasses
import re
from dataclasses import field
from pathlib import Path
from typing import Literal

from compress.errors import RecipeError


@dataclasses.dataclass(frozen=True)
class Quantize:
    """Round a model's linear weights to a few bits, in groups that share a scale."""

    model: str | None = field(
        default=None, metadata={"help": "Model folder or GGUF file.", "model": True, "chained": True}
    )
    bits: Literal[3, 4, 5, 6, 8] = field(default=4, metadata={"help": "Bits of a weight."})
    group_size: int = field(default=64, metadata={"help": "Inputs that share a scale.", "min": 32, "max": 256})
    symmetric: bool = field(
        default=True, metadata={"help": "Levels around zero, or with a zero point a group.", "off": "asymmetric"}
    )
    method: Literal["gptq", "autoround", "awq", "rtn", "hqq", "nf4"] = field(
        default="gptq",
        metadata={
            "help": "GPTQ, AutoRound, AWQ, round to nearest with the best clipping, HQQ, or QLoRA's 4-bit NormalFloat."
        },
    )
    calibration: tuple[Path, ...] = field(
        default=(), metadata={"help": "Text to quantize and heal by: JSONL, Parquet or plain text."}
    )
    calibration_tokens: int = field(
        default=16384, metadata={"help": "Tokens of it to use, of each file an equal share.", "min": 1}
    )
    sequence_length: int = field(default=512, metadata={"help": "Tokens in a calibration row.", "min": 2, "max": 2**20})
    embedding_bits: Literal[4, 5, 6, 8] | None = field(
        default=None, metadata={"help": "Bits of the embedding; kept in floats if not given."}
    )
    damp: float = field(
        default=0.01, metadata={"help": "GPTQ's damping, as a share of the mean diagonal.", "above": 0, "max": 1}
    )
    autoround_steps: int = field(default=200, metadata={"help": "AutoRound's steps, a layer.", "min": 0})
    heal_passes: int = field(
        default=3,
        metadata={"help": "Passes over the calibration text that train scales and norms by KL in the end.", "min": 0},
    )
    heal_learning_rate: float = field(
        default=2e-3, metadata={"help": "Peak learning rate of the scales' factors.", "above": 0}
    )
    fallback_group_size: int | None = field(
        default=None, metadata={"help": "Group size for layers that group_size does not divide.", "min": 32, "max": 256}
    )
    budget: str | None = field(
        default=None,
        metadata={"help": "Choose bits of each layer under '90 MB' of the artifact, or '4.5 bits' a quantized weight."},
    )
    max_kl: float | None = field(
        default=None,
        metadata={"help": "Choose bits of each layer for the smallest model of at most this KL, in nats.", "above": 0},
    )
    allowed_bits: tuple[Literal[3, 4, 5, 6, 8], ...] = field(
        default=(4, 5, 8), metadata={"help": "Bits to choose from, under a budget or a KL."}
    )
    allowed_group_sizes: tuple[Literal[32, 64, 128, 256], ...] = field(
        default=(), metadata={"help": "Group sizes to choose from; group_size alone if not given."}
    )
    budget_format: Literal["compressed-tensors", "gguf"] = field(
        default="compressed-tensors", metadata={"help": "Format whose bytes are counted."}
    )
    sensitivity_tokens: int = field(
        default=1024, metadata={"help": "Calibration tokens on which each layer's KL is measured.", "min": 2}
    )
    exclude: tuple[str, ...] = field(
        default=(), metadata={"help": "Patterns of linears that stay floats, such as '*.down_proj.weight'."}
    )
    rotate: Literal["none", "value", "full"] = field(
        default="none",
        metadata={"help": "First rotate values, or the residual stream too, folded into the weights."},
    )
    requantize: Literal["warn", "refuse"] = field(
        default="warn", metadata={"help": "What to do with a model that is quantized already."}
    )

    def __post_init__(self):
        for name in ("group_size", "fallback_group_size"):
            size = getattr(self, name)
            if size is not None and size & (size - 1):
                raise RecipeError(f"{name} = {size}: must be 32, 64, 128 or 256")
        if self.method == "nf4" and (self.embedding_bits or self.fallback_group_size or not self.symmetric):
            raise RecipeError(
                "method 'nf4' has no zero points, no fallback_group_size and no embedding_bits; leave them out"
            )
        require_nf4_form(self.method, self.bits, self.group_size)
        if self.is_mixed:
            self._check_choice()

    @property
    def is_mixed(self) -> bool:
        """Whether each layer's bits are chosen, under a budget or a KL."""
        return self.budget is not None or self.max_kl is not None

    @property
    def group_sizes(self) -> tuple[int, ...]:
        """The group sizes to choose from."""
        return self.allowed_group_sizes or (self.group_size,)

    def _check_choice(self) -> None:
        if self.budget is not None and self.max_kl is not None:
            raise RecipeError("give either budget or max_kl, not both")
        if self.method == "nf4" or self.embedding_bits or self.fallback_group_size or self.exclude:
            raise RecipeError(
                "a budget or max_kl chooses bits by itself, of integers; leave nf4, embedding_bits, "
                "fallback_group_size and exclude out"
            )
        if self.budget is not None:
            parse_budget(self.budget)


def parse_budget(text: str) -> tuple[float, Literal["MB", "bits"]]:
    """A budget's number and unit.

    Raises:
      RecipeError: it is none.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(MB|bits)", text.strip())
    if match is None or float(match[1]) == 0:
        raise RecipeError(f"budget = {text!r}: give megabytes, or bits a weight, as in '90 MB' or '4.5 bits'")
    return float(match[1]), "MB" if match[2] == "MB" else "bits"


def require_nf4_form(method: str, bits: int, group_size: int) -> None:
    """Refuse other bits or groups than NF4 has, where `method` is nf4.

    Raises:
      RecipeError: it says which NF4 has.
    """
    if method == "nf4" and (bits, group_size) != (4, 64):
        raise RecipeError(
            f"bits = {bits}, group_size = {group_size}: nf4 has 4 bits and blocks of 64; leave them out, or take rtn"
        )
