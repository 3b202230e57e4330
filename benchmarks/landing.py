"""What landing in 4 bits leaves of adapters: round to nearest and GPTQ, after training that saw the rounding and not.

    python benchmarks/landing.py

The embedded teacher, rounded to 4 bits, learns from the quickstart's exchanges: once with its adapters beside the base,
once with the base and adapters rounded in every step (`landing = "fake_quantize"`). Both are merged and quantized both
ways. The loss is that of held-out answers, in nats a token; "kept" is the share of the adapters' effect on held-out
logits that survived. "codes" is the share of the base's codes that landing changed.
"""

import argparse
import dataclasses
import statistics
import sys
import time
from pathlib import Path

import jax
import numpy as np

from compress.align.loss import token_nll
from compress.align.settings import Align
from compress.align.stage import Trainer, quantized_base
from compress.evaluate import open_windows, retention
from compress.models.decoder import linears, stack, unstack
from compress.models.folder import Model, load, to_host
from compress.progress import Progress
from compress.quantize.settings import Quantize
from compress.quantize.stage import calibration_rows, quantize
from compress.settings import Common, Eval
from eval.metrics import CANDIDATE
from export.peft import Adapters

QUICKSTART = Path(__file__).parent.parent / "recipes" / "quickstart"
TRAIN, VALID = (QUICKSTART / "data" / f"chats-{part}.jsonl" for part in ("train", "valid"))
TEXT = QUICKSTART / "data" / "train.jsonl"
COMMON = Common(progress=Progress(quiet=True))
GOAL = 0.5


def align(landing: str, arguments: argparse.Namespace) -> tuple[Trainer, Model]:
    """Train; the held-out batches, and the base with its adapters."""
    settings = Align(
        data=(TRAIN,),
        valid=(VALID,),
        method="sft",
        landing=landing,
        dropout=0.0,
        group_size=32,
        sequence_length=arguments.length,
        steps=arguments.steps,
        learning_rate=arguments.learning_rate,
        warmup=arguments.steps // 8,
        valid_every=arguments.steps,
    )
    base = quantized_base(load(QUICKSTART / "teacher"), settings)
    trainer = Trainer(base, settings, COMMON)
    began = time.perf_counter()
    found, trace = trainer.train()
    step = statistics.median(row["seconds"] for row in trace.steps)
    print(
        f"{landing}: {arguments.steps} steps, {step:.2f} s each, {time.perf_counter() - began:.0f} s in all", flush=True
    )
    adapters = Adapters(to_host(unstack(base.config, found)), settings.rank, settings.alpha)
    return trainer, dataclasses.replace(base, adapters=adapters)


def land(model: Model, method: str) -> Model:
    """Merge and quantize, as the stage does."""
    calibration = (TRAIN, TEXT) if method == "gptq" else ()
    settings = Quantize(method=method, group_size=32, calibration=calibration, sequence_length=128)
    return quantize(model.merged(), calibration_rows(settings, COMMON), settings, COMMON).model


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--length", type=int, default=128, help="tokens in a row (%(default)s)")
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--tokens", type=int, default=4096, help="of the held-out text (%(default)s)")
    arguments = parser.parse_args()
    losses: dict[tuple[str, str], float] = {}
    rows = []
    for landing in ("none", "fake_quantize"):
        trainer, aligned = align(landing, arguments)
        config = aligned.config
        nll = jax.jit(lambda stacked, batch, config=config: token_nll(config, stacked, batch).sum())
        targets = sum(float(batch.mask[:, 1:].sum()) for batch in trainer.checks)

        def loss(model: Model, trainer=trainer, nll=nll, targets=targets) -> float:
            stacked = stack(model.config, model.weights)
            return sum(float(nll(stacked, batch)) for batch in trainer.checks) / targets

        losses["base", ""] = loss(dataclasses.replace(aligned, adapters=None))
        losses[landing, "merged"] = loss(aligned.merged())
        for method in ("rtn", "gptq"):
            landed = land(aligned, method)
            losses[landing, method] = loss(landed)
            settings = Eval(data=(VALID,), window=128, max_tokens=arguments.tokens)
            found = retention(aligned, landed, open_windows({CANDIDATE: landed}, settings, COMMON), COMMON)
            share, residual = found.share(), found.residual()
            moved = [np.mean(landed.weights[n].codes() != aligned.weights[n].codes()) for n in linears(config)]
            rows.append((landing, method, losses[landing, method], share, residual, float(np.mean(moved))))
    print(f"held-out loss: base {losses['base', '']:.3f}, with adapters {losses['none', 'merged']:.3f}")
    print(f"{'training':14} {'landing':8} {'loss':>6} {'kept':>7} {'95% interval':>16} {'residual':>9} {'codes':>7}")
    for landing, method, value, share, residual, moved in rows:
        interval = f"{share.low:.3f} to {share.high:.3f}"
        print(
            f"{landing:14} {method:8} {value:6.3f} {share.value:7.3f} {interval:>16} {residual.value:9.3f} {moved:7.3f}"
        )
    cost = losses["none", "rtn"] - losses["none", "merged"]
    saved = losses["none", "rtn"] - losses["fake_quantize", "rtn"]
    print(f"share of rtn's loss that fake quantization saves: {saved / cost:.2f}, goal {GOAL}")
    return 0 if saved >= GOAL * cost else 1


if __name__ == "__main__":
    sys.exit(main())
