"""Ragged paged attention for CPUs: an XLA handler in Numba (step 6b).

Operands  q [T, N, H], k and v [T, K, H] (float32 or bfloat16), block_tables [B, M],
          cu_q_lens [B + 1], kv_lens [B] (int32), sinks [N] or [0] (float32),
          pages k and v [P, K, page_size, H] (float32 or bfloat16)
Results   pages k and v (the same memory), out [T, N, H] in q's dtype
Attributes, sorted by name: scale, soft_cap (float64; 0: none), window (int64; 0: none)

The work: rows are written into their pages, then items of (sequence, tile of query rows, KV head,
splits of the KV range) are shared among XLA's threads. A tile's rows fold one block of BLOCK
positions after the other into a running softmax; every SPLIT positions start a new one, and these
partial results are merged in order. Blocks and splits stand at fixed positions of the sequence, so
a row's result, bit for bit, is a function of its query and of the keys and values before it: not
of the batch, the chunk it came in, or the threads.

No page is touched but those that the block tables name for the positions read; a position that no
row of the tile may see is not read. Must not know anything outside pallas_kernels.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from pallas_kernels.ffi import abi
from pallas_kernels.ffi.abi import (
    argument,
    attribute,
    compiled,
    data_of,
    dtype_of,
    free,
    larger,
    load_f32,
    load_f64,
    load_i64,
    make_error,
    malloc,
    must_run,
    result,
    size_of,
    smaller,
    store_f32,
    store_i32,
    store_i64,
    text,
)
from pallas_kernels.ffi.pool import atomic_add, make_parallel_for
from pallas_kernels.ffi.vectors import LANES, exp2
from pallas_kernels.paged_attention.cpu_call import (
    CALL_BYTES,
    TILE_BYTES,
    WRITE_ROWS,
    call_at,
    copy_floats,
    element_bytes,
    int_at,
    load_float,
    place_in_pages,
    store_float,
    tile_at,
    write_rows,
)
from pallas_kernels.paged_attention.cpu_tiles import (
    EMPTY,
    PANEL_VECTORS,
    VECTOR_BYTES,
    add_values,
    cap_column,
    make_scores,
    mask_column,
    soften_column,
)

BLOCK, SPLIT = 64, 512
PANEL = PANEL_VECTORS * LANES
TILE_ROWS = 6 * PANEL
LOG2_E = 1.4426950408889634
#: Below so many bytes read or written, waking other threads costs more than it saves.
SERIAL_BYTES = 64 * 1024
LINE = 64
S32, F32, BF16 = abi.S32, abi.F32, abi.BF16
INVALID_ARGUMENT, RESOURCE_EXHAUSTED = abi.INVALID_ARGUMENT, abi.RESOURCE_EXHAUSTED


@compiled
def gather_block(
    context: int, sequence: int, head: int, first: int, end: int, k: int, v: int
) -> None:
    """Copies positions first..end of k and v, as float32, to [end - first, H] each."""
    call = call_at(context)
    size = element_bytes(call.pages_bf16)
    position = first
    as_is: Any = np.int64(0)
    while position < end:
        count = smaller(end - position, call.page_size - position % call.page_size)
        place = size * place_in_pages(context, sequence, head, position)
        done = 4 * (position - first) * call.H
        copy_floats(call.pages_k + place, call.pages_bf16, k + done, as_is, count * call.H)
        copy_floats(call.pages_v + place, call.pages_bf16, v + done, as_is, count * call.H)
        position += count


@compiled
def scores_in_pages(
    context: int, sequence: int, head: int, first: int, end: int, queries: int, rows: int, out: int
) -> None:
    """`make_scores` for positions first..end, read in place; asks for their values ahead."""
    call = call_at(context)
    position, row_bytes = first, (rows + LANES - 1) // LANES * VECTOR_BYTES
    while position < end:
        count = smaller(end - position, call.page_size - position % call.page_size)
        place = 4 * place_in_pages(context, sequence, head, position)
        make_scores(
            call.pages_k + place,
            count,
            queries,
            call.H,
            rows,
            out + (position - first) * row_bytes,
            call.pages_v + place,
        )
        position += count


@compiled
def values_in_pages(
    context: int,
    sequence: int,
    head: int,
    first: int,
    end: int,
    limit: int,
    weights: int,
    width: int,
    rows: int,
    out: int,
) -> None:
    """`add_values` for positions first..end, read in place; asks for the next block's keys."""
    call = call_at(context)
    position, row_bytes = first, width * VECTOR_BYTES
    while position < end:
        count = smaller(end - position, call.page_size - position % call.page_size)
        values = call.pages_v + 4 * place_in_pages(context, sequence, head, position)
        ahead = values
        if position + BLOCK < limit:
            ahead = call.pages_k + 4 * place_in_pages(context, sequence, head, position + BLOCK)
        source = weights + (position - first) * row_bytes
        add_values(source, width * LANES, values, count, rows, call.H, out, ahead)
        position += count


