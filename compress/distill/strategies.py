"""What a student may copy from its teacher beside the logits, layer by layer; a new one is an entry of STRATEGIES.

Letters: M mapped pairs of layers, B batch, T time, S keys, D model, E the teacher's D.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Key

from compress.distill.settings import Distill
from compress.distill.student import read_cut
from compress.errors import RecipeError
from compress.models.attention import MASKED
from compress.models.config import DecoderConfig
from compress.models.decoder import Tap

# Where the projections stand among the student's weights while it trains.
PROJECTION = "projection"


def hidden_state(block: nnx.Module, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
    """The residual stream after the layer."""
    return x


def attention_map(block: Any, x: Float[Array, "B T D"]) -> Float[Array, "B T S"]:
    """Log of the attention weights averaged over heads, so that models may differ in their number."""
    weights = jax.nn.log_softmax(block.self_attn.scores.get_value(), axis=-1)
    return jax.nn.logsumexp(weights, axis=(1, 2)) - jnp.log(weights.shape[1] * weights.shape[2])


def cosine_distance(student: Float[Array, "*N D"], teacher: Float[Array, "*N D"]) -> Float[Array, "*N"]:
    """1 - cosine of the angle between the two; 1 where one of them is zero."""
    scale = jax.lax.rsqrt(jnp.sum(student**2, -1) + 1e-12) * jax.lax.rsqrt(jnp.sum(teacher**2, -1) + 1e-12)
    return 1 - jnp.sum(student * teacher, -1) * scale


def squared_error(student: Float[Array, "*N D"], teacher: Float[Array, "*N D"]) -> Float[Array, "*N"]:
    """Mean over the channels of the squared difference (FitNets, arXiv:1412.6550; TinyBERT, arXiv:1909.10351)."""
    return jnp.mean((student - teacher) ** 2, -1)


def map_kl(student: Float[Array, "*N S"], teacher: Float[Array, "*N S"]) -> Float[Array, "*N"]:
    """KL(teacher || student) of attention maps given by their logs, in nats (MiniLM, arXiv:2002.10957, section 3.1)."""
    return jnp.sum(jnp.where(teacher > MASKED / 2, jnp.exp(teacher) * (teacher - student), 0), -1)


def map_squared_error(student: Float[Array, "*N S"], teacher: Float[Array, "*N S"]) -> Float[Array, "*N"]:
    """Mean over the keys that a token sees of the squared difference of attention maps given by their logs."""
    seen = teacher > MASKED / 2
    return jnp.sum(jnp.where(seen, (jnp.exp(student) - jnp.exp(teacher)) ** 2, 0), -1) / seen.sum(-1)


class Strategy(NamedTuple):
    """Something that a layer shows, and how far two layers are apart in it.

    Attributes:
      tap: (a block after its run, its output) -> array [B, T, ...].
      losses: (the student's [..., N], the teacher's) -> [...], by the names that `<strategy>_loss` may have.
    """

    tap: Callable[[nnx.Module, Array], Array]
    losses: dict[str, Callable[[Array, Array], Array]]


STRATEGIES: dict[str, Strategy] = {
    "hidden": Strategy(hidden_state, {"cosine": cosine_distance, "mse": squared_error}),
    "attention": Strategy(attention_map, {"kl": map_kl, "mse": map_squared_error}),
}


@dataclasses.dataclass(frozen=True)
class Matching:
    """Which layers of a student copy what from which of the teacher's.

    Attributes:
      pairs: (student's layer, teacher's layer), the student's each once.
      terms: strategy -> (its weight in the loss, its distance).
      widths: of the student's hidden states and of the teacher's.
      pooled: whether the teacher's channels are averaged to the student's width, instead of the student's projected.
    """

    pairs: tuple[tuple[int, int], ...]
    terms: dict[str, tuple[float, Callable[[Array, Array], Array]]]
    widths: tuple[int, int]
    pooled: bool = False

    @property
    def teacher_layers(self) -> tuple[int, ...]:
        """The teacher's layers of the pairs, each once."""
        return tuple(dict.fromkeys(layer for _, layer in self.pairs))

    def taps(self) -> tuple[Tap, Tap]:
        """What to keep of the student's run and of the teacher's."""

        def read(block: nnx.Module, x: Array) -> dict[str, Array]:
            return {name: STRATEGIES[name].tap(block, x) for name in self.terms}

        return Tap(tuple(layer for layer, _ in self.pairs), read), Tap(self.teacher_layers, read)

    def projections(self, key: Key[Array, ""]) -> dict[str, Float[Array, "M E D"]]:
        """Fresh weights from the student's width to the teacher's, one a pair; none where none are needed."""
        student, teacher = self.widths
        if "hidden" not in self.terms or self.pooled or student == teacher:
            return {}
        return {PROJECTION: jax.random.normal(key, (len(self.pairs), teacher, student)) * student**-0.5}

    def distances(
        self, student: dict[str, Array], teacher: dict[str, Array], projections: Float[Array, "M E D"] | None
    ) -> dict[str, Float[Array, "B T"]]:
        """Each strategy's distance a token, averaged over the pairs, in float32.

        Args:
          student, teacher: what the taps have read, with a leading axis over the taps' layers.
          projections: the student's to the teacher's width, of any dtype.
        """

        # A pair at a time, computed anew in the backward pass: what is compared may be large.
        @jax.checkpoint
        def pair(totals, scanned):
            shown, at, projection = scanned
            for name, (_, distance) in self.terms.items():
                ours, theirs = shown[name], teacher[name][at]
                if ours.shape[-1] != theirs.shape[-1]:
                    ours, theirs = same_width(ours, theirs, projection)
                values = distance(ours.astype(jnp.float32), theirs.astype(jnp.float32))
                totals = totals | {name: totals[name] + values / len(self.pairs)}
            return totals, None

        zeros = {name: jnp.zeros(student[name].shape[1:3]) for name in self.terms}
        at = jnp.array([self.teacher_layers.index(layer) for _, layer in self.pairs])
        return jax.lax.scan(pair, zeros, (student, at, projections))[0]


