"""What the threads of one attention call share, and how its arrays are addressed (step 6b, CPU).

Knows the layout of the operands; the arithmetic is in `cpu_rows` and `cpu_panels`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types

from pallas_kernels.ffi import abi, vectors
from pallas_kernels.ffi.abi import (
    bits_of_float,
    compiled,
    float_of_bits,
    inlined,
    larger,
    load_f32,
    load_u16,
    primitive,
    store_f32,
    store_u16,
)
from pallas_kernels.ffi.records import record, record_at
from pallas_kernels.ffi.vectors import LANES

#: Positions folded per step of the softmax, and per partial result. Both stand at fixed places
#: of a sequence; multiples of LANES.
BLOCK, SPLIT = 64, 256
#: Head sizes are padded to whole pairs of vectors.
HEAD_STEP = 2 * LANES
VECTOR_BYTES = 4 * LANES
LINE = 64
LOG2_E = 1.4426950408889634
#: Running maximum before any score, and the score of a position that a row must not see. The
#: second is so much lower that its weight is exactly zero, also before any score was seen.
EMPTY, MASKED = -1e29, -1e30

#: One call: addresses, flags, and sizes by their letters (M: pages of a block table's row;
#: width: H padded to HEAD_STEP; heads: KV heads per item where pages are read in place).
#: item_starts [B + 1], partial_starts [B] and counters [B, K] are int64, partials float32.
CALL = record(
    "q k v out lse tables cu_q_lens kv_lens sinks pages_k pages_v scales_k scales_v "
    "q_bf16 k_bf16 v_bf16 T N K G H B M P page_size width in_place heads window has_sinks capped "
    "failed item_starts partial_starts counters partials",
    "multiplier soft_cap",
)
CALL_BYTES = CALL.itemsize
call_at = record_at(CALL)


@primitive
def int_at(typing_context: Any, address: Any, index: Any) -> Any:
    """An element of an int32 array, as a 64-bit integer."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        place = vectors.offset(builder, args[0], args[1], 4)
        value = builder.load(builder.inttoptr(place, abi.I32.as_pointer()))
        return builder.sext(value, abi.I64)

    return types.int64(types.intp, types.intp), emit


@primitive
def element_bytes(typing_context: Any, is_bf16: Any) -> Any:
    """2 for bfloat16 and 4 for float32."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        yes = builder.icmp_signed("!=", args[0], vectors.int64(0))
        return builder.select(yes, vectors.int64(2), vectors.int64(4))

    return types.int64(types.int64), emit


@primitive
def copy_bytes(typing_context: Any, source: Any, target: Any, count: Any) -> Any:
    """memcpy."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        byte = abi.I8.as_pointer()
        kind = ir.FunctionType(ir.VoidType(), [byte, byte, abi.I64, ir.IntType(1)])
        name = "llvm.memcpy.p0.p0.i64"
        function = builder.module.globals.get(name) or ir.Function(builder.module, kind, name)
        places = [builder.inttoptr(args[i], byte) for i in (1, 0)]
        builder.call(function, [*places, args[2], ir.Constant(ir.IntType(1), 0)])
        return context.get_dummy_value()

    return types.void(types.intp, types.intp, types.int64), emit


@inlined
def load_float(address: int, index: int, is_bf16: int) -> Any:
    if is_bf16 != 0:
        return float_of_bits(np.uint32(np.uint32(load_u16(address + 2 * index)) << 16))
    return load_f32(address + 4 * index)


@inlined
def store_float(address: int, index: int, is_bf16: int, value: Any) -> None:
    """Rounds to the nearest bfloat16, ties to even, and keeps NaN."""
    if is_bf16 != 0:
        bits = np.int64(bits_of_float(value))
        rounded = bits + 0x7FFF + ((bits >> 16) & 1)
        if value != value:
            rounded = bits | 0x400000
        store_u16(address + 2 * index, np.uint16(rounded >> 16))
    else:
        store_f32(address + 4 * index, value)


@compiled
def fill_floats(address: int, count: int, value: Any) -> None:
    for i in range(count):
        store_f32(address + 4 * i, value)


@compiled
def token_in_pages(context: int, sequence: int, head: int, position: int) -> Any:
    """Which of a pool's P * K * page_size tokens is a sequence's position, for a KV head.

    A page that the pool does not have is noted and taken to be the trash page.
    """
    call = call_at(context)
    page = int_at(call.tables, sequence * call.M + position // call.page_size)
    if page < 0 or page >= call.P:
        call.failed = 1
        page = np.int64(0)
    return (page * call.K + head) * call.page_size + position % call.page_size


@compiled
def query_place(context: int, sequence: int, head: int, row: int) -> Any:
    """Which of the T * N rows of q is a row (query token, head of the group) of a KV head."""
    call = call_at(context)
    token = int_at(call.cu_q_lens, sequence) + row // call.G
    return token * call.N + head * call.G + row % call.G


@compiled
def row_bounds(context: int, sequence: int, row: int) -> Any:
    """First and last position that a row of a sequence's query rows may see."""
    call = call_at(context)
    start, end = int_at(call.cu_q_lens, sequence), int_at(call.cu_q_lens, sequence + 1)
    high = int_at(call.kv_lens, sequence) - (end - start) + row // call.G
    low = np.int64(0)
    if call.window > 0:
        low = larger(low, high - call.window + 1)
    return low, high


@compiled
def tile_splits(context: int, sequence: int, first_row: int, rows: int) -> Any:
    """First split that a tile reads, and how many."""
    low, _ = row_bounds(context, sequence, first_row)
    _, high = row_bounds(context, sequence, first_row + rows - 1)
    return low // SPLIT, high // SPLIT - low // SPLIT + 1
