"""Rounding of a row of x to integers, as `quantize.round_integers` defines it (step 6).

Knows vectors of 8 floats; counts are multiples of 8.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from pallas_kernels.ffi.abi import FLOAT, I16, I32
from pallas_kernels.ffi.vectors import Emitter, int64, loop, offset, procedure
from pallas_kernels.quantized_matmul.cpu_dots import NIBBLE_ORDER, ints

ADDRESS, SIZE = types.intp, types.intp
LANES = 8
INTS = ints(LANES)
_VECTOR_BYTES = 4 * LANES
#: Adding 1.5 * 2**23 rounds to an integer, ties to even, that stands in the low bits.
_ROUND = 12582912.0
_ROUND_BITS = 0x4B400000


def _variable(b: Any, kind: Any) -> Any:
    place = cgutils.alloca_once(b, kind)
    b.store(ir.Constant(kind, None), place)
    return place


def _lanes(b: Any, vector: Any) -> list[Any]:
    return [b.extract_element(vector, ir.Constant(I32, i)) for i in range(LANES)]


def _over_lanes(b: Any, vector: Any, join: Callable[[Any, Any], Any]) -> Any:
    """All lanes joined, halves first; for operations whose order changes nothing."""
    step = LANES // 2
    while step:
        order = ir.Constant(INTS, [lane ^ step for lane in range(LANES)])
        vector = join(vector, b.shuffle_vector(vector, ir.Constant(INTS, ir.Undefined), order))
        step //= 2
    return b.extract_element(vector, ir.Constant(I32, 0))


def _larger(b: Any, x: Any, y: Any) -> Any:
    return b.select(b.icmp_signed(">", x, y), x, y)


@procedure(ADDRESS, SIZE, ADDRESS)
def largest_bits(b: Any, x: Any, vectors: Any, out: Any) -> None:
    """Bits of the largest |x| of 8 * vectors floats to an int32; NaN is larger than infinity."""
    e = Emitter(b, LANES)
    top = _variable(b, INTS)
    with loop(b, vectors) as i:
        bits = e.load_ints(offset(b, x, i, _VECTOR_BYTES))
        bits = b.and_(bits, e.int_constant(0x7FFFFFFF))
        b.store(_larger(b, bits, b.load(top)), top)
    largest = _over_lanes(b, b.load(top), lambda x, y: _larger(b, x, y))
    b.store(largest, b.inttoptr(out, I32.as_pointer()))


def make_round(nibble_order: bool, row_group: int) -> Any:
    """out int16 = round(x * factor) of 8 * vectors floats, and their sum to an int32.

    Pairs are written row_group pairs apart. nibble_order: columns of 8 in `NIBBLE_ORDER`.
    """
    pairs = LANES // 2

    @procedure(ADDRESS, SIZE, types.float32, ADDRESS, ADDRESS)
    def round_unit(b: Any, x: Any, vectors: Any, factor: Any, out: Any, total: Any) -> None:
        e = Emitter(b, LANES)
        sums, factors = _variable(b, INTS), e.splat(factor)
        with loop(b, vectors) as i:
            product = b.fmul(e.load(offset(b, x, i, _VECTOR_BYTES)), factors)
            bits = b.bitcast(b.fadd(product, e.constant(_ROUND)), INTS)
            whole = b.sub(bits, e.int_constant(_ROUND_BITS))
            b.store(b.add(b.load(sums), whole), sums)
            if nibble_order:
                order = ir.Constant(INTS, list(NIBBLE_ORDER))
                whole = b.shuffle_vector(whole, ir.Constant(INTS, ir.Undefined), order)
            narrow = b.trunc(whole, ir.VectorType(I16, LANES))
            both = b.bitcast(narrow, ir.VectorType(I32, pairs))
            for pair in range(pairs):
                place = b.add(offset(b, out, i, 4 * pairs * row_group), int64(4 * pair * row_group))
                value = b.extract_element(both, ir.Constant(I32, pair))
                b.store(value, b.inttoptr(place, I32.as_pointer())).align = 4
        b.store(_over_lanes(b, b.load(sums), b.add), b.inttoptr(total, I32.as_pointer()))

    return round_unit


@procedure(ADDRESS, SIZE, ADDRESS)
def sum_unit(b: Any, x: Any, vectors: Any, out: Any) -> None:
    """Minus the sum of 8 * vectors floats, always in the same order."""
    e = Emitter(b, LANES)
    sums = _variable(b, e.floats)
    with loop(b, vectors) as i:
        b.store(b.fadd(b.load(sums), e.load(offset(b, x, i, _VECTOR_BYTES))), sums)
    first, *others = _lanes(b, b.load(sums))
    for value in others:
        first = b.fadd(first, value)
    first = b.fsub(ir.Constant(FLOAT, -0.0), first)
    b.store(first, b.inttoptr(out, FLOAT.as_pointer()))
