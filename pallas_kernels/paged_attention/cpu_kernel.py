"""Ragged paged attention for CPUs: XLA calls in Numba, for each format of pages (step 6b).

Operands  q [T, N, H], k and v [T, K, H] (float32 or bfloat16), block_tables [B, M],
          cu_q_lens [B + 1], kv_lens [B] (int32), sinks [N] or [0] (float32),
          pages k and v [P, K, page_size, H], and, for formats with scales, scales of k and v
          [P, K, page_size] (float32)
Results   pages k and v and their scales (the same memory), out [T, N, H] in q's dtype, lse [T, N]
Attributes, sorted by name: scale, soft_cap (float64; 0: none), window (int64; 0: none)

The work: rows are written into their pages, then items are shared among XLA's threads. A sequence
with few query rows (a decode) is cut into splits of SPLIT positions, with all KV heads in one item
where that leaves items enough (`cpu_few`); others into tiles of query rows (`cpu_tile`). Rows fold
one block of BLOCK positions after the other into a running softmax; every SPLIT positions start a
new one, and these partial results are merged in order (`cpu_parts`). Blocks and splits stand at
fixed positions of the sequence, so a row's result, bit for bit, is a function of its query and of
the keys and values before it: not of the batch, the chunk it came in, or the threads.

No page is touched but those that the block tables name for the positions read; a position that no
row of the tile may see is not read. Must not know anything outside pallas_kernels.
"""

from __future__ import annotations

from collections.abc import Callable
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
    load_f64,
    load_i64,
    make_error,
    malloc,
    merged,
    must_run,
    named,
    result,
    size_of,
    smaller,
    store_f32,
    store_i64,
    text,
)
from pallas_kernels.ffi.pool import make_parallel_for, num_threads
from pallas_kernels.ffi.vectors import LANES
from pallas_kernels.paged_attention.cpu_call import (
    CALL_BYTES,
    HEAD_STEP,
    LINE,
    LOG2_E,
    SPLIT,
    call_at,
    int_at,
    store_float,
    tile_splits,
)
from pallas_kernels.paged_attention.cpu_few import FEW_ROWS, make_attend_few
from pallas_kernels.paged_attention.cpu_pages import WRITE_ROWS, PageFormat, make_write_rows
from pallas_kernels.paged_attention.cpu_panels import PANEL
from pallas_kernels.paged_attention.cpu_tile import TILE_ROWS, make_attend_tile

#: Below so many bytes read or written, waking other threads costs more than it saves.
SERIAL_BYTES = 64 * 1024
#: Items per thread that should be left when one takes all KV heads of a split.
ITEMS_PER_THREAD = 6
BF16 = abi.BF16
INVALID_ARGUMENT, RESOURCE_EXHAUSTED = abi.INVALID_ARGUMENT, abi.RESOURCE_EXHAUSTED


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
def num_rows(context: int, sequence: int) -> Any:
    """Query rows per KV head of a sequence, and whether they are read in place."""
    call = call_at(context)
    rows = (int_at(call.cu_q_lens, sequence + 1) - int_at(call.cu_q_lens, sequence)) * call.G
    return rows, call.in_place != 0 and rows <= FEW_ROWS


