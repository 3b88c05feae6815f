"""Attention of a sequence with few query rows, over pages where they are (step 6b, CPU).

One item is one split of the sequence's positions for one or several KV heads. Memory is read as it
stands: page after page, all heads of a page before the next, keys of a block and then its values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from pallas_kernels.ffi.abi import (
    compiled,
    free,
    larger,
    load_i64,
    malloc,
    merged,
    named,
    smaller,
    store_f32,
    store_i64,
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
    int_at,
    load_float,
    query_place,
    row_bounds,
    tile_splits,
    token_in_pages,
)
from pallas_kernels.paged_attention.cpu_pages import PageFormat
from pallas_kernels.paged_attention.cpu_panels import cap_column
from pallas_kernels.paged_attention.cpu_parts import (
    clear_part,
    finish_part,
    part_bytes,
    scale_floats,
    shrink_sums,
)
from pallas_kernels.paged_attention.cpu_rows import (
    ROW_BYTES,
    make_row_scores,
    make_row_values,
    mask_row,
    scale_row,
    soften_row,
)

#: Rows per KV head up to which a sequence is worked on here: a few guesses with their groups of
#: heads. More are better off where rows are lanes (`cpu_tile`), the sooner the narrower a vector.
FEW_ROWS = 48 if LANES == 16 else 24
#: One item: where it belongs (heads: KV heads from `head` on; part_size in bytes), and addresses
#: of its floats: queries [heads, rows, H], weights [heads, rows, BLOCK], one part per head, factors
#: [rows], runs of the block, and room for LANES keys and for merging.
ITEM = record(
    "sequence head heads rows begin limit queries weights parts part_size factors spare whole "
    "runs num_runs"
)
#: A run: positions of a block that lie in one page. The pool's token at which the page begins (of
#: the item's first head), the first place in the page, the end, the first slot in the block, and
#: the pool's token of what the next block has in that slot.
RUN_BYTES = 5 * 8
FACTOR_BYTES = -(-4 * FEW_ROWS // LINE) * LINE
RUNS_BYTES = (BLOCK // LANES + 1) * RUN_BYTES
ITEM_BYTES = ITEM.itemsize
item_at = record_at(ITEM)


@compiled
def _make_item(context: int, sequence: int, split: int, head: int, heads: int) -> int:
    """Address of a new item's record and floats, queries filled in; 0 without memory."""
    call = call_at(context)
    rows = (int_at(call.cu_q_lens, sequence + 1) - int_at(call.cu_q_lens, sequence)) * call.G
    part_size = part_bytes(context, rows)
    query_bytes, weight_bytes = 4 * heads * rows * call.H, heads * rows * ROW_BYTES
    spare_bytes = LANES * 4 * call.H
    memory = malloc(
        ITEM_BYTES
        + query_bytes
        + weight_bytes
        + (heads + 1) * part_size
        + spare_bytes
        + RUNS_BYTES
        + FACTOR_BYTES
        + 3 * LINE
    )
    if memory == 0:
        return 0
    item = item_at(memory)
    item.sequence, item.head, item.heads, item.rows = sequence, head, heads, rows
    first_row: Any = np.int64(0)
    low, _ = row_bounds(context, sequence, first_row)
    _, high = row_bounds(context, sequence, rows - 1)
    item.begin = larger(low, split * SPLIT)
    item.limit = smaller(high + 1, (split + 1) * SPLIT)
    item.queries = (memory + ITEM_BYTES + LINE - 1) // LINE * LINE
    item.weights = (item.queries + query_bytes + LINE - 1) // LINE * LINE
    item.spare = item.weights + weight_bytes
    item.factors = item.spare + spare_bytes
    item.runs = item.factors + FACTOR_BYTES
    item.parts = item.runs + RUNS_BYTES
    item.part_size = part_size
    item.whole = item.parts + heads * part_size
    for i in range(heads):
        clear_part(context, rows, item.parts + i * part_size)
        for row in range(rows):
            at = query_place(context, sequence, head + i, row)
            source = call.q + element_bytes(call.q_bf16) * at * call.H
            target = item.queries + 4 * (i * rows + row) * call.H
            if call.q_bf16 == 0:
                scale_floats(source, target, call.H, call.multiplier)
            else:
                for d in range(call.H):
                    value = call.multiplier * load_float(source, d, call.q_bf16)
                    store_f32(target + 4 * d, value)
    return memory  # type: ignore[no-any-return]


@compiled
def _find_runs(context: int, work: int, first: int, end: int) -> None:
    """Notes where positions first..end of a block lie in the pages of the item's first head."""
    call = call_at(context)
    item = item_at(work)
    place = item.runs
    slot, low = first % BLOCK, first % call.page_size
    count = end - first
    while count > 0:
        high = smaller(low + count, call.page_size)
        token = token_in_pages(context, item.sequence, item.head, first)
        following = token
        if first + BLOCK < item.limit:
            following = token_in_pages(context, item.sequence, item.head, first + BLOCK)
        store_i64(place, token - low)
        store_i64(place + 8, low)
        store_i64(place + 16, high)
        store_i64(place + 24, slot)
        store_i64(place + 32, following)
        place += RUN_BYTES
        count -= high - low
        first += high - low
        slot += high - low
        low = np.int64(0)
    item.num_runs = (place - item.runs) // RUN_BYTES


