"""The device mesh and the one table that says how arrays are split over it.

Used where parameters and pages are made (before step 1) and inside step 6. There is always a
mesh: one device is a mesh of one. Arrays name their axes logically ("heads", "ffn"); only this
module knows mesh axes. It must not know models or the engine.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from jaxserve.config import ModelConfig
from jaxserve.errors import ResourceError, UsageError

DATA_AXIS = "data"
TENSOR_AXIS = "tensor"

LogicalAxes = tuple[str | None, ...]

#: Logical axis of an array -> axis of the mesh that it is split over (None: every device has all).
LOGICAL_RULES: dict[str, str | None] = {
    "vocab": TENSOR_AXIS,  # rows of the embedding and of the output head
    "embed": None,  # the residual stream
    "heads": TENSOR_AXIS,  # query heads, or rows that are grouped by query head
    "kv_heads": TENSOR_AXIS,  # key-value heads, or rows that are grouped by key-value head
    "head": None,  # inside one head
    "ffn": TENSOR_AXIS,  # the width between the two halves of the feed-forward layer
    "pages": None,  # pages of the KV pool
    "page": None,  # tokens inside a page
    "tokens": None,  # rows of the flat batch
}

#: Axes that are kept whole on every device when their size does not divide: correct, only larger.
REPLICATED_IF_UNEVEN = frozenset({"vocab"})


def make_mesh(tensor_parallel: int, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A mesh ("data", "tensor") of shape [1, tensor_parallel] over the first of `devices`.

    devices None: all that jax has, on all hosts. Raises ResourceError when there are too few, and
    UsageError when a host would have none of them.
    """
    if tensor_parallel < 1:
        raise UsageError(f"--tensor-parallel is {tensor_parallel}; it must be at least 1")
    found = list(jax.devices() if devices is None else devices)
    if len(found) < tensor_parallel:
        raise ResourceError(
            f"--tensor-parallel is {tensor_parallel} but there are {len(found)} "
            f"{found[0].platform if found else ''} devices; use at most {len(found)}"
        )
    idle = {one.process_index for one in found} - {
        one.process_index for one in found[:tensor_parallel]
    }
    if idle:
        raise UsageError(
            f"--tensor-parallel is {tensor_parallel}, which leaves process {min(idle)} without a "
            f"part of the model; all processes together have {len(found)} devices: use that many, "
            "or fewer processes"
        )
    grid = np.array(found[:tensor_parallel], dtype=object).reshape(1, tensor_parallel)
    return Mesh(grid, (DATA_AXIS, TENSOR_AXIS), axis_types=(AxisType.Auto, AxisType.Auto))


def make_abstract_mesh(tensor_parallel: int) -> AbstractMesh:
    """Such a mesh without devices, for shapes alone."""
    return AbstractMesh(
        (1, tensor_parallel),
        (DATA_AXIS, TENSOR_AXIS),
        axis_types=(AxisType.Auto, AxisType.Auto),
    )


def tensor_parallel_size(mesh: Mesh | AbstractMesh) -> int:
    """Over how many devices the split axes are spread."""
    return int(mesh.shape[TENSOR_AXIS])


def spec(logical_axes: LogicalAxes) -> PartitionSpec:
    """The partition of an array whose axes are named so; None is an axis that is never split."""
    mesh_axes = (None if axis is None else LOGICAL_RULES[axis] for axis in logical_axes)
    return PartitionSpec(*mesh_axes)  # type: ignore[no-untyped-call]


def sharding(
    mesh: Mesh, logical_axes: LogicalAxes, shape: tuple[int, ...] | None = None
) -> NamedSharding:
    """Where the parts of an array live.

    With `shape`, sizes are checked: one that does not divide is a UsageError, or leaves its axis
    whole where REPLICATED_IF_UNEVEN allows that.
    """
    if shape is not None:
        assert len(shape) == len(logical_axes), (shape, logical_axes)
        logical_axes = tuple(
            _split_axis(mesh, axis, size) for axis, size in zip(logical_axes, shape, strict=True)
        )
    return NamedSharding(mesh, spec(logical_axes))


def _split_axis(mesh: Mesh, axis: str | None, size: int) -> str | None:
    mesh_axis = None if axis is None else LOGICAL_RULES[axis]
    if mesh_axis is None or size % mesh.shape[mesh_axis] == 0:
        return axis
    if axis in REPLICATED_IF_UNEVEN:
        return None
    raise UsageError(
        f"axis {axis!r} of size {size} cannot be split over {mesh.shape[mesh_axis]} devices; "
        "choose a --tensor-parallel that divides it"
    )


def check_divisible(config: ModelConfig, mesh: Mesh) -> None:
    """Raises UsageError, with both numbers, when the model cannot be split over the mesh."""
    size = tensor_parallel_size(mesh)
    for what, value in (
        ("key-value heads", config.num_kv_heads),
        ("query heads", config.num_heads),
        ("feed-forward width", config.ffn_size),
    ):
        if value % size:
            raise UsageError(
                f"--tensor-parallel {size} does not divide the model's {what} ({value}); "
                f"use a divisor of {value}"
            )