def same_width(
    student: Float[Array, "B T D"], teacher: Float[Array, "B T E"], projection: Float[Array, "E D"] | None
) -> tuple[Array, Array]:
    """The student's states projected to the teacher's width, or, without a projection, the teacher's averaged."""
    if projection is not None:
        return jnp.matmul(student, projection.T, preferred_element_type=jnp.float32), teacher
    pooled = teacher.reshape(*student.shape, -1)
    return student, pooled.mean(-1, dtype=jnp.float32)


def layer_pairs(
    layer_map: str, spec: str, student: DecoderConfig, teacher: DecoderConfig
) -> tuple[tuple[int, int], ...]:
    """Pairs of a student's layer and the teacher's that it copies.

    Args:
      layer_map: pairs as in "0:1,1:3". If empty, every layer of a student that is a cut has the layer that it was cut
        from. Of another one, or where importance has chosen the layers, layer i of S has layer ceil((i + 1) L / S) - 1
        of L: the last has the last (TinyBERT, arXiv:1909.10351, section 3.1).
      spec: where the student came from, as in `make_student`.

    Raises:
      RecipeError: a layer isn't there, or a student's layer is named twice.
    """
    depth, depth_above = student.num_hidden_layers, teacher.num_hidden_layers
    if layer_map:
        pairs = tuple((int(a), int(b)) for a, b in (pair.split(":") for pair in layer_map.split(",")))
        if any(ours >= depth or theirs >= depth_above for ours, theirs in pairs):
            raise RecipeError(
                f"layer_map {layer_map!r}: the student has layers 0 to {depth - 1}, the teacher 0 to {depth_above - 1}"
            )
        if len({ours for ours, _ in pairs}) < len(pairs):
            raise RecipeError(
                f"layer_map {layer_map!r}: a student's layer is named twice; give it one of the teacher's"
            )
        return pairs
    cut = read_cut(spec, teacher)
    if cut is not None and not isinstance(cut.layers, int):
        return tuple(enumerate(cut.layers))
    return tuple((layer, -(-(layer + 1) * depth_above // depth) - 1) for layer in range(depth))


def make_matching(settings: Distill, student: DecoderConfig, teacher: DecoderConfig) -> Matching | None:
    """What the settings ask for beside the logits; None if that is nothing.

    Raises:
      RecipeError: no such layer, a width that pooling does not divide, or attention through unlike windows.
    """
    terms = {
        name: (getattr(settings, name), strategy.losses[getattr(settings, f"{name}_loss")])
        for name, strategy in STRATEGIES.items()
        if getattr(settings, name) > 0
    }
    if not terms:
        return None
    pairs = layer_pairs(settings.layer_map, settings.student, student, teacher)
    widths = student.hidden_size, teacher.hidden_size
    pooled = settings.hidden_match == "pooling"
    if "hidden" in terms and pooled and widths[1] % widths[0]:
        raise RecipeError(
            f"hidden_match = pooling: the teacher's width {widths[1]} is not a multiple of the student's {widths[0]}; "
            "use projection"
        )
    if "attention" in terms:
        reach = partial(_reach, length=settings.sequence_length)
        for ours, theirs in pairs:
            if reach(student, ours) != reach(teacher, theirs):
                raise RecipeError(
                    f"attention: layer {ours} of the student looks back {reach(student, ours)} tokens and layer "
                    f"{theirs} of the teacher {reach(teacher, theirs)}; pair layers of one window with layer_map"
                )
    return Matching(pairs, terms, widths, pooled)


def _reach(config: DecoderConfig, layer: int, length: int) -> int:
    """How many tokens of a row of `length` the layer's attention sees at most."""
    window = config.windows[layer]
    return length if window is None else min(window, length)
