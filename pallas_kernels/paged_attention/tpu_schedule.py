"""Which tiles, KV blocks and writes a call has: scalar arithmetic inside the kernel (step 6b).

A *tile* is up to `tile_tokens` consecutive query tokens of one sequence; a *write* is one aligned
run of `write_tokens` tokens of one sequence in which some are new. Both are walked with a cursor
(sequence, number within it); sequences without rows are skipped, and behind the last row of the
batch there is nothing to skip. A cursor at sequence B is at the end.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.paged_attention.tpu_blocks import Blocks, Facts

#: A reference to memory inside a kernel; Pallas has no public type for it.
Ref = Any


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """All that a kernel is compiled for."""

    facts: Facts
    blocks: Blocks
    scale: float
    window: int | None
    soft_cap: float | None
    has_sinks: bool


class Cursor(NamedTuple):
    """A place in the walk: two int32 scalars."""

    sequence: jax.Array
    number: jax.Array


class Tokens(NamedTuple):
    """The rows of a sequence: the first, how many, and the position of the first."""

    row: jax.Array
    num_rows: jax.Array
    position: jax.Array


class Tile(NamedTuple):
    """What the tile at a cursor reads.

    row, num_rows: its query tokens; position: of the first. begin, end: positions of the KV tokens
    that it needs, from begin to end - 1; first_block, last_block: of those, last excluded.
    """

    cursor: Cursor
    row: jax.Array
    num_rows: jax.Array
    position: jax.Array
    begin: jax.Array
    end: jax.Array
    first_block: jax.Array
    last_block: jax.Array


def divide(number: jax.Array, by: int) -> jax.Array:
    """number // by, neither being negative. (`//` itself asks the local device for its kind.)"""
    if by & (by - 1) == 0:
        return lax.shift_right_logical(number, jnp.int32(by.bit_length() - 1))
    return lax.div(number, jnp.int32(by))


def remainder(number: jax.Array, by: int) -> jax.Array:
    """number % by, neither being negative."""
    return number - divide(number, by) * by


def divide_up(number: jax.Array, by: int) -> jax.Array:
    """The number of parts of size `by`, the last one perhaps not full."""
    return divide(number + (by - 1), by)


class Schedule:
    """Walks the sequences of a batch, whose description lies in scalar memory."""

    def __init__(self, plan: Plan, cu_q_lens: Ref, kv_lens: Ref, num_sequences: int) -> None:
        self.plan = plan
        self._cu_q_lens = cu_q_lens
        self._kv_lens = kv_lens
        self._num_sequences = num_sequences

    def more(self, cursor: Cursor) -> jax.Array:
        """Whether the cursor is at something."""
        return cursor.sequence < self._num_sequences

    def tokens(self, sequence: jax.Array) -> Tokens:
        """The new tokens of a sequence."""
        row = self._cu_q_lens[sequence]
        count = self._cu_q_lens[sequence + 1] - row
        return Tokens(row, count, self._kv_lens[sequence] - count)

    def skip_empty(self, sequence: jax.Array) -> jax.Array:
        """The first sequence from here on that has rows; B when there is none."""
        rest = self._cu_q_lens[sequence] < self._cu_q_lens[self._num_sequences]
        sequence = jnp.where(rest, sequence, self._num_sequences)

        def is_empty(sequence: jax.Array) -> jax.Array:
            inside = jnp.minimum(sequence, self._num_sequences - 1)
            return (sequence < self._num_sequences) & (self.tokens(inside).num_rows == 0)

        def step(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            return carry[0] + 1, is_empty(carry[0] + 1)

        carry = (sequence, is_empty(sequence))
        return lax.while_loop(lambda carry: carry[1], step, carry)[0]

    def start(self) -> Cursor:
        """At the first tile, or the first write."""
        return Cursor(self.skip_empty(jnp.int32(0)), jnp.int32(0))

    def advance(self, cursor: Cursor, count: jax.Array) -> Cursor:
        """One further, `count` being the number of tiles or writes of the cursor's sequence."""
        same = cursor.number + 1 < count
        sequence = lax.cond(
            same,
            lambda: cursor.sequence,
            lambda: self.skip_empty(cursor.sequence + 1),
        )
        return Cursor(sequence, jnp.where(same, cursor.number + 1, 0))

    def next_tile(self, tile: Tile) -> Tile:
        """The tile after this one."""
        count = self.tokens(tile.cursor.sequence).num_rows
        tiles = divide_up(count, self.plan.blocks.tile_tokens)
        return self.tile(self.advance(tile.cursor, tiles))

    def tile(self, cursor: Cursor) -> Tile:
        """The tile at the cursor; at the end, one that must not be read."""
        blocks = self.plan.blocks
        tokens = self.tokens(jnp.minimum(cursor.sequence, self._num_sequences - 1))
        offset = cursor.number * blocks.tile_tokens
        count = jnp.minimum(tokens.num_rows - offset, blocks.tile_tokens)
        position = tokens.position + offset
        begin = jnp.int32(0)
        if self.plan.window is not None:
            begin = jnp.maximum(position - (self.plan.window - 1), 0)
        end = position + count
        return Tile(
            cursor,
            tokens.row + offset,
            count,
            position,
            begin,
            end,
            divide(begin, blocks.block_tokens),
            divide_up(end, blocks.block_tokens),
        )

    def next_write(self, cursor: Cursor) -> Cursor:
        """The write after the cursor's."""
        size = self.plan.facts.write_tokens
        tokens = self.tokens(cursor.sequence)
        first = divide(tokens.position, size)
        return self.advance(cursor, divide_up(tokens.position + tokens.num_rows, size) - first)

    def write_position(self, cursor: Cursor) -> jax.Array:
        """Position of the first token of the write at the cursor; a multiple of write_tokens."""
        size = self.plan.facts.write_tokens
        return (divide(self.tokens(cursor.sequence).position, size) + cursor.number) * size
