"""The inner loops of attention on CPUs: small tiles of products, and the softmax of a block.

Step 6b. A *panel* is up to 2 * LANES query rows of one KV head (row = query token, query head of
the group). Its scores stand transposed, [kv positions, panel width], so that every operation on
them is a plain vector operation over rows, and a row's arithmetic is the same whatever rows share
its panel: a key's product with a query is two chains of multiply-adds over the head's even and odd dimensions,
a sum over positions one chain in ascending order. Nothing here depends on the tile's size except
the speed. Knows nothing of pages or batches.
"""

from __future__ import annotations

from typing import Any

from numba import types
from numba.core import cgutils

from pallas_kernels.ffi import vectors
from pallas_kernels.ffi.abi import I32, compiled, named
from pallas_kernels.ffi.vectors import LANES, Emitter, offset, procedure

ADDRESS, SIZE = types.intp, types.intp
#: Running maximum before any score, and the score of a position that a row must not see. The
#: second is so much lower that its weight is exactly zero, also before any score was seen.
EMPTY, MASKED = -1e29, -1e30
VECTOR_BYTES = 4 * LANES
LINE = 64
#: A panel's width in vectors. Tiles keep at most 8 sums in registers: 16 exist on AVX2, and with
#: more LLVM moves sums to memory and back in each round, which doubles the time.
PANEL_VECTORS = 2
#: Kv positions per tile of the score product.
SCORE_ROWS = 4
#: Query rows per tile of the value product, and its width in vectors.
VALUE_VECTORS = {4: 2, 3: 2, 2: 4, 1: 4}


def _score_tile(rows: int, width: int) -> Any:
    """out[s, :] = sum over d of k[s, d] * q[d, :] for `rows` positions, `width` vectors.

    Even and odd d are summed up apart, then added: two chains hide the latency of one. Narrow
    panels run both at once, wide ones, with sums enough, one after the other. Asks, little by
    little, for as much memory from `ahead` on as the tile's rows of k take.
    """

    @procedure(ADDRESS, SIZE, ADDRESS, SIZE, ADDRESS, ADDRESS)
    def score_tile(
        b: Any, k: Any, k_stride: Any, q: Any, head_size: Any, out: Any, ahead: Any
    ) -> None:
        e = Emitter(b, LANES)
        even, odd = ([[_variable(e) for _ in range(width)] for _ in range(rows)] for _ in range(2))
        starts = [offset(b, k, row, k_stride) for row in range(rows)]
        half = b.lshr(head_size, vectors.int64(1))

        def add(sums: list[list[Any]], d: Any) -> None:
            q_row = offset(b, q, d, width * VECTOR_BYTES)
            query = [e.load(offset(b, q_row, i, VECTOR_BYTES)) for i in range(width)]
            for start, row in zip(starts, sums, strict=True):
                key = e.splat_from(offset(b, start, d, 4))
                for i in range(width):
                    b.store(e.muladd(key, query[i], b.load(row[i])), row[i])

        def second(i: Any) -> Any:
            return b.add(b.shl(i, vectors.int64(1)), vectors.int64(1))

        with vectors.loop(b, half) as i:
            vectors.emit_prefetch(b, offset(b, ahead, i, 8 * rows))
            add(even, b.shl(i, vectors.int64(1)))
            if width == 1:
                add(odd, second(i))
        with vectors.loop(b, b.and_(head_size, vectors.int64(1))):
            add(even, b.sub(head_size, vectors.int64(1)))
        if width > 1:
            with vectors.loop(b, half) as i:
                add(odd, second(i))
        for row in range(rows):
            for i in range(width):
                place = offset(b, out, row * width + i, VECTOR_BYTES)
                e.store(b.fadd(b.load(even[row][i]), b.load(odd[row][i])), place)

    return score_tile


def _few_rows_tile(rows: int) -> Any:
    """As a score tile of LANES positions and one vector, for panels of few rows.

    Here the lanes are positions, so that none is idle: keys are transposed in registers. Sums are
    made in the same order as in the other tiles.
    """

    @procedure(ADDRESS, SIZE, ADDRESS, SIZE, ADDRESS, ADDRESS)
    def few_rows_tile(
        b: Any, k: Any, k_stride: Any, q: Any, head_size: Any, out: Any, ahead: Any
    ) -> None:
        e = Emitter(b, LANES)
        even, odd = ([_variable(e) for _ in range(rows)] for _ in range(2))
        starts = [offset(b, k, position, k_stride) for position in range(LANES)]

        def add(sums: list[Any], keys: Any, d: Any) -> None:
            q_row = offset(b, q, d, VECTOR_BYTES)
            for row in range(rows):
                query = e.splat_from(offset(b, q_row, row, 4))
                b.store(e.muladd(keys, query, b.load(sums[row])), sums[row])

        with vectors.loop(b, b.udiv(head_size, vectors.int64(LANES))) as chunk:
            for line in range(0, LANES * VECTOR_BYTES, LINE):
                start = offset(b, ahead, chunk, LANES * VECTOR_BYTES)
                vectors.emit_prefetch(b, offset(b, start, line, 1))
            keys = e.transpose([e.load(offset(b, start, chunk, VECTOR_BYTES)) for start in starts])
            for i in range(LANES):
                d = b.add(b.mul(chunk, vectors.int64(LANES)), vectors.int64(i))
                add(odd if i % 2 else even, keys[i], d)
        left = b.urem(head_size, vectors.int64(LANES))
        first = b.sub(head_size, left)
        with vectors.loop(b, b.lshr(left, vectors.int64(1))) as pair:
            d = b.add(first, b.shl(pair, vectors.int64(1)))
            for sums in (even, odd):
                add(sums, e.collect([offset(b, start, d, 4) for start in starts]), d)
                d = b.add(d, vectors.int64(1))
        with vectors.loop(b, b.and_(left, vectors.int64(1))):
            d = b.sub(head_size, vectors.int64(1))
            add(even, e.collect([offset(b, start, d, 4) for start in starts]), d)
        totals = [b.fadd(b.load(x), b.load(y)) for x, y in zip(even, odd, strict=True)]
        totals += [e.constant(0.0)] * (LANES - rows)
        for position, vector in enumerate(e.transpose(totals)):
            e.store(vector, offset(b, out, position, VECTOR_BYTES))

    return few_rows_tile


