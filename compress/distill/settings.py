"""Keys of the recipe's [distill] and [cache_teacher] tables."""

import dataclasses
import re
from dataclasses import field
from pathlib import Path
from typing import Literal

from compress.errors import RecipeError
from compress.train.settings import Training

LAYER_MAP = re.compile(r"([0-9]{1,6}:[0-9]{1,6}(,[0-9]{1,6}:[0-9]{1,6})*)?")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Distill(Training):
    """Teach a smaller model to predict as its teacher does."""

    teacher: str = field(metadata={"help": "Model folder or GGUF file.", "model": True})
    data: tuple[Path, ...] = field(metadata={"help": "Text to learn from: JSONL, Parquet or plain text."})
    student: str = field(
        default="half",
        metadata={
            "help": "Model folder, config.json (fresh weights), or a cut of the teacher: half, layers:15, layers:0,2, "
            "cut:layers=15@importance,hidden=384,ffn=1024,kv_heads=2.",
            "model": True,
            "unless": r"half|layers:\d+(,\d+)*|cut:.*",
        },
    )
    valid: tuple[Path, ...] = field(
        default=(), metadata={"help": "Held-out text; part of the training text if not given."}
    )
    teacher_cache: Path | None = field(
        default=None,
        metadata={"help": "What compress cache-teacher wrote; the teacher's weights stay out of the training."},
    )
    divergence: Literal["forward_kl", "reverse_kl", "jsd", "skew_forward_kl", "skew_reverse_kl", "total_variation"] = (
        field(default="forward_kl", metadata={"help": "How far the student's distribution is from the teacher's."})
    )
    mix: float | None = field(
        default=None,
        metadata={
            "help": "Mixture weight of jsd (0.5 if not given) and of the skew divergences (0.1); below 1.",
            "above": 0,
        },
    )
    alpha: float = field(
        default=0.9, metadata={"help": "Weight of the divergence; the rest is cross-entropy.", "min": 0, "max": 1}
    )
    temperature: float | None = field(
        default=None,
        metadata={"help": "Softens both distributions; if not given 2, or what the teacher's cache is at.", "above": 0},
    )
    temperature_end: float | None = field(
        default=None, metadata={"help": "Temperature of the last step; the first one's if not given.", "above": 0}
    )
    temperature_schedule: Literal["linear", "cosine"] = field(
        default="linear", metadata={"help": "How the temperature goes from the first step's to the last one's."}
    )
    hidden: float = field(
        default=0.0, metadata={"help": "Weight of matching the teacher's hidden states; 0 leaves it out.", "min": 0}
    )
    hidden_loss: Literal["cosine", "mse"] = field(
        default="cosine", metadata={"help": "How far two hidden states are apart: 1 - cosine, or mean squared error."}
    )
    hidden_match: Literal["projection", "pooling"] = field(
        default="projection",
        metadata={
            "help": "What bridges unlike widths: a projection that trains along, or averages of the teacher's channels."
        },
    )
    attention: float = field(
        default=0.0, metadata={"help": "Weight of matching the teacher's attention; 0 leaves it out.", "min": 0}
    )
    attention_loss: Literal["kl", "mse"] = field(
        default="kl", metadata={"help": "How far two attention maps are apart: KL(teacher‖student), or squared error."}
    )
    on_policy: float = field(
        default=0.0,
        metadata={"help": "Share of the steps that learn from the student's own answers.", "min": 0, "max": 1},
    )
    on_policy_temperature: float = field(
        default=1.0, metadata={"help": "Temperature at which the student samples them.", "above": 0}
    )
    on_policy_tokens: int = field(default=128, metadata={"help": "Most tokens of such an answer.", "min": 1})
    layer_map: str = field(
        default="",
        metadata={"help": "Layers to match, student:teacher, as in 0:1,1:3; if not given, as the student was cut."},
    )
    landing: Literal["none", "fake_quantize"] = field(
        default="none",
        metadata={"help": "Train the linears as they are, or as rtn will round them; then they are written rounded."},
    )
    bits: Literal[3, 4, 5, 6, 8] | None = field(
        default=None, metadata={"help": "Bits of a linear's weight where it is rounded; 4 if not given."}
    )
    group_size: Literal[32, 64, 128, 256] = field(
        default=64, metadata={"help": "Inputs that share a scale where weights are rounded."}
    )
    symmetric: bool = field(
        default=True,
        metadata={"help": "Levels around zero, or with a zero point a group, where weights are rounded."}
        | {"off": "asymmetric"},
    )
    rank: int | None = field(
        default=None,
        metadata={
            "help": "Train adapters of this rank, on the rounded student, instead of its weights; a quantized student "
            "is a base as it is.",
            "min": 1,
        },
    )
    lora_alpha: float = field(default=32.0, metadata={"help": "How much adapters count; see scaling.", "above": 0})
    scaling: Literal["lora", "rslora"] = field(
        default="lora", metadata={"help": "Adapters count lora_alpha / rank, or lora_alpha / sqrt(rank)."}
    )
    learning_rate: float | None = field(
        default=None,
        metadata={"help": "Peak of the cosine schedule; if not given, 0.5 / the student's hidden size.", "above": 0},
    )
    chunk: int = field(
        default=96,
        metadata={
            "help": "Tokens whose logits exist at once on a device; no effect on the result.",
            "min": 1,
            "layout": True,
        },
    )

    def __post_init__(self):
        super().__post_init__()
        if self.mix is not None and self.mix >= 1:
            raise RecipeError(f"mix = {self.mix} must be below 1: at 1 the mixture is one of the distributions itself")
        if not LAYER_MAP.fullmatch(self.layer_map):
            raise RecipeError(f"layer_map = {self.layer_map!r}: give pairs of layers student:teacher, as in 0:1,1:3")
        if self.teacher_cache is not None and (self.hidden or self.attention):
            raise RecipeError("teacher_cache holds logits alone; leave it out, or hidden and attention")
        if self.on_policy:
            self._check_on_policy()
        if self.bits is not None and not self.is_rounded:
            raise RecipeError(
                f'bits = {self.bits}: nothing is rounded; set landing = "fake_quantize", or a rank for adapters'
            )

    @property
    def tau(self) -> float:
        """The temperature of the first step and of validation, where no cache has its own."""
        return 2.0 if self.temperature is None else self.temperature

    @property
    def is_rounded(self) -> bool:
        """Whether the student's linears are, as it trains or before."""
        return self.landing != "none" or self.rank is not None

    def _check_on_policy(self) -> None:
        if self.teacher_cache is not None:
            raise RecipeError("teacher_cache knows nothing of what the student will say; leave it out, or on_policy")
        if self.sequence_length - self.on_policy_tokens < 2:
            raise RecipeError(
                f"on_policy_tokens = {self.on_policy_tokens} leaves no prompt in sequence_length = "
                f"{self.sequence_length}; lower it"
            )


