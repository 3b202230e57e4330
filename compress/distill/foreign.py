"""What a teacher somewhere else says of rows of its own, as `compress cache-teacher --logits rows/` takes it.

The rows are a file of safetensors or a folder of them, all of one form. Each has

    input_ids       integers [N, T]
    mask            [N, T], optional: 1 where the token is a target, else 0; without it, all but a row's first are

and one of

    logits          floats [N, T, V]: at t what is said of token t + 1, as Hugging Face's models return it
    log_probs       floats [N, T, V]
    top_log_probs   floats [N, T, K] of the tokens top_ids, integers [N, T, K]; at the temperature that the floats
                    `temperature` [1] say, or 1

What follows a row's last target is padding, whatever it holds.

Letters: N rows, T tokens of a row, R targets, V vocabulary, K named tokens, W columns (see `cache`).
"""

import dataclasses
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Float16, Integer

from compress.data.examples import Example, marked
from compress.distill.buckets import kept
from compress.distill.cache import LOWEST
from compress.errors import DataError
from compress.models.folder import Model
from export.safetensors import read_file, shown

WHOLE, TOP = ("logits", "log_probs"), "top_log_probs"
ROUNDING = 0.01  # to float16 may take a sum of probabilities so far from 1
CHUNK = 128  # tokens whose logits are taken at once


@dataclasses.dataclass(frozen=True)
class Told(Example):
    """An example and what is said of its targets: log-probabilities float16 [R, W], and ids [R, K] where W = K + 1."""

    said: tuple[np.ndarray, ...] = ()


class Form(NamedTuple):
    """Which tensor says it, the last of its dimensions, and at what temperature."""

    name: str
    width: int
    temperature: float


class ForeignRows:
    """The rows at `path` for a model of that tokenizer and vocabulary, checked as they are read.

    Attributes:
      top_k, temperature: what a cache of them has: of top_log_probs their own; else as given, without a temperature
        where `top_k` is 0.
    Raises:
      DataError: tensors or values that are missing, or not what they must be.
      ArtifactError: a file that is no safetensors, or a broken one.
    """

    def __init__(self, path: Path, model: Model, *, length: int, top_k: int, temperature: float):
        self.model, self.length, self.vocabulary = model, length, model.config.vocab_size
        self.files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
        if not self.files:
            raise DataError(f"{path}: no .safetensors in it")
        forms = {file: form_of(file, read_file(file.parent, file.name)) for file in self.files}
        self.form = forms[self.files[0]]
        other = next((file for file, form in forms.items() if form != self.form), None)
        if other:
            raise DataError(
                f"{other}: {tuple(forms[other])} is not {tuple(self.form)} as in {self.files[0]}: name, width and "
                "temperature must be the same in all files"
            )
        named, known = self.form.name == TOP, model.tokenizer.vocab_size
        if not named and self.form.width < known:
            raise DataError(f"{path}: {self.form.name} of {self.form.width} tokens, and the tokenizer has {known}")
        self.top_k = self.form.width if named else top_k
        self.temperature = self.form.temperature if named else temperature if top_k else None
        self._keep = jax.jit(jax.vmap(partial(kept, k=top_k, temperature=temperature)))

    def __iter__(self) -> Iterator[Told]:
        for file in self.files:
            tensors = dict(read_file(file.parent, file.name))
            tensors.pop("temperature", None)
            for row in range(len(tensors["input_ids"])):
                try:
                    yield self._told({name: array[row] for name, array in tensors.items()})
                except DataError as error:
                    raise DataError(f"{file}: row {row}: {error}") from None

    def _told(self, row: Mapping[str, np.ndarray]) -> Told:
        tokens = row["input_ids"]
        mask = row.get("mask", np.ones_like(tokens))
        if not np.isin(mask, (0, 1)).all():
            raise DataError("mask holds other values than 0 and 1")
        targets = 1 + np.flatnonzero(mask[1:])
        if not len(targets):
            raise DataError("no target: mask is 0 behind the first token")
        end = int(targets[-1]) + 1
        if end > self.length:
            raise DataError(f"{end} tokens, but sequence_length = {self.length}; raise it, and that of distill")
        self._check_ids("input_ids", tokens[:end])
        with np.errstate(over="ignore"):  # Inf is refused
            said = row[self.form.name][targets - 1].astype(np.float32)
        if np.isnan(said).any() or np.isposinf(said).any():
            raise DataError(f"NaN or Inf among the {self.form.name}")
        if self.form.name != "logits":
            self._check_sums(said)
        found = self._top(row["top_ids"][targets - 1], said) if self.form.name == TOP else self._whole(said)
        if not np.isfinite(found[0]).all():
            raise DataError(f"{self.form.name} of a token leave no token possible")
        sample = marked(tokens[:end], mask[:end])
        return Told(sample.tokens, sample.mask, sample.start, found)

    def _check_sums(self, said: Float[np.ndarray, "R V"]) -> None:
        with np.errstate(over="ignore"):
            sums = np.exp(said[:, : self.vocabulary].astype(np.float64)).sum(axis=1)
        if sums.max() > 1 + ROUNDING:
            raise DataError(f"{self.form.name} of a token sum to a probability of {sums.max():.4g}, above 1")
        if self.form.name == "log_probs" and sums.min() < 1 - ROUNDING:
            raise DataError(
                f"log_probs of a token sum to a probability of {sums.min():.4g} over the model's vocabulary, below 1; "
                "where some are left out, give top_log_probs"
            )

    def _check_ids(self, name: str, ids: Integer[np.ndarray, "..."]) -> None:
        beyond = ids[(ids < 0) | (ids >= self.vocabulary)]
        if beyond.size:
            raise DataError(f"{name}: token id {beyond[0]}: the model has {self.vocabulary}")

    def _whole(self, said: Float[np.ndarray, "R V"]) -> tuple[np.ndarray, ...]:
        """Padding rows of the vocabulary are cut to the model's or filled up to it."""
        room = max(0, self.vocabulary - said.shape[1])
        rows = np.pad(said[:, : self.vocabulary], ((0, 0), (0, room)), constant_values=-np.inf)
        filled = np.pad(rows, ((0, -len(rows) % CHUNK), (0, 0)))
        parts = [self._keep(filled[at : at + CHUNK]) for at in range(0, len(filled), CHUNK)]
        joined = jax.tree.map(lambda *leaves: np.concatenate(leaves)[: len(rows)], *parts)
        return tuple(array for array in joined if array is not None)

    def _top(
        self, ids: Integer[np.ndarray, "R K"], said: Float[np.ndarray, "R K"]
    ) -> tuple[Float16[np.ndarray, "R W"], Integer[np.ndarray, "R K"]]:
        self._check_ids("top_ids", ids)
        if (np.diff(np.sort(ids, axis=1), axis=1) == 0).any():
            raise DataError("top_ids name a token twice")
        with np.errstate(divide="ignore"):
            rest = np.log(np.maximum(1 - np.exp(said.astype(np.float64)).sum(axis=1, keepdims=True), 0))
        return np.maximum(np.concatenate([said, rest], axis=1), LOWEST).astype(np.float16), ids


