"""A whole recipe: the tables of all stages, each owned by its stage."""

import dataclasses
from dataclasses import field

from compress.align.settings import Align
from compress.distill.settings import CacheTeacher, Distill
from compress.quantize.settings import Quantize
from compress.settings import Data, Device, Dtype, Eval, Export, Gate, Generate, Log, MeshShape, Verify


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Which stages run, with what; the stage of an absent table does not run."""

    name: str | None = field(default=None, metadata={"help": "Name of the run; the recipe's file name if not given."})
    seed: int = field(default=0, metadata={"help": "Everything random comes from it.", "min": 0, "max": 2**63 - 1})
    dtype: Dtype = field(
        default="auto", metadata={"help": "Of weights and activations; auto: bfloat16, and float32 on a CPU."}
    )
    device: Device = field(default="auto", metadata={"help": "What to run on; auto takes the best there is."})
    distributed: bool = field(default=False, metadata={"help": "Train together with the same command on other hosts."})
    data: Data = field(default_factory=Data, metadata={"help": "How rows of all data files are read."})
    mesh: MeshShape = field(
        default_factory=MeshShape, metadata={"help": "How training and scoring spread over the devices."}
    )
    log: Log = field(default_factory=Log, metadata={"help": "Where figures of the training go."})
    cache_teacher: CacheTeacher | None = None
    distill: Distill | None = None
    align: Align | None = None
    quantize: Quantize | None = None
    eval: Eval | None = None
    gate: Gate | None = None
    export: Export | None = None
    verify: Verify | None = None
    generate: Generate | None = None
