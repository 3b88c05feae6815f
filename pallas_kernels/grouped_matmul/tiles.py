"""The grouped product tile by tile, in plain XLA, for platforms that have nothing better.

What `jax.lax.ragged_dot` lacks on CPUs: there XLA multiplies every row with every group. Here a
loop runs over tiles of rows of one group, as many as there are; a group without rows costs
nothing. Reads each matrix once per `TILE` of its rows.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

#: Rows of a tile. A row's result is the same bits in every tile, so it may depend on sizes.
SMALL_TILE, LARGE_TILE = 8, 32
DTYPES = ("bfloat16", "float16", "float32")


def refusals(*, platform: str, dtype: DTypeLike) -> list[str]:
    """Why this implementation cannot do such a call; empty when it can."""
    if (name := jnp.dtype(dtype).name) in DTYPES:
        return []
    return [f"{name} is not among {', '.join(DTYPES)}"]


def grouped_matmul(x: jax.Array, weights: jax.Array, group_sizes: jax.Array) -> jax.Array:
    """As `reference.grouped_matmul`; products of 16-bit numbers are summed in float32."""
    num_rows, width = x.shape
    num_groups, _, out_width = weights.shape
    tile = LARGE_TILE if num_rows >= 2 * LARGE_TILE * num_groups else SMALL_TILE
    sizes = group_sizes.astype(jnp.int32)
    ends, tiles = jnp.cumsum(sizes), (sizes + tile - 1) // tile
    last_tiles = jnp.cumsum(tiles)
    padded = jnp.pad(x, ((0, tile), (0, 0)))
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None

    def compute_tile(index: jax.Array, out: jax.Array) -> jax.Array:
        group = jnp.sum(index >= last_tiles, dtype=jnp.int32)
        before = index - (last_tiles[group] - tiles[group])
        start = ends[group] - sizes[group] + before * tile
        rows = lax.dynamic_slice(padded, (start, 0), (tile, width))
        matrix = lax.dynamic_index_in_dim(weights, group, 0, keepdims=False)
        made = jnp.dot(rows, matrix, precision=precision, preferred_element_type=jnp.float32)
        # Rows past the group's end belong to the next one: left as they are.
        mine = start + jnp.arange(tile) < ends[group]
        old = lax.dynamic_slice(out, (start, 0), (tile, out_width))
        new: jax.Array = lax.dynamic_update_slice(
            out, jnp.where(mine[:, None], made, old), (start, 0)
        )
        return new

    empty = jnp.zeros((num_rows + tile, out_width), jnp.float32)
    out: jax.Array = lax.fori_loop(0, last_tiles[-1], compute_tile, empty)
    return out[:num_rows].astype(x.dtype)
