"""The tiny random models whose logits transformers gave, drawn anew, and their compiled forward passes."""

import json
from functools import cache, partial

import jax
import numpy as np

from compress.models import decoder, read_config
from tests.goldens.make_models import GOLDENS, draw

RECORDS: dict[str, dict] = json.loads((GOLDENS / "models.json").read_text())["models"]


@cache
def golden(case: str) -> tuple[np.ndarray, np.ndarray]:
    """Tokens [2, T] and transformers' logits [2, T, V]."""
    with np.load(GOLDENS / "models.npz") as arrays:
        return arrays[f"{case}.tokens"], arrays[f"{case}.logits"]


@cache
def config_of(case: str):
    return read_config(RECORDS[case]["config"])


EXEMPLARS: dict[str, str] = {}
"""A golden of each family by model_type, one with windows where the family has them."""
for case, record in RECORDS.items():
    family = record["config"]["model_type"]
    if family not in EXEMPLARS or (any(config_of(case).windows) and not any(config_of(EXEMPLARS[family]).windows)):
        EXEMPLARS[family] = case


@cache
def weights_of(case: str) -> dict[str, np.ndarray]:
    return draw(decoder.shapes(config_of(case)), RECORDS[case]["seed"])


@cache
def stacked_of(case: str) -> decoder.Stacked:
    return decoder.stack(config_of(case), weights_of(case))


@partial(jax.jit, static_argnums=0)
def forward(config, stacked, tokens, positions=None, segments=None, branches=None):
    """Logits of packed rows."""
    view = {"positions": positions, "segments": segments, "branches": branches}
    hidden = decoder.hidden_states(config, stacked, tokens, **view)
    return decoder.logits(config, stacked, hidden)
