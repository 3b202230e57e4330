"""Dataclasses of arrays as JAX pytrees."""

import dataclasses
from collections.abc import Iterable
from typing import Any

import jax


def register(kind: type, static: tuple[str, ...] = ()) -> None:
    """Make a pytree of a dataclass whose fields are arrays, but for the `static` ones, which jit compiles for."""
    arrays = tuple(field.name for field in dataclasses.fields(kind) if field.name not in static)

    def flatten(node: Any) -> tuple[tuple, tuple]:
        leaves = tuple((jax.tree_util.GetAttrKey(name), getattr(node, name)) for name in arrays)
        return leaves, tuple(getattr(node, name) for name in static)

    def unflatten(fixed: tuple, leaves: Iterable) -> Any:
        # JAX puts shapes, shardings and bare objects in the leaves' places, so the constructor's checks are passed by.
        node: Any = object.__new__(kind)
        for name, value in zip((*arrays, *static), (*leaves, *fixed)):
            object.__setattr__(node, name, value)
        return node

    jax.tree_util.register_pytree_with_keys(kind, flatten, unflatten)
