"""One process of a tiny distillation, alone or of several, that signals itself at a step.

python -m tests.tiny_process WORLD OUT [SIGNAL STEP PROCESS]...
"""

import os
import signal
import sys
from pathlib import Path

from compress.device import join_processes
from compress.distill.settings import Distill
from compress.errors import Preempted
from compress.progress import Progress
from compress.settings import Common, MeshShape

STEPS = 8
PREEMPTED = 75


def train(world: Path, out: Path, listener, fsdp: int = 1) -> None:
    """Distil two of the teacher's four layers and write the student."""
    from compress.distill.stage import run
    from tests.tiny_training import unoptimized

    settings = Distill(
        teacher=str(world / "teacher"),
        student="half",
        data=(world / "train.jsonl",),
        valid=(world / "valid.jsonl",),
        steps=STEPS,
        sequence_length=32,
        global_batch=4,
        learning_rate=3e-3,
        warmup=2,
        valid_every=4,
        save_every=2,
    )
    progress = Progress(quiet=True)
    progress.listener = listener
    with unoptimized():
        run(settings, Common(out=out, progress=progress, mesh=MeshShape(fsdp=fsdp)))


def main(world: str, out: str, *signals: str) -> int:
    process = join_processes(distributed=False)
    due = {
        int(step): getattr(signal, name)
        for name, step, whose in zip(*[iter(signals)] * 3, strict=True)
        if int(whose) == process
    }

    def listener(stage, done, total, **figures):
        if done in due:
            os.kill(os.getpid(), due[done])

    try:
        train(Path(world), Path(out), listener, fsdp=2)
    except Preempted:
        return PREEMPTED
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
