"""The device mesh and where weights and batches lie on it.

Axes: `data` splits the batch, `fsdp` splits the batch and every weight, `tensor` splits heads and channels. An axis
that does not divide a dimension is dropped for that tensor.
"""

import contextlib
import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from compress.errors import RecipeError
from compress.models.spread import ROW_AXES
from compress.settings import MeshShape

AXES = ("data", "fsdp", "tensor")
# First match wins; the spec is for a weight [O, I]. Whatever matches none is replicated.
RULES = (
    (r"(q_proj|k_proj|v_proj|gate_proj|up_proj)\.(weight|lora_B)$", ("tensor", "fsdp")),
    (r"(o_proj|down_proj)\.(weight|lora_A)$", ("fsdp", "tensor")),
    (r"(embed_tokens|lm_head)\.weight$", ("tensor", "fsdp")),
    (r"lora_A$", (None, "fsdp")),
    (r"lora_B$", ("fsdp", None)),
)


def make_mesh(data: int | None = None, fsdp: int = 1, tensor: int = 1) -> Mesh:
    """A mesh over all devices; `data` defaults to what the other two leave.

    Raises:
      RecipeError: the product isn't the number of devices.
    """
    devices = jax.device_count()
    data = devices // max(1, fsdp * tensor) if data is None else data
    if min(data, fsdp, tensor) < 1 or data * fsdp * tensor != devices:
        raise RecipeError(
            f"mesh {data} x {fsdp} x {tensor} (data x fsdp x tensor) does not fit {devices} devices; "
            "choose sizes whose product is their number, or leave data out"
        )
    return jax.make_mesh((data, fsdp, tensor), AXES, axis_types=(AxisType.Auto,) * 3)


def mesh_of_devices(shape: MeshShape) -> Mesh | None:
    """A mesh of that shape over all devices; None where there is one.

    Raises:
      RecipeError: the shape is for another number of devices.
    """
    mesh = make_mesh(shape.data, shape.fsdp, shape.tensor)
    return mesh if mesh.size > 1 else None


def fit_spec(mesh: Mesh, spec: tuple, shape: tuple[int, ...]) -> PartitionSpec:
    """Align `spec` with the last dimensions of `shape` and drop the axes that do not divide."""
    full = (None,) * (len(shape) - len(spec)) + spec[max(0, len(spec) - len(shape)) :]
    sizes = [1 if axis is None else int(np.prod([mesh.shape[name] for name in np.atleast_1d(axis)])) for axis in full]
    return PartitionSpec(
        *(axis if length % size == 0 else None for axis, size, length in zip(full, sizes, shape, strict=True))
    )


def weight_shardings(mesh: Mesh, tree: Any) -> Any:
    """A sharding for every leaf of a tree of weights, by the tensor's name in the tree's path."""

    def place(path, leaf):
        name = ".".join(str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", key)))) for key in path)
        # The arrays of a quantized tensor lie along the same axes as the weight that they stand for.
        name = re.sub(r"\.(packed|scale|zero)$", "", name)
        spec = next((spec for pattern, spec in RULES if re.search(pattern, name)), ())
        return NamedSharding(mesh, fit_spec(mesh, spec, leaf.shape) if leaf.ndim >= 2 else PartitionSpec())

    return jax.tree_util.tree_map_with_path(place, tree)


def batch_sharding(mesh: Mesh, rows_axis: int = 0) -> NamedSharding:
    """Rows over data and fsdp; `rows_axis` is where the rows are."""
    return NamedSharding(mesh, PartitionSpec(*(None,) * rows_axis, ROW_AXES))


def rows_across(mesh: Mesh | None) -> int:
    """Number of devices that a batch's rows are split over."""
    return 1 if mesh is None else mesh.shape["data"] * mesh.shape["fsdp"]


def on_mesh(mesh: Mesh | None, function: Callable[..., Any]) -> Callable[..., Any]:
    """A function to be jitted, whose models keep each row on a device of its own (`compress.models.spread`)."""

    @functools.wraps(function)
    def run(*arguments):
        with contextlib.nullcontext() if mesh is None else jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return function(*arguments)

    return run


def replicated(mesh: Mesh | None) -> NamedSharding | None:
    """Whole on every device; what a jitted function returns so can be read in every process."""
    return None if mesh is None else NamedSharding(mesh, PartitionSpec())


def on_host(mesh: Mesh | None) -> contextlib.AbstractContextManager:
    """Where what is to be spread is made: in the host's memory, since no device may have room for all of it."""
    return contextlib.nullcontext() if mesh is None else jax.default_device(jax.local_devices(backend="cpu")[0])


def place(mesh: Mesh | None, tree: Any) -> Any:
    """Put weights on the mesh, if there is one."""
    return tree if mesh is None else jax.tree.map(_put, tree, weight_shardings(mesh, tree))


def place_rows(mesh: Mesh | None, batch: Any) -> Any:
    """Put a batch's rows on the mesh, if there is one: on each device its own."""
    return batch if mesh is None else jax.tree.map(lambda leaf: _put(leaf, batch_sharding(mesh)), batch)


def _put(leaf: Any, sharding: NamedSharding) -> jax.Array:
    """Every process holds the whole array, and hands its own devices their parts of it."""
    if sharding.is_fully_addressable or (isinstance(leaf, jax.Array) and not leaf.is_fully_addressable):
        return jax.device_put(leaf, sharding)
    whole = np.asarray(leaf)
    return jax.make_array_from_callback(whole.shape, sharding, lambda part: whole[part])
