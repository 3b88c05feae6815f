"""First half of the TPU kernel: new keys and values go into their pages (step 6b).

Memory is written in whole tiles, so a write reads the aligned run of tokens around the new ones
(unless all of it is new), puts the new ones in, and writes the run back. Runs of different
sequences, and of one sequence, do not overlap: many are in flight together, in a ring of buffers.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.paged_attention import tpu_scales
from pallas_kernels.paged_attention.tpu_blocks import Blocks, Facts
from pallas_kernels.paged_attention.tpu_schedule import (
    Cursor,
    Ref,
    Schedule,
    divide,
    remainder,
)


class WriteBuffers(NamedTuple):
    """Scratch memory of the writes, keys first and values second.

    runs: [writes, K, write_rows, lanes]; fresh: [writes, K, write_tokens, 1, lanes] float32.
    """

    runs: tuple[Ref, Ref]
    fresh: tuple[Ref, Ref]
    read_done: Ref
    write_done: Ref


class WriteRefs(NamedTuple):
    """What the writes touch, keys first and values second.

    new: [K, write_tokens + T + write_tokens, 1, lanes] float32, of 8-bit pages the numbers to be
    stored; pages: [P, K, page rows, lanes]; scales: of 8-bit pages.
    """

    tables: Ref
    new: tuple[Ref, Ref]
    pages: tuple[Ref, Ref]
    buffers: WriteBuffers
    scales: tpu_scales.ScaleWriteRefs | None


def buffers(facts: Facts, blocks: Blocks) -> WriteBuffers:
    """What `WriteBuffers` is made of."""
    heads, lanes = facts.num_kv_heads, facts.layout.lanes
    run = pltpu.VMEM((blocks.writes, heads, facts.write_rows, lanes), facts.page_dtype)
    fresh = pltpu.VMEM((blocks.writes, heads, facts.write_tokens, 1, lanes), jnp.float32)
    sems = pltpu.SemaphoreType.DMA((blocks.writes,))
    return WriteBuffers((run, run), (fresh, fresh), sems, sems)


def write_all(schedule: Schedule, refs: WriteRefs) -> None:
    """Stores every new row of the batch; returns when all of them are in the pages."""
    writes = schedule.plan.blocks.writes
    ahead = writes // 2

    def fetch(cursor: Cursor, number: jax.Array) -> Cursor:
        slot = remainder(number, writes)

        @pl.when(number >= writes)
        def _() -> None:
            _finish_write(schedule, refs, slot)

        _start_read(schedule, refs, cursor, slot)
        return schedule.next_write(cursor)

    def fetch_if_any(cursor: Cursor, number: jax.Array) -> tuple[Cursor, jax.Array]:
        any_left = schedule.more(cursor)
        cursor = lax.cond(any_left, lambda: fetch(cursor, number), lambda: cursor)
        return cursor, number + any_left.astype(jnp.int32)

    def fill(_: Any, carry: tuple[Cursor, jax.Array]) -> tuple[Cursor, jax.Array]:
        return fetch_if_any(*carry)

    def step(
        carry: tuple[Cursor, jax.Array, Cursor, jax.Array],
    ) -> tuple[Cursor, jax.Array, Cursor, jax.Array]:
        reader, fetched, cursor, number = carry
        reader, fetched = fetch_if_any(reader, fetched)
        _merge(schedule, refs, cursor, remainder(number, writes))
        return reader, fetched, schedule.next_write(cursor), number + 1

    start = schedule.start()
    if refs.scales is not None:
        pl.when(schedule.more(start))(functools.partial(tpu_scales.stage, refs.scales))
    reader, fetched = lax.fori_loop(0, ahead, fill, (start, jnp.int32(0)))
    *_, total = lax.while_loop(
        lambda carry: schedule.more(carry[2]), step, (reader, fetched, start, jnp.int32(0))
    )

    def drain(number: jax.Array, _: None) -> None:
        _finish_write(schedule, refs, remainder(number, writes))

    lax.fori_loop(jnp.maximum(total - writes, 0), total, drain, None)


def _place(schedule: Schedule, refs: WriteRefs, cursor: Cursor) -> tuple[jax.Array, jax.Array]:
    """Page and first row within it of the run at the cursor."""
    facts = schedule.plan.facts
    position = schedule.write_position(cursor)
    table = cursor.sequence * facts.pages_per_sequence
    page = refs.tables[table + divide(position, facts.page_size)]
    row = divide(remainder(position, facts.page_size), facts.layout.pack)
    return page, pl.multiple_of(row, facts.write_rows)


def _is_partial(schedule: Schedule, cursor: Cursor) -> jax.Array:
    """Whether the run holds tokens that are not new."""
    tokens = schedule.tokens(cursor.sequence)
    position = schedule.write_position(cursor)
    end = position + schedule.plan.facts.write_tokens
    return (position < tokens.position) | (end > tokens.position + tokens.num_rows)


def _read_copies(
    schedule: Schedule, refs: WriteRefs, cursor: Cursor, slot: jax.Array
) -> tuple[list[Any], list[Any]]:
    """The copies of the new rows, and those of the old contents of the run."""
    facts = schedule.plan.facts
    tokens = schedule.tokens(cursor.sequence)
    # The new rows have write_tokens rows of padding before the first.
    first = tokens.row + schedule.write_position(cursor) - tokens.position + facts.write_tokens
    page, row = _place(schedule, refs, cursor)
    done = refs.buffers.read_done.at[slot]
    rows, window = pl.ds(row, facts.write_rows), pl.ds(first, facts.write_tokens)
    fresh = [
        pltpu.make_async_copy(new.at[:, window], into.at[slot], done)
        for new, into in zip(refs.new, refs.buffers.fresh, strict=True)
    ]
    old = [
        pltpu.make_async_copy(pages.at[page, :, rows], into.at[slot], done)
        for pages, into in zip(refs.pages, refs.buffers.runs, strict=True)
    ]
    return fresh, old


def _start_read(schedule: Schedule, refs: WriteRefs, cursor: Cursor, slot: jax.Array) -> None:
    fresh, old = _read_copies(schedule, refs, cursor, slot)
    for copy in fresh:
        copy.start()

    @pl.when(_is_partial(schedule, cursor))
    def _() -> None:
        for copy in old:
            copy.start()

    if refs.scales is not None:
        page = _place(schedule, refs, cursor)[0]
        tpu_scales.start_read(schedule, refs.scales, cursor, page, slot)


def _merge(schedule: Schedule, refs: WriteRefs, cursor: Cursor, slot: jax.Array) -> None:
    """Waits for a run, puts the new rows in, and starts to write it back."""
    facts = schedule.plan.facts
    layout = facts.layout
    fresh, old = _read_copies(schedule, refs, cursor, slot)
    for copy in fresh:
        copy.wait()

    @pl.when(_is_partial(schedule, cursor))
    def _() -> None:
        for copy in old:
            copy.wait()

    tokens = schedule.tokens(cursor.sequence)
    shape = (facts.write_rows, layout.lanes)
    lane = lax.broadcasted_iota(jnp.int32, shape, 1)
    second = (lane >= layout.head_size).astype(jnp.int32) if layout.pack == 2 else jnp.int32(0)
    position = schedule.write_position(cursor) + second
    position = position + lax.broadcasted_iota(jnp.int32, shape, 0) * layout.pack
    is_new = (position >= tokens.position) & (position < tokens.position + tokens.num_rows)

    def put(head: jax.Array, _: None) -> None:
        for run, source in zip(refs.buffers.runs, refs.buffers.fresh, strict=True):
            heads = source.at[slot, head]
            parts = [
                heads[pl.ds(part, facts.write_rows, stride=layout.pack)].reshape(shape)
                for part in range(layout.pack)
            ]
            new = parts[0] if layout.pack == 1 else jnp.where(second == 0, parts[0], parts[1])
            kept = run[slot, head].astype(jnp.float32)
            run[slot, head] = jnp.where(is_new, new, kept).astype(run.dtype)

    lax.fori_loop(0, facts.num_kv_heads, put, None)
    page, row = _place(schedule, refs, cursor)
    for copy in _write_copies(schedule, refs, page, row, slot):
        copy.start()
    if refs.scales is not None:
        tpu_scales.merge(schedule, refs.scales, cursor, page, slot)


def _write_copies(
    schedule: Schedule, refs: WriteRefs, page: jax.Array, row: jax.Array, slot: jax.Array
) -> list[Any]:
    rows = pl.ds(row, schedule.plan.facts.write_rows)
    return [
        pltpu.make_async_copy(
            run.at[slot], pages.at[page, :, rows], refs.buffers.write_done.at[slot]
        )
        for run, pages in zip(refs.buffers.runs, refs.pages, strict=True)
    ]


def _finish_write(schedule: Schedule, refs: WriteRefs, slot: jax.Array) -> None:
    """Waits until the run that was in a slot is written; only the size of a copy matters here."""
    for copy in _write_copies(schedule, refs, jnp.int32(0), jnp.int32(0), slot):
        copy.wait()
    if refs.scales is not None:
        tpu_scales.finish(refs.scales, slot)
