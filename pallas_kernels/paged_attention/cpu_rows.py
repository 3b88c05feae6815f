"""The inner loops for few query rows: keys and values are read where they are (step 6b, CPU).

The rows of a decode are few: here the lanes of a score vector are LANES positions of one row, and
a token's numbers are read in the order in which they stand, which is what memory is fast at.
A score is the sum of LANES chains of multiply-adds over the head (lane i: dimensions i,
i + LANES, ..), joined as a tree; a sum of weights is LANES chains over positions, joined likewise;
a sum of values is one chain in ascending order. `cpu_panels`, which serves many rows, adds in the
same orders, so that a row's result is the same in both. Knows nothing of page tables.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types

from pallas_kernels.ffi import vectors
from pallas_kernels.ffi.abi import I32, compiled, larger, named, smaller
from pallas_kernels.ffi.vectors import LANES, Emitter, offset, procedure, variable
from pallas_kernels.paged_attention.cpu_call import (
    BLOCK,
    LINE,
    MASKED,
    VECTOR_BYTES,
    copy_bytes,
)
from pallas_kernels.paged_attention.cpu_pages import PageFormat, load_numbers

ADDRESS, SIZE = types.intp, types.intp
#: Rows that share one pass over the keys or values: sums must fit into 16 registers.
PASS_ROWS = 4
#: Positions whose products run side by side (AVX-512 has twice the registers), and vectors of a
#: value in one pass.
SIDE_BY_SIDE, VALUE_VECTORS = (4 if LANES == 16 else 2), 2
ROW_BYTES = 4 * BLOCK


def _make_score_tile(pages: PageFormat, rows: int) -> Any:
    """out[r, 0..LANES] = keys [LANES, H] . q[r], times the keys' scales where there are any.

    Asks meanwhile for as much memory from `ahead` on as the keys take.
    """
    lines = LANES * LANES * pages.bytes // LINE

    @procedure(ADDRESS, ADDRESS, SIZE, ADDRESS, ADDRESS, ADDRESS)
    def score_tile(
        b: Any, k: Any, q: Any, head_size: Any, scales: Any, out: Any, ahead: Any
    ) -> None:
        e = Emitter(b, LANES)
        chunks = b.udiv(head_size, vectors.int64(LANES))
        key_bytes = b.mul(head_size, vectors.int64(pages.bytes))
        queries = [offset(b, q, row, b.mul(head_size, vectors.int64(4))) for row in range(rows)]
        sums: list[list[Any]] = [[] for _ in range(rows)]
        asked = 0
        for first in range(0, LANES, SIDE_BY_SIDE):
            together = [[variable(e) for _ in range(SIDE_BY_SIDE)] for _ in range(rows)]
            starts = [offset(b, k, first + i, key_bytes) for i in range(SIDE_BY_SIDE)]
            upto = lines * (first + SIDE_BY_SIDE) // LANES
            with vectors.loop(b, chunks) as chunk:
                for line in range(asked, upto):
                    place = b.add(b.mul(chunks, vectors.int64(line)), chunk)
                    vectors.emit_prefetch(b, offset(b, ahead, place, LINE))
                keys = [
                    load_numbers(e, pages, offset(b, start, chunk, LANES * pages.bytes))
                    for start in starts
                ]
                for query, row in zip(queries, together, strict=True):
                    numbers = e.load(offset(b, query, chunk, VECTOR_BYTES))
                    for key, total in zip(keys, row, strict=True):
                        b.store(e.muladd(key, numbers, b.load(total)), total)
            asked = upto
            for row, total in zip(sums, together, strict=True):
                row += total
        for i, row in enumerate(sums):
            scores = e.sum_each([b.load(total) for total in row])
            if pages.limit > 0:
                scores = b.fmul(scores, e.load(scales))
            e.store(scores, offset(b, out, i, ROW_BYTES))

    return score_tile


def make_row_scores(pages: PageFormat) -> Any:
    """Compiled `scores(k, low, high, rows, q, head_size, scales, out, spare, ahead)`.

    out[r, i] for i in low..high, rounded outwards to LANES, = q[r] . k[i]; rows BLOCK floats
    apart. k: the place of position 0 in a pool, scales: of its scale, ahead: what is to be fetched
    meanwhile. spare: room for LANES keys, through which positions outside low..high stay unread.
    """
    tile_1, tile_2, tile_3, tile_4 = (_make_score_tile(pages, rows + 1) for rows in range(4))
    size = pages.bytes

    def scores(
        k: int,
        low: int,
        high: int,
        rows: int,
        q: int,
        head_size: int,
        scales: int,
        out: int,
        spare: int,
        ahead: int,
    ) -> None:
        key_bytes = size * head_size
        for group in range(low // LANES * LANES, high, LANES):
            keys = k + group * key_bytes
            if group < low or group + LANES > high:
                first, end = larger(group, low), smaller(group + LANES, high)
                place = spare + (first - group) * key_bytes
                copy_bytes(k + first * key_bytes, place, (end - first) * key_bytes)
                keys = spare
            row = 0
            fetch, scale = ahead + group * key_bytes, scales + 4 * group
            while row < rows:
                query, target = q + 4 * row * head_size, out + row * ROW_BYTES + 4 * group
                left = rows - row
                if left == 1:
                    tile_1(keys, query, head_size, scale, target, fetch)
                elif left == 2:
                    tile_2(keys, query, head_size, scale, target, fetch)
                elif left == 3:
                    tile_3(keys, query, head_size, scale, target, fetch)
                else:
                    tile_4(keys, query, head_size, scale, target, fetch)
                row += PASS_ROWS

    return compiled(named(scores, f"row_scores_{pages.name}"))


def _make_value_tile(pages: PageFormat, rows: int) -> Any:
    """out[r, 0..width] += sum over s of p[r, s] * v[s, 0..width], for VALUE_VECTORS vectors.

    Asks meanwhile for as much memory from `ahead` on as the values take.
    """
    width, size = VALUE_VECTORS, pages.bytes
    lines = max(1, width * LANES * size // LINE)

    @procedure(ADDRESS, ADDRESS, SIZE, SIZE, ADDRESS, ADDRESS)
    def value_tile(
        b: Any, p: Any, v: Any, head_size: Any, count: Any, out: Any, ahead: Any
    ) -> None:
        e = Emitter(b, LANES)
        out_bytes, value_bytes = (b.mul(head_size, vectors.int64(n)) for n in (4, size))
        places = [
            [offset(b, offset(b, out, row, out_bytes), i, VECTOR_BYTES) for i in range(width)]
            for row in range(rows)
        ]
        weights = [offset(b, p, row, ROW_BYTES) for row in range(rows)]
        sums = [[variable(e, e.load(place)) for place in row] for row in places]
        with vectors.loop(b, count) as s:
            start = offset(b, v, s, value_bytes)
            for line in range(lines):
                place = b.add(offset(b, ahead, s, value_bytes), vectors.int64(line * LINE))
                vectors.emit_prefetch(b, place)
            values = [
                load_numbers(e, pages, offset(b, start, i, LANES * size)) for i in range(width)
            ]
            for row, totals in zip(weights, sums, strict=True):
                weight = e.splat_from(offset(b, row, s, 4))
                for value, total in zip(values, totals, strict=True):
                    b.store(e.muladd(weight, value, b.load(total)), total)
        for row, totals in zip(places, sums, strict=True):
            for place, total in zip(row, totals, strict=True):
                e.store(b.load(total), place)

    return value_tile


def make_row_values(pages: PageFormat) -> Any:
    """Compiled `values(p, v, count, rows, head_size, out, ahead)`.

    out [rows, head_size] += p [rows, count] . v [count, head_size]; rows of p BLOCK floats apart.
    ahead: what is to be fetched meanwhile.
    """
    tile_1, tile_2, tile_3, tile_4 = (_make_value_tile(pages, rows + 1) for rows in range(4))
    size, width = pages.bytes, VALUE_VECTORS * LANES

    def values(p: int, v: int, count: int, rows: int, head_size: int, out: int, ahead: int) -> None:
        row = 0
        while row < rows:
            weights, sums, left = p + row * ROW_BYTES, out + 4 * row * head_size, rows - row
            for d in range(0, head_size, width):
                value, total, fetch = v + size * d, sums + 4 * d, ahead + size * d
                if left == 1:
                    tile_1(weights, value, head_size, count, total, fetch)
                elif left == 2:
                    tile_2(weights, value, head_size, count, total, fetch)
                elif left == 3:
                    tile_3(weights, value, head_size, count, total, fetch)
                else:
                    tile_4(weights, value, head_size, count, total, fetch)
            row += PASS_ROWS

    return compiled(named(values, f"row_values_{pages.name}"))


@procedure(ADDRESS, SIZE, types.int32, types.int32, types.int32)
def mask_row(b: Any, scores: Any, count: Any, first: Any, low: Any, high: Any) -> None:
    """Hides positions below low and above high; scores are `count` vectors from `first` on."""
    e = Emitter(b, LANES)
    kind = ir.VectorType(I32, LANES)
    lanes = b.add(e.splat(first), ir.Constant(kind, list(range(LANES))))
    lows, highs, masked = e.splat(low), e.splat(high), e.constant(MASKED)
    with vectors.loop(b, count) as i:
        place = offset(b, scores, i, VECTOR_BYTES)
        position = b.add(lanes, e.splat(b.mul(b.trunc(i, I32), I32(LANES))))
        seen = b.and_(b.icmp_signed(">=", position, lows), b.icmp_signed("<=", position, highs))
        e.store(b.select(seen, e.load(place), masked), place)


@procedure(ADDRESS, SIZE, ADDRESS, ADDRESS, ADDRESS)
def soften_row(b: Any, scores: Any, count: Any, top: Any, total: Any, shrink: Any) -> None:
    """`count` vectors of scores become weights 2**(score - top); top and total are updated.

    shrink: what sums made with the old top are to be multiplied by.
    """
    e, one = Emitter(b, LANES), Emitter(b, 1)
    old = one.load(top)
    highest, added = variable(e, e.splat(old)), variable(e)
    with vectors.loop(b, count) as i:
        score = e.load(offset(b, scores, i, VECTOR_BYTES))
        b.store(e.maximum(b.load(highest), score), highest)
    new = e.max_lanes(b.load(highest))
    with vectors.loop(b, count) as i:
        place = offset(b, scores, i, VECTOR_BYTES)
        weight = e.exp2(b.fsub(e.load(place), new))
        e.store(weight, place)
        b.store(b.fadd(b.load(added), weight), added)
    lane = ir.Constant(I32, 0)
    new, sum_ = (b.extract_element(x, lane) for x in (new, e.sum_lanes(b.load(added))))
    factor = one.exp2(b.fsub(old, new))
    one.store(one.muladd(one.load(total), factor, sum_), total)
    one.store(factor, shrink)
    one.store(new, top)


@procedure(ADDRESS, SIZE, ADDRESS)
def scale_row(b: Any, weights: Any, count: Any, scales: Any) -> None:
    """Weights of `count` positions are multiplied by their values' scales."""
    one = Emitter(b, 1)
    with vectors.loop(b, count) as i:
        place = offset(b, weights, i, 4)
        one.store(b.fmul(one.load(place), one.load(offset(b, scales, i, 4))), place)
