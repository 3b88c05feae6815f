"""The inner loops of quantised products on CPUs: a few rows of x times a panel of a weight (step 6).

A *panel* is PANEL rows of a weight, interleaved so that a vector holds all or half of them (see
`cpu.pack`): its *parts*.
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
    as_it_is,
    emit_prefetch,
    int64,
    loop,
    offset,
    procedure,
)
from pallas_kernels.quantized_matmul.cpu_dots import (
    LANES,
    ROW_GROUP,
    Dots,
    Instructions,
    byte_pairs,
    floats_of_bytes,
    floats_of_fp8,
    floats_of_nibbles,
    floats_of_scales,
    ints,
    load_vector,
    nibble_pairs,
    words,
)

Format = Literal["int8", "int4", "fp8"]
#: What a tile of integers reads: a format, or what `make_unpack_pairs` made of it.
PairFormat = Literal["int8", "int4", "fp8", "int16"]

ADDRESS, SIZE = types.intp, types.intp
PANEL = 16
#: Columns of a step: what one or two loads of a panel hold.
STEP_COLUMNS = {"int8": 2, "int4": 8, "fp8": 2, "int16": 2}
#: Bytes of a panel per step.
STEP_BYTES = {"int8": 2 * PANEL, "int4": 4 * PANEL, "fp8": 2 * PANEL, "int16": 4 * PANEL}
#: What stands so many bytes ahead is asked for: reading then goes on while products are made.
BYTES_AHEAD = 4096
PANEL_BYTES, LINE = 4 * PANEL, 64


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

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return (
            (row, column) for row, places in enumerate(self.places) for column in range(len(places))
        )

    def get(self, row: int, column: int) -> Any:
        return self.builder.load(self.places[row][column])

    def set(self, row: int, column: int, value: Any) -> None:
        self.builder.store(value, self.places[row][column])


def _parts(e: Emitter) -> range:
    """Numbers of the vectors that a panel is made of."""
    return range(PANEL // e.lanes)


def _at(e: Emitter, base: Any, index: Any, part: int) -> Any:
    """Address of a part of the index-th PANEL floats from base on."""
    return e.builder.add(offset(e.builder, base, index, PANEL_BYTES), int64(4 * part * e.lanes))


def _splat_pair(e: Emitter, address: Any) -> Any:
    """The two int16 at an address, for every lane."""
    value = e.builder.load(e.builder.inttoptr(address, I32.as_pointer()))
    value.align = 4
    return e.builder.bitcast(e.splat(value), words(e.lanes))


def _step_pairs(e: Emitter, weights: PairFormat, place: Any) -> Iterator[list[Any]]:
    """Pairs of columns of a step: for each, int16 [lanes, 2] of the panel's parts."""
    b, lanes = e.builder, e.lanes
    size = STEP_BYTES[weights] * lanes // PANEL
    parts = [b.add(place, int64(part * size)) for part in _parts(e)]
    if weights == "int16":
        yield [load_vector(b, address, words(lanes)) for address in parts]
    elif weights == "int8":
        yield [byte_pairs(b, address, lanes) for address in parts]
    else:
        for pairs in zip(*(nibble_pairs(b, address, lanes) for address in parts), strict=True):
            yield list(pairs)