@compiled
def _soften_head(context: int, work: int, i: int, first: int, end: int) -> None:
    """Scores of positions first..end become weights, for all rows of the item's i-th head."""
    call = call_at(context)
    item = item_at(work)
    base, part = first // BLOCK * BLOCK, item.parts + i * item.part_size
    start = (first - base) // LANES
    count = (end - base + LANES - 1) // LANES - start
    first, end = base + start * LANES, base + (start + count) * LANES
    for row in range(item.rows):
        scores = item.weights + (i * item.rows + row) * ROW_BYTES + start * VECTOR_BYTES
        low, high = row_bounds(context, item.sequence, row)
        if call.capped != 0:
            stride: Any = np.int64(VECTOR_BYTES)
            cap_column(scores, stride, count, call.soft_cap)
        if low > first or high < end - 1:
            mask_row(scores, count, np.int32(first), np.int32(low), np.int32(high))
        total = part + 4 * (item.rows + row)
        soften_row(scores, count, part + 4 * row, total, item.factors + 4 * row)
    shrink_sums(context, item.rows, part + 8 * item.rows, item.factors)


def make_attend_few(pages: PageFormat) -> Callable[[int, int, int, int, int], None]:
    """Compiled `attend_few(context, sequence, split, head, heads)` for pages of a format.

    split: a number of a split of the sequence, from 0 at position 0.
    """
    row_scores, row_values = make_row_scores(pages), make_row_values(pages)
    size, scaled = pages.bytes, pages.limit > 0

    def score_block(context: int, work: int) -> None:
        call = call_at(context)
        item = item_at(work)
        for run in range(item.runs, item.runs + item.num_runs * RUN_BYTES, RUN_BYTES):
            low, high = load_i64(run + 8), load_i64(run + 16)
            # whole vectors: the page's positions from a multiple of LANES on
            skip = low % LANES
            token = load_i64(run) + low - skip
            target = item.weights + 4 * (load_i64(run + 24) - skip)
            for i in range(item.heads):
                row_scores(
                    call.pages_k + size * token * call.H,
                    skip,
                    skip + high - low,
                    item.rows,
                    item.queries + 4 * i * item.rows * call.H,
                    call.H,
                    call.scales_k + 4 * token,
                    target,
                    item.spare,
                    call.pages_v + size * token * call.H,
                )
                token += call.page_size
                target += item.rows * ROW_BYTES

    score_block = compiled(named(score_block, f"score_block_{pages.name}"))

    def value_block(context: int, work: int) -> None:
        call = call_at(context)
        item = item_at(work)
        for run in range(item.runs, item.runs + item.num_runs * RUN_BYTES, RUN_BYTES):
            low, high = load_i64(run + 8), load_i64(run + 16)
            token, following = load_i64(run) + low, load_i64(run + 32)
            weights = item.weights + 4 * load_i64(run + 24)
            sums = item.parts + 8 * item.rows
            for _ in range(item.heads):
                if scaled:
                    for row in range(item.rows):
                        scale_row(weights + row * ROW_BYTES, high - low, call.scales_v + 4 * token)
                values = call.pages_v + size * token * call.H
                ahead = call.pages_k + size * following * call.H
                row_values(weights, values, high - low, item.rows, call.H, sums, ahead)
                token += call.page_size
                following += call.page_size
                weights += item.rows * ROW_BYTES
                sums += item.part_size

    value_block = compiled(named(value_block, f"value_block_{pages.name}"))

    def attend_few(context: int, sequence: int, split: int, head: int, heads: int) -> None:
        call = call_at(context)
        work = _make_item(context, sequence, split, head, heads)
        if work == 0:
            call.failed = 2
            return
        item = item_at(work)
        for block in range(item.begin // BLOCK, (item.limit + BLOCK - 1) // BLOCK):
            first = larger(item.begin, block * BLOCK)
            end = smaller(item.limit, (block + 1) * BLOCK)
            _find_runs(context, work, first, end)
            score_block(context, work)
            for i in range(heads):
                _soften_head(context, work, i, first, end)
            value_block(context, work)
        first_row: Any = np.int64(0)
        first_split, splits = tile_splits(context, sequence, first_row, item.rows)
        for i in range(heads):
            finish_part(
                context,
                sequence,
                head + i,
                item.rows,
                item.rows,
                split - first_split,
                splits,
                item.parts + i * item.part_size,
                item.whole,
            )
        free(work)

    return merged(named(attend_few, f"attend_few_{pages.name}"))
