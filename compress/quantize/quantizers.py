"""Quantizers: functions from a weight, and what its inputs looked like, to a packed one."""

from collections.abc import Callable
from typing import NamedTuple

from compress.quantize.gptq import gptq
from compress.quantize.nf4 import nf4
from compress.quantize.rtn import rtn
from export.quantized import PackedTensor


class Quantizer(NamedTuple):
    """A way to quantize one weight.

    Attributes:
      quantize: `(w, spec, *, hessian=None, **settings) -> PackedTensor`.
      calibrated: whether it needs a Hessian, and so calibration data.
      settings: keys of the [quantize] table that it takes as keywords.
    """

    quantize: Callable[..., PackedTensor]
    calibrated: bool
    settings: tuple[str, ...] = ()


def _rtn(w, spec, *, hessian=None, **settings):
    return rtn(w, spec, **settings)


def _gptq(w, spec, *, hessian, **settings):
    return gptq(w, hessian, spec, **settings)


def _nf4(w, spec, *, hessian=None):
    return nf4(w)


QUANTIZERS: dict[str, Quantizer] = {
    "rtn": Quantizer(_rtn, calibrated=False),
    "gptq": Quantizer(_gptq, calibrated=True, settings=("damp",)),
    "nf4": Quantizer(_nf4, calibrated=False),
}
