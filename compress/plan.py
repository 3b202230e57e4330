"""`compress plan`: what each stage of a recipe takes of memory, disk and time, told before anything runs.

A stage's heaviest programs are compiled for shapes alone: no weight is read, and nothing is computed. XLA's buffer
assignment then says how many bytes a program holds at once, arguments, gradients, AdamW's moments, activations and
logits included; what lies beside the program is counted here, and each function below says how. Seconds are
floating-point operations over the rate of a matrix product on this machine. A bias, a norm or a tokenizer's work is
in neither.

Letters: P parameters, B rows of a batch, T tokens of a row, D model, V vocabulary, L layers, I inputs, O outputs.
"""

import dataclasses
import math
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from compress.align.loss import loss_of as alignment_loss
from compress.align.settings import Align
from compress.data.batches import BUFFER
from compress.data.pack import batch_of, pair_batch_of
from compress.data.rows import Rows
from compress.data.split import ONE_IN
from compress.distill.cache import IDENTITY, Cached, bytes_per_target, id_type, widths
from compress.distill.cache_stage import SHARD_BYTES, saying
from compress.distill.form import spec_of, split
from compress.distill.loss import loss_of as distillation_loss
from compress.distill.on_policy import Prompts
from compress.distill.settings import CacheTeacher, Distill
from compress.distill.strategies import make_matching
from compress.distill.student import read_cut, student_architecture
from compress.evaluate import CHUNK, scoring_mesh, windows_at_once
from compress.machine import free_device_memory, free_disk, free_memory, matmul_rate, resident_bytes
from compress.models.config import DecoderConfig
from compress.models.decoder import (
    EMBEDDING,
    Stacked,
    block_shapes,
    hidden_states,
    layer_data,
    linears,
    partition,
    shapes,
    stack,
)
from compress.models.folder import architecture
from compress.models.lora import init_adapters, is_adapter, magnitudes
from compress.pipeline import Run
from compress.quantize.calibrate import capture
from compress.quantize.gptq import round_in_order
from compress.quantize.layer import JOIN
from compress.quantize.nf4 import round_to_nf4
from compress.quantize.preflight import spec_of_layers
from compress.quantize.quantizers import QUANTIZERS
from compress.quantize.rotate import rotated_architecture
from compress.quantize.rtn import CLIP_STEPS, round_to_nearest
from compress.quantize.settings import Quantize
from compress.schema import Recipe
from compress.settings import Common, Eval, Export
from compress.train.checkpoints import KEEP
from compress.train.course import VALIDATION_BATCHES
from compress.train.mesh import batch_sharding, mesh_of_devices, on_mesh, rows_across, weight_shardings
from compress.train.settings import Training
from compress.train.step import FitSettings, LossFn, make_step
from export.quantized import PackedTensor, QuantizedTensor, QuantSpec
from export.untrusted import read_object

GB = 1e9
BYTES_PER_TOKEN = 4  # of a data file; English text has four to five
LEFT_BEHIND = 150_000_000  # bytes of RAM, of programs, that a stage leaves to those after it; so the quickstart's do
MISFIT = 1  # exit code

shape_of = jax.ShapeDtypeStruct


@dataclasses.dataclass(frozen=True)
class Need:
    """What a stage takes.

    Attributes:
      device: bytes on each device at the peak.
      host: bytes of RAM beside it, less Python, JAX and its compiler.
      disk: bytes that it writes, checkpoints included, which go when it is done.
      flops: floating-point operations.
      loading: bytes of RAM while nothing is on the device yet.
    """

    device: int
    host: int
    disk: int
    flops: float
    loading: int = 0


