"""How activations lie over the devices of a mesh: each row on a device of its own, where the weights are brought to it.

A weight whose inputs are split over devices can be used in two ways: all of it is gathered on every device, or every
device computes its share of all rows' products, for which the rows are gathered. Left to itself the compiler may
choose the second, and gather the logits of all rows too. It is only told so where a mesh is set, as
`compress.train.mesh.on_mesh` does.
"""

import math

import jax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Shaped

ROW_AXES = ("data", "fsdp")


def row_devices() -> int:
    """Number of devices that rows are split over; 1 where no mesh is set."""
    mesh = jax.sharding.get_abstract_mesh()
    return 1 if mesh.empty else math.prod(mesh.shape[axis] for axis in ROW_AXES)


def alone() -> bool:
    """Whether arrays lie whole on one device: no mesh is set."""
    return bool(jax.sharding.get_abstract_mesh().empty)


def by_rows(x: Shaped[Array, "B ..."]) -> Shaped[Array, "B ..."]:
    """The same array with its rows split over devices, however its other axes are."""
    if row_devices() == 1:
        return x
    return jax.lax.with_sharding_constraint(x, PartitionSpec(ROW_AXES, *[PartitionSpec.UNCONSTRAINED] * (x.ndim - 1)))