@compiled
def row_bounds(context: int, sequence: int, row: int) -> Any:
    """First and last position that a row of a sequence's query rows may see."""
    call = call_at(context)
    start, end = int_at(call.cu_q_lens, sequence), int_at(call.cu_q_lens, sequence + 1)
    high = int_at(call.kv_lens, sequence) - (end - start) + row // call.G
    low = np.int64(0)
    if call.window > 0:
        low = larger(low, high - call.window + 1)
    return low, high


@compiled
def tile_splits(context: int, sequence: int, first_row: int, rows: int) -> Any:
    """First split that a tile reads, and how many."""
    low, _ = row_bounds(context, sequence, first_row)
    _, high = row_bounds(context, sequence, first_row + rows - 1)
    return low // SPLIT, high // SPLIT - low // SPLIT + 1


@compiled
def make_tile(context: int, sequence: int, head: int, first_row: int, rows: int) -> int:
    """Address of a new tile record with room for its floats; 0 without memory. To be freed."""
    call = call_at(context)
    panels = (rows + PANEL - 1) // PANEL
    lanes = panels * PANEL
    gathered = np.int64(1 if call.pages_bf16 != 0 or panels > 1 else 0)
    floats = lanes * call.H + 7 * lanes + 2 * rows * call.H + BLOCK * PANEL + 8 * LINE
    if gathered != 0:
        floats += 2 * BLOCK * call.H
    memory = malloc(TILE_BYTES + LINE + 4 * floats)
    if memory == 0:
        return 0
    tile = tile_at(memory)
    tile.sequence, tile.head, tile.first_row, tile.rows = sequence, head, first_row, rows
    tile.gathered = gathered
    place = (memory + TILE_BYTES + LINE - 1) // LINE * LINE
    tile.queries = place
    tile.weights = tile.queries + 4 * lanes * call.H
    tile.tops = tile.weights + 4 * BLOCK * PANEL
    tile.totals = tile.tops + 4 * lanes
    tile.shrinks = tile.totals + 4 * lanes
    tile.lows = tile.shrinks + 4 * lanes
    tile.highs = tile.lows + 4 * lanes
    tile.merged_tops = tile.highs + 4 * lanes
    tile.merged_totals = tile.merged_tops + 4 * lanes
    tile.sums = tile.merged_totals + 4 * lanes
    tile.merged_sums = tile.sums + 4 * rows * call.H
    tile.block_k = (tile.merged_sums + 4 * rows * call.H + LINE - 1) // LINE * LINE
    tile.block_v = tile.block_k + 4 * BLOCK * call.H
    return memory  # type: ignore[no-any-return]


