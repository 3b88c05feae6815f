"""Second half of the TPU kernel: every tile attends to its KV blocks (step 6b).

Tiles follow one another in the order of the batch. While a block is computed the next one is on
its way into the other buffer, also when it belongs to the next tile or the next sequence. Two
kinds of tiles are compiled: one token (decoding), and up to `tile_tokens`. What is computed is
the business of `tpu_tile`; here are the walk and the copies.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.paged_attention.tpu_schedule import (
    Plan,
    Ref,
    Schedule,
    Tile,
    divide,
    divide_up,
)
from pallas_kernels.paged_attention.tpu_tile import (
    TileRefs,
    TileSize,
    begin_tile,
    clear_edges,
    end_tile,
    fold_block,
)


class AttendSemaphores(NamedTuple):
    """Of the copies of pages, of queries and of results."""

    pages: Ref
    query: Ref
    out: Ref


def semaphores() -> AttendSemaphores:
    """What `AttendSemaphores` is made of."""
    sems = pltpu.SemaphoreType.DMA
    return AttendSemaphores(sems((2,)), sems((2,)), sems)


class AttendRefs(NamedTuple):
    """What attending touches beside the buffers of tiles.

    sinks: [N] float32; queries: [K, (T + tile_tokens) * group, 1, lanes] and out: [K, T * group, 1,
    out_lanes], both float32; pages: the leaves of the pool.
    """

    tables: Ref
    sinks: Ref
    queries: Ref
    out: Ref
    pages: tuple[Ref, ...]
    tile: TileRefs
    done: AttendSemaphores


class Block(NamedTuple):
    """What is fetched of a sequence's KV block: its tokens from begin to end - 1."""

    sequence: jax.Array
    number: jax.Array
    begin: jax.Array
    end: jax.Array


def attend_all(schedule: Schedule, refs: AttendRefs) -> None:
    """Computes all rows of the batch, and returns when they are in `out`."""
    plan, zero = schedule.plan, jnp.int32(0)

    def step(
        carry: tuple[Tile, jax.Array, jax.Array, jax.Array],
    ) -> tuple[Tile, jax.Array, jax.Array, jax.Array]:
        tile, side, slot, unfinished = carry
        following = schedule.next_tile(tile)
        more = schedule.more(following.cursor)

        @pl.when(more)
        def _() -> None:
            _with_query_copy(refs, plan, following, 1 - side, _start)

        _with_query_copy(refs, plan, tile, side, _wait)
        _with_size(plan, tile, lambda size: begin_tile(refs.tile, refs.sinks, plan, side, size))
        slot = _fold_blocks(refs, plan, tile, following, more, slot)
        # The tile before this one had all of this one's time to be written.
        _each_out_copy(refs, plan, zero, unfinished, _wait)
        _with_size(plan, tile, lambda size: end_tile(refs.tile, plan, size))
        _each_out_copy(refs, plan, tile.row, tile.num_rows, _start)
        return following, 1 - side, slot, tile.num_rows

    first = schedule.tile(schedule.start())

    @pl.when(schedule.more(first.cursor))
    def _() -> None:
        _with_query_copy(refs, plan, first, zero, _start)
        _each_page(refs, plan, _block(first, first.first_block), zero, _start)

    unfinished = lax.while_loop(
        lambda carry: schedule.more(carry[0].cursor), step, (first, zero, zero, zero)
    )[-1]
    _each_out_copy(refs, plan, zero, unfinished, _wait)


def _start(copy: Any) -> None:
    copy.start()


def _wait(copy: Any) -> None:
    copy.wait()


def _with_size(plan: Plan, tile: Tile, act: Callable[[TileSize], None]) -> None:
    """Calls `act` with the tile's static size: every size is compiled, one runs."""
    largest = plan.blocks.tile_tokens
    sizes = [TileSize(tokens, plan.facts.rows(tokens)) for tokens in sorted({1, largest})]
    if len(sizes) == 1:
        act(sizes[0])
        return
    single = tile.num_rows == 1
    lax.cond(single, lambda: act(sizes[0]), lambda: act(sizes[1]))