def _value_tile(rows: int, width: int, lanes: int) -> Any:
    """out[r, :] += sum over s of p[s, r] * v[s, :] for `rows` rows, `width` vectors of `lanes`.

    Asks, line after line, for as much memory from `ahead` on as it reads of v.
    """

    @procedure(ADDRESS, SIZE, ADDRESS, SIZE, SIZE, ADDRESS, SIZE, ADDRESS)
    def value_tile(
        b: Any,
        p: Any,
        p_stride: Any,
        v: Any,
        v_stride: Any,
        count: Any,
        out: Any,
        stride: Any,
        ahead: Any,
    ) -> None:
        e = Emitter(b, lanes)
        places = [
            [offset(b, offset(b, out, row, stride), i, 4 * lanes) for i in range(width)]
            for row in range(rows)
        ]
        sums = [[_variable(e, e.load(place)) for place in row] for row in places]
        with vectors.loop(b, count) as s:
            v_row = offset(b, v, s, v_stride)
            next_line = offset(b, ahead, s, 4 * width * lanes)
            for line in range(0, 4 * width * lanes, LINE):
                vectors.emit_prefetch(b, offset(b, next_line, line, 1))
            p_row = offset(b, p, s, p_stride)
            values = [e.load(offset(b, v_row, i, 4 * lanes)) for i in range(width)]
            for row in range(rows):
                weight = e.splat_from(offset(b, p_row, row, 4))
                for i in range(width):
                    b.store(e.muladd(weight, values[i], b.load(sums[row][i])), sums[row][i])
        for row in range(rows):
            for i in range(width):
                e.store(b.load(sums[row][i]), places[row][i])

    return value_tile


def _variable(e: Emitter, start: Any = None) -> Any:
    """A vector variable, kept in a register by the optimiser."""
    place = cgutils.alloca_once(e.builder, e.floats)
    e.builder.store(e.constant(0.0) if start is None else start, place)
    return place


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


@procedure(ADDRESS, SIZE, SIZE, types.int32, ADDRESS, ADDRESS)
def mask_column(
    b: Any, scores: Any, stride: Any, count: Any, first: Any, low: Any, high: Any
) -> None:
    """Hides positions below low[row] and above high[row]; the first row of scores is `first`."""
    e = Emitter(b, LANES)
    lows, highs, masked = e.load_ints(low), e.load_ints(high), e.constant(MASKED)
    with vectors.loop(b, count) as s:
        place = offset(b, scores, s, stride)
        position = e.splat(b.add(first, b.trunc(s, I32)))
        seen = b.and_(b.icmp_signed(">=", position, lows), b.icmp_signed("<=", position, highs))
        e.store(b.select(seen, e.load(place), masked), place)


@procedure(ADDRESS, SIZE, SIZE, ADDRESS, ADDRESS, ADDRESS)
def soften_column(
    b: Any, scores: Any, stride: Any, count: Any, top: Any, total: Any, shrink: Any
) -> None:
    """Scores become weights 2**(score - top); top and total are updated.

    shrink: what sums made with the old top are to be multiplied by.
    """
    e = Emitter(b, LANES)
    old = e.load(top)
    highest, added = _variable(e, old), _variable(e)
    with vectors.loop(b, count) as s:
        b.store(e.maximum(b.load(highest), e.load(offset(b, scores, s, stride))), highest)
    new = b.load(highest)
    with vectors.loop(b, count) as s:
        place = offset(b, scores, s, stride)
        weight = e.exp2(b.fsub(e.load(place), new))
        e.store(weight, place)
        b.store(b.fadd(b.load(added), weight), added)
    factor = e.exp2(b.fsub(old, new))
    e.store(e.muladd(e.load(total), factor, b.load(added)), total)
    e.store(factor, shrink)
    e.store(new, top)


