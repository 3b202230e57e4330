"""Quantizers: functions from a weight, and what its inputs looked like, to a packed one, and what goes around them."""

from collections.abc import Callable
from typing import NamedTuple

from jaxtyping import Array

from compress.quantize.autoround import autoround
from compress.quantize.awq import awq, fold
from compress.quantize.gptq import solve
from compress.quantize.hqq import hqq
from compress.quantize.layer import Layer
from compress.quantize.nf4 import nf4
from compress.quantize.rtn import rtn
from export.quantized import PackedTensor


class Quantizer(NamedTuple):
    """A way to quantize weights.

    Attributes:
      quantize: of one weight, `(w, spec, *, hessian=None, **settings) -> PackedTensor`.
      calibrated: whether it needs a Hessian, and so calibration data; then it takes `notes` too, a list to which it
        adds what it did otherwise than asked.
      settings: keys of the [quantize] table that it takes as keywords.
      prepare: before `quantize`, the layer as an equal one that is easier to round.
      refine: after it, `(Layer, packed weights by name, **settings) -> packed weights by name`, better by the whole
        layer's output.
      refine_settings: keys of the [quantize] table that `refine` takes as keywords.
    """

    quantize: Callable[..., PackedTensor]
    calibrated: bool
    settings: tuple[str, ...] = ()
    prepare: Callable[[Layer], Layer] | None = None
    refine: Callable[..., dict[str, Array | PackedTensor]] | None = None
    refine_settings: tuple[str, ...] = ()

    @property
    def keys(self) -> tuple[str, ...]:
        """All keys of the [quantize] table that it takes."""
        return self.settings + self.refine_settings


def _rtn(w, spec, *, hessian=None, notes=None, **settings):
    return rtn(w, spec, **settings)


def _hqq(w, spec, *, hessian=None):
    return hqq(w, spec)


def _gptq(w, spec, *, hessian, damp=0.01, notes=None, **settings):
    solution = solve(w, hessian, spec, damp=damp, **settings)
    if notes is not None and solution.damping > 2 * damp:
        notes.append(f"damping of {float(solution.damping):.3g}: with {damp:g} the Hessian has no Cholesky factor")
    return solution.tensor


def _awq(w, spec, *, hessian, notes=None):
    return awq(w, hessian, spec)


def _nf4(w, spec, *, hessian=None):
    return nf4(w)


QUANTIZERS: dict[str, Quantizer] = {
    "rtn": Quantizer(_rtn, calibrated=False),
    "gptq": Quantizer(_gptq, calibrated=True, settings=("damp",)),
    "awq": Quantizer(_awq, calibrated=True, prepare=fold),
    "autoround": Quantizer(_rtn, calibrated=True, refine=autoround, refine_settings=("autoround_steps",)),
    "hqq": Quantizer(_hqq, calibrated=False),
    "nf4": Quantizer(_nf4, calibrated=False),
}
