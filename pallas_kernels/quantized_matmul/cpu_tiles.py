"""The inner loops of quantised products on CPUs: a few rows of x times a panel of a weight (step 6).

A *panel* is PANEL rows of a weight, interleaved so that a vector holds 8 of them (see `cpu.pack`).
A *unit* is a run of columns that is summed up by itself, then scaled and added to the result:

    out[m, n] = out[m, n] + sum of the unit * (x_scales[m, u] * scales[u, n])
                          + x_sums[m, u] * biases[u, n]                        (int4 only)

where biases are zero points times scales, and x_sums sums of x with their sign turned.

Sums of a unit are exact integers, or one chain of float32 multiply-adds over ascending k; units
follow one another. So a row's arithmetic is the same whatever rows share its tile, and nothing
depends on the tile's size except the speed. Knows nothing of blocks, threads or XLA.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from llvmlite import ir
from numba import types
from numba.core import cgutils

from pallas_kernels.ffi.abi import I32
from pallas_kernels.ffi.vectors import (
    Emitter,
    emit_prefetch,
    int64,
    loop,
    offset,
    procedure,
)
from pallas_kernels.quantized_matmul.cpu_dots import (
    INTS,
    LANES,
    WORDS,
    Dots,
    Instructions,
    byte_pairs,
    floats_of_bytes,
    floats_of_fp8,
    floats_of_nibbles,
    floats_of_scales,
    load_vector,
    nibble_pairs,
)

Format = Literal["int8", "int4", "fp8"]
#: What a tile of integers reads: a format, or what `make_unpack_pairs` made of it.
PairFormat = Literal["int8", "int4", "fp8", "int16"]

ADDRESS, SIZE = types.intp, types.intp
PANEL = 2 * LANES
HALVES = (0, 1)
#: Columns of a step: what one or two loads of a panel hold.
STEP_COLUMNS = {"int8": 2, "int4": 8, "fp8": 2, "int16": 2}
#: Bytes of a panel per step.
STEP_BYTES = {"int8": 2 * PANEL, "int4": 4 * PANEL, "fp8": 2 * PANEL, "int16": 4 * PANEL}
#: Tiles of so few rows wait for memory: they ask for what stands so many bytes ahead.
FEW_ROWS, BYTES_AHEAD = 2, 2048
VECTOR_BYTES, PANEL_BYTES = 4 * LANES, 4 * PANEL


class _Sums:
    """Variables of a tile, rows by vectors of outputs, kept in registers by the optimiser."""

    def __init__(self, builder: Any, rows: int, columns: int, kind: Any) -> None:
        self.builder, self.kind = builder, kind
        self.places = [
            [cgutils.alloca_once(builder, kind) for _ in range(columns)] for _ in range(rows)
        ]

    def clear(self) -> None:
        for row in self.places:
            for place in row:
                self.builder.store(ir.Constant(self.kind, None), place)

    def get(self, row: int, column: int) -> Any:
        return self.builder.load(self.places[row][column])

    def set(self, row: int, column: int, value: Any) -> None:
        self.builder.store(value, self.places[row][column])


def _at(b: Any, base: Any, index: Any, half: int) -> Any:
    """Address of a half of the index-th PANEL floats from base on."""
    return b.add(offset(b, base, index, PANEL_BYTES), int64(half * VECTOR_BYTES))


def _splat_pair(e: Emitter, address: Any) -> Any:
    """The two int16 at an address, eight times."""
    value = e.builder.load(e.builder.inttoptr(address, I32.as_pointer()))
    value.align = 4
    return e.builder.bitcast(e.splat(value), WORDS)


def _step_pairs(b: Any, weights: PairFormat, place: Any) -> Iterator[list[Any]]:
    """Pairs of columns of a step: for each, int16 [16] of both halves of the panel."""
    halves = [b.add(place, int64(half * STEP_BYTES[weights] // 2)) for half in HALVES]
    if weights == "int16":
        yield [load_vector(b, address, WORDS) for address in halves]
    elif weights == "int8":
        yield [byte_pairs(b, address) for address in halves]
    else:
        for first, second in zip(*(nibble_pairs(b, address) for address in halves), strict=True):
            yield [first, second]


def make_integers_tile(
    rows: int, weights: PairFormat, has_biases: bool, instructions: Instructions
) -> Any:
    """Adds int16 x times a panel of integers to out; `steps` steps make a unit.

    x: [rows, K] int16, for int4 in `NIBBLE_ORDER` within 8; x_scales and x_sums: float32
    [rows, units]; scales and biases: float32 [units, PANEL]; out: float32 [rows, PANEL]. Strides
    are those of rows, in bytes. x_sums and biases are used where has_biases.
    """

    @procedure(*[ADDRESS] * 12)
    def integers_tile(
        b: Any,
        x: Any,
        x_stride: Any,
        w: Any,
        units: Any,
        steps: Any,
        x_scales: Any,
        x_sums: Any,
        x_scales_stride: Any,
        scales: Any,
        biases: Any,
        out: Any,
        out_stride: Any,
    ) -> None:
        e, dots = Emitter(b, LANES), Dots(b, instructions)
        inputs = [offset(b, x, row, x_stride) for row in range(rows)]
        sums = _Sums(b, rows, len(HALVES), INTS)
        with loop(b, units) as unit:
            sums.clear()
            first = b.mul(unit, steps)
            with loop(b, steps) as i:
                step = b.add(first, i)
                place = offset(b, w, step, STEP_BYTES[weights])
                if rows <= FEW_ROWS:
                    emit_prefetch(b, b.add(place, int64(BYTES_AHEAD)))
                for number, halves in enumerate(_step_pairs(b, weights, place)):
                    moved = offset(b, int64(4 * number), step, 2 * STEP_COLUMNS[weights])
                    for row in range(rows):
                        pair = _splat_pair(e, b.add(inputs[row], moved))
                        for half in HALVES:
                            total = dots.pairs(sums.get(row, half), pair, halves[half])
                            sums.set(row, half, total)
            for row in range(rows):
                moved = offset(b, offset(b, int64(0), row, x_scales_stride), unit, 4)
                x_scale = e.splat_from(b.add(x_scales, moved))
                for half in HALVES:
                    value = b.sitofp(sums.get(row, half), e.floats)
                    factor = b.fmul(e.load(_at(b, scales, unit, half)), x_scale)
                    target = _at(b, offset(b, out, row, out_stride), 0, half)
                    total = e.muladd(value, factor, e.load(target))
                    if has_biases:
                        x_sum = e.splat_from(b.add(x_sums, moved))
                        total = e.muladd(x_sum, e.load(_at(b, biases, unit, half)), total)
                    e.store(total, target)

    return integers_tile


def make_floats_tile(rows: int, panels: int, weights: Format) -> Any:
    """Adds float32 x times `panels` panels, unpacked to [K, PANEL] each, to out.

    `size` columns make a unit. x: [rows, K]; x_sums: [rows, units], int4 only; panels stand
    w_stride, their scales and biases scales_stride bytes apart, their outputs side by side.
    """

    @procedure(*[ADDRESS] * 13)
    def floats_tile(
        b: Any,
        x: Any,
        x_stride: Any,
        w: Any,
        w_stride: Any,
        units: Any,
        size: Any,
        x_sums: Any,
        x_sums_stride: Any,
        scales: Any,
        biases: Any,
        scales_stride: Any,
        out: Any,
        out_stride: Any,
    ) -> None:
        e = Emitter(b, LANES)
        columns = [(panel, half) for panel in range(panels) for half in HALVES]
        inputs = [offset(b, x, row, x_stride) for row in range(rows)]
        starts = [offset(b, w, panel, w_stride) for panel in range(panels)]
        sums = _Sums(b, rows, len(columns), e.floats)
        with loop(b, units) as unit:
            sums.clear()
            first = b.mul(unit, size)
            with loop(b, size) as i:
                k = b.add(first, i)
                values = [e.load(_at(b, starts[panel], k, half)) for panel, half in columns]
                for row in range(rows):
                    value = e.splat_from(offset(b, inputs[row], k, 4))
                    for j, weight in enumerate(values):
                        sums.set(row, j, e.muladd(value, weight, sums.get(row, j)))
            for row in range(rows):
                place = offset(b, offset(b, x_sums, row, x_sums_stride), unit, 4)
                x_sum = e.splat_from(place) if weights == "int4" else None
                for j, (panel, half) in enumerate(columns):
                    moved = offset(b, _at(b, int64(0), unit, half), panel, scales_stride)
                    target = _at(b, offset(b, out, row, out_stride), panel, half)
                    scale = e.load(b.add(scales, moved))
                    total = e.muladd(sums.get(row, j), scale, e.load(target))
                    if x_sum is not None:
                        total = e.muladd(x_sum, e.load(b.add(biases, moved)), total)
                    e.store(total, target)

    return floats_tile


def make_unpack_pairs(weights: Format) -> Any:
    """Writes `steps` steps of a panel of integers as int16 [columns / 2, 2, 8, 2], pair by pair."""
    pairs = STEP_COLUMNS[weights] // 2

    @procedure(ADDRESS, SIZE, ADDRESS)
    def unpack_pairs(b: Any, w: Any, steps: Any, out: Any) -> None:
        with loop(b, steps) as step:
            place = offset(b, w, step, STEP_BYTES[weights])
            target = offset(b, out, step, pairs * STEP_BYTES["int16"])
            for number, halves in enumerate(_step_pairs(b, weights, place)):
                for half in HALVES:
                    moved = int64(number * STEP_BYTES["int16"] + half * 4 * LANES)
                    address = b.inttoptr(b.add(target, moved), WORDS.as_pointer())
                    b.store(halves[half], address).align = 4

    return unpack_pairs


def make_unpack(weights: Format) -> Any:
    """Writes `steps` steps of a panel as float32 [columns, PANEL]."""
    floats_of = {"int8": floats_of_bytes, "int4": floats_of_nibbles, "fp8": floats_of_fp8}[weights]

    @procedure(ADDRESS, SIZE, ADDRESS)
    def unpack(b: Any, w: Any, steps: Any, out: Any) -> None:
        e = Emitter(b, LANES)
        with loop(b, steps) as step:
            place = offset(b, w, step, STEP_BYTES[weights])
            first = b.mul(step, int64(STEP_COLUMNS[weights]))
            for half in HALVES:
                address = b.add(place, int64(half * STEP_BYTES[weights] // 2))
                for column, vector in enumerate(floats_of(e, address)):
                    e.store(vector, _at(b, out, b.add(first, int64(column)), half))

    return unpack


@procedure(ADDRESS, SIZE)
def clear(b: Any, out: Any, groups: Any) -> None:
    """Zeros in `groups` times PANEL floats."""
    e = Emitter(b, LANES)
    with loop(b, groups) as i:
        for half in HALVES:
            e.store(e.constant(0.0), _at(b, out, i, half))


@procedure(ADDRESS, SIZE, SIZE, ADDRESS, SIZE)
def copy_rows(b: Any, source: Any, rows: Any, groups: Any, out: Any, out_stride: Any) -> None:
    """[rows, groups * PANEL] floats that stand together to rows out_stride bytes apart."""
    e = Emitter(b, LANES)
    with loop(b, rows) as row, loop(b, groups) as group:
        start = offset(b, source, b.add(b.mul(row, groups), group), PANEL_BYTES)
        target = offset(b, out, row, out_stride)
        for half in HALVES:
            e.store(e.load(_at(b, start, 0, half)), _at(b, target, group, half))


def make_expand(dtype: str, instructions: Instructions, *, biases: bool, repeats: bool) -> Any:
    """out [groups * repeat, PANEL] float32 from [groups, PANEL]: `repeat` units share a group.

    biases: source holds zero points, and zero point * scale is written; scales are there already.
    repeats: whether `repeat` is anything but 1.
    """
    size = 4 if dtype == "float32" else 2

    @procedure(ADDRESS, SIZE, SIZE, ADDRESS, ADDRESS)
    def expand(b: Any, source: Any, groups: Any, repeat: Any, scales: Any, out: Any) -> None:
        e = Emitter(b, LANES)
        with loop(b, groups) as group:
            first = b.mul(group, repeat) if repeats else group
            values = []
            for half in HALVES:
                place = offset(b, offset(b, source, group, size * PANEL), half, size * LANES)
                value = floats_of_scales(e, place, dtype, instructions)
                if biases:
                    value = b.fmul(value, e.load(_at(b, scales, first, half)))
                values.append(value)
            if not repeats:
                for half in HALVES:
                    e.store(values[half], _at(b, out, first, half))
            else:
                with loop(b, repeat) as i:
                    for half in HALVES:
                        e.store(values[half], _at(b, out, b.add(first, i), half))

    return expand


@procedure(ADDRESS, SIZE, types.float32, ADDRESS)
def biases_of_one(b: Any, scales: Any, units: Any, zero: Any, out: Any) -> None:
    """out [units, PANEL] = zero * scales [units, PANEL]."""
    e = Emitter(b, LANES)
    factor = e.splat(zero)
    with loop(b, units) as unit:
        for half in HALVES:
            e.store(b.fmul(factor, e.load(_at(b, scales, unit, half))), _at(b, out, unit, half))
