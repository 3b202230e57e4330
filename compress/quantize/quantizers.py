"""Quantizers: functions from a weight, or a whole layer, and what its inputs looked like, to packed ones."""

from collections.abc import Callable
from typing import NamedTuple

from jaxtyping import Array

from compress.quantize.awq import awq, fold
from compress.quantize.gptq import gptq
from compress.quantize.hqq import hqq
from compress.quantize.layer import Layer
from compress.quantize.nf4 import nf4
from compress.quantize.rtn import rtn
from export.quantized import PackedTensor


class Quantizer(NamedTuple):
    """A way to quantize weights.

    Attributes:
      quantize: of one weight, `(w, spec, *, hessian=None, **settings) -> PackedTensor`.
      calibrated: whether it needs a Hessian, and so calibration data.
      settings: keys of the [quantize] table that it takes as keywords.
      layer: in place of `quantize`, of a whole layer:
        `(Layer, **settings) -> dict of the tensors that it changes, by their names within the layer`.
      prepare: before `quantize`, the layer as an equal one that is easier to round.
    """

    quantize: Callable[..., PackedTensor]
    calibrated: bool
    settings: tuple[str, ...] = ()
    layer: Callable[..., dict[str, Array | PackedTensor]] | None = None
    prepare: Callable[[Layer], Layer] | None = None


def _rtn(w, spec, *, hessian=None, **settings):
    return rtn(w, spec, **settings)


def _hqq(w, spec, *, hessian=None):
    return hqq(w, spec)


def _gptq(w, spec, *, hessian, **settings):
    return gptq(w, hessian, spec, **settings)


def _awq(w, spec, *, hessian):
    return awq(w, hessian, spec)


def _nf4(w, spec, *, hessian=None):
    return nf4(w)


QUANTIZERS: dict[str, Quantizer] = {
    "rtn": Quantizer(_rtn, calibrated=False),
    "gptq": Quantizer(_gptq, calibrated=True, settings=("damp",)),
    "awq": Quantizer(_awq, calibrated=True, prepare=fold),
    "hqq": Quantizer(_hqq, calibrated=False),
    "nf4": Quantizer(_nf4, calibrated=False),
}
