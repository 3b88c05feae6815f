"""The scales of 8-bit pages in the TPU kernel: written beside new tokens, read beside blocks (6b).

`tpu_layout` says how they lie. A row holds the scales of a whole page, so it is read, changed and
written once per page and call, by the first run of values that goes into the page. The scales of
new tokens are small: they are in VMEM from the beginning, the heads one below the other, and a
page's window of them is cut out by turning lanes. Must not know what is done with the scales.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.paged_attention.tpu_blocks import Blocks, Facts
from pallas_kernels.paged_attention.tpu_layout import LANES
from pallas_kernels.paged_attention.tpu_schedule import (
    Cursor,
    Ref,
    Schedule,
    Tile,
    divide,
    remainder,
)


class ScaleBuffers(NamedTuple):
    """Scratch memory for writing, keys first and values second.

    staged: the new scales, `Facts.staged_scales`; rows: [writes, K, 1, lanes]; both float32.
    has_row: [writes] int32 in scalar memory, whether a row is being written from that slot.
    """

    staged: tuple[Ref, Ref]
    rows: tuple[Ref, Ref]
    has_row: Ref
    staged_done: Ref
    read_done: Ref
    write_done: Ref


class ScaleWriteRefs(NamedTuple):
    """new: as `staged`, where it comes from; pages: [P, K, 1, lanes] float32."""

    new: tuple[Ref, Ref]
    pages: tuple[Ref, Ref]
    buffers: ScaleBuffers


def buffers(facts: Facts, blocks: Blocks) -> ScaleBuffers:
    """What `ScaleBuffers` is made of."""
    staged = pltpu.VMEM(facts.staged_scales, jnp.float32)
    rows = pltpu.VMEM((blocks.writes, facts.num_kv_heads, 1, facts.scale_lanes), jnp.float32)
    sems = pltpu.SemaphoreType.DMA
    return ScaleBuffers(
        (staged, staged),
        (rows, rows),
        pltpu.SMEM((blocks.writes,), jnp.int32),
        sems,
        sems((blocks.writes,)),
        sems((blocks.writes,)),
    )


def stage(refs: ScaleWriteRefs) -> None:
    """Brings the new scales into VMEM."""
    copies: list[Any] = [
        pltpu.make_async_copy(source, into, refs.buffers.staged_done)
        for source, into in zip(refs.new, refs.buffers.staged, strict=True)
    ]
    for copy in copies:
        copy.start()
    for copy in copies:
        copy.wait()


def start_read(
    schedule: Schedule, refs: ScaleWriteRefs, cursor: Cursor, page: jax.Array, slot: jax.Array
) -> None:
    """Fetches the page's row for the run at the cursor, where it needs one."""

    @pl.when(_opens_page(schedule, cursor) & _keeps_some(schedule, cursor))
    def _() -> None:
        for copy in _copies(refs, page, slot, into_page=False):
            copy.start()


def merge(
    schedule: Schedule, refs: ScaleWriteRefs, cursor: Cursor, page: jax.Array, slot: jax.Array
) -> None:
    """Puts the new scales into the page's row and starts to write it back, where `start_read`
    was for one."""
    opens = _opens_page(schedule, cursor)
    refs.buffers.has_row[slot] = opens.astype(jnp.int32)

    @pl.when(opens)
    def _() -> None:
        @pl.when(_keeps_some(schedule, cursor))
        def _() -> None:
            for copy in _copies(refs, page, slot, into_page=False):
                copy.wait()

        _put(schedule, refs, cursor, slot)
        for copy in _copies(refs, page, slot, into_page=True):
            copy.start()


def finish(refs: ScaleWriteRefs, slot: jax.Array) -> None:
    """Waits until the row that was in a slot, if any, is written."""

    @pl.when(refs.buffers.has_row[slot] != 0)
    def _() -> None:
        for copy in _copies(refs, jnp.int32(0), slot, into_page=True):
            copy.wait()


def _page_start(schedule: Schedule, cursor: Cursor) -> jax.Array:
    """Position of the first token of the page that the run at the cursor is in."""
    position = schedule.write_position(cursor)
    return position - remainder(position, schedule.plan.facts.page_size)


def _opens_page(schedule: Schedule, cursor: Cursor) -> jax.Array:
    """Whether the run is the first of the call in its page."""
    return (cursor.number == 0) | (schedule.write_position(cursor) == _page_start(schedule, cursor))


def _keeps_some(schedule: Schedule, cursor: Cursor) -> jax.Array:
    """Whether the page holds, or has place for, tokens that are not new."""
    tokens, start = schedule.tokens(cursor.sequence), _page_start(schedule, cursor)
    end = start + schedule.plan.facts.page_size
    return (start < tokens.position) | (end > tokens.position + tokens.num_rows)


def _copies(
    refs: ScaleWriteRefs, page: jax.Array, slot: jax.Array, *, into_page: bool
) -> list[Any]:
    result = []
    for pages, rows in zip(refs.pages, refs.buffers.rows, strict=True):
        there, here = pages.at[page], rows.at[slot]
        if into_page:
            result.append(pltpu.make_async_copy(here, there, refs.buffers.write_done.at[slot]))
        else:
            result.append(pltpu.make_async_copy(there, here, refs.buffers.read_done.at[slot]))
    return result


