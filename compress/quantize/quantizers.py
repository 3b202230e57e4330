"""Quantizers: functions from a weight, and what its inputs looked like, to a `QuantizedTensor`."""

from collections.abc import Callable
from typing import NamedTuple

from compress.quantize.gptq import gptq
from compress.quantize.rtn import rtn
from export.quantized import QuantizedTensor


class Quantizer(NamedTuple):
    """A way to quantize one weight.

    Attributes:
      quantize: `(w, spec, *, hessian=None, **settings) -> QuantizedTensor`.
      calibrated: whether it needs a Hessian, and so calibration data.
      settings: keys of the [quantize] table that it takes as keywords.
    """

    quantize: Callable[..., QuantizedTensor]
    calibrated: bool
    settings: tuple[str, ...] = ()


def _rtn(w, spec, *, hessian=None, **settings):
    return rtn(w, spec, **settings)


def _gptq(w, spec, *, hessian, **settings):
    return gptq(w, hessian, spec, **settings)


QUANTIZERS: dict[str, Quantizer] = {
    "rtn": Quantizer(_rtn, calibrated=False),
    "gptq": Quantizer(_gptq, calibrated=True, settings=("damp",)),
}
