"""Quantised weights on a mesh: one format per kind of weight, and their products (step 6).

A `WeightFormat` is chosen once, where an engine is put together; layers multiply with `multiply`
and look rows up with `take_rows` and do not know what is inside. Each device multiplies its own
part. Must not know models or files.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, Mesh

from jaxserve.parallel.mesh import LOGICAL_RULES, TENSOR_AXIS, spec, tensor_parallel_size
from pallas_kernels.quantized_matmul import api
from pallas_kernels.quantized_matmul.scheme import QuantizedWeight, Scheme


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WeightFormat:
    """A scheme, the implementation that multiplies with it, and the mesh it does so on.

    implementation: a name of `pallas_kernels.quantized_matmul`, as `dispatch` chose it. An abstract
    mesh does for shapes.
    """

    scheme: Scheme
    implementation: str
    mesh: Mesh | AbstractMesh


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Quantization:
    """The formats of a model: of its layers' matrices, and of embedding and output head."""

    layers: WeightFormat
    embedding: WeightFormat


def weight_axes(out_axis: str, in_axis: str) -> QuantizedWeight:
    """The logical axes of each array of a quantised weight [out, in]."""
    axes = (out_axis, in_axis)
    return QuantizedWeight(axes, axes, axes)  # type: ignore[arg-type]


def is_split(axis: str) -> bool:
    """Whether a logical axis is spread over devices."""
    return LOGICAL_RULES[axis] == TENSOR_AXIS


def multiply(
    x: jax.Array, weight: QuantizedWeight, out_axis: str, in_axis: str, form: WeightFormat
) -> jax.Array:
    """x [T, in] times weight [out, in] transposed: float32 [T, out], summed over devices if need be."""
    several = tensor_parallel_size(form.mesh) > 1  # a sum over one is a copy

    def product(x: jax.Array, weight: QuantizedWeight) -> jax.Array:
        out = api.quantized_matmul(
            x, weight, form.scheme, out_dtype=jnp.float32, implementation=form.implementation
        )
        return _sum_over_devices(out) if is_split(in_axis) and several else out

    out: jax.Array = jax.shard_map(
        product,
        mesh=form.mesh,
        in_specs=(spec(("tokens", in_axis)), spec((out_axis, in_axis))),
        out_specs=spec(("tokens", out_axis)),
        check_vma=False,
    )(x, weight)
    return out


def _sum_over_devices(x: jax.Array) -> jax.Array:
    total: jax.Array = lax.psum(x, TENSOR_AXIS)  # type: ignore[no-untyped-call]
    return total


def take_rows(
    weight: QuantizedWeight, row_ids: jax.Array, form: WeightFormat, *, split: bool
) -> jax.Array:
    """float32 [T, K]: rows of a weight [V, K], dequantised. split: rows are spread over devices."""

    def take(weight: QuantizedWeight, row_ids: jax.Array) -> jax.Array:
        if not split:
            return api.take_rows(weight, form.scheme, row_ids, implementation=form.implementation)
        count = weight.scales.shape[0]
        local = row_ids - lax.axis_index(TENSOR_AXIS) * count
        rows = api.take_rows(weight, form.scheme, local, implementation=form.implementation)
        mine = (local >= 0) & (local < count)
        return _sum_over_devices(jnp.where(mine[:, None], rows, 0.0))

    rows: jax.Array = jax.shard_map(
        take,
        mesh=form.mesh,
        in_specs=(spec(("vocab" if split else None, "embed")), spec(("tokens",))),
        out_specs=spec(("tokens", "embed")),
        check_vma=False,
    )(weight, row_ids)
    return rows
