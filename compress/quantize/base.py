"""A model whose linears are packed without data: what adapters train on, and what training on grids ends in."""

import dataclasses

import jax
import numpy as np

from compress.errors import RecipeError
from compress.models.decoder import linears
from compress.models.folder import Model
from compress.quantize.preflight import require_fit
from compress.quantize.quantizers import QUANTIZERS
from export.quantized import PackedTensor, QuantSpec


def packed_base(model: Model, spec: QuantSpec, method: str = "rtn", *, landing: str = "none") -> Model:
    """A model with quantized linears as it is, another one with its linears quantized without data.

    Args:
      landing: how adapters are to train on it, as the key of that name says.

    Raises:
      RecipeError: groups that do not divide a linear's inputs, or NF4 where adapters are to land on integers.
      ArtifactError: a weight is NaN or infinite.
    """
    # Of the linears alone: merged adapters have made floats of them, whatever the embedding is.
    packed = any(isinstance(model.weights[name], PackedTensor) for name in linears(model.config))
    if landing != "none" and (model.is_nf4 if packed else method == "nf4"):
        raise RecipeError(f'landing = "{landing}" rounds to integers; leave it out with a base in NF4')
    if packed:
        return model
    require_fit(model.config, spec.group_size, method=method)
    quantize = QUANTIZERS[method].quantize
    made = {name: jax.tree.map(np.asarray, quantize(model.weights[name], spec)) for name in linears(model.config)}
    return dataclasses.replace(model, weights=model.weights | made)