def make_attend_item(pages: PageFormat) -> Callable[[int, int], None]:
    """Compiled `attend_item(context, item)`: what `plan_items` counted as one item."""
    attend_few, attend_tile = make_attend_few(pages), make_attend_tile(pages)

    def attend_item(context: int, item: int) -> None:
        call = call_at(context)
        sequence = last_start(call.item_starts, call.B, item)
        unit = item - load_i64(call.item_starts + 8 * sequence)
        rows, few = num_rows(context, sequence)
        first_row: Any = np.int64(0)
        if few:
            first_split, _ = tile_splits(context, sequence, first_row, rows)
            groups = call.K // call.heads
            head = unit % groups * call.heads
            attend_few(context, sequence, first_split + unit // groups, head, call.heads)
        elif rows <= TILE_ROWS:
            attend_tile(context, sequence, unit % call.K, first_row, rows, unit // call.K)
        else:
            first_row = unit // call.K * TILE_ROWS
            rows = smaller(TILE_ROWS, rows - first_row)
            all_splits: Any = np.int64(-1)
            attend_tile(context, sequence, unit % call.K, first_row, rows, all_splits)

    return merged(named(attend_item, f"attend_item_{pages.name}"))


@compiled
def plan_items(context: int, threads: int) -> Any:
    """Chooses `heads`, fills item_starts and partial_starts.

    Returns the number of items, of partial floats and of KV elements read, or -1 for all where
    the lengths contradict one another.
    """
    call = call_at(context)
    whole_items = np.int64(0)
    first_row: Any = np.int64(0)
    for sequence in range(call.B):
        start, end = int_at(call.cu_q_lens, sequence), int_at(call.cu_q_lens, sequence + 1)
        length = int_at(call.kv_lens, sequence)
        if start < 0 or end < start or end > call.T:
            return -1, -1, -1
        if end > start and (length < end - start or length > call.M * call.page_size):
            return -1, -1, -1
        rows, _ = num_rows(context, sequence)
        if end > start:
            _, splits = tile_splits(context, sequence, first_row, rows)
            whole_items += splits
    call.heads = call.K if whole_items >= ITEMS_PER_THREAD * threads else 1
    items, floats, read = np.int64(0), np.int64(0), np.int64(0)
    for sequence in range(call.B):
        store_i64(call.item_starts + 8 * sequence, items)
        store_i64(call.partial_starts + 8 * sequence, floats)
        rows, few = num_rows(context, sequence)
        if rows == 0:
            continue
        length = int_at(call.kv_lens, sequence)
        if rows > TILE_ROWS:
            items += (rows + TILE_ROWS - 1) // TILE_ROWS * call.K
        else:
            _, splits = tile_splits(context, sequence, first_row, rows)
            items += splits * (call.K // call.heads if few else call.K)
            if splits > 1:
                room = rows if few else (rows + PANEL - 1) // PANEL * PANEL
                floats += splits * call.K * room * (call.width + 2)
            length = smaller(length, splits * SPLIT)
        read += 2 * call.K * call.H * length
    store_i64(call.item_starts + 8 * call.B, items)
    return items, floats, read


@compiled
def clear_padding(context: int) -> None:
    """Zeros in the output rows that belong to no sequence, and -inf in their lse."""
    call = call_at(context)
    used = int_at(call.cu_q_lens, call.B)
    size = call.N * call.H
    for i in range(used * size, call.T * size):
        store_float(call.out, i, call.q_bf16, np.float32(0))
    for i in range(used * call.N, call.T * call.N):
        store_f32(call.lse + 4 * i, np.float32(-np.inf))


def make_fill_call(pages: PageFormat) -> Callable[[int, int], None]:
    """Compiled `fill_call(frame, context)`: reads operands, results and attributes."""
    leaves = 4 if pages.limit > 0 else 2

    def fill_call(frame: int, context: int) -> None:
        call = call_at(context)
        q, k, v, pool = argument(frame, 0), argument(frame, 1), argument(frame, 2), result(frame, 0)
        call.q, call.k, call.v = data_of(q), data_of(k), data_of(v)
        call.tables, call.cu_q_lens = data_of(argument(frame, 3)), data_of(argument(frame, 4))
        call.kv_lens, call.sinks = data_of(argument(frame, 5)), data_of(argument(frame, 6))
        call.pages_k, call.pages_v = data_of(pool), data_of(result(frame, 1))
        # Without scales these are addresses that nobody uses.
        call.scales_k = data_of(result(frame, leaves - 2))
        call.scales_v = data_of(result(frame, leaves - 1))
        call.out, call.lse = data_of(result(frame, leaves)), data_of(result(frame, leaves + 1))
        call.q_bf16 = np.int64(dtype_of(q) == BF16)
        call.k_bf16 = np.int64(dtype_of(k) == BF16)
        call.v_bf16 = np.int64(dtype_of(v) == BF16)
        call.T, call.N, call.H = size_of(q, 0), size_of(q, 1), size_of(q, 2)
        call.P, call.K, call.page_size = size_of(pool, 0), size_of(pool, 1), size_of(pool, 2)
        call.B, call.M = size_of(argument(frame, 3), 0), size_of(argument(frame, 3), 1)
        call.G = call.N // call.K
        call.width = (call.H + HEAD_STEP - 1) // HEAD_STEP * HEAD_STEP
        call.in_place = np.int64(call.width == call.H and call.page_size % LANES == 0)
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

    return compiled(named(fill_call, f"fill_call_{pages.name}"))


@compiled
def make_call_error(frame: int, failed: int) -> int:
    """What a call noted while it ran, as an XLA error; 0 for nothing."""
    if failed == 1:
        return make_error(
            frame, INVALID_ARGUMENT, text("paged_attention: a block table names no page")
        )
    if failed == 2:
        return make_error(frame, RESOURCE_EXHAUSTED, text("paged_attention: no memory for a tile"))
    return 0


def make_run_call(pages: PageFormat) -> Callable[[int, int], int]:
    """Compiled: plans and runs a call whose record stands at `context`; an error, or 0."""
    write_rows, attend_item = make_write_rows(pages), make_attend_item(pages)
    run_writes = make_parallel_for(write_rows, f"paged_attention_write_rows_{pages.name}")
    run_items = make_parallel_for(attend_item, f"paged_attention_attend_item_{pages.name}")
    size = pages.bytes

    def run_call(frame: int, context: int) -> int:
        call = call_at(context)
        items, floats, read = plan_items(context, num_threads(frame))
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
        written = 8 * call.T * call.K * call.H
        run_writes(frame if written >= 4 * SERIAL_BYTES else 0, context, blocks)
        clear_padding(context)
        run_items(frame if size * read >= SERIAL_BYTES else 0, context, items)
        free(call.partials)
        return make_call_error(frame, call.failed)

    return merged(named(run_call, f"run_call_{pages.name}"))


def make_body(pages: PageFormat) -> Callable[[int], int]:
    """What the XLA handler for pages of a format does; see `cpu_handlers`."""
    fill_call, run_call = make_fill_call(pages), make_run_call(pages)

    def body(frame: int) -> int:
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

    return merged(named(body, f"paged_attention_body_{pages.name}"))
