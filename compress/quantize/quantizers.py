"""Quantizers: functions from a weight, and what its inputs looked like, to a `QuantizedTensor`."""

from collections.abc import Callable
from typing import NamedTuple

from compress.quantize.gptq import gptq
from compress.quantize.grid import CLIP_STEPS
from compress.quantize.rtn import rtn
from export.quantized import QuantizedTensor


class Quantizer(NamedTuple):
    """A way to quantize one weight.

    Attributes:
      quantize: `(w, spec, *, hessian=None, **settings) -> QuantizedTensor`.
      calibrated: whether it needs a Hessian, and so calibration data.
      settings: the keywords that it takes, with their defaults.
    """

    quantize: Callable[..., QuantizedTensor]
    calibrated: bool
    settings: dict[str, object]


def _rtn(w, spec, *, hessian=None, **settings):
    return rtn(w, spec, **settings)


def _gptq(w, spec, *, hessian, **settings):
    return gptq(w, hessian, spec, **settings)


QUANTIZERS: dict[str, Quantizer] = {
    "rtn": Quantizer(_rtn, calibrated=False, settings={"clip_steps": CLIP_STEPS}),
    "gptq": Quantizer(_gptq, calibrated=True, settings={"damp": 0.01, "act_order": "static", "clip_steps": CLIP_STEPS}),
}
