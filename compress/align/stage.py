"""The align stage: a model in; the same model on a 4-bit base, with trained adapters beside it, out."""

import dataclasses
import itertools
import json
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import numpy as np

from compress.align.loss import answer_log_probabilities, loss_of, needs_reference, policy_divergence
from compress.align.mix import Staged
from compress.align.preference import PREFERENCE_LOSSES
from compress.align.settings import Align
from compress.align.stream import PairStream, Reference
from compress.data.batch import Batch, PairBatch
from compress.data.batches import Batches, PairBatches
from compress.data.rows import Rows, keep_quarantine
from compress.data.split import training_and_held_out
from compress.models.decoder import Stacked, partition, stack, unstack
from compress.models.folder import Model, cast, load, save, to_host
from compress.models.lora import init_adapters, is_adapter, magnitudes, with_adapters, with_landing
from compress.quantize.base import packed_base
from compress.quantize.rtn import fake_quantize
from compress.record import TRACE
from compress.settings import Common
from compress.train.checkpoints import Checkpoints
from compress.train.course import (
    fit_settings,
    held_out,
    open_checkpoints,
    tellers,
    told_of,
    validator,
)
from compress.train.fit import fit
from compress.train.mesh import mesh_of_devices, on_mesh, place, place_rows, replicated
from compress.train.processes import shared_folder
from compress.train.step import mean_of
from compress.train.trace import Trace
from export.peft import SCALINGS, Adapters
from export.quantized import QuantSpec

PAIRS = "preference.json"
CONVERGED = 0.5  # held-out DPO loss; log 2 is where it begins
SCORED = 1024  # held-out pairs, from which the report takes its intervals; a validation takes fewer


def run(settings: Align, common: Common) -> dict[str, Any]:
    """Train adapters and write base and adapters as one folder, with the loss curve and the held-out pairs' scores.

    Raises:
      RecipeError, DataError, ArtifactError: settings, data or models that will not do.
    """
    assert common.out is not None and settings.model is not None
    with shared_folder(common.out, common.force) as folder:
        base = quantized_base(load(settings.model).merged(), settings)
        trainer = Trainer(base, settings, common)
        checkpoints = open_checkpoints(settings, common)
        adapters, trace = trainer.train(checkpoints)
        (folder / TRACE).write_text(trace.to_json())
        scores = trainer.score_pairs(adapters)
        if scores:
            (folder / PAIRS).write_text(json.dumps({**scores, "beta": trainer.reward_scale}) + "\n")
        weights = to_host(unstack(base.config, adapters))
        described = (settings.rank, settings.alpha, settings.dropout, settings.model, settings.scaling)
        kept = Adapters({**weights}, *described)
        facts = {"stage": "align", "method": settings.method, "model": settings.model, **trainer.facts()}
        skipped = keep_quarantine(folder, trainer.rows, trainer.valid)
        save(dataclasses.replace(base, adapters=kept), folder, facts)
    checkpoints.remove()
    return {
        "out": str(common.out),
        "method": settings.method,
        **told_of(trace, CONVERGED if settings.method == "dpo" else None),
        **trainer.facts(),
        **skipped,
    }


def quantized_base(model: Model, settings: Align) -> Model:
    """The frozen base: a quantized model as it is, another one as `settings.base` says; errors as of `packed_base`."""
    spec = QuantSpec(bits=settings.bits, group_size=settings.group_size)
    return packed_base(model, spec, settings.base, landing=settings.landing)


