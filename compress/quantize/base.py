"""A model whose linears are rounded to nearest: what adapters train on, and what training on grids ends in."""

import dataclasses

import jax
import numpy as np

from compress.models.decoder import linears
from compress.models.folder import Model
from compress.quantize.preflight import require_fit
from compress.quantize.quantizers import QUANTIZERS
from export.quantized import PackedTensor, QuantSpec


def is_packed(model: Model) -> bool:
    """Whether linears are quantized; merged adapters have made floats of them, whatever the embedding is."""
    return any(isinstance(model.weights[name], PackedTensor) for name in linears(model.config))


def packed_base(model: Model, spec: QuantSpec, method: str = "rtn") -> Model:
    """A model with quantized linears as it is, another one with its linears quantized without data.

    Raises:
      RecipeError: the group size does not divide a linear's inputs.
      ArtifactError: a weight is NaN or infinite.
    """
    if is_packed(model):
        return model
    require_fit(model.config, spec.group_size)
    quantize = QUANTIZERS[method].quantize
    packed = {name: jax.tree.map(np.asarray, quantize(model.weights[name], spec)) for name in linears(model.config)}
    return dataclasses.replace(model, weights=model.weights | packed)