def form_of(file: Path, tensors: Mapping[str, np.ndarray]) -> Form:
    """The form of a file whose tensors fit each other.

    Raises:
      DataError: they do not.
    """
    names = [name for name in (*WHOLE, TOP) if name in tensors]
    needed = {"input_ids", *names, *(("top_ids",) if TOP in names else ())}
    allowed = needed | {"mask", *(("temperature",) if TOP in names else ())}
    if len(names) != 1 or not needed <= tensors.keys() <= allowed:
        there = ", ".join(shown(name) for name in sorted(tensors)[:8]) or "nothing"
        raise DataError(
            f"{file}: has {there}; it needs input_ids, and logits, log_probs or top_log_probs and top_ids, and may "
            "have mask, and beside top_log_probs temperature"
        )
    rows, said = tensors["input_ids"], tensors[names[0]]
    integers, floats, flags = ("integers", jnp.integer), ("floats", jnp.floating), ("0 or 1", jnp.generic)
    wanted = {
        "input_ids": (integers, rows.shape),
        names[0]: (floats, (*rows.shape, *said.shape[-1:])),
        "top_ids": (integers, said.shape),
        "mask": (flags, rows.shape),
        "temperature": (floats, (1,)),
    }
    for name, ((words, kind), shape) in wanted.items():
        if name in tensors and not (jnp.issubdtype(tensors[name].dtype, kind) and tensors[name].shape == shape):
            found = f"{tensors[name].dtype} {list(tensors[name].shape)}"
            raise DataError(f"{file}: {name} is {found}; it must be {words} {list(shape)}")
    if rows.ndim != 2 or not said.size:
        raise DataError(f"{file}: input_ids must be [N, T] and not empty, not {list(rows.shape)}")
    temperature = float(tensors["temperature"][0]) if "temperature" in tensors else 1.0
    if not 0 < temperature < np.inf:
        raise DataError(f"{file}: temperature = {temperature}: must be above 0 and finite")
    return Form(names[0], said.shape[2], temperature)
