"""The inner loops for many query rows: panels of rows against a block of keys (step 6b, CPU).

A *panel* is up to 2 * LANES query rows of one KV head (row = query token, query head of the
group). Its scores stand transposed, [kv positions, panel width], so that every operation on them
is a plain vector operation over rows, and a row's arithmetic is the same whatever rows share its
panel. Sums are made in the orders that `cpu_rows` describes. Keys and values are floats; knows
nothing of pages or batches.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from pallas_kernels.ffi import vectors
from pallas_kernels.ffi.abi import I32, I64, compiled
from pallas_kernels.ffi.vectors import LANES, Emitter, offset, procedure, variable
from pallas_kernels.paged_attention.cpu_call import MASKED, VECTOR_BYTES

ADDRESS, SIZE = types.intp, types.intp
#: A panel's width in vectors. Tiles keep at most 8 sums in registers: 16 exist on AVX2, and with
#: more LLVM moves sums to memory and back in each round, which doubles the time.
PANEL_VECTORS = 2
PANEL = PANEL_VECTORS * LANES
PANEL_BYTES = PANEL_VECTORS * VECTOR_BYTES
#: Kv positions per tile of the score product; query rows and vectors per tile of the value product.
SCORE_ROWS = 4
VALUE_ROWS, VALUE_VECTORS = 4, 2


@procedure(ADDRESS, ADDRESS, SIZE, ADDRESS)
def _score_tile(b: Any, k: Any, q: Any, head_size: Any, out: Any) -> None:
    """out [SCORE_ROWS, PANEL] = k [SCORE_ROWS, H] . q [H, PANEL], one chain per lane of `cpu_rows`."""
    e = Emitter(b, LANES)
    number = SCORE_ROWS * PANEL_VECTORS
    chains = cgutils.alloca_once(b, ir.ArrayType(e.floats, LANES * number))
    chains = b.ptrtoint(chains, I64)
    sums = [[variable(e) for _ in range(PANEL_VECTORS)] for _ in range(SCORE_ROWS)]
    starts = [offset(b, k, row, b.mul(head_size, vectors.int64(4))) for row in range(SCORE_ROWS)]
    with vectors.loop(b, vectors.int64(LANES)) as lane:
        for row in sums:
            for total in row:
                b.store(e.constant(0.0), total)
        with vectors.loop(b, b.udiv(head_size, vectors.int64(LANES))) as chunk:
            d = b.add(b.mul(chunk, vectors.int64(LANES)), lane)
            place = offset(b, q, d, PANEL_BYTES)
            queries = [e.load(offset(b, place, i, VECTOR_BYTES)) for i in range(PANEL_VECTORS)]
            for start, row in zip(starts, sums, strict=True):
                key = e.splat_from(offset(b, start, d, 4))
                for query, total in zip(queries, row, strict=True):
                    b.store(e.muladd(key, query, b.load(total)), total)
        target = offset(b, chains, lane, number * VECTOR_BYTES)
        for i, total in enumerate(total for row in sums for total in row):
            e.store(b.load(total), offset(b, target, i, VECTOR_BYTES))
    with vectors.loop(b, vectors.int64(number)) as i:
        place = offset(b, chains, i, VECTOR_BYTES)
        parts = [e.load(offset(b, place, lane, number * VECTOR_BYTES)) for lane in range(LANES)]
        e.store(e.sum_tree(parts), offset(b, out, i, VECTOR_BYTES))


@compiled
def make_scores(k: int, count: int, q: int, head_size: int, out: int) -> None:
    """out [count, PANEL] = k [count, head_size] . q [head_size, PANEL]; count is a multiple of LANES."""
    for s in range(0, count, SCORE_ROWS):
        _score_tile(k + 4 * s * head_size, q, head_size, out + s * PANEL_BYTES)


@procedure(ADDRESS, ADDRESS, SIZE, SIZE, ADDRESS)
def _value_tile(b: Any, p: Any, v: Any, count: Any, head_size: Any, out: Any) -> None:
    """out[r, :] += sum over s of p[s, r] * v[s, :] for VALUE_ROWS rows, VALUE_VECTORS vectors."""
    e = Emitter(b, LANES)
    row_bytes = b.mul(head_size, vectors.int64(4))
    places = [
        [offset(b, offset(b, out, row, row_bytes), i, VECTOR_BYTES) for i in range(VALUE_VECTORS)]
        for row in range(VALUE_ROWS)
    ]
    sums = [[variable(e, e.load(place)) for place in row] for row in places]
    with vectors.loop(b, count) as s:
        v_row, p_row = offset(b, v, s, row_bytes), offset(b, p, s, PANEL_BYTES)
        values = [e.load(offset(b, v_row, i, VECTOR_BYTES)) for i in range(VALUE_VECTORS)]
        for i, row in enumerate(sums):
            weight = e.splat_from(offset(b, p_row, i, 4))
            for value, total in zip(values, row, strict=True):
                b.store(e.muladd(weight, value, b.load(total)), total)
    for row, totals in zip(places, sums, strict=True):
        for place, total in zip(row, totals, strict=True):
            e.store(b.load(total), place)


@compiled
def add_values(p: int, v: int, count: int, rows: int, head_size: int, out: int) -> None:
    """out [rows, head_size] += p [count, PANEL] transposed . v [count, head_size].

    Rows are rounded up to VALUE_ROWS: out has room for whole panels.
    """
    for row in range(0, rows, VALUE_ROWS):
        for d in range(0, head_size, VALUE_VECTORS * LANES):
            place = out + 4 * (row * head_size + d)
            _value_tile(p + 4 * row, v + 4 * d, count, head_size, place)


@procedure(ADDRESS, SIZE, SIZE, types.float32)
def cap_column(b: Any, scores: Any, stride: Any, count: Any, cap: Any) -> None:
    """x -> cap * tanh(z), where scores hold 2 * log2(e) * z; tanh(z) = 1 - 2 / (1 + e**(2 z))."""
    e = Emitter(b, LANES)
    one, two, limit = e.constant(1.0), e.constant(2.0), e.constant(60.0)
    capped = e.splat(cap)
    with vectors.loop(b, count) as s:
        place = offset(b, scores, s, stride)
        x = e.load(place)
        x = b.select(b.fcmp_ordered(">", x, limit), limit, x)
        ratio = b.fdiv(two, b.fadd(one, e.exp2(x)))
        e.store(b.fmul(capped, b.fsub(one, ratio)), place)


@procedure(ADDRESS, SIZE, types.int32, ADDRESS, ADDRESS)
def mask_column(b: Any, scores: Any, count: Any, first: Any, low: Any, high: Any) -> None:
    """Hides positions below low[row] and above high[row]; the first row of scores is `first`."""
    e = Emitter(b, LANES)
    lows, highs, masked = e.load_ints(low), e.load_ints(high), e.constant(MASKED)
    with vectors.loop(b, count) as s:
        place = offset(b, scores, s, PANEL_BYTES)
        position = e.splat(b.add(first, b.trunc(s, I32)))
        seen = b.and_(b.icmp_signed(">=", position, lows), b.icmp_signed("<=", position, highs))
        e.store(b.select(seen, e.load(place), masked), place)


@procedure(ADDRESS, SIZE, ADDRESS)
def scale_column(b: Any, scores: Any, count: Any, scales: Any) -> None:
    """Each of `count` rows of scores or weights is multiplied by its position's scale."""
    e = Emitter(b, LANES)
    with vectors.loop(b, count) as s:
        place, scale = offset(b, scores, s, PANEL_BYTES), e.splat_from(offset(b, scales, s, 4))
        e.store(b.fmul(e.load(place), scale), place)


