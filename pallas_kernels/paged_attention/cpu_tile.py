"""Attention of a tile of many query rows, over gathered blocks of pages (step 6b, CPU).

A tile is up to TILE_ROWS query rows of one KV head of one sequence; also those with few rows whose
head or page size does not fill vectors (`cpu_few` reads those in place). Keys and values of a
block are copied to floats once and serve all panels of the tile.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from pallas_kernels.ffi.abi import (
    compiled,
    free,
    larger,
    malloc,
    named,
    smaller,
    store_f32,
    store_i32,
)
from pallas_kernels.ffi.records import record, record_at
from pallas_kernels.ffi.vectors import LANES
from pallas_kernels.paged_attention.cpu_call import (
    BLOCK,
    LINE,
    SPLIT,
    VECTOR_BYTES,
    call_at,
    element_bytes,
    fill_floats,
    int_at,
    load_float,
    query_place,
    row_bounds,
    tile_splits,
)
from pallas_kernels.paged_attention.cpu_pages import PageFormat, make_gather
from pallas_kernels.paged_attention.cpu_panels import (
    PANEL,
    PANEL_BYTES,
    PANEL_VECTORS,
    add_values,
    cap_column,
    make_scores,
    mask_column,
    scale_column,
    soften_column,
)
from pallas_kernels.paged_attention.cpu_parts import (
    add_part,
    clear_part,
    finish_part,
    part_bytes,
    shrink_sums,
    start_whole,
    write_output,
)

TILE_ROWS = 6 * PANEL
#: One tile: where it belongs (room: its rows, rounded up to panels), and addresses of its floats:
#: queries [panel, width, PANEL], factors [room], lows and highs [room] (int32), weights
#: [BLOCK, PANEL], its part and what was merged so far, the block's keys and values [BLOCK, width]
#: and their scales [2, BLOCK].
TILE = record(
    "sequence head first_row rows room queries factors lows highs weights part whole k v scales"
)
TILE_BYTES = TILE.itemsize
tile_at = record_at(TILE)


@compiled
def _make_tile(context: int, sequence: int, head: int, first_row: int, rows: int) -> int:
    """Address of a new tile record with room for its floats; 0 without memory. To be freed."""
    call = call_at(context)
    room = (rows + PANEL - 1) // PANEL * PANEL
    part_size = part_bytes(context, room)
    block_bytes = 4 * BLOCK * call.width
    memory = malloc(
        TILE_BYTES
        + LINE
        + 4 * room * (call.width + 3)
        + BLOCK * (PANEL_BYTES + 8)
        + 2 * part_size
        + 2 * block_bytes
    )
    if memory == 0:
        return 0
    tile = tile_at(memory)
    tile.sequence, tile.head, tile.first_row = sequence, head, first_row
    tile.rows, tile.room = rows, room
    tile.queries = (memory + TILE_BYTES + LINE - 1) // LINE * LINE
    tile.k = tile.queries + 4 * room * call.width
    tile.v = tile.k + block_bytes
    tile.weights = tile.v + block_bytes
    tile.scales = tile.weights + BLOCK * PANEL_BYTES
    tile.part = tile.scales + 8 * BLOCK
    tile.whole = tile.part + part_size
    tile.factors = tile.whole + part_size
    tile.lows = tile.factors + 4 * room
    tile.highs = tile.lows + 4 * room
    if call.width != call.H:  # what is beyond the head stays zero
        fill_floats(tile.k, 2 * BLOCK * call.width, np.float32(0))
    return memory  # type: ignore[no-any-return]


@compiled
def _fill_tile(context: int, work: int) -> None:
    """Copies the queries, multiplied and transposed, and notes what each row may see.

    Lanes beyond the rows hold zeros; what is computed in them is never read.
    """
    call = call_at(context)
    tile = tile_at(work)
    fill_floats(tile.queries, tile.room * call.width, np.float32(0))
    for lane in range(tile.room):
        row = tile.first_row + smaller(lane, tile.rows - 1)
        low, high = row_bounds(context, tile.sequence, row)
        store_i32(tile.lows + 4 * lane, np.int32(low))
        store_i32(tile.highs + 4 * lane, np.int32(high))
    for lane in range(tile.rows):
        at = query_place(context, tile.sequence, tile.head, tile.first_row + lane)
        source = call.q + element_bytes(call.q_bf16) * at * call.H
        out = tile.queries + 4 * (lane // PANEL * PANEL * call.width + lane % PANEL)
        for d in range(call.H):
            value = call.multiplier * load_float(source, d, call.q_bf16)
            store_f32(out + d * PANEL_BYTES, value)


@compiled
def _soften_panel(context: int, work: int, panel: int, first: int, count: int) -> None:
    """Scores of `count` positions from `first` on become weights, for the panel at row `panel`."""
    call = call_at(context)
    tile = tile_at(work)
    last = smaller(panel + PANEL, tile.rows) - 1
    scores = tile.weights + first % BLOCK * PANEL_BYTES
    all_seen = first >= int_at(tile.lows, last) and first + count - 1 <= int_at(tile.highs, panel)
    for column in range(PANEL_VECTORS):
        place, lane = scores + column * VECTOR_BYTES, 4 * (panel + column * LANES)
        if call.capped != 0:
            stride: Any = np.int64(PANEL_BYTES)
            cap_column(place, stride, count, call.soft_cap)
        if not all_seen:
            mask_column(place, count, np.int32(first), tile.lows + lane, tile.highs + lane)
        total = tile.part + 4 * tile.room + lane
        soften_column(place, count, tile.part + lane, total, tile.factors + lane)


def make_attend_tile(pages: PageFormat) -> Callable[[int, int, int, int, int, int], None]:
    """Compiled `attend_tile(context, sequence, head, first_row, rows, split)`.

    split: which of its splits are worked on, counted from the first that the rows read; -1 for
    all, where the sequence has several tiles.
    """
    gather, scaled = make_gather(pages), pages.limit > 0

    def fold_panel(context: int, work: int, panel: int, first: int, end: int) -> None:
        call = call_at(context)
        tile = tile_at(work)
        last = smaller(panel + PANEL, tile.rows) - 1
        if first > int_at(tile.highs, last) or end <= int_at(tile.lows, panel):
            return  # no row sees any of it
        base = first // BLOCK * BLOCK
        slot = (first - base) // LANES * LANES
        count = (end - base + LANES - 1) // LANES * LANES - slot
        queries = tile.queries + 4 * panel * call.width
        scores = tile.weights + slot * PANEL_BYTES
        make_scores(tile.k + 4 * slot * call.width, count, queries, call.width, scores)
        if scaled:
            for column in range(PANEL_VECTORS):
                scale_column(scores + column * VECTOR_BYTES, count, tile.scales + 4 * slot)
        _soften_panel(context, work, panel, base + slot, count)
        slot = first - base
        weights = tile.weights + slot * PANEL_BYTES
        if scaled:
            for column in range(PANEL_VECTORS):
                place = weights + column * VECTOR_BYTES
                scale_column(place, end - first, tile.scales + 4 * (BLOCK + slot))
        rows = last + 1 - panel
        sums = tile.part + 4 * (2 * tile.room + panel * call.width)
        shrink_sums(context, rows, sums, tile.factors + 4 * panel)
        add_values(weights, tile.v + 4 * slot * call.width, end - first, rows, call.width, sums)

    fold_panel = compiled(named(fold_panel, f"fold_panel_{pages.name}"))

    def fold_split(context: int, work: int, split: int) -> None:
        tile = tile_at(work)
        low, _ = row_bounds(context, tile.sequence, tile.first_row)
        _, high = row_bounds(context, tile.sequence, tile.first_row + tile.rows - 1)
        begin, limit = larger(low, split * SPLIT), smaller(high + 1, (split + 1) * SPLIT)
        clear_part(context, tile.room, tile.part)
        for block in range(begin // BLOCK, (limit + BLOCK - 1) // BLOCK):
            first, end = larger(begin, block * BLOCK), smaller(limit, (block + 1) * BLOCK)
            scales_apart: Any = np.int64(4 * BLOCK)
            gather(
                context,
                tile.sequence,
                tile.head,
                first,
                end,
                first % BLOCK,
                tile.k,
                tile.v,
                tile.scales,
                scales_apart,
            )
            for panel in range(0, tile.rows, PANEL):
                fold_panel(context, work, panel, first, end)

    fold_split = compiled(named(fold_split, f"fold_split_{pages.name}"))

    def attend_tile(
        context: int, sequence: int, head: int, first_row: int, rows: int, split: int
    ) -> None:
        call = call_at(context)
        work = _make_tile(context, sequence, head, first_row, rows)
        if work == 0:
            call.failed = 2
            return
        tile = tile_at(work)
        _fill_tile(context, work)
        first_split, splits = tile_splits(context, sequence, first_row, rows)
        if split >= 0:
            fold_split(context, work, first_split + split)
            part, whole = tile.part, tile.whole
            finish_part(context, sequence, head, rows, tile.room, split, splits, part, whole)
        else:
            start_whole(context, head, first_row, rows, tile.room, tile.whole)
            for i in range(first_split, first_split + splits):
                fold_split(context, work, i)
                add_part(context, rows, tile.room, tile.whole, tile.part)
            write_output(context, sequence, head, first_row, rows, tile.room, tile.whole)
        free(work)

    return compiled(named(attend_tile, f"attend_tile_{pages.name}"))