def run(recipe: Recipe, common: Common) -> dict[str, Any]:
    """Each stage's memory, disk and time against what the machine has; `exit_code` 1 where they do not fit.

    Raises:
      RecipeError, DataError, ArtifactError, EvidenceError: whatever a run would refuse before its first stage.
    """
    assert common.out is not None
    plan = Plan(Run(recipe, common), common)
    rows, change = {}, {}
    for number, name in enumerate(plan.stages, 1):
        need = plan.need(name)
        rows[name] = plan.row(need)
        if not plan.fits(need):
            change[name] = plan.cure(name)
        common.progress("plan", number, len(plan.stages))
    room = {"memory_gb": plan.memory / GB, "disk_gb": plan.disk / GB}
    if plan.device_memory is not None:
        room["device_gb"] = plan.device_memory / GB
    written = sum(row["disk_gb"] for row in rows.values())
    if written > room["disk_gb"]:
        change["disk"] = f"free {written - room['disk_gb']:.3g} GB, or give --out a place on another disk"
    return {
        "stages": rows,
        "free": _rounded(room),
        "matmul_gflops": round(plan.rate / 1e9, 1),
        "note": "memory and seconds are estimates: docs/run.md says how they are made and how far off they were",
        "fits": not change,
        **({"change": change} if change else {}),
        "exit_code": MISFIT if change else 0,
    }


