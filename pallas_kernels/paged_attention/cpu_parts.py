"""Partial results of attention, their merging, and what is made of them at the end (step 6b, CPU).

A part is what some rows saw in one range of positions: floats tops [room], totals [room] and sums
[room, width], where room >= rows. Parts of a sequence are merged in the order of their ranges,
whichever thread made them.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import types

from pallas_kernels.ffi import vectors
from pallas_kernels.ffi.abi import compiled, load_f32, load_i64, store_f32
from pallas_kernels.ffi.pool import atomic_add
from pallas_kernels.ffi.vectors import LANES, Emitter, exp2, offset, procedure
from pallas_kernels.paged_attention.cpu_call import (
    EMPTY,
    LOG2_E,
    VECTOR_BYTES,
    call_at,
    copy_bytes,
    element_bytes,
    fill_floats,
    query_place,
    store_float,
)


@procedure(types.intp, types.intp, types.intp, types.float32)
def scale_floats(b: Any, source: Any, target: Any, count: Any, factor: Any) -> None:
    """target = factor * source, for `count` floats, a multiple of LANES."""
    e = Emitter(b, LANES)
    factors = e.splat(factor)
    with vectors.loop(b, b.udiv(count, vectors.int64(LANES))) as i:
        value = e.load(offset(b, source, i, VECTOR_BYTES))
        e.store(b.fmul(factors, value), offset(b, target, i, VECTOR_BYTES))


@procedure(types.intp, types.float32, types.intp, types.float32, types.intp)
def _blend_floats(b: Any, target: Any, keep: Any, source: Any, add: Any, count: Any) -> None:
    """target = keep * target + add * source, for `count` floats, a multiple of LANES."""
    e = Emitter(b, LANES)
    keeps, adds = e.splat(keep), e.splat(add)
    with vectors.loop(b, b.udiv(count, vectors.int64(LANES))) as i:
        place = offset(b, target, i, VECTOR_BYTES)
        kept = b.fmul(keeps, e.load(place))
        e.store(b.fadd(kept, b.fmul(adds, e.load(offset(b, source, i, VECTOR_BYTES)))), place)


@compiled
def part_bytes(context: int, room: int) -> Any:
    call = call_at(context)
    return 4 * room * (call.width + 2)


@compiled
def clear_part(context: int, room: int, part: int) -> None:
    """Nothing was seen yet."""
    call = call_at(context)
    fill_floats(part, room, np.float32(EMPTY))
    fill_floats(part + 4 * room, room * (call.width + 1), np.float32(0))


@compiled
def shrink_sums(context: int, rows: int, sums: int, factors: int) -> None:
    """sums[r] *= factors[r]."""
    call = call_at(context)
    for row in range(rows):
        factor = load_f32(factors + 4 * row)
        if factor != 1:
            place = sums + 4 * row * call.width
            scale_floats(place, place, call.width, factor)


@compiled
def start_whole(context: int, head: int, first_row: int, rows: int, room: int, whole: int) -> None:
    """Nothing was seen yet but the sinks: a logit per head that takes weight and adds no value."""
    call = call_at(context)
    clear_part(context, room, whole)
    if call.has_sinks != 0:
        for row in range(rows):
            sink = load_f32(call.sinks + 4 * (head * call.G + (first_row + row) % call.G))
            store_f32(whole + 4 * row, np.float32(LOG2_E) * sink)
            store_f32(whole + 4 * (room + row), np.float32(1))


@compiled
def add_part(context: int, rows: int, room: int, whole: int, part: int) -> None:
    """Merges a part into what was merged so far."""
    call = call_at(context)
    for row in range(rows):
        top_place, total_place = whole + 4 * row, whole + 4 * (room + row)
        old, new = load_f32(top_place), load_f32(part + 4 * row)
        top = new if new > old else old
        if new != new:
            top = new
        keep, add = exp2(old - top), exp2(new - top)
        store_f32(top_place, top)
        total = keep * load_f32(total_place) + add * load_f32(part + 4 * (room + row))
        store_f32(total_place, total)
        place = 4 * (2 * room + row * call.width)
        _blend_floats(whole + place, keep, part + place, add, call.width)


@compiled
def write_output(
    context: int, sequence: int, head: int, first_row: int, rows: int, room: int, whole: int
) -> None:
    """out = sums / totals, zeros where nothing was seen; lse = log of the totals at their tops."""
    call = call_at(context)
    for row in range(rows):
        at = query_place(context, sequence, head, first_row + row)
        top, total = load_f32(whole + 4 * row), load_f32(whole + 4 * (room + row))
        lse = np.float32(-np.inf)
        if total != 0:
            lse = np.float32(np.float64(top) / LOG2_E + math.log(np.float64(total)))
        store_f32(call.lse + 4 * at, lse)
        factor = np.float32(1) / (total if total != 0 else np.float32(1))
        target = call.out + element_bytes(call.q_bf16) * at * call.H
        source = whole + 4 * (2 * room + row * call.width)
        scale_floats(source, source, call.width, factor)
        if call.q_bf16 == 0:
            copy_bytes(source, target, 4 * call.H)
        else:
            for d in range(call.H):
                store_float(target, d, call.q_bf16, load_f32(source + 4 * d))


@compiled
def finish_part(
    context: int,
    sequence: int,
    head: int,
    rows: int,
    room: int,
    split: int,
    num_splits: int,
    part: int,
    whole: int,
) -> None:
    """Keeps the part of one of several splits; the last to come merges all, in their order.

    split counts from the first split that the sequence's rows read; whole: room for the merging.
    """
    call = call_at(context)
    first_row: Any = np.int64(0)
    if num_splits == 1:
        start_whole(context, head, first_row, rows, room, whole)
        add_part(context, rows, room, whole, part)
        write_output(context, sequence, head, first_row, rows, room, whole)
        return
    size = part_bytes(context, room)
    start = call.partials + 4 * load_i64(call.partial_starts + 8 * sequence)
    start += head * num_splits * size
    copy_bytes(part, start + split * size, size)
    if atomic_add(call.counters + 8 * (sequence * call.K + head), 1) != num_splits - 1:
        return
    start_whole(context, head, first_row, rows, room, whole)
    for i in range(num_splits):
        add_part(context, rows, room, whole, start + i * size)
    write_output(context, sequence, head, first_row, rows, room, whole)