@compiled
def fill_tile(context: int, work: int) -> None:
    """Copies the queries, multiplied and transposed, and notes what each row may see.

    Lanes beyond the rows hold zeros; what is computed in them is never read.
    """
    call = call_at(context)
    tile = tile_at(work)
    start = int_at(call.cu_q_lens, tile.sequence)
    for first in range(0, tile.rows, PANEL):
        count = smaller(PANEL, tile.rows - first)
        lanes = (count + LANES - 1) // LANES * LANES
        out = tile.queries + 4 * first * call.H
        for lane in range(lanes):
            row = tile.first_row + first + smaller(lane, count - 1)
            low, high = row_bounds(context, tile.sequence, row)
            store_i32(tile.lows + 4 * (first + lane), np.int32(low))
            store_i32(tile.highs + 4 * (first + lane), np.int32(high))
            query_row = (start + row // call.G) * call.N + tile.head * call.G + row % call.G
            source = call.q + element_bytes(call.q_bf16) * query_row * call.H
            factor = call.multiplier if lane < count else np.float32(0)
            for d in range(call.H):
                value = factor * load_float(source, d, call.q_bf16)
                store_f32(out + 4 * (d * lanes + lane), value)


@compiled
def start_merged(context: int, work: int) -> None:
    """Nothing was seen yet but the sinks: a logit per head that takes weight and adds no value."""
    call = call_at(context)
    tile = tile_at(work)
    for row in range(tile.rows):
        top, total = np.float32(EMPTY), np.float32(0)
        if call.has_sinks != 0:
            query_head = tile.head * call.G + (tile.first_row + row) % call.G
            top = np.float32(LOG2_E) * load_f32(call.sinks + 4 * query_head)
            total = np.float32(1)
        store_f32(tile.merged_tops + 4 * row, top)
        store_f32(tile.merged_totals + 4 * row, total)
    for i in range(tile.rows * call.H):
        store_f32(tile.merged_sums + 4 * i, np.float32(0))


@compiled
def merge(context: int, work: int, tops: int, totals: int, sums: int) -> None:
    """Adds the result of one split to the tile's merged result."""
    call = call_at(context)
    tile = tile_at(work)
    for row in range(tile.rows):
        old, new = load_f32(tile.merged_tops + 4 * row), load_f32(tops + 4 * row)
        top = new if new > old else old
        if new != new:
            top = new
        keep, add = exp2(old - top), exp2(new - top)
        total = keep * load_f32(tile.merged_totals + 4 * row) + add * load_f32(totals + 4 * row)
        store_f32(tile.merged_tops + 4 * row, top)
        store_f32(tile.merged_totals + 4 * row, total)
        source, target = sums + 4 * row * call.H, tile.merged_sums + 4 * row * call.H
        for d in range(call.H):
            value = keep * load_f32(target + 4 * d) + add * load_f32(source + 4 * d)
            store_f32(target + 4 * d, value)


@compiled
def write_output(context: int, work: int) -> None:
    """out = merged sums / merged totals, zeros where nothing was seen."""
    call = call_at(context)
    tile = tile_at(work)
    start = int_at(call.cu_q_lens, tile.sequence)
    for i in range(tile.rows):
        row = tile.first_row + i
        query_row = (start + row // call.G) * call.N + tile.head * call.G + row % call.G
        target = call.out + element_bytes(call.q_bf16) * query_row * call.H
        total = load_f32(tile.merged_totals + 4 * i)
        factor = np.float32(1) / (total if total != 0 else np.float32(1))
        source = tile.merged_sums + 4 * i * call.H
        for d in range(call.H):
            store_float(target, d, call.q_bf16, factor * load_f32(source + 4 * d))


@compiled
def fold_block(context: int, work: int, panel: int, first: int, end: int, limit: int) -> None:
    """Folds positions first..end of one block into the softmax of the panel at row `panel`."""
    call = call_at(context)
    tile = tile_at(work)
    count = smaller(PANEL, tile.rows - panel)
    width = (count + LANES - 1) // LANES
    row_bytes = width * VECTOR_BYTES
    if first > int_at(tile.highs, panel + count - 1) or end <= int_at(tile.lows, panel):
        return  # no row sees any of it
    queries = tile.queries + 4 * panel * call.H
    if tile.gathered != 0:
        make_scores(
            tile.block_k,
            end - first,
            queries,
            call.H,
            count,
            tile.weights,
            tile.block_v,
        )
    else:
        scores_in_pages(context, tile.sequence, tile.head, first, end, queries, count, tile.weights)
    all_seen = first >= int_at(tile.lows, panel + count - 1) and end - 1 <= int_at(
        tile.highs, panel
    )
    for column in range(width):
        place, lane = tile.weights + column * VECTOR_BYTES, 4 * (panel + column * LANES)
        if call.capped != 0:
            cap_column(place, row_bytes, end - first, call.soft_cap)
        if not all_seen:
            mask_column(
                place, row_bytes, end - first, np.int32(first), tile.lows + lane, tile.highs + lane
            )
        soften_column(
            place,
            row_bytes,
            end - first,
            tile.tops + lane,
            tile.totals + lane,
            tile.shrinks + lane,
        )
    sums = tile.sums + 4 * panel * call.H
    for row in range(count):
        shrink = load_f32(tile.shrinks + 4 * (panel + row))
        if shrink != 1:
            for i in range(row * call.H, (row + 1) * call.H):
                store_f32(sums + 4 * i, shrink * load_f32(sums + 4 * i))
    if tile.gathered != 0:
        add_values(
            tile.weights,
            width * LANES,
            tile.block_v,
            end - first,
            count,
            call.H,
            sums,
            tile.block_v,
        )
    else:
        values_in_pages(
            context,
            tile.sequence,
            tile.head,
            first,
            end,
            limit,
            tile.weights,
            width,
            count,
            sums,
        )


@compiled
def fold_split(context: int, work: int, split: int) -> None:
    """Attention of the tile's rows over the positions of one split: tops, totals and sums."""
    call = call_at(context)
    tile = tile_at(work)
    low, _ = row_bounds(context, tile.sequence, tile.first_row)
    _, high = row_bounds(context, tile.sequence, tile.first_row + tile.rows - 1)
    begin, limit = larger(low, split * SPLIT), smaller(high + 1, (split + 1) * SPLIT)
    lanes = (tile.rows + PANEL - 1) // PANEL * PANEL
    for lane in range(lanes):
        store_f32(tile.tops + 4 * lane, np.float32(EMPTY))
        store_f32(tile.totals + 4 * lane, np.float32(0))
    for i in range(tile.rows * call.H):
        store_f32(tile.sums + 4 * i, np.float32(0))
    for block in range(begin // BLOCK, (limit + BLOCK - 1) // BLOCK):
        first, end = larger(begin, block * BLOCK), smaller(limit, (block + 1) * BLOCK)
        if tile.gathered != 0:
            gather_block(context, tile.sequence, tile.head, first, end, tile.block_k, tile.block_v)
        for panel in range(0, tile.rows, PANEL):
            fold_block(context, work, panel, first, end, limit)


@compiled
def finish_splits(context: int, work: int, split: int, num_splits: int) -> None:
    """Keeps the result of one of several splits; the last to come merges all, in their order."""
    call = call_at(context)
    tile = tile_at(work)
    size = tile.rows * (call.H + 2)
    start = load_i64(call.partial_starts + 8 * tile.sequence) + tile.head * num_splits * size
    place = call.partials + 4 * (start + split * size)
    as_is: Any = np.int64(0)
    copy_floats(tile.tops, as_is, place, as_is, tile.rows)
    copy_floats(tile.totals, as_is, place + 4 * tile.rows, as_is, tile.rows)
    copy_floats(tile.sums, as_is, place + 8 * tile.rows, as_is, tile.rows * call.H)
    counter = call.counters + 8 * (tile.sequence * call.K + tile.head)
    if atomic_add(counter, 1) != num_splits - 1:
        return
    start_merged(context, work)
    for i in range(num_splits):
        place = call.partials + 4 * (start + i * size)
        merge(context, work, place, place + 4 * tile.rows, place + 8 * tile.rows)
    write_output(context, work)


@compiled
def last_start(starts: int, count: int, value: int) -> int:
    """Largest i < count with starts[i] <= value, for ascending 64-bit starts."""
    low, high = 0, count
    while high - low > 1:
        middle = (low + high) // 2
        if load_i64(starts + 8 * middle) <= value:
            low = middle
        else:
            high = middle
    return low


@compiled
def attend_item(context: int, item: int) -> None:
    """One KV head of one tile: all its splits, or one of them where the sequence has one tile."""
    call = call_at(context)
    sequence = last_start(call.item_starts, call.B, item)
    unit = item - load_i64(call.item_starts + 8 * sequence)
    head, unit = unit % call.K, unit // call.K
    start, end = int_at(call.cu_q_lens, sequence), int_at(call.cu_q_lens, sequence + 1)
    all_rows = (end - start) * call.G
    one_tile = all_rows <= TILE_ROWS
    first_row = 0 if one_tile else unit * TILE_ROWS
    rows = smaller(TILE_ROWS, all_rows - first_row)
    work = make_tile(context, sequence, head, first_row, rows)
    if work == 0:
        call.failed = 2
        return
    tile = tile_at(work)
    fill_tile(context, work)
    first_split, num_splits = tile_splits(context, sequence, first_row, rows)
    if one_tile and num_splits > 1:
        fold_split(context, work, first_split + unit)
        finish_splits(context, work, unit, num_splits)
    else:
        start_merged(context, work)
        for split in range(first_split, first_split + num_splits):
            fold_split(context, work, split)
            merge(context, work, tile.tops, tile.totals, tile.sums)
        write_output(context, work)
    free(work)


run_writes = make_parallel_for(write_rows, "paged_attention_write_rows")
run_items = make_parallel_for(attend_item, "paged_attention_attend_item")


@compiled
def plan_items(context: int) -> Any:
    """Fills item_starts and partial_starts.

    Returns the number of items, of partial floats and of KV bytes read, or -1 for all where the
    lengths contradict one another.
    """
    call = call_at(context)
    items, floats, read = np.int64(0), np.int64(0), np.int64(0)
    for sequence in range(call.B):
        store_i64(call.item_starts + 8 * sequence, items)
        store_i64(call.partial_starts + 8 * sequence, floats)
        start, end = int_at(call.cu_q_lens, sequence), int_at(call.cu_q_lens, sequence + 1)
        length = int_at(call.kv_lens, sequence)
        if start < 0 or end < start or end > call.T:
            return -1, -1, -1
        if end == start:
            continue
        if length < end - start or length > call.M * call.page_size:
            return -1, -1, -1
        rows = (end - start) * call.G
        if rows > TILE_ROWS:
            items += (rows + TILE_ROWS - 1) // TILE_ROWS * call.K
        else:
            first_row: Any = np.int64(0)
            _, splits = tile_splits(context, sequence, first_row, rows)
            items += splits * call.K
            if splits > 1:
                floats += splits * call.K * rows * (call.H + 2)
        read += (
            8 * call.K * call.H * smaller(length, splits * SPLIT if rows <= TILE_ROWS else length)
        )
    store_i64(call.item_starts + 8 * call.B, items)
    return items, floats, read


@compiled
def fill_call(frame: int, context: int) -> None:
    """Reads operands, results and attributes of a call frame."""
    call = call_at(context)
    q, k, v, pages = argument(frame, 0), argument(frame, 1), argument(frame, 2), argument(frame, 7)
    call.q, call.k, call.v = data_of(q), data_of(k), data_of(v)
    call.tables, call.cu_q_lens = data_of(argument(frame, 3)), data_of(argument(frame, 4))
    call.kv_lens, call.sinks = data_of(argument(frame, 5)), data_of(argument(frame, 6))
    call.pages_k, call.pages_v = data_of(result(frame, 0)), data_of(result(frame, 1))
    call.out = data_of(result(frame, 2))
    call.q_bf16 = np.int64(dtype_of(q) == BF16)
    call.k_bf16 = np.int64(dtype_of(k) == BF16)
    call.v_bf16 = np.int64(dtype_of(v) == BF16)
    call.pages_bf16 = np.int64(dtype_of(pages) == BF16)
    call.T, call.N, call.H = size_of(q, 0), size_of(q, 1), size_of(q, 2)
    call.P, call.K, call.page_size = size_of(pages, 0), size_of(pages, 1), size_of(pages, 2)
    call.B, call.M = size_of(argument(frame, 3), 0), size_of(argument(frame, 3), 1)
    call.G = call.N // call.K
    call.has_sinks = size_of(argument(frame, 6), 0)
    scale, cap = load_f64(attribute(frame, 0)), load_f64(attribute(frame, 1))
    call.window = load_i64(attribute(frame, 2))
    call.capped = np.int64(cap > 0)
    call.failed = 0
    if cap > 0:
        call.multiplier = np.float32(2 * LOG2_E * scale / cap)
        call.soft_cap = np.float32(LOG2_E * cap)
    else:
        call.multiplier = np.float32(LOG2_E * scale)
        call.soft_cap = np.float32(0)


@compiled
def clear_padding(context: int) -> None:
    """Zeros in the output rows that belong to no sequence."""
    call = call_at(context)
    used = int_at(call.cu_q_lens, call.B)
    size = call.N * call.H
    for i in range(used * size, call.T * size):
        store_float(call.out, i, call.q_bf16, np.float32(0))


@compiled
def run_call(frame: int, context: int) -> int:
    """Plans and runs a call whose record stands at `context`; returns an error or 0."""
    call = call_at(context)
    items, floats, read = plan_items(context)
    if items < 0:
        return make_error(
            frame, INVALID_ARGUMENT, text("paged_attention: cu_q_lens and kv_lens do not agree")
        )
    call.partials = malloc(4 * floats + LINE)
    if call.partials == 0:
        return make_error(
            frame, RESOURCE_EXHAUSTED, text("paged_attention: no memory for partial results")
        )
    for i in range(call.B * call.K):
        store_i64(call.counters + 8 * i, 0)
    blocks = (int_at(call.cu_q_lens, call.B) + WRITE_ROWS - 1) // WRITE_ROWS
    if 8 * call.T * call.K * call.H < 4 * SERIAL_BYTES:
        for i in range(blocks):
            write_rows(context, i)
    else:
        run_writes(frame, context, blocks)
    clear_padding(context)
    if read < SERIAL_BYTES:
        for i in range(items):
            attend_item(context, i)
    else:
        run_items(frame, context, items)
    free(call.partials)
    if call.failed == 1:
        return make_error(
            frame, INVALID_ARGUMENT, text("paged_attention: a block table names no page")
        )
    if call.failed == 2:
        return make_error(frame, RESOURCE_EXHAUSTED, text("paged_attention: no memory for a tile"))
    return 0


def handler(frame: int) -> int:
    """The XLA handler; compiled and kept by `ffi.targets`."""
    if not must_run(frame):
        return 0
    sequences, heads = size_of(argument(frame, 3), 0), size_of(argument(frame, 7), 1)
    context = malloc(CALL_BYTES + 8 * (2 * sequences + 1 + sequences * heads))
    if context == 0:
        return make_error(
            frame, RESOURCE_EXHAUSTED, text("paged_attention: no memory for the plan")
        )
    call = call_at(context)
    fill_call(frame, context)
    call.item_starts = context + CALL_BYTES
    call.partial_starts = call.item_starts + 8 * (sequences + 1)
    call.counters = call.partial_starts + 8 * sequences
    error = run_call(frame, context)
    free(context)
    return error
