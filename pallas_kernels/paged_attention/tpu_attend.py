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
    Cursor,
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


class AttendRefs(NamedTuple):
    """What attending touches beside the buffers of tiles.

    queries: [K, (T + tile_tokens) * group, 1, lanes] and out: [K, T * group, 1, lanes], both
    float32; pages: keys and values [P, K, page rows, lanes]; the rest are semaphores.
    """

    tables: Ref
    queries: Ref
    out: Ref
    pages: tuple[Ref, Ref]
    tile: TileRefs
    pages_done: Ref
    query_done: Ref
    out_done: Ref


def attend_all(schedule: Schedule, refs: AttendRefs) -> None:
    """Computes all rows of the batch, and returns when they are in `out`."""
    plan = schedule.plan
    start, zero = schedule.start(), jnp.int32(0)

    def step(
        carry: tuple[Cursor, jax.Array, jax.Array, jax.Array],
    ) -> tuple[Cursor, jax.Array, jax.Array, jax.Array]:
        cursor, side, slot, unfinished = carry
        tile, following = schedule.tile(cursor), schedule.next_tile(cursor)
        _start_query(schedule, refs, following, 1 - side)

        def compute(size: TileSize) -> None:
            _query_copy(refs, plan, tile, side, size).wait()
            begin_tile(refs.tile, plan, side, size)
            _fold_blocks(schedule, refs, cursor, following, slot, size)

        _with_size(schedule, cursor, compute)
        # The tile before this one had all of this one's time to be written.
        _each_out_copy(refs, plan, zero, unfinished, _wait)
        _with_size(schedule, cursor, lambda size: end_tile(refs.tile, plan, size))
        _each_out_copy(refs, plan, tile.row, tile.num_rows, _start)
        slot = (slot + tile.last_block - tile.first_block) & 1
        return following, 1 - side, slot, tile.num_rows

    _start_query(schedule, refs, start, zero)
    _start_first_block(schedule, refs, start, zero)
    *_, unfinished = lax.while_loop(
        lambda carry: schedule.more(carry[0]), step, (start, zero, zero, zero)
    )
    _each_out_copy(refs, plan, zero, unfinished, _wait)


def _start(copy: Any) -> None:
    copy.start()


def _wait(copy: Any) -> None:
    copy.wait()


def _with_size(schedule: Schedule, cursor: Cursor, act: Callable[[TileSize], None]) -> None:
    """Calls `act` with the size of the tile at the cursor; every size is compiled, one runs."""
    facts, largest = schedule.plan.facts, schedule.plan.blocks.tile_tokens
    single = schedule.is_single(cursor)
    if largest == 1:
        act(TileSize(1, facts.rows(1)))
        return
    for tokens, wanted in ((1, single), (largest, jnp.logical_not(single))):
        size = TileSize(tokens, facts.rows(tokens))
        pl.when(wanted)(functools.partial(act, size))


def _start_query(schedule: Schedule, refs: AttendRefs, cursor: Cursor, side: jax.Array) -> None:
    """Starts to fetch the queries of the tile at the cursor, if there is one."""

    @pl.when(schedule.more(cursor))
    def _() -> None:
        def start(size: TileSize) -> None:
            _query_copy(refs, schedule.plan, schedule.tile(cursor), side, size).start()

        _with_size(schedule, cursor, start)


def _query_copy(refs: AttendRefs, plan: Plan, tile: Tile, side: jax.Array, size: TileSize) -> Any:
    count = size.tokens * plan.facts.group
    source = refs.queries.at[:, pl.ds(tile.row * plan.facts.group, count)]
    into = refs.tile.query_in.at[side, :, pl.ds(0, count)]
    return pltpu.make_async_copy(source, into, refs.query_done.at[side])


def _start_first_block(
    schedule: Schedule, refs: AttendRefs, cursor: Cursor, slot: jax.Array
) -> None:
    """Starts to fetch the first block of the tile at the cursor, if there is one."""

    @pl.when(schedule.more(cursor))
    def _() -> None:
        tile = schedule.tile(cursor)
        _each_page(refs, schedule.plan, cursor, tile, tile.first_block, slot, _start)


def _fold_blocks(
    schedule: Schedule,
    refs: AttendRefs,
    cursor: Cursor,
    following: Cursor,
    slot: jax.Array,
    size: TileSize,
) -> None:
    """Adds the blocks of the cursor's tile to its sums, fetching one block ahead."""
    plan, tile = schedule.plan, schedule.tile(cursor)

    def fold(block: jax.Array, slot: jax.Array) -> jax.Array:
        is_last = block + 1 == tile.last_block

        @pl.when(jnp.logical_not(is_last))
        def _() -> None:
            _each_page(refs, plan, cursor, tile, block + 1, 1 - slot, _start)

        @pl.when(is_last)
        def _() -> None:
            _start_first_block(schedule, refs, following, 1 - slot)

        _each_page(refs, plan, cursor, tile, block, slot, _wait)
        clear_edges(refs.tile, plan, tile, block, slot)
        fold_block(refs.tile, plan, tile, block, slot, size)
        return 1 - slot

    lax.fori_loop(tile.first_block, tile.last_block, fold, slot)


def _each_page(
    refs: AttendRefs,
    plan: Plan,
    cursor: Cursor,
    tile: Tile,
    block: jax.Array,
    slot: jax.Array,
    act: Callable[[Any], None],
) -> None:
    """Calls `act` with the copies of those pages of a block that the tile needs."""
    facts = plan.facts
    per_block = plan.blocks.block_tokens // facts.page_size
    page_rows = facts.page_size // facts.layout.pack
    first = jnp.maximum(block * per_block, divide(tile.begin, facts.page_size))
    last = jnp.minimum((block + 1) * per_block, divide_up(tile.end, facts.page_size))
    table = cursor.sequence * facts.pages_per_sequence

    def copy(number: jax.Array, _: None) -> None:
        page = refs.tables[table + number]
        row = pl.multiple_of((number - block * per_block) * page_rows, page_rows)
        for pages, buffer in zip(refs.pages, refs.tile.blocks, strict=True):
            into = buffer.at[slot, :, pl.ds(row, page_rows)]
            act(pltpu.make_async_copy(pages.at[page], into, refs.pages_done.at[slot]))

    lax.fori_loop(first, last, copy, None)


def _each_out_copy(
    refs: AttendRefs, plan: Plan, row: jax.Array, count: jax.Array, act: Callable[[Any], None]
) -> None:
    """Calls `act` with copies that together hold `count` tokens: one per power of two in it."""
    group = plan.facts.group
    for size in _powers_of_two(plan.blocks.tile_tokens):
        first = (count & ~(2 * size - 1)) * group
        source = refs.tile.out_tile.at[:, pl.ds(first, size * group)]
        into = refs.out.at[:, pl.ds(row * group + first, size * group)]
        copy = pltpu.make_async_copy(source, into, refs.out_done)
        pl.when((count & size) != 0)(functools.partial(act, copy))


def _powers_of_two(largest: int) -> list[int]:
    """From `largest`, itself one, down to 1."""
    return [1 << bit for bit in reversed(range(largest.bit_length()))]
