"""Products of small integers and numbers of small formats, as LLVM instructions (step 6).

A vector of 8 lanes belongs to 8 rows of a weight. `Dots.pairs` multiplies int16 and adds
neighbours, exactly. On x86-64 with AVX2 that is one instruction and an addition; elsewhere it is
written in plain vector arithmetic, with the same numbers as result. The rest is plain everywhere.
Knows no layout of memory beyond the vector that it is given.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import llvmlite.binding as llvm
from llvmlite import ir
from numba.core import cgutils

from pallas_kernels.ffi.abi import I8, I16, I32
from pallas_kernels.ffi.vectors import Emitter

Instructions = Literal["avx2", "portable"]

#: Rows of a weight in a vector.
LANES = 8
INTS = ir.VectorType(I32, LANES)
WORDS = ir.VectorType(I16, 2 * LANES)
#: Order of the columns of 8 in int16 x that `nibble_pairs` are multiplied with.
NIBBLE_ORDER = (0, 2, 1, 3, 4, 6, 5, 7)


def best_instructions() -> Instructions:
    """What this machine has."""
    features = llvm.get_host_cpu_features()
    return "avx2" if features.get("avx2") and features.get("f16c") else "portable"


class Dots:
    """Emits products of pairs with one kind of instructions."""

    def __init__(self, builder: Any, instructions: Instructions) -> None:
        self.builder = builder
        self.native = instructions == "avx2"

    def pairs(self, total: Any, x: Any, w: Any) -> Any:
        """total + products: int32 [8] + (int16 [16] * int16 [16], neighbours added)."""
        b = self.builder
        if self.native:
            kind = ir.FunctionType(INTS, [WORDS, WORDS])
            name = "llvm.x86.avx2.pmadd.wd"
            return b.add(
                total, b.call(cgutils.get_or_insert_function(b.module, kind, name), [x, w])
            )
        wide = ir.VectorType(I32, 2 * LANES)
        products = b.mul(b.sext(x, wide), b.sext(w, wide))
        undefined = ir.Constant(wide, ir.Undefined)
        even, odd = (
            b.shuffle_vector(
                products, undefined, ir.Constant(INTS, [2 * i + j for i in range(LANES)])
            )
            for j in (0, 1)
        )
        return b.add(total, b.add(even, odd))


def load_vector(builder: Any, address: Any, kind: Any) -> Any:
    """A vector at an address of any alignment."""
    value = builder.load(builder.inttoptr(address, kind.as_pointer()))
    value.align = 1
    return value


def byte_pairs(builder: Any, address: Any) -> Any:
    """int8 [8, 2] at an address as int16 [16]."""
    return builder.sext(load_vector(builder, address, ir.VectorType(I8, 2 * LANES)), WORDS)


def nibble_pairs(builder: Any, address: Any) -> Iterator[Any]:
    """Bytes [8, 4] of int4 as four times int16 [16]: columns (0, 2), (1, 3), (4, 6), (5, 7)."""
    value = load_vector(builder, address, WORDS)
    mask = ir.Constant(WORDS, [15] * WORDS.count)
    for bits in (0, 8, 4, 12):
        shift = ir.Constant(WORDS, [bits] * WORDS.count)
        moved = value if bits == 0 else builder.lshr(value, shift)
        yield moved if bits == 12 else builder.and_(moved, mask)


def floats_of_bytes(e: Emitter, address: Any) -> Iterator[Any]:
    """int8 [8, 2] at an address as float32 [8], column by column."""
    b = e.builder
    value = b.sext(load_vector(b, address, ir.VectorType(I16, LANES)), INTS)
    low = b.shl(value, e.int_constant(24))
    yield b.sitofp(b.ashr(low, e.int_constant(24)), e.floats)
    yield b.sitofp(b.ashr(value, e.int_constant(8)), e.floats)


def floats_of_fp8(e: Emitter, address: Any) -> Iterator[Any]:
    """float8_e4m3fn [8, 2] at an address as float32 [8], column by column; NaN is not met.

    Works on bits: XLA's threads treat float32 numbers below 2**-126 as zero, so that a
    multiplication of shifted bits would lose the smallest numbers.
    """
    b = e.builder
    pair = b.zext(load_vector(b, address, ir.VectorType(I16, LANES)), INTS)
    for value in (pair, b.lshr(pair, e.int_constant(8))):
        sign = b.shl(b.and_(value, e.int_constant(0x80)), e.int_constant(24))
        rest = b.and_(value, e.int_constant(0x7F))
        normal = b.add(b.shl(rest, e.int_constant(20)), e.int_constant(120 << 23))
        small = b.fmul(b.sitofp(rest, e.floats), e.constant(2.0**-9))
        is_small = b.icmp_signed("<", rest, e.int_constant(8))
        bits = b.select(is_small, b.bitcast(small, INTS), normal)
        yield b.bitcast(b.or_(bits, sign), e.floats)


def floats_of_nibbles(e: Emitter, address: Any) -> Iterator[Any]:
    """Bytes [8, 4] of int4 as float32 [8], column by column of 8: 0 to 15."""
    b = e.builder
    value = load_vector(b, address, INTS)
    for bits in (0, 8, 16, 24, 4, 12, 20, 28):
        moved = b.and_(b.lshr(value, e.int_constant(bits)), e.int_constant(15))
        yield b.sitofp(moved, e.floats)


def floats_of_scales(e: Emitter, address: Any, dtype: str, instructions: Instructions) -> Any:
    """float32 [8] of 8 finite numbers of a dtype at an address."""
    b = e.builder
    if dtype == "float32":
        return e.load(address)
    value = load_vector(b, address, ir.VectorType(I16, LANES))
    if dtype == "bfloat16":
        return b.bitcast(b.shl(b.zext(value, INTS), e.int_constant(16)), e.floats)
    assert dtype == "float16", dtype
    if instructions == "avx2":
        return b.fpext(b.bitcast(value, ir.VectorType(ir.HalfType(), LANES)), e.floats)
    bits = b.zext(value, INTS)
    sign = b.shl(b.and_(bits, e.int_constant(0x8000)), e.int_constant(16))
    rest = b.and_(bits, e.int_constant(0x7FFF))
    normal = b.add(b.shl(rest, e.int_constant(13)), e.int_constant(112 << 23))
    small = b.bitcast(b.fmul(b.sitofp(rest, e.floats), e.constant(2.0**-24)), INTS)
    is_small = b.icmp_signed("<", rest, e.int_constant(0x400))
    return b.bitcast(b.or_(b.select(is_small, small, normal), sign), e.floats)
