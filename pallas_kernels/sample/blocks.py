"""The best blocks of a vocabulary: a small part that holds the largest values (step 7).

The n largest values of a row lie in the n blocks with the largest maxima, so most questions about
the top of a row are answered by a few thousand values instead of the whole vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

BLOCK = 64


class TopBlocks(NamedTuple):
    """The best `count` blocks of each row; what is not in them is at most `rest`.

    ids: [R, count] int32, ascending; values: [R, count * BLOCK]; rest: [R].
    """

    ids: jax.Array
    values: jax.Array
    rest: jax.Array

    def token_ids(self, places: jax.Array) -> jax.Array:
        """Ids in the vocabulary of places [R, n] in `values`."""
        return jnp.take_along_axis(self.ids, places // BLOCK, axis=1) * BLOCK + places % BLOCK


def top_k(values: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """`lax.top_k`, kept apart: XLA falls back to a full sort where a slice of it is fused in.

    Two barriers, because one around both results makes XLA's compiler abort on a mesh.
    """
    barrier: Callable[[jax.Array], jax.Array] = lax.optimization_barrier
    best, ids = lax.top_k(values, count)
    return barrier(best), barrier(ids)


def pad_to_blocks(values: jax.Array, fill: float | int) -> jax.Array:
    """values [R, V] with V rounded up to whole blocks."""
    return jnp.pad(values, ((0, 0), (0, -values.shape[1] % BLOCK)), constant_values=fill)


def flag_broken(values: jax.Array) -> jax.Array:
    """values with NaN as +inf: XLA's maximum may lose a NaN on a CPU, it never loses +inf."""
    return jnp.where(values < jnp.inf, values, jnp.inf)


def largest(values: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The largest of each row of values [R, V] and its id, the lowest among equals: two [R].

    One pass; XLA's argmax does several on a CPU. A row with a NaN or +inf gives +inf and some id.
    """
    blocks = pad_to_blocks(values, -jnp.inf).reshape(values.shape[0], -1, BLOCK)
    maxima = flag_broken(blocks).max(2)
    top = maxima.max(1)
    block = _first_equal(maxima, top)
    inside = jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]
    return top, block * BLOCK + _first_equal(inside, top)


def _first_equal(values: jax.Array, wanted: jax.Array) -> jax.Array:
    """[R] int32: the first place in values [R, n] that equals wanted [R]; 0 where none does."""
    size = values.shape[1]
    places = jnp.where(values == wanted[:, None], jnp.arange(size, dtype=jnp.int32), size)
    first = places.min(1)
    return jnp.where(first == size, 0, first)


def top_blocks(values: jax.Array, count: int) -> TopBlocks:
    """The count best blocks of values [R, V] float32; V is a multiple of BLOCK * (more than count)."""
    blocks = values.reshape(values.shape[0], -1, BLOCK)
    maxima, ids = top_k(blocks.max(2), count + 1)
    ids = jnp.sort(ids[:, :count], axis=1)
    chosen = jnp.take_along_axis(blocks, ids[:, :, None], axis=1)
    return TopBlocks(ids, chosen.reshape(values.shape[0], -1), maxima[:, count])
