"""Rotations folded into the weights: the same model in a basis in which no few channels stand out.

Letters: D model, K key-value heads, G query heads a key-value head, E head dimension, N any size.

"value" rotates each key-value head's values, and turns them back in the output projection (SpinQuant,
arXiv:2405.16406, R2). "full" rotates the residual stream too (QuaRot, arXiv:2404.00456, section 4; R1 of SpinQuant):
a norm without weights gives the rotated state of a rotated input, so norms' weights go into the linears that follow
them first, the final norm's into the head.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Array, Float

from compress.errors import RecipeError
from compress.models.config import DecoderConfig
from compress.models.decoder import EMBEDDING, FINAL_NORM, HEAD, block_shapes
from compress.models.folder import Model
from export.quantized import Weights

POST_NORM = "post_feedforward_layernorm.weight"
BEHIND = {
    "input_layernorm": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "post_attention_layernorm": ("mlp.gate_proj", "mlp.up_proj"),
}
"""The linears behind a norm, which take its weight."""
WRITERS = ("self_attn.o_proj", "mlp.down_proj")
"""The linears whose outputs are added to the residual stream."""


def require_rotation(config: DecoderConfig, mode: str) -> None:
    """The family's residual stream can be rotated.

    Raises:
      RecipeError: its norms stand before the addition, where their weights cannot be folded.
    """
    if mode == "full" and POST_NORM in block_shapes(config):
        raise RecipeError(
            'rotate = "full": this family weighs channels with a norm right before it adds to the residual stream, '
            'and no linear can take that weight; "value" is exact for every family'
        )


def rotated_architecture(config: DecoderConfig, mode: str) -> DecoderConfig:
    """The architecture of the rotated model: with "full" the head is not tied."""
    return dataclasses.replace(config, tie_word_embeddings=False) if mode == "full" else config


def rotated(model: Model, mode: str, seed: int = 0) -> Model:
    """An equal model, its float weights rotated as `rotate` does."""
    config = rotated_architecture(model.config, mode)
    hf = model.hf | ({"tie_word_embeddings": False} if mode == "full" else {})
    floats: Any = model.weights
    weights: Weights = {**rotate(model.config, floats, mode, seed)}
    return dataclasses.replace(model, hf=hf, config=config, weights=weights)


def rotate(
    config: DecoderConfig, weights: Mapping[str, Float[Array | np.ndarray, "..."]], mode: str, seed: int = 0
) -> dict[str, Float[np.ndarray, "..."]]:
    """The weights of an equal model in another basis, float32.

    A tied head becomes one of its own with "full", since it takes the final norm's weight and the embedding does not.

    Args:
      mode: "none", "value" or "full".
      seed: of the random rotations.

    Raises:
      RecipeError: as `require_rotation`.
    """
    require_rotation(config, mode)
    turned = {name: np.asarray(value, np.float32) for name, value in weights.items()}
    if mode == "none":
        return turned
    rng = np.random.default_rng(seed)
    for index in range(config.num_hidden_layers):
        _rotate_values(config, turned, f"model.layers.{index}.self_attn", rng)
    if mode == "full":
        _rotate_residual(config, turned, rng)
    return turned


def _rotate_values(config: DecoderConfig, weights: dict, attention: str, rng: np.random.Generator) -> None:
    heads, size = config.num_key_value_heads, config.head_dim
    turns = np.stack([orthogonal(size, rng) for _ in range(heads)])
    value, output = f"{attention}.v_proj", f"{attention}.o_proj.weight"
    for name in (f"{value}.weight", f"{value}.bias"):
        if name in weights:
            shape = weights[name].shape
            weights[name] = np.einsum("kfe,kei->kfi", turns, weights[name].reshape(heads, size, -1)).reshape(shape)
    back = np.einsum("okge,kfe->okgf", weights[output].reshape(config.hidden_size, heads, -1, size), turns)
    weights[output] = back.reshape(weights[output].shape)


def _rotate_residual(config: DecoderConfig, weights: dict, rng: np.random.Generator) -> None:
    turn = orthogonal(config.hidden_size, rng)
    weights[HEAD] = weights[EMBEDDING] if config.tie_word_embeddings else weights[HEAD]
    behind = {FINAL_NORM: [HEAD]}
    for index in range(config.num_hidden_layers):
        layer = f"model.layers.{index}."
        for norm, linears in BEHIND.items():
            behind[f"{layer}{norm}.weight"] = [f"{layer}{linear}.weight" for linear in linears]
        for linear in WRITERS:
            for name in (f"{layer}{linear}.weight", f"{layer}{linear}.bias"):
                if name in weights:
                    weights[name] = turn.T @ weights[name]
    for norm, names in behind.items():
        gain = config.norm_offset + weights[norm]
        weights |= {name: (weights[name] * gain) @ turn for name in names}
        weights[norm] = np.full_like(gain, 1 - config.norm_offset)
    weights[EMBEDDING] = weights[EMBEDDING] @ turn


def orthogonal(size: int, rng: np.random.Generator) -> Float[np.ndarray, "N N"]:
    """A random rotation: a Hadamard matrix with random signs, over its root, where one is known; else a uniform one.

    A uniform one is the Q of a normal matrix, its signs made unique (Mezzadri 2007, arXiv:math-ph/0609050, section 5).
    """
    matrix = hadamard(size)
    if matrix is not None:
        return (matrix * rng.choice([-1.0, 1.0], size)[:, None] / size**0.5).astype(np.float32)
    q, r = np.linalg.qr(rng.normal(size=(size, size)))
    return (q * np.sign(np.diag(r))).astype(np.float32)


def hadamard(size: int) -> Float[np.ndarray, "N N"] | None:
    """A matrix of -1 and 1 with orthogonal rows: Sylvester's doubling of one of Paley's; None where that gives none."""
    power = 1
    while size % power == 0:
        small = _paley(size // power)
        if small is not None:
            return np.kron(_sylvester(power), small)
        power *= 2
    return None


def _sylvester(size: int) -> np.ndarray:
    matrix: np.ndarray = np.ones((1, 1))
    while len(matrix) < size:
        matrix = np.kron(matrix, [[1, 1], [1, -1]])
    return matrix


def _paley(order: int) -> np.ndarray | None:
    """Paley's matrices, of order q + 1 for a prime q = 3 mod 4, 2 (q + 1) for q = 1 mod 4; those of order 1 and 2."""
    if order <= 2:
        return _sylvester(order)
    if order % 4:
        return None
    for q, twice in ((order - 1, False), (order // 2 - 1, True)):
        if q % 4 == (1 if twice else 3) and all(q % factor for factor in range(2, int(q**0.5) + 1)):
            residues = {i * i % q for i in range(1, q)}
            character = np.array([0, *(1 if i in residues else -1 for i in range(1, q))])
            core = np.zeros((q + 1, q + 1))
            core[0, 1:], core[1:, 0] = 1, 1 if twice else -1
            core[1:, 1:] = character[(np.arange(q)[:, None] - np.arange(q)) % q]
            if not twice:
                return core + np.eye(q + 1)
            return np.kron(core, [[1, 1], [1, -1]]) + np.kron(np.eye(q + 1), [[1, -1], [-1, -1]])
    return None
