"""Products of small integers and numbers of small formats, as LLVM instructions (step 6).

A lane of a vector belongs to a row of a weight: 16 rows with AVX-512, else 8. `Dots.pairs`
multiplies int16 and adds neighbours, exactly. On x86-64 that is one instruction and an addition
(LLVM makes one of both where the machine has VNNI); elsewhere it is written in plain vector
arithmetic, with the same numbers as result. The rest is plain everywhere. Knows no layout of
memory beyond the vector that it is given.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

import llvmlite.binding as llvm
from llvmlite import ir
from numba.core import cgutils

from pallas_kernels.ffi.abi import I8, I16, I32
from pallas_kernels.ffi.vectors import Emitter

Instructions = Literal["avx512", "avx2", "portable"]

#: Rows of a weight in a vector.
LANES: Mapping[Instructions, int] = {"avx512": 16, "avx2": 8, "portable": 8}
#: Rows of x that stand together, pair of columns by pair, so that a tile finds them at constant
#: places from one address; tiles of more rows are made of whole groups.
ROW_GROUP: Mapping[Instructions, int] = {"avx512": 4, "avx2": 2, "portable": 2}
#: Intrinsics that multiply int16 and add neighbours.
_NATIVE_PAIRS: Mapping[Instructions, str] = {
    "avx512": "llvm.x86.avx512.pmaddw.d.512",
    "avx2": "llvm.x86.avx2.pmadd.wd",
}
#: Order of the columns of 8 in int16 x that `nibble_pairs` are multiplied with.
NIBBLE_ORDER = (0, 2, 1, 3, 4, 6, 5, 7)


def best_instructions() -> Instructions:
    """What this machine has."""
    features = llvm.get_host_cpu_features()
    if features.get("avx512f") and features.get("avx512bw"):
        return "avx512"
    return "avx2" if features.get("avx2") and features.get("f16c") else "portable"


def ints(lanes: int) -> Any:
    """The type of int32 [lanes]."""
    return ir.VectorType(I32, lanes)


def words(lanes: int) -> Any:
    """The type of a pair of int16 for each lane."""
    return ir.VectorType(I16, 2 * lanes)


class Dots:
    """Emits products of pairs with one kind of instructions."""

    def __init__(self, builder: Any, instructions: Instructions) -> None:
        self.builder = builder
        self.lanes = LANES[instructions]
        self.native = _NATIVE_PAIRS.get(instructions)

    def pairs(self, total: Any, x: Any, w: Any) -> Any:
        """total + products: int32 [lanes] + (int16 [lanes, 2] * the same, neighbours added)."""
        b = self.builder
        if self.native is not None:
            kind = ir.FunctionType(ints(self.lanes), [words(self.lanes)] * 2)
            function = cgutils.get_or_insert_function(b.module, kind, self.native)
            return b.add(total, b.call(function, [x, w]))
        wide = ints(2 * self.lanes)
        products = b.mul(b.sext(x, wide), b.sext(w, wide))
        undefined = ir.Constant(wide, ir.Undefined)
        even, odd = (
            b.shuffle_vector(
                products,
                undefined,
                ir.Constant(ints(self.lanes), [2 * i + j for i in range(self.lanes)]),
            )
            for j in (0, 1)
        )
        return b.add(total, b.add(even, odd))


def load_vector(builder: Any, address: Any, kind: Any) -> Any:
    """A vector at an address of any alignment."""
    value = builder.load(builder.inttoptr(address, kind.as_pointer()))
    value.align = 1
    return value


def byte_pairs(builder: Any, address: Any, lanes: int) -> Any:
    """int8 [lanes, 2] at an address as int16."""
    return builder.sext(load_vector(builder, address, ir.VectorType(I8, 2 * lanes)), words(lanes))


def nibble_pairs(builder: Any, address: Any, lanes: int) -> Iterator[Any]:
    """Bytes [lanes, 4] of int4 as int16 [lanes, 2]: columns (0, 2), (1, 3), (4, 6), (5, 7)."""
    kind = words(lanes)
    value = load_vector(builder, address, kind)
    mask = ir.Constant(kind, [15] * kind.count)
    for bits in (0, 8, 4, 12):
        shift = ir.Constant(kind, [bits] * kind.count)
        moved = value if bits == 0 else builder.lshr(value, shift)
        yield moved if bits == 12 else builder.and_(moved, mask)


def floats_of_bytes(e: Emitter, address: Any) -> Iterator[Any]:
    """int8 [lanes, 2] at an address as float32 [lanes], column by column."""
    b = e.builder
    value = b.sext(load_vector(b, address, ir.VectorType(I16, e.lanes)), e.ints)
    low = b.shl(value, e.int_constant(24))
    yield b.sitofp(b.ashr(low, e.int_constant(24)), e.floats)
    yield b.sitofp(b.ashr(value, e.int_constant(8)), e.floats)


def floats_of_fp8(e: Emitter, address: Any) -> Iterator[Any]:
    """float8_e4m3fn [lanes, 2] at an address as float32 [lanes], column by column; NaN is not met.

    Works on bits: XLA's threads treat float32 numbers below 2**-126 as zero, so that a
    multiplication of shifted bits would lose the smallest numbers.
    """
    b = e.builder
    pair = b.zext(load_vector(b, address, ir.VectorType(I16, e.lanes)), e.ints)
    for value in (pair, b.lshr(pair, e.int_constant(8))):
        sign = b.shl(b.and_(value, e.int_constant(0x80)), e.int_constant(24))
        rest = b.and_(value, e.int_constant(0x7F))
        normal = b.add(b.shl(rest, e.int_constant(20)), e.int_constant(120 << 23))
        small = b.fmul(b.sitofp(rest, e.floats), e.constant(2.0**-9))
        is_small = b.icmp_signed("<", rest, e.int_constant(8))
        bits = b.select(is_small, b.bitcast(small, e.ints), normal)
        yield b.bitcast(b.or_(bits, sign), e.floats)


def floats_of_nibbles(e: Emitter, address: Any) -> Iterator[Any]:
    """Bytes [lanes, 4] of int4 as float32 [lanes], column by column of 8: 0 to 15."""
    b = e.builder
    value = load_vector(b, address, e.ints)
    for bits in (0, 8, 16, 24, 4, 12, 20, 28):
        moved = b.and_(b.lshr(value, e.int_constant(bits)), e.int_constant(15))
        yield b.sitofp(moved, e.floats)


def floats_of_scales(e: Emitter, address: Any, dtype: str, instructions: Instructions) -> Any:
    """float32 [lanes] of finite numbers of a dtype at an address."""
    b = e.builder
    if dtype == "float32":
        return e.load(address)
    value = load_vector(b, address, ir.VectorType(I16, e.lanes))
    if dtype == "bfloat16":
        return b.bitcast(b.shl(b.zext(value, e.ints), e.int_constant(16)), e.floats)
    assert dtype == "float16", dtype
    if instructions != "portable":
        return b.fpext(b.bitcast(value, ir.VectorType(ir.HalfType(), e.lanes)), e.floats)
    bits = b.zext(value, e.ints)
    sign = b.shl(b.and_(bits, e.int_constant(0x8000)), e.int_constant(16))
    rest = b.and_(bits, e.int_constant(0x7FFF))
    normal = b.add(b.shl(rest, e.int_constant(13)), e.int_constant(112 << 23))
    small = b.bitcast(b.fmul(b.sitofp(rest, e.floats), e.constant(2.0**-24)), e.ints)
    is_small = b.icmp_signed("<", rest, e.int_constant(0x400))
    return b.bitcast(b.or_(b.select(is_small, small, normal), sign), e.floats)
