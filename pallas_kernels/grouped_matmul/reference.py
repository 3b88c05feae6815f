"""Definition of the grouped matrix product in plain jnp.

    out[t] = x[t] @ weights[g] for the group g that row t belongs to

Rows stand in order of their groups: group g owns group_sizes[g] rows, after those of the groups
before it. Rows behind the last group are padding and give zeros.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike


def refusals(*, platform: str, dtype: DTypeLike) -> list[str]:
    """What has no meaning; the platform makes no difference."""
    if jnp.issubdtype(dtype, jnp.floating):
        return []
    return [f"x and weights of {jnp.dtype(dtype).name} are not floating-point numbers"]


def group_of_rows(group_sizes: jax.Array, num_rows: int) -> jax.Array:
    """The group of each of the rows, [T] int32; the number of groups for padding."""
    ends = jnp.cumsum(group_sizes)
    rows = jnp.arange(num_rows, dtype=jnp.int32)
    return jnp.sum(rows[:, None] >= ends[None, :], axis=1, dtype=jnp.int32)


def grouped_matmul(x: jax.Array, weights: jax.Array, group_sizes: jax.Array) -> jax.Array:
    """x [T, D], weights [X, D, F], group_sizes [X] int32 -> [T, F] in x's dtype, float32 inside.

    Computes every group for every row: a definition, not a way to run a model.
    """
    group = group_of_rows(group_sizes, x.shape[0])
    every = jnp.einsum(
        "td,xdf->xtf",
        x.astype(jnp.float32),
        weights.astype(jnp.float32),
        precision=lax.Precision.HIGHEST,
    )
    mine = group[None, :] == jnp.arange(weights.shape[0])[:, None]
    # A group that is not ours may hold anything, NaN included.
    return jnp.where(mine[..., None], every, 0.0).sum(0).astype(x.dtype)