def _put(schedule: Schedule, refs: ScaleWriteRefs, cursor: Cursor, slot: jax.Array) -> None:
    """The new scales into the rows of all heads."""
    facts = schedule.plan.facts
    tokens, start = schedule.tokens(cursor.sequence), _page_start(schedule, cursor)
    first = tokens.row + start - tokens.position + facts.scales_before
    lane = lax.broadcasted_iota(jnp.int32, (facts.num_kv_heads, LANES), 1)
    for number in range(facts.scale_lanes // LANES):
        place = remainder(lane + number * LANES, facts.page_size)
        token = remainder(place, facts.page_rows) * facts.layout.pack
        position = start + token + divide(place, facts.page_rows)
        is_new = (position >= tokens.position) & (position < tokens.position + tokens.num_rows)
        lanes = pl.ds(number * LANES, LANES)
        for staged, rows in zip(refs.buffers.staged, refs.buffers.rows, strict=True):
            new = _page_lanes(staged, facts, first, number)[: facts.num_kv_heads]
            rows[slot, :, 0, lanes] = jnp.where(is_new, new, rows[slot, :, 0, lanes])


def _page_lanes(staged: Ref, facts: Facts, first: jax.Array, number: int) -> jax.Array:
    """[K, 128]: the new scales as lanes 128 * number and on of a page's row; first: the row, among
    those that are staged, of the page's first token."""
    if facts.page_size > LANES:
        if facts.layout.pack == 2:
            return _window(staged, facts, first + number, 0)
        return _window(staged, facts, first, number)
    result = _window(staged, facts, first, 0)
    lane = lax.broadcasted_iota(jnp.int32, result.shape, 1)
    if facts.layout.pack == 2:
        second = pltpu.roll(_window(staged, facts, first + 1, 0), facts.page_rows, 1)
        result = jnp.where(lane < facts.page_rows, result, second)
    filled = facts.page_size
    while filled < LANES:
        result = jnp.where(lane < filled, result, pltpu.roll(result, filled, 1))
        filled *= 2
    return result


def _window(staged: Ref, facts: Facts, row: jax.Array, number: int) -> jax.Array:
    """[K, 128]: the scales of row, row + pack, row + 2 * pack .. from the 128 * number-th on."""
    part, place = remainder(row, facts.layout.pack), divide(row, facts.layout.pack)
    group, offset = divide(place, LANES) + number, remainder(place, LANES)
    back = remainder(LANES - offset, LANES)
    low = pltpu.roll(staged[part, group], back, 1)
    high = pltpu.roll(staged[part, group + 1], back, 1)
    lane = lax.broadcasted_iota(jnp.int32, low.shape, 1)
    return jnp.where(lane < LANES - offset, low, high)


def block_scales(
    ref: Ref, facts: Facts, blocks: Blocks, slot: jax.Array, head: jax.Array
) -> tuple[jax.Array, ...]:
    """The scales of the tokens that a block's rows hold: for each of `pack` parts [1, block rows].

    ref: [2, K, pages of a block, 1, lanes]. What is read of a page that was not fetched is
    anything, in the places of that page.
    """
    rows = blocks.block_tokens // facts.layout.pack
    groups = [_group(ref, facts, slot, head, number) for number in range(rows // LANES)]
    return tuple(
        jnp.concatenate([group[part] for group in groups], axis=1)
        for part in range(facts.layout.pack)
    )


def _group(
    ref: Ref, facts: Facts, slot: jax.Array, head: jax.Array, number: int
) -> tuple[jax.Array, ...]:
    """As `block_scales`, of the 128 rows from 128 * number on."""
    page_rows, pack = facts.page_rows, facts.layout.pack
    if page_rows >= LANES:
        page, offset = divmod(number * LANES, page_rows)
        return tuple(
            ref[slot, head, pl.ds(page, 1), 0, pl.ds(part * page_rows + offset, LANES)]
            for part in range(pack)
        )
    count = LANES // page_rows
    pages = ref[slot, head, pl.ds(number * count, count), 0, :]
    shape = (count, LANES)
    lane = lax.broadcasted_iota(jnp.int32, shape, 1)
    mine = lax.broadcasted_iota(jnp.int32, shape, 0) == divide(lane, page_rows)
    # A lane's page, and the part that its row has there: its own, or the other one.
    own = jnp.sum(jnp.where(mine, pages, 0.0), axis=0, keepdims=True)
    if pack == 1:
        return (own,)
    turned = pltpu.roll(pages, page_rows, 1)
    other = jnp.sum(jnp.where(mine, turned, 0.0), axis=0, keepdims=True)
    is_first = remainder(divide(lane[:1], page_rows), 2) == 0
    return jnp.where(is_first, own, other), jnp.where(is_first, other, own)


def only_needed(
    scales: tuple[jax.Array, ...], facts: Facts, blocks: Blocks, tile: Tile, block: jax.Array
) -> tuple[jax.Array, ...]:
    """Zeros in the places of tokens that the tile does not need."""
    lane = lax.broadcasted_iota(jnp.int32, scales[0].shape, 1)
    result = []
    for part, scale in enumerate(scales):
        position = block * blocks.block_tokens + lane * facts.layout.pack + part
        needed = (position >= tile.begin) & (position < tile.end)
        result.append(jnp.where(needed, scale, 0.0))
    return tuple(result)
