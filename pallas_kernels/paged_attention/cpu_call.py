"""What the threads of one attention call share, and how its arrays are read (step 6b, CPU).

Knows the layout of the operands; the arithmetic is in `cpu_tiles` and `cpu_kernel`.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from numba import types

from pallas_kernels.ffi import abi, vectors
from pallas_kernels.ffi.abi import (
    bits_of_float,
    compiled,
    float_of_bits,
    inlined,
    load_f32,
    load_u16,
    primitive,
    smaller,
    store_f32,
    store_i32,
    store_u16,
)

#: Rows that one item of the page write stores.
WRITE_ROWS = 32


def _record(integers: str, floats: str = "") -> np.dtype[np.void]:
    fields = [(name, np.int64) for name in integers.split()]
    return np.dtype([*fields, *((name, np.float32) for name in floats.split())], align=True)


#: One call: addresses, flags, and sizes by their letters (M: pages of a block table's row).
#: item_starts [B + 1], partial_starts [B] and counters [B, K] are int64, partials float32.
CALL = _record(
    "q k v out tables cu_q_lens kv_lens sinks pages_k pages_v q_bf16 k_bf16 v_bf16 pages_bf16 "
    "T N K G H B M P page_size window has_sinks capped failed item_starts partial_starts counters "
    "partials",
    "multiplier soft_cap",
)
#: One tile of query rows while it is worked on: where it belongs, and addresses of its floats:
#: queries [panel, H, lanes], tops, totals, shrinks, lows, highs [lanes] (the latter two int32),
#: sums [rows, H], weights [BLOCK, lanes of a panel], the same for what was merged so far, and a
#: block's keys and values [BLOCK, H] where they are gathered.
TILE = _record(
    "sequence head first_row rows queries tops totals shrinks lows highs sums weights "
    "merged_tops merged_totals merged_sums gathered block_k block_v"
)
CALL_BYTES, TILE_BYTES = CALL.itemsize, TILE.itemsize


def _record_at(record: np.dtype[np.void]) -> Any:
    """A primitive: the record that stands at an address."""
    kind = numba.from_dtype(record)

    def at(typing_context: Any, address: Any) -> Any:
        def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.inttoptr(args[0], context.get_value_type(kind))

        return kind(types.intp), emit

    return primitive(at)


# Functions take the address and open the record inside: Numba would spell out all fields of a
# record among the arguments in the name of the function, at a cost in compile time.
call_at, tile_at = _record_at(CALL), _record_at(TILE)


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
def copy_floats(source: int, from_bf16: int, target: int, to_bf16: int, count: int) -> None:
    """`count` floats from one place to another, converted where the types differ."""
    if from_bf16 == 0 and to_bf16 == 0:
        for i in range(count):
            store_f32(target + 4 * i, load_f32(source + 4 * i))
    elif to_bf16 == 0:
        for i in range(count):
            bits = np.uint32(load_u16(source + 2 * i)) << 16
            store_i32(target + 4 * i, np.int32(bits))
    else:
        for i in range(count):
            store_float(target, i, to_bf16, load_float(source, i, from_bf16))


@compiled
def place_in_pages(context: int, sequence: int, head: int, position: int) -> Any:
    """Index of the first element, in either pool, of a sequence's position.

    A page that the pool does not have is noted and taken to be the trash page.
    """
    call = call_at(context)
    entry = sequence * call.M + position // call.page_size
    page = int_at(call.tables, entry)
    if page < 0 or page >= call.P:
        call.failed = 1
        page = np.int64(0)
    return ((page * call.K + head) * call.page_size + position % call.page_size) * call.H


@compiled
def write_rows(context: int, item: int) -> None:
    """Stores k and v of WRITE_ROWS rows in their pages."""
    call = call_at(context)
    end = smaller((item + 1) * WRITE_ROWS, int_at(call.cu_q_lens, call.B))
    sequence = 0
    for row in range(item * WRITE_ROWS, end):
        while int_at(call.cu_q_lens, sequence + 1) <= row:
            sequence += 1
        position = int_at(call.kv_lens, sequence) - int_at(call.cu_q_lens, sequence + 1) + row
        size = element_bytes(call.pages_bf16)
        for head in range(call.K):
            place = size * place_in_pages(context, sequence, head, position)
            start = (row * call.K + head) * call.H
            copy_floats(
                call.k + element_bytes(call.k_bf16) * start,
                call.k_bf16,
                call.pages_k + place,
                call.pages_bf16,
                call.H,
            )
            copy_floats(
                call.v + element_bytes(call.v_bf16) * start,
                call.v_bf16,
                call.pages_v + place,
                call.pages_bf16,
                call.H,
            )
