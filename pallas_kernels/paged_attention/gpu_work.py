"""Which program does what: small arrays worked out by XLA before the GPU kernels run (step 6b).

A sequence with at most `few.tokens` query tokens is one tile, its keys split over programs; the
others are cut into tiles of `many.tokens`. Grids are static, so there are as many entries as a
batch could need; an entry with `tokens` 0 has nothing to do. Knows no keys and no values.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.paged_attention.gpu_sizes import Sizes
from pallas_kernels.paged_attention.reference import PagedBatch, row_positions


class Tiles(NamedTuple):
    """Tiles, int32 [tiles] each.

    sequence: whose they are; row: their first query token's place in the batch; position: its
    place in the sequence; tokens: how many it has.
    """

    sequence: jax.Array
    row: jax.Array
    position: jax.Array
    tokens: jax.Array


class Splits(NamedTuple):
    """Of each sequence, int32 [B]: keys of a split; and its first row in the partial results."""

    length: jax.Array
    part_row: jax.Array


class Parts(NamedTuple):
    """Of each row of the partial results, int32 [R]: where its result goes, and what it is made of.

    row: in the batch; first, end: its splits; none where end is not above first.
    """

    row: jax.Array
    first: jax.Array
    end: jax.Array


def most_many_tiles(sizes: Sizes, num_rows: int, num_sequences: int) -> int:
    """The most tiles of the second kind that a batch of these static sizes can have."""
    longer = min(num_sequences, num_rows // (sizes.few.tokens + 1))
    return (num_rows - longer) // sizes.many.tokens + longer


def num_splits(sizes: Sizes, most_tokens: int) -> int:
    """The most splits of a sequence of at most `most_tokens`."""
    return min(sizes.most_splits, -(-most_tokens // sizes.split_tokens))


def num_parts(sizes: Sizes, num_rows: int, num_sequences: int) -> int:
    """Rows of the partial results: R."""
    return min(num_rows, num_sequences * sizes.few.tokens)


def few_tiles(batch: PagedBatch, sizes: Sizes) -> Tiles:
    """One tile per sequence; without tokens where the sequence has many, or none."""
    starts, lengths = batch.cu_q_lens[:-1], jnp.diff(batch.cu_q_lens)
    return Tiles(
        sequence=jnp.arange(len(starts), dtype=jnp.int32),
        row=starts,
        position=batch.kv_lens - lengths,
        tokens=jnp.where(lengths <= sizes.few.tokens, lengths, 0),
    )


def many_tiles(batch: PagedBatch, sizes: Sizes, num_tiles: int) -> Tiles:
    """Tiles of the sequences with many query tokens, in order."""
    size = sizes.many.tokens
    starts, lengths = batch.cu_q_lens[:-1], jnp.diff(batch.cu_q_lens)
    tiles = jnp.where(lengths > sizes.few.tokens, (lengths + size - 1) // size, 0)
    ends = jnp.cumsum(tiles, dtype=jnp.int32)
    number = jnp.arange(num_tiles, dtype=jnp.int32)
    sequence = jnp.sum(number[:, None] >= ends, axis=1, dtype=jnp.int32)
    used = number < ends[-1]
    sequence = jnp.where(used, sequence, 0)
    first = (number - (ends - tiles)[sequence]) * size
    length = lengths[sequence]
    return Tiles(
        sequence=sequence,
        row=starts[sequence] + first,
        position=batch.kv_lens[sequence] - length + first,
        tokens=jnp.where(used, jnp.minimum(size, length - first), 0),
    )


def make_splits(
    batch: PagedBatch, tiles: Tiles, sizes: Sizes, window: int | None, num_rows: int
) -> tuple[Splits, Parts]:
    """How `few_tiles` are split, and how their parts are put together."""
    blocks = -(-batch.kv_lens // (sizes.most_splits * sizes.block_tokens))
    length = jnp.maximum(sizes.split_tokens, blocks * sizes.block_tokens)
    end = (batch.kv_lens + length - 1) // length
    first = jnp.zeros_like(end)
    if window is not None:
        first = jnp.maximum(tiles.position - window + 1, 0) // length
    parts = num_parts(sizes, num_rows, len(length))
    number = jnp.arange(parts, dtype=jnp.int32)
    if parts == num_rows:
        sequence, _, valid = row_positions(batch, num_rows)
        used, part_row, row = valid & (tiles.tokens[sequence] > 0), tiles.row, number
    else:
        sequence, token = number // sizes.few.tokens, number % sizes.few.tokens
        used, part_row = token < tiles.tokens[sequence], tiles.sequence * sizes.few.tokens
        row = tiles.row[sequence] + token
    return Splits(length, part_row), Parts(row, first[sequence], jnp.where(used, end[sequence], 0))