@dataclasses.dataclass(frozen=True)
class CacheTeacher:
    """Keep what the teacher says of a data set, to distill from later."""

    teacher: str | None = field(
        default=None,
        metadata={
            "help": "Model folder or GGUF file; with logits, any of the same tokenizer, such as the student.",
            "model": True,
            "chained": True,
        },
    )
    data: tuple[Path, ...] = field(default=(), metadata={"help": "Text to learn from: JSONL, Parquet or plain text."})
    logits: Path | None = field(
        default=None,
        metadata={
            "help": "Token ids and what another program's teacher says of them, as safetensors; instead of data."
        },
    )
    valid: tuple[Path, ...] = field(
        default=(), metadata={"help": "Held-out text; part of the training text if not given."}
    )
    top_k: int = field(
        default=64,
        metadata={"help": "Likeliest tokens to keep, with one bucket for the others; 0 keeps all tokens.", "min": 0},
    )
    temperature: float = field(
        default=1.0, metadata={"help": "What to distill at; without effect if top_k is 0.", "above": 0}
    )
    sequence_length: int = field(default=512, metadata={"help": "Tokens in a packed row.", "min": 2, "max": 2**20})
    per_device_batch: int = field(default=8, metadata={"help": "Rows that a device reads at once.", "min": 1})

    def __post_init__(self):
        if self.data and self.logits is not None:
            raise RecipeError("give either data, for the teacher to read, or logits, of one that has read it")
        if self.logits is not None and self.valid:
            raise RecipeError("logits have no valid beside them: a twentieth of their rows is held out")