def _with_query_copy(
    refs: AttendRefs, plan: Plan, tile: Tile, side: jax.Array, act: Callable[[Any], None]
) -> None:
    """Calls `act` with the copy of the tile's queries."""

    def with_copy(size: TileSize) -> None:
        count = size.tokens * plan.facts.group
        source = refs.queries.at[:, pl.ds(tile.row * plan.facts.group, count)]
        into = refs.tile.query_in.at[side, :, pl.ds(0, count)]
        act(pltpu.make_async_copy(source, into, refs.done.query.at[side]))

    _with_size(plan, tile, with_copy)


def _block(tile: Tile, number: jax.Array) -> Block:
    return Block(tile.cursor.sequence, number, tile.begin, tile.end)


def _fold_blocks(
    refs: AttendRefs, plan: Plan, tile: Tile, following: Tile, more: jax.Array, slot: jax.Array
) -> jax.Array:
    """Adds the tile's blocks to its sums, fetching one block ahead; returns the next slot.

    more: whether there is a following tile, whose first block is fetched during the last of this.
    """

    def fold(number: jax.Array, slot: jax.Array) -> jax.Array:
        is_last = number + 1 == tile.last_block
        ahead = jax.tree.map(
            lambda after, other: jnp.where(is_last, after, other),
            _block(following, following.first_block),
            _block(tile, number + 1),
        )

        @pl.when(jnp.logical_not(is_last) | more)
        def _() -> None:
            _each_page(refs, plan, ahead, 1 - slot, _start)

        _each_page(refs, plan, _block(tile, number), slot, _wait)
        clear_edges(refs.tile, plan, tile, number, slot)
        _with_size(plan, tile, lambda size: fold_block(refs.tile, plan, tile, number, slot, size))
        return 1 - slot

    slot = lax.fori_loop(tile.first_block, tile.last_block, fold, slot)
    return slot


def _each_page(
    refs: AttendRefs, plan: Plan, block: Block, slot: jax.Array, act: Callable[[Any], None]
) -> None:
    """Calls `act` with the copies of the pages that hold the block's tokens."""
    facts = plan.facts
    per_block = plan.blocks.block_tokens // facts.page_size
    page_rows = facts.page_rows
    before = block.number * per_block
    first = jnp.maximum(before, divide(block.begin, facts.page_size))
    last = jnp.minimum(before + per_block, divide_up(block.end, facts.page_size))
    table = block.sequence * facts.pages_per_sequence

    def copy(number: jax.Array, _: None) -> None:
        page = refs.tables[table + number]
        row = pl.multiple_of((number - before) * page_rows, page_rows)
        done = refs.done.pages.at[slot]
        for pages, buffer in zip(refs.pages[:2], refs.tile.blocks, strict=True):
            into = buffer.at[slot, :, pl.ds(row, page_rows)]
            act(pltpu.make_async_copy(pages.at[page], into, done))
        if refs.tile.scales is not None:
            for scales, buffer in zip(refs.pages[2:], refs.tile.scales, strict=True):
                into = buffer.at[slot, :, number - before]
                act(pltpu.make_async_copy(scales.at[page], into, done))

    lax.fori_loop(first, last, copy, None)


def _each_out_copy(
    refs: AttendRefs, plan: Plan, row: jax.Array, count: jax.Array, act: Callable[[Any], None]
) -> None:
    """Calls `act` with copies that together hold `count` tokens: one per power of two in it."""
    group = plan.facts.group
    for bit in reversed(range(plan.blocks.tile_tokens.bit_length())):
        size = 1 << bit
        first = (count & ~(2 * size - 1)) * group
        source = refs.tile.out_tile.at[:, pl.ds(first, size * group)]
        into = refs.out.at[:, pl.ds(row * group + first, size * group)]
        copy = pltpu.make_async_copy(source, into, refs.done.out)
        pl.when((count & size) != 0)(functools.partial(act, copy))
