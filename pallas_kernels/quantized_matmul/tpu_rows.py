"""x as the TPU kernels take it: rounded as the scheme says, in planes of bfloat16 or int8 (step 6).

Plain jnp, outside of the kernels: x is small beside the weight. Must not know the kernels' code.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.quantized_matmul.quantize import round_fp8, round_integers
from pallas_kernels.quantized_matmul.tpu_kernels import Plan
from pallas_kernels.quantized_matmul.tpu_numbers import planes_of


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """x as the kernels take it. values: [halves, planes, rows, columns]; the rest: see `Refs`."""

    values: jax.Array
    row_scales: jax.Array | None = None
    group_scales: jax.Array | None = None
    group_sums: jax.Array | None = None


def prepare(x: jax.Array, plan: Plan) -> Rows:
    """Rounds x [M, K] as the scheme says, and takes it apart into planes."""
    facts, kind = plan.facts, plan.facts.scheme.activations
    groups = (x.shape[0], facts.num_groups, -1)
    row_scales = group_scales = None
    rounded = x
    if kind == "fp8_token":
        rounded, row_scales = round_fp8(x)
    elif kind == "int8_token":
        rounded, row_scales = round_integers(x, "int8")
    elif kind != "float":
        rounded, group_scales = round_integers(x.reshape(groups), kind.removesuffix("_group"))
    group_sums = None
    if facts.scheme.zeros:
        wide = jnp.float32 if kind in ("float", "fp8_token") else jnp.int32
        group_sums = rounded.astype(wide).reshape(groups).sum(-1).astype(jnp.float32)
    if plan.blocks.way == "weights" and group_scales is not None:
        rounded = rounded.astype(jnp.float32) * group_scales[..., None]
        group_scales = None
    planes = jnp.stack(_planes(rounded.reshape(x.shape), plan))
    planes = planes.reshape(len(planes), x.shape[0], facts.columns, facts.num_halves)
    return Rows(
        values=jnp.moveaxis(planes, 3, 0),
        row_scales=None if row_scales is None else row_scales[:, None],
        group_scales=_per_strip(group_scales, plan),
        group_sums=None if plan.blocks.way == "weights" else _per_strip(group_sums, plan),
    )


def _planes(rounded: jax.Array, plan: Plan) -> list[jax.Array]:
    """What a matrix unit takes, which together are the rows of x."""
    if rounded.dtype == jnp.bfloat16:
        return [rounded]
    if rounded.dtype == jnp.int16:
        return [(rounded >> 8).astype(jnp.bfloat16), (rounded & 255).astype(jnp.bfloat16)]
    if rounded.dtype == jnp.float32:
        return planes_of(rounded, plan.facts.num_planes(plan.blocks.way))
    if plan.blocks.way == "end":
        return [rounded]  # int8 or fp8, as its weight is
    return [rounded.astype(jnp.bfloat16)]


def _per_strip(groups: jax.Array | None, plan: Plan) -> jax.Array | None:
    """[M, G] as [strips, M, groups of a strip], so that a strip's are in one place."""
    if groups is None:
        return None
    if plan.facts.num_groups == 1:
        return groups[None]
    width, each = plan.facts.sum_columns, plan.facts.group_columns
    first = np.arange(0, plan.facts.columns, width) // each
    wanted = np.minimum(
        first[:, None] + np.arange(plan.facts.strip_groups), plan.facts.num_groups - 1
    )
    return groups[:, wanted].transpose(1, 0, 2)