class Plan:
    """The stages of a run, the models that go through them, and the machine."""

    def __init__(self, work: Run, common: Common):
        """Read the architectures that the recipe names, and look at the machine."""
        self.settings, self.folder, self.common = work.settings, work.folder, common
        self.stages = work.stages
        self.dtype = jnp.dtype(common.dtype)
        self.mesh = mesh_of_devices(common.mesh)
        self.teacher: DecoderConfig | None = None
        if "distill" in self.stages:
            self.teacher = architecture(self.settings["distill"].teacher)
            self.first = student_architecture(self.settings["distill"].student, self.teacher)
        else:
            self.first = architecture(self.settings[self.stages[0]].model)
        # What this process holds already is part of what a stage takes.
        self.memory, self.device_memory = free_memory() + resident_bytes(), free_device_memory()
        self.disk = free_disk(self.folder)
        largest = self.teacher or self.first
        self.rate = matmul_rate(largest.hidden_size, largest.intermediate_size, self.dtype)

    def need(self, name: str, **changes: Any) -> Need:
        """What a stage takes, with some of its settings changed."""
        found = getattr(self, name)(dataclasses.replace(self.settings[name], **changes))
        left = LEFT_BEHIND * self.stages.index(name)
        return dataclasses.replace(found, host=found.host + left, loading=found.loading + left)

    def row(self, need: Need) -> dict[str, float]:
        """A stage's line of the table."""
        device = {} if self.device_memory is None else {"device_gb": need.device / GB}
        figures = {"memory_gb": self.ram(need) / GB, **device, "disk_gb": need.disk / GB}
        return _rounded(figures) | {"seconds": round(need.flops / self.rate / jax.device_count(), 1)}

    def ram(self, need: Need) -> int:
        """Bytes of RAM at the peak: where the device is the CPU, what it holds is RAM too.

        What Python, JAX and the compiler hold is what they hold here, after the same programs were compiled.
        """
        on_host = need.host + (need.device * jax.device_count() if self.device_memory is None else 0)
        return max(need.loading, on_host) + resident_bytes()

    def fits(self, need: Need) -> bool:
        """Whether the memory suffices."""
        enough = self.ram(need) <= self.memory
        return enough and (self.device_memory is None or need.device <= self.device_memory)

    def cure(self, name: str) -> str:
        """What to change where a stage does not fit: the most rows at once that do, if any do."""
        settings = self.settings[name]
        if not isinstance(settings, Training):
            key = {"cache_teacher": "per_device_batch", "quantize": "calibration_tokens", "eval": "window"}.get(name)
            return f"lower {key}, or take a smaller model" if key else "take a smaller model"
        share = settings.global_batch // rows_across(self.mesh)
        now = settings.per_device_batch or share
        for rows in (rows for rows in range(now - 1, 0, -1) if share % rows == 0):
            need = self.need(name, per_device_batch=rows)
            if self.fits(need):
                return f"per_device_batch = {rows} takes {self.ram(need) / GB:.3g} GB, and the result is the same"
        return "not even per_device_batch = 1 fits: lower sequence_length, or take a smaller model"

    def config(self, settings: Any) -> DecoderConfig:
        """The architecture of the model that a stage reads; it may not exist yet."""
        made_here = Path(settings.model).is_relative_to(self.folder)
        return self.first if made_here else architecture(settings.model)

    def cache_teacher(self, settings: CacheTeacher) -> Need:
        """The teacher in float32 on the host, and a shard twice, as it is put together; the teacher's program.

        Operations: of a token the teacher's forward pass.
        """
        assert self.teacher is not None
        teacher, length = self.teacher, settings.sequence_length
        stacked = _spread(self.mesh, _stacked(teacher, _floats(teacher, self.dtype)))
        batch = _by_rows(self.mesh, _batch(settings.per_device_batch * jax.device_count(), length))
        tokens = tokens_in(settings.data) + tokens_in(settings.valid)
        written = tokens * bytes_per_target(settings.top_k, teacher.vocab_size)
        return Need(
            device=held(saying(teacher, settings), stacked, batch),
            host=size(_floats(teacher, jnp.float32)) + 2 * min(written, SHARD_BYTES),
            disk=written,
            flops=tokens * forward_flops(teacher, length),
        )

    def distill(self, settings: Distill) -> Need:
        """The teacher in float32 on the host, two copies of the best student, and the step beside the first weights.

        With a cache of the teacher, its weights are there at most before the training, to be cut. Where adapters train,
        the packed student is on the host and on the device.

        Operations: of a token the teacher's forward pass and three times the student's (forward, and the gradients
        of inputs and of weights), or twice under adapters, and once more where the student writes it. The step that
        samples is the one whose memory counts, where there is one: it does all that the other does.
        """
        assert self.teacher is not None
        length, student = settings.sequence_length, self.first
        loss = distillation_loss(settings, student, self.teacher, self.dtype)
        trainable, whole = _stacked(student, _floats(student, jnp.float32)), size(_floats(self.teacher, jnp.float32))
        batch, cached = _batch(settings.global_batch, length), settings.teacher_cache
        frozen: Any = None if cached else _stacked(self.teacher, _floats(self.teacher, self.dtype))
        specs, base, written = dict.fromkeys(linears(student), spec_of(settings)), None, _floats(student, jnp.bfloat16)
        if settings.is_rounded:
            written = _packed(student, specs, jnp.bfloat16)
        if settings.rank is not None:
            adapters = _adapters(student, settings.rank)
            trainable, base = split(_stacked(student, _packed(student, specs, self.dtype) | adapters), settings)
            frozen, written = (base, frozen), written | adapters
        if matching := make_matching(settings, student, self.teacher):
            projections = jax.eval_shape(matching.projections, jax.random.key(0))
            trainable = dataclasses.replace(trainable, rest=trainable.rest | projections)
        checks = self.cached(batch, cached) if cached else batch
        heaviest = _prompts(settings) if settings.on_policy else checks
        device = self.training(loss, trainable, frozen, heaviest, settings, checks)
        ours, theirs = forward_flops(student, length), 0.0 if cached else forward_flops(self.teacher, length)
        steps, validated = self.course(settings)
        tokens = settings.global_batch * length
        buffers = (2 if settings.on_policy else 1) * buffer_bytes(settings.data)
        return Need(
            device=device + size(trainable),
            host=(0 if cached else whole) + size(base) + 2 * size(trainable) + buffers,
            loading=whole if cached and read_cut(settings.student, self.teacher) else 0,
            disk=size(written) + checkpoint_bytes(trainable),
            flops=tokens
            * (steps * (theirs + ((2 if base else 3) + settings.on_policy) * ours) + validated * (theirs + ours)),
        )

    def cached(self, batch: Any, folder: Path) -> Cached:
        """A batch with what the cache in `folder` says of it; the run may have yet to make it."""
        if "cache_teacher" in self.stages:
            assert self.teacher is not None
            found = {"top_k": self.settings["cache_teacher"].top_k, "vocabulary": self.teacher.vocab_size}
        else:
            found = read_object(folder, IDENTITY)
        top_k, width = widths(folder, found)

        def said(columns: int, dtype: Any) -> Any:
            return shape_of((*batch.tokens.shape, columns), dtype)

        ids = said(top_k, id_type(found["vocabulary"])) if top_k else None
        return Cached(batch, said(width, jnp.float16), ids)

    def align(self, settings: Align) -> Need:
        """The packed base on the host, and the step; before that the float32 model while it is packed.

        Operations: the base is frozen, so of a token twice the forward pass, adapters aside, and once more with
        remat; a preference has a row for both answers, twice as long at most, and a forward pass of the reference.
        """
        config, length = self.config(settings), settings.sequence_length
        spec = QuantSpec(bits=settings.bits, group_size=settings.group_size)
        base = _packed(config, dict.fromkeys(linears(config), spec), self.dtype, settings.base)
        adapters = _adapters(config, settings.rank)
        adapters |= jax.eval_shape(magnitudes, base, adapters) if settings.dora else {}
        trainable, frozen = partition(_stacked(config, base | adapters), is_adapter)
        scale, rows = settings.alpha / settings.rank, settings.global_batch
        loss = alignment_loss(settings, config, scale, dropout=settings.dropout)
        batch, reference = _batch(rows, length), 0
        if settings.method != "sft":
            length, reference = 2 * length, 1
            batch = _shapes(pair_batch_of([], rows, length))
        device = self.training(loss, trainable, frozen, batch, settings, batch)
        steps, checks = self.course(settings)
        tokens, once = rows * length, forward_flops(config, length)
        return Need(
            device=device + size(trainable),
            host=size(base) + 2 * size(trainable) + buffer_bytes(settings.data),
            loading=size(_floats(config, jnp.float32)) + size(base),
            disk=size(_packed(config, dict.fromkeys(linears(config), spec), jnp.bfloat16, settings.base))
            + size(adapters)
            + checkpoint_bytes(trainable),
            flops=tokens * once * (steps * (2 + settings.remat + reference) + checks * 3),
        )

    def quantize(self, settings: Quantize) -> Need:
        """Three parts of the model in float32, of which one is read, one made and one written (a layer is a part, and
        the embedding); on the device a layer's program, and the calibration's hidden states
        of a batch into the layer, out of it, and out of the packed layer.

        Operations: of a calibration token two forward passes and the x x^T of each layer's inputs, 2 I^2; of a linear
        O I^2 to make up for errors, and I^3 / 3 for the Hessian's factor. Healing holds the float model, and the hidden
        states of all calibration tokens; a token of a pass takes a forward, a repeated and a backward pass.
        """
        config, length = rotated_architecture(self.config(settings), settings.rotate), settings.sequence_length
        specs = specs_of(settings, config)
        spec = next(iter(specs.values()))
        layer = {name: shape_of(shape, jnp.float32) for name, shape in block_shapes(config).items()}
        widest = max((leaf for leaf in layer.values() if leaf.ndim == 2), key=lambda leaf: leaf.size)
        is_nf4, flops, taught = settings.method == "nf4", 0.0, 0
        device = held(round_to_nf4, widest) if is_nf4 else held(round_to_nearest, widest, spec, CLIP_STEPS)
        if settings.calibration:
            tokens, layers = settings.calibration_tokens, config.num_hidden_layers
            rows = max(1, min(4, tokens // len(settings.calibration) // length))
            x = shape_of((rows, length, config.hidden_size), jnp.float32)
            arguments = (config, layer, x, tuple(part[0] for part in layer_data(config)), _batch(rows, length))
            _, grams = jax.eval_shape(partial(capture, config), *arguments[1:])
            alike = {name: [layer[f"{part}.weight"].shape for part in name.split(JOIN)] for name in grams}
            wide = {name: (sum(outputs for outputs, _ in found), found[0][1]) for name, found in alike.items()}
            device = held(capture, *arguments)
            if QUANTIZERS[settings.method].calibrated:
                name = max(wide, key=lambda name: math.prod(wide[name]) + grams[name].size)
                w = shape_of(wide[name], jnp.float32)
                device = max(device, held(round_in_order, w, grams[name], settings.damp, spec, "static", CLIP_STEPS))
                flops += layers * sum(o * i**2 + i**3 / 3 for o, i in wide.values())
            device += 3 * x.size * x.dtype.itemsize + size(grams)
            squares = sum(gram.size for gram in grams.values())
            flops += tokens * 2 * (forward_flops(config, length) + squares * layers)
            if settings.heal_passes and not is_nf4:
                device, taught = max(device, size(_floats(config, jnp.float32))), 4 * tokens * config.hidden_size
                flops += tokens * forward_flops(config, length) * (1 + 4 * settings.heal_passes)
        return Need(
            device=device,
            host=3 * max(size(layer), size(_floats(config, jnp.float32)[EMBEDDING])) + taught,
            disk=size(_packed(config, specs, jnp.bfloat16, settings.method)),
            flops=flops,
        )

    def export(self, settings: Export) -> Need:
        """The model, the one that is read back, and one of them on the device, where their logits are compared."""
        config = self.config(settings)
        model, packed = self.landed(config, jnp.float32), size(self.landed(config, jnp.bfloat16))
        written = {
            "compressed-tensors": packed,
            "bitsandbytes": packed,
            "gguf": sum(int(math.prod(v.shape) * gguf_bits(v, settings.gguf_type) / 8) for v in model.values()),
            "safetensors": size(_floats(config, jnp.bfloat16)),
            "orbax": size(model),
        }
        disk = sum(written[name] for name in settings.format)
        return Need(device=size(model), host=2 * size(model), disk=disk, flops=0.0)

    def eval(self, settings: Eval) -> Need:
        """Every model on the host and on the device, its hidden states of a batch and its logits of a chunk.

        Operations: of a token every model's forward pass, and three more for what has landed of the adapters.
        """
        config, window = self.config(settings), settings.window
        exported = self.settings["export"].format if "export" in self.stages else ("",)
        models = [(config, self.landed(config, jnp.float32)) for _ in exported]
        floats = [config] if settings.baseline or "quantize" in self.stages else []
        floats += [architecture(settings.teacher)] if settings.teacher else [self.teacher] if self.teacher else []
        floats += [config, config] if self.teacher else []  # the student before distillation and after
        models += [(other, _floats(other, jnp.float32)) for other in floats]
        mesh, placed = scoring_mesh(self.common.mesh), []
        for other, weights in models:
            placed.append((other, _spread(mesh, _stacked(other, _cast(weights, self.dtype)))))
        largest, stacked = max(placed, key=lambda model: model[0].num_hidden_layers * model[0].hidden_size ** 2)
        at_once = windows_at_once(mesh)
        tokens = _by_rows(mesh, shape_of((at_once, window), jnp.int32))
        inside = held(jax.jit(on_mesh(mesh, partial(hidden_states, largest))), stacked, tokens) - share(stacked)
        hidden = sum(at_once * window * other.hidden_size * self.dtype.itemsize for other, _ in models)
        logits = sum(CHUNK * other.vocab_size * 4 for other, _ in models)
        passes = [other for other, _ in models] + 3 * [config] * ({"align", "quantize"} <= set(self.stages))
        scored = settings.max_tokens or tokens_in(settings.data)
        return Need(
            device=sum(share(weights) for _, weights in placed) + inside + hidden + logits,
            host=sum(size(weights) for _, weights in models),
            disk=0,
            flops=scored * sum(forward_flops(other, window) for other in passes),
        )

    def landed(self, config: DecoderConfig, dtype: Any) -> dict[str, Any]:
        """The weights that are exported, floats in `dtype`."""
        if "quantize" in self.stages:
            settings = self.settings["quantize"]
            config = rotated_architecture(config, settings.rotate)
            return _packed(config, specs_of(settings, config), dtype, settings.method)
        return _floats(config, dtype)

    def training(
        self, loss: LossFn, trainable: Stacked, frozen: Any, batch: Any, settings: Training, checks: Any
    ) -> int:
        """Bytes of a step, or of a validation on `checks` beside AdamW's state, whichever is more."""
        fit = FitSettings(
            steps=1,
            learning_rate=0.0,  # takes no memory, whatever it is
            global_batch=settings.global_batch,
            per_device_batch=settings.per_device_batch,
        )
        step, optimizer = make_step(loss, fit, self.mesh)
        trees = (trainable, jax.eval_shape(optimizer.init, trainable), frozen)
        trainable, state, frozen = (_spread(self.mesh, tree) for tree in trees)
        batch, checks = _by_rows(self.mesh, (batch, checks))
        validation = jax.jit(on_mesh(self.mesh, lambda trainable, frozen, batch: loss(trainable, frozen, batch, None)))
        return max(
            held(step, trainable, state, frozen, batch, shape_of((), jnp.int32), shape_of((), jnp.float32)),
            held(validation, trainable, frozen, checks) + size(state),
        )

    def course(self, settings: Distill | Align) -> tuple[int, int]:
        """Steps, and batches of all validations together."""
        steps = settings.steps
        if steps is None:
            if isinstance(settings, Align) and settings.method != "sft":
                data = self.common.data
                rows: float = sum(1 for _ in Rows(settings.data, columns=data.columns, bad_rows=data.bad_rows))
            else:
                rows = tokens_in(settings.data) / settings.sequence_length
            steps = math.ceil((settings.epochs or 1) * rows / settings.global_batch)
        validations = 1 + math.ceil(steps / settings.valid_every)
        held_out = tokens_in(settings.valid) if settings.valid else tokens_in(settings.data) / ONE_IN
        batches = math.ceil(held_out / settings.global_batch / settings.sequence_length)
        return steps, validations * min(VALIDATION_BATCHES, batches)


def held(function: Any, *arguments: Any) -> int:
    """Bytes that a jitted function of these shapes holds on a device at once, its arguments among them."""
    # Code that never runs need not be fast; which buffers there are is settled before.
    options = {"xla_backend_optimization_level": 0} if jax.default_backend() == "cpu" else None
    found = function.lower(*arguments).compile(compiler_options=options).memory_analysis()
    results = found.output_size_in_bytes - found.alias_size_in_bytes
    return found.argument_size_in_bytes + results + found.temp_size_in_bytes


def size(tree: Any) -> int:
    """Bytes of a tree of shapes."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def share(tree: Any) -> int:
    """Bytes that a device holds of a tree of shapes, whole or spread."""
    shards = [
        (leaf, leaf.sharding.shard_shape(leaf.shape) if leaf.sharding else leaf.shape) for leaf in jax.tree.leaves(tree)
    ]
    return sum(math.prod(shape) * leaf.dtype.itemsize for leaf, shape in shards)


def forward_flops(config: DecoderConfig, length: int) -> float:
    """Operations of a token's way through a model and its head.

    Two a weight of each linear and of the head; and in attention, which is computed whole and then masked, two for
    each of the row's tokens and channels, for scores and for values.
    """
    weights = sum(math.prod(shape) for shape in linears(config).values()) + config.vocab_size * config.hidden_size
    return 2.0 * weights + 4.0 * config.num_hidden_layers * length * config.num_attention_heads * config.head_dim


def gguf_bits(value: Any, gguf_type: str) -> float:
    """Bits of a weight in GGUF, where each block of 32 has a float16 scale, and a minimum if asymmetric."""
    if gguf_type in ("F16", "Q8_0"):
        return {"F16": 16.0, "Q8_0": 8.5}[gguf_type]
    return value.spec.bits + (0.5 if value.spec.symmetric else 1.0) if isinstance(value, QuantizedTensor) else 16.0


def specs_of(settings: Quantize, config: DecoderConfig) -> dict[str, QuantSpec]:
    """How each linear will be quantized, and the embedding if it is."""
    spec = QuantSpec(bits=settings.bits, group_size=settings.group_size, symmetric=settings.symmetric)
    return spec_of_layers(config, spec, settings.fallback_group_size, settings.embedding_bits, settings.exclude)


def tokens_in(paths: Iterable[Path]) -> int:
    """About how many tokens files hold."""
    return sum(path.stat().st_size for path in paths) // BYTES_PER_TOKEN


def checkpoint_bytes(trainable: Any) -> int:
    """Bytes of a training stage's checkpoints: in each its weights, the best ones, and AdamW's two moments."""
    return KEEP * 4 * size(trainable)


def buffer_bytes(paths: Iterable[Path]) -> int:
    """Bytes of a training stage's buffer of examples: an int32 and a bool a token."""
    return 5 * min(BUFFER, tokens_in(paths))


def _floats(config: DecoderConfig, dtype: Any) -> dict[str, Any]:
    return {name: shape_of(shape, dtype) for name, shape in shapes(config).items()}


def _packed(config: DecoderConfig, specs: dict[str, QuantSpec], dtype: Any, method: str = "rtn") -> dict[str, Any]:
    """The shapes of a model whose tensors of `specs` are quantized by a method of `QUANTIZERS`."""
    rounding = lambda spec: round_to_nf4 if method == "nf4" else partial(round_to_nearest, spec=spec)  # noqa: E731
    whole = _floats(config, dtype)
    return whole | {name: jax.eval_shape(rounding(spec), whole[name]) for name, spec in specs.items()}


def _cast(weights: dict[str, Any], dtype: Any) -> dict[str, Any]:
    return {n: v if isinstance(v, PackedTensor) else shape_of(v.shape, dtype) for n, v in weights.items()}


def _stacked(config: DecoderConfig, weights: dict[str, Any]) -> Stacked:
    return jax.eval_shape(partial(stack, config), weights)


def _adapters(config: DecoderConfig, rank: int) -> dict[str, Any]:
    return jax.eval_shape(lambda: init_adapters(config, jax.random.key(0), rank))


def _spread(mesh: Mesh | None, tree: Any) -> Any:
    """The shapes of `place`."""
    return tree if mesh is None else jax.tree.map(_placed, tree, weight_shardings(mesh, tree))


def _by_rows(mesh: Mesh | None, tree: Any) -> Any:
    """The shapes of `place_rows`."""
    return tree if mesh is None else jax.tree.map(lambda leaf: _placed(leaf, batch_sharding(mesh)), tree)


def _placed(leaf: Any, sharding: Any) -> Any:
    return shape_of(leaf.shape, leaf.dtype, sharding=sharding)


def _shapes(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: shape_of(leaf.shape, leaf.dtype), tree)


def _batch(rows: int, length: int) -> Any:
    return _shapes(batch_of([], rows, length))


def _prompts(settings: Distill) -> Prompts:
    rows, room = settings.global_batch, settings.sequence_length - settings.on_policy_tokens
    return jax.eval_shape(lambda: Prompts(jnp.zeros((rows, room), jnp.int32), jnp.zeros(rows, jnp.int32)))


def _rounded(row: dict[str, float]) -> dict[str, float]:
    return {name: float(f"{value:.3g}") for name, value in row.items()}