@procedure(ADDRESS, SIZE, ADDRESS, ADDRESS, ADDRESS)
def soften_column(b: Any, scores: Any, count: Any, top: Any, total: Any, shrink: Any) -> None:
    """Scores become weights 2**(score - top); top and total are updated.

    count: a multiple of LANES. shrink: what sums made with the old top are to be multiplied by.
    """
    e = Emitter(b, LANES)
    old = e.load(top)
    highest, added = variable(e, old), [variable(e) for _ in range(LANES)]
    with vectors.loop(b, count) as s:
        score = e.load(offset(b, scores, s, PANEL_BYTES))
        b.store(e.maximum(b.load(highest), score), highest)
    new = b.load(highest)
    with vectors.loop(b, b.udiv(count, vectors.int64(LANES))) as group:
        start = offset(b, scores, group, LANES * PANEL_BYTES)
        for lane, chain in enumerate(added):
            place = offset(b, start, lane, PANEL_BYTES)
            weight = e.exp2(b.fsub(e.load(place), new))
            e.store(weight, place)
            b.store(b.fadd(b.load(chain), weight), chain)
    factor = e.exp2(b.fsub(old, new))
    sum_ = e.sum_tree([b.load(chain) for chain in added])
    e.store(e.muladd(e.load(total), factor, sum_), total)
    e.store(factor, shrink)
    e.store(new, top)