def make_integers_tile(
    rows: int, weights: PairFormat, has_biases: bool, instructions: Instructions
) -> Any:
    """Adds int16 x times a panel of integers to out; `steps` steps make a unit.

    x: [groups, K / 2, ROW_GROUP, 2] int16, for int4 in `NIBBLE_ORDER` within 8 columns; x_scales
    and x_sums: float32 [groups, units, ROW_GROUP]; scales and biases: float32 [units, PANEL]; out:
    float32 [rows, PANEL]. x_stride and x_scales_stride are those of groups of rows, in bytes.
    x_sums and biases are used where has_biases.
    """
    row_group = ROW_GROUP[instructions]
    # 32 registers hold sums of a unit and of all units; with 16 the latter stand in memory.
    keeps_totals = instructions == "avx512"

    @procedure(*[ADDRESS] * 11)
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
    ) -> None:
        e, dots = Emitter(b, LANES[instructions]), Dots(b, instructions)
        places = [divmod(row, row_group) for row in range(rows)]
        groups = range(places[-1][0] + 1)
        sums = _Sums(b, rows, len(_parts(e)), ints(e.lanes))
        totals = _Sums(b, rows, len(_parts(e)), e.floats) if keeps_totals else None
        if totals is not None:
            for row, part in totals:
                totals.set(row, part, e.load(_at(e, out, row, part)))
        with loop(b, units) as unit:
            sums.clear()
            first = b.mul(unit, steps)
            with loop(b, steps) as i:
                step = b.add(first, i)
                place = offset(b, w, step, STEP_BYTES[weights])
                if weights != "int16":
                    emit_prefetch(b, b.add(place, int64(BYTES_AHEAD)))
                here = offset(b, x, step, 2 * row_group * STEP_COLUMNS[weights])
                starts = [as_it_is(b, offset(b, here, group, x_stride)) for group in groups]
                for number, parts in enumerate(_step_pairs(e, weights, place)):
                    for row, (group, place) in enumerate(places):
                        moved = int64(4 * (number * row_group + place))
                        pair = _splat_pair(e, b.add(starts[group], moved))
                        for part, values in enumerate(parts):
                            total = dots.pairs(sums.get(row, part), pair, values)
                            sums.set(row, part, total)
            unit_scales = [e.load(_at(e, scales, unit, part)) for part in _parts(e)]
            if has_biases:
                unit_biases = [e.load(_at(e, biases, unit, part)) for part in _parts(e)]
            for row, part in sums:
                group, place = places[row]
                moved = offset(b, int64(4 * place), unit, 4 * row_group)
                moved = offset(b, moved, group, x_scales_stride)
                value = b.sitofp(sums.get(row, part), e.floats)
                factor = b.fmul(unit_scales[part], e.splat_from(b.add(x_scales, moved)))
                target = _at(e, out, row, part)
                total = e.load(target) if totals is None else totals.get(row, part)
                total = e.muladd(value, factor, total)
                if has_biases:
                    x_sum = e.splat_from(b.add(x_sums, moved))
                    total = e.muladd(x_sum, unit_biases[part], total)
                if totals is None:
                    e.store(total, target)
                else:
                    totals.set(row, part, total)
        if totals is not None:
            for row, part in totals:
                e.store(totals.get(row, part), _at(e, out, row, part))

    return integers_tile


def make_floats_tile(rows: int, panels: int, weights: Format, instructions: Instructions) -> Any:
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
        e = Emitter(b, LANES[instructions])
        columns = [(panel, part) for panel in range(panels) for part in _parts(e)]
        inputs = [offset(b, x, row, x_stride) for row in range(rows)]
        starts = [offset(b, w, panel, w_stride) for panel in range(panels)]
        sums = _Sums(b, rows, len(columns), e.floats)
        with loop(b, units) as unit:
            sums.clear()
            first = b.mul(unit, size)
            with loop(b, size) as i:
                k = b.add(first, i)
                values = [e.load(_at(e, starts[panel], k, part)) for panel, part in columns]
                for row in range(rows):
                    value = e.splat_from(offset(b, inputs[row], k, 4))
                    for j, weight in enumerate(values):
                        sums.set(row, j, e.muladd(value, weight, sums.get(row, j)))
            for row in range(rows):
                place = offset(b, offset(b, x_sums, row, x_sums_stride), unit, 4)
                x_sum = e.splat_from(place) if weights == "int4" else None
                for j, (panel, part) in enumerate(columns):
                    moved = offset(b, _at(e, int64(0), unit, part), panel, scales_stride)
                    target = _at(e, offset(b, out, row, out_stride), panel, part)
                    scale = e.load(b.add(scales, moved))
                    total = e.muladd(sums.get(row, j), scale, e.load(target))
                    if x_sum is not None:
                        total = e.muladd(x_sum, e.load(b.add(biases, moved)), total)
                    e.store(total, target)

    return floats_tile


def make_unpack_pairs(weights: Format, instructions: Instructions) -> Any:
    """Writes `steps` steps of a panel of integers as int16 [columns / 2, PANEL, 2]."""
    pairs = STEP_COLUMNS[weights] // 2

    @procedure(ADDRESS, SIZE, ADDRESS)
    def unpack_pairs(b: Any, w: Any, steps: Any, out: Any) -> None:
        e = Emitter(b, LANES[instructions])
        with loop(b, steps) as step:
            place = offset(b, w, step, STEP_BYTES[weights])
            emit_prefetch(b, b.add(place, int64(BYTES_AHEAD)))
            target = offset(b, out, step, pairs * STEP_BYTES["int16"])
            for number, parts in enumerate(_step_pairs(e, weights, place)):
                for part, values in enumerate(parts):
                    moved = int64(number * STEP_BYTES["int16"] + part * 4 * e.lanes)
                    address = b.inttoptr(b.add(target, moved), words(e.lanes).as_pointer())
                    b.store(values, address).align = 4

    return unpack_pairs