def _single_scores(name: str, width: int) -> Any:
    """Compiled score tile of one position, shared by all that have a remainder."""
    tile = _score_tile(1, width)

    def single(k: int, q: int, head_size: int, out: int, ahead: int) -> None:
        tile(k, 4 * head_size, q, head_size, out, ahead)

    return compiled(named(single, f"scores_single_{name}"))


def _scores_of_panel(name: str, several: Any, positions: int, single: Any, width: int) -> Any:
    """Compiled function: out [count, width * LANES] = k [count, H] . q [H, width * LANES].

    several: a tile of that many positions; single: one of the remaining positions.
    """
    row_bytes = width * VECTOR_BYTES

    def scores(k: int, count: int, q: int, head_size: int, out: int, ahead: int) -> None:
        s = 0
        stride = 4 * head_size
        while s + positions <= count:
            place = s * stride
            several(k + place, stride, q, head_size, out + s * row_bytes, ahead + place)
            s += positions
        while s < count:
            place = s * stride
            single(k + place, q, head_size, out + s * row_bytes, ahead + place)
            s += 1

    return compiled(named(scores, f"scores_{name}"))


_single_wide, _single_narrow = _single_scores("wide", 2), _single_scores("narrow", 1)
_scores_wide = _scores_of_panel("wide", _score_tile(SCORE_ROWS, 2), SCORE_ROWS, _single_wide, 2)
_scores_narrow = _scores_of_panel(
    "narrow", _score_tile(SCORE_ROWS, 1), SCORE_ROWS, _single_narrow, 1
)
_scores_1, _scores_2, _scores_3, _scores_4 = (
    _scores_of_panel(f"of_{rows}", _few_rows_tile(rows), LANES, _single_narrow, 1)
    for rows in (1, 2, 3, 4)
)
_value_vector, _value_scalar = _value_tile(1, 1, LANES), _value_tile(1, 1, 1)


@compiled
def _last_values(
    p: int, v: int, count: int, head_size: int, first: int, out: int, lanes: int
) -> None:
    """The value product of one row from d = first on, which is less than a tile's width."""
    d, stride = first, 4 * head_size
    while d + LANES <= head_size:
        place = v + 4 * d
        _value_vector(p, 4 * lanes, place, stride, count, out + 4 * d, stride, place)
        d += LANES
    while d < head_size:
        place = v + 4 * d
        _value_scalar(p, 4 * lanes, place, stride, count, out + 4 * d, stride, place)
        d += 1


def _values_of_rows(rows: int) -> Any:
    """Compiled function: out [rows, H] += p [count, lanes] transposed . v [count, H]."""
    width = VALUE_VECTORS[rows] * LANES
    tile = _value_tile(rows, VALUE_VECTORS[rows], LANES)

    def values(
        p: int, lanes: int, v: int, count: int, head_size: int, out: int, ahead: int
    ) -> None:
        d, stride = 0, 4 * head_size
        while d + width <= head_size:
            next_lines = ahead + 4 * d * count
            tile(p, 4 * lanes, v + 4 * d, stride, count, out + 4 * d, stride, next_lines)
            d += width
        if d < head_size:
            for row in range(rows):
                _last_values(p + 4 * row, v, count, head_size, d, out + row * stride, lanes)

    return compiled(named(values, f"values_{rows}"))


_values_4, _values_3, _values_2, _values_1 = (_values_of_rows(rows) for rows in (4, 3, 2, 1))


@compiled
def make_scores(
    k: int, count: int, q: int, head_size: int, rows: int, out: int, ahead: int
) -> None:
    """out [count, lanes] = k [count, head_size] . q [head_size, lanes].

    lanes: rows, rounded up to LANES or 2 * LANES. Memory from `ahead` on, as much as k takes, is
    fetched into the cache meanwhile.
    """
    if rows > LANES:
        _scores_wide(k, count, q, head_size, out, ahead)
    elif rows > 4:
        _scores_narrow(k, count, q, head_size, out, ahead)
    elif rows == 4:
        _scores_4(k, count, q, head_size, out, ahead)
    elif rows == 3:
        _scores_3(k, count, q, head_size, out, ahead)
    elif rows == 2:
        _scores_2(k, count, q, head_size, out, ahead)
    else:
        _scores_1(k, count, q, head_size, out, ahead)


@compiled
def add_values(
    p: int, lanes: int, v: int, count: int, rows: int, head_size: int, out: int, ahead: int
) -> None:
    """out [rows, head_size] += p [count, lanes] transposed . v [count, head_size].

    Memory from `ahead` on, as much as v takes, is fetched into the cache meanwhile.
    """
    row_bytes = 4 * head_size
    r = 0
    while r + 4 <= rows:
        _values_4(p + 4 * r, lanes, v, count, head_size, out + r * row_bytes, ahead)
        ahead = v
        r += 4
    p, out, left = p + 4 * r, out + r * row_bytes, rows - r
    if left == 3:
        _values_3(p, lanes, v, count, head_size, out, ahead)
    elif left == 2:
        _values_2(p, lanes, v, count, head_size, out, ahead)
    elif left == 1:
        _values_1(p, lanes, v, count, head_size, out, ahead)