class Trainer:
    """Adapters on a base, the data that they learn from, and the loss."""

    def __init__(self, base: Model, settings: Align, common: Common):
        """Draw fresh adapters and open the data; nothing is trained yet."""
        self.settings, self.common, self.config = settings, common, base.config
        self.scale = SCALINGS[settings.scaling](settings.alpha, settings.rank)
        adapters = init_adapters(base.config, jax.random.key(common.seed), settings.rank)
        if settings.dora:
            adapters |= magnitudes(base.weights, adapters)
        stacked = stack(base.config, cast(base.weights, common.dtype) | adapters)
        self.adapters, frozen = partition(stacked, is_adapter)
        self.mesh = mesh_of_devices(common.mesh)
        self.base = place(self.mesh, frozen)
        if settings.landing == "fake_quantize":
            self.base = with_landing(self.base, fake_quantize)
        self.is_preference = settings.method != "sft"
        self.mix = Staged() if settings.mix == "staged" else None
        kinds = ("preference",) if self.is_preference else ("completion", "messages", "text", "tokens")
        options = {"columns": common.data.columns, "bad_rows": common.data.bad_rows, "kinds": kinds}
        self.rows, self.valid = training_and_held_out(settings.data, settings.valid, **options)
        self.tokenizer = base.tokenizer
        readable = replicated(self.mesh)
        reference = jax.jit(on_mesh(self.mesh, partial(answer_log_probabilities, self.config)), out_shardings=readable)
        self.reference = Reference(lambda rows: reference(self.base, place_rows(self.mesh, rows)))
        self.log_probability = jax.jit(on_mesh(self.mesh, self._log_probability), out_shardings=readable)

    def batches(self, rows: Rows, **options: Any) -> Batches:
        """Batches of the method's kind."""
        make = PairBatches if self.is_preference else Batches
        settings = self.settings
        return make(
            rows,
            self.tokenizer,
            size=settings.global_batch,
            length=settings.sequence_length,
            seed=self.common.seed,
            room=settings.max_prompt,
            **options,
        )

    @property
    def reward_scale(self) -> float:
        """What the report multiplies log-ratios by: beta where the method's rewards are sums of them, else 1."""
        return 1.0 if PREFERENCE_LOSSES[self.settings.method].average else self.settings.own["beta"]

    def train(self, checkpoints: Checkpoints | None = None):
        """The trained adapters and their trace."""
        batches = self.batches(self.rows, sample=self.settings.sample)
        plan = fit_settings(self.settings, batches, self.common.seed, self.mesh)
        if self.mix is not None or self.settings.on_kl == "raise_beta":
            plan = dataclasses.replace(plan, rebound=0.0)  # the loss itself changes, and may rise for that
        self.checks = held_out(partial(self.batches, self.valid), self.settings)
        if self.is_preference:
            self.checks = [self.reference.fill(pairs) for pairs in self.checks]
        stage, counted = f"align ({self.settings.method})", "pairs" if self.is_preference else "tokens"
        stream = self.stream(batches)
        adapters, trace = fit(
            loss_of(self.settings, self.config, self.scale, dropout=self.settings.dropout),
            self.adapters,
            self.base,
            stream,
            plan,
            mesh=self.mesh,
            validate=self.validator(),
            watch=partial(self.watch, stream),
            checkpoints=checkpoints,
            **tellers(self.common.progress, stage, plan.steps, counted),
        )
        return adapters, trace

    def stream(self, batches: Batches) -> "Batches | PairStream":
        """`batches` with what the loss needs beside them."""
        if not self.is_preference:
            return batches
        compares = needs_reference(self.settings.method, self.settings.reference_free)
        return PairStream(batches, self.reference if compares else None, self.mix)

    def validator(self) -> Callable[[Stacked], dict[str, float]]:
        """Held-out loss and metrics, and the exact KL(policy || reference) a token."""
        loss = loss_of(self.settings, self.config, self.scale, dropout=0.0)
        measure = validator(loss, self.base, self.checks, self.mesh)
        rows = [batch.rows if isinstance(batch, PairBatch) else batch for batch in self.checks]

        @jax.jit
        @partial(on_mesh, self.mesh)
        def divergence(adapters: Stacked, base: Stacked, batch: Batch):
            policy = with_adapters(base, adapters, self.scale)
            return policy_divergence(self.config, policy, base, batch)

        def validate(adapters: Stacked) -> dict[str, float]:
            parts = [divergence(adapters, self.base, place_rows(self.mesh, batch)) for batch in rows]
            kl = (sum(float(total) for total, _ in parts), sum(float(count) for _, count in parts))
            found = measure(adapters) | mean_of({"kl_to_reference": kl})
            if self.mix is not None:
                self.mix.observe(found["accuracy"])
                found["preference_weight"] = self.mix.weight
            return found

        return validate

    def watch(self, stream: Batches | PairStream, trace: Trace) -> dict[str, Any] | None:
        """What comes of a policy that is too far from its reference: a stop, or a larger beta."""
        limit, kl = self.settings.kl_bound, trace.validations[-1]["kl_to_reference"]
        if not limit or kl <= limit:
            return None
        if self.settings.on_kl == "stop" or not isinstance(stream, PairStream):
            why = f"KL(policy || reference) is {kl:.4g} nats a token, over the limit of {limit:g}"
            return {"event": "stopped", "why": why}
        stream.beta_scale *= 2
        return {"event": "beta", "kl": kl, "scale": stream.beta_scale}

    def _log_probability(self, adapters: Stacked, base: Stacked, rows: Batch):
        return answer_log_probabilities(self.config, with_adapters(base, adapters, self.scale), rows)

    def score_pairs(self, adapters: Stacked) -> dict[str, list[float]]:
        """Log-probabilities of the held-out pairs' answers under policy and reference; nothing for SFT."""
        if not self.is_preference:
            return {}
        scores: dict[str, list[float]] = {}
        held_out = self.batches(self.valid, epochs=1, shuffle=False)
        for pairs in map(self.reference.fill, itertools.islice(held_out, -(-SCORED // self.settings.global_batch))):
            real = np.asarray(pairs.rows.mask.sum(1) > 0)
            chosen, rejected = self.log_probability(adapters, self.base, place_rows(self.mesh, pairs.rows))
            columns = {
                "chosen": chosen,
                "rejected": rejected,
                "reference_chosen": pairs.reference_chosen,
                "reference_rejected": pairs.reference_rejected,
            }
            for name, values in columns.items():
                scores.setdefault(name, []).extend(np.asarray(values, float)[real].tolist())
        return scores

    def facts(self) -> dict[str, Any]:
        """What the data was."""
        return {"rows": self.rows.quarantine.counts(), "data_sha256": self.rows.sha256}