def make_unpack(weights: Format, instructions: Instructions) -> Any:
    """Writes `steps` steps of a panel as float32 [columns, PANEL]."""
    floats_of = {"int8": floats_of_bytes, "int4": floats_of_nibbles, "fp8": floats_of_fp8}[weights]

    @procedure(ADDRESS, SIZE, ADDRESS)
    def unpack(b: Any, w: Any, steps: Any, out: Any) -> None:
        e = Emitter(b, LANES[instructions])
        size = STEP_BYTES[weights] * e.lanes // PANEL
        with loop(b, steps) as step:
            place = offset(b, w, step, STEP_BYTES[weights])
            first = b.mul(step, int64(STEP_COLUMNS[weights]))
            for part in _parts(e):
                address = b.add(place, int64(part * size))
                for column, vector in enumerate(floats_of(e, address)):
                    e.store(vector, _at(e, out, b.add(first, int64(column)), part))

    return unpack


@procedure(ADDRESS, SIZE)
def ask_for(b: Any, address: Any, size: Any) -> None:
    """Asks for `size` bytes that will be read soon."""
    with loop(b, b.udiv(b.add(size, int64(LINE - 1)), int64(LINE))) as i:
        emit_prefetch(b, offset(b, address, i, LINE))


@procedure(ADDRESS, SIZE)
def clear(b: Any, out: Any, groups: Any) -> None:
    """Zeros in `groups` times PANEL floats."""
    e = Emitter(b, PANEL)
    with loop(b, groups) as i:
        e.store(e.constant(0.0), _at(e, out, i, 0))


@procedure(ADDRESS, SIZE, SIZE, ADDRESS, SIZE)
def copy_rows(b: Any, source: Any, rows: Any, groups: Any, out: Any, out_stride: Any) -> None:
    """[rows, groups * PANEL] floats that stand together to rows out_stride bytes apart."""
    e = Emitter(b, PANEL)
    with loop(b, rows) as row, loop(b, groups) as group:
        start = _at(e, source, b.add(b.mul(row, groups), group), 0)
        e.store(e.load(start), _at(e, offset(b, out, row, out_stride), group, 0))


def make_expand(dtype: str, instructions: Instructions, *, biases: bool, repeats: bool) -> Any:
    """out [groups * repeat, PANEL] float32 from [groups, PANEL]: `repeat` units share a group.

    biases: source holds zero points, and zero point * scale is written; scales are there already.
    repeats: whether `repeat` is anything but 1.
    """
    size = 4 if dtype == "float32" else 2

    @procedure(ADDRESS, SIZE, SIZE, ADDRESS, ADDRESS)
    def expand(b: Any, source: Any, groups: Any, repeat: Any, scales: Any, out: Any) -> None:
        e = Emitter(b, LANES[instructions])
        with loop(b, groups) as group:
            first = b.mul(group, repeat) if repeats else group
            values = []
            for part in _parts(e):
                place = offset(b, offset(b, source, group, size * PANEL), part, size * e.lanes)
                value = floats_of_scales(e, place, dtype, instructions)
                if biases:
                    value = b.fmul(value, e.load(_at(e, scales, first, part)))
                values.append(value)
            if not repeats:
                for part, value in enumerate(values):
                    e.store(value, _at(e, out, first, part))
            else:
                with loop(b, repeat) as i:
                    for part, value in enumerate(values):
                        e.store(value, _at(e, out, b.add(first, i), part))

    return expand


@procedure(ADDRESS, SIZE, types.float32, ADDRESS)
def biases_of_one(b: Any, scales: Any, units: Any, zero: Any, out: Any) -> None:
    """out [units, PANEL] = zero * scales [units, PANEL]."""
    e = Emitter(b, PANEL)
    factor = e.splat(zero)
    with loop(b, units) as unit:
        e.store(b.fmul(factor, e.load(_at(e, scales, unit, 0))), _at(e, out, unit, 0))
