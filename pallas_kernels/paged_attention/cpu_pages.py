"""The formats of KV pages: how their numbers are read into vectors and stored (step 6b, CPU).

A format is a dtype of pages. Code that touches pages is made once per format, so that a process
compiles only what it uses. Knows nothing of softmax or threads.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types

from pallas_kernels.ffi import vectors
from pallas_kernels.ffi.abi import (
    I8,
    I16,
    bits_of_float,
    compiled,
    load_f32,
    merged,
    named,
    smaller,
    store_f32,
    store_i8,
)
from pallas_kernels.ffi.vectors import LANES, Emitter, offset, procedure
from pallas_kernels.paged_attention.cpu_call import (
    VECTOR_BYTES,
    call_at,
    copy_bytes,
    element_bytes,
    int_at,
    load_float,
    store_float,
    token_in_pages,
)
from pallas_kernels.paged_attention.reference import QUANTISED

#: Rows that one item of the page write stores.
WRITE_ROWS = 32
#: Adding and subtracting it rounds a float below 2**22 to the nearest integer, ties to even.
_ROUND = 12582912.0
#: Exponents of float8_e4m3fn count from -7, those of float32 from -127; its smallest normal number.
_FP8_BIAS, _FP8_TINY = (127 - 7) << 23, 2.0**-6


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PageFormat:
    """A dtype of pages; limit: the largest number where tokens have scales, else 0."""

    name: str
    bytes: int
    limit: float = 0.0


FORMATS: Mapping[str, PageFormat] = {
    "float32": PageFormat(name="float32", bytes=4),
    "bfloat16": PageFormat(name="bfloat16", bytes=2),
    **{name: PageFormat(name=name, bytes=1, limit=limit) for name, limit in QUANTISED.items()},
}


def load_numbers(e: Emitter, pages: PageFormat, address: Any) -> Any:
    """Numbers at an address of a pool as floats; `e` says how many."""
    b = e.builder
    if pages.name == "float32":
        return e.load(address)
    kind = {1: I8, 2: I16}[pages.bytes]
    kind = kind if e.lanes == 1 else ir.VectorType(kind, e.lanes)
    stored = b.load(b.inttoptr(address, kind.as_pointer()))
    stored.align = pages.bytes
    if pages.name == "bfloat16":
        return b.bitcast(b.shl(b.zext(stored, e.ints), e.int_constant(16)), e.floats)
    numbers = b.sext(stored, e.ints)
    return b.sitofp(numbers, e.floats) if pages.name == "int8" else _from_fp8(e, numbers)


def _from_fp8(e: Emitter, numbers: Any) -> Any:
    """Bytes of float8_e4m3fn, sign-extended, as floats. Its NaN reads as 480: the scale is NaN.

    No denormal float is made on the way: XLA's threads may take those to be zero.
    """
    b = e.builder
    shifted = b.shl(numbers, e.int_constant(20))
    size = b.and_(shifted, e.int_constant(0x07F00000))
    normal = b.bitcast(b.add(size, e.int_constant(_FP8_BIAS)), e.floats)
    lifted = b.bitcast(b.add(size, e.int_constant(_FP8_BIAS + (1 << 23))), e.floats)
    tiny = b.icmp_signed("<", size, e.int_constant(1 << 23))
    value = b.select(tiny, b.fsub(lifted, e.constant(_FP8_TINY)), normal)
    sign = b.and_(shifted, e.int_constant(-(2**31)))
    return b.bitcast(b.or_(b.bitcast(value, e.ints), sign), e.floats)


def make_gather(pages: PageFormat) -> Any:
    """Compiled `gather(context, sequence, head, first, end, slot, k, v, scales)`.

    Copies positions first..end of k and v as floats to [slots, width] each, from slot `slot` on;
    where the format has scales, those of k to scales [slots], of v a block of floats behind.
    """
    size, scaled = pages.bytes, pages.limit > 0

    @procedure(types.intp, types.intp, types.intp)
    def to_floats(b: Any, source: Any, target: Any, count: Any) -> None:
        e, one = Emitter(b, LANES), Emitter(b, 1)
        whole = b.and_(count, vectors.int64(-LANES))
        with vectors.loop(b, b.udiv(count, vectors.int64(LANES))) as i:
            value = load_numbers(e, pages, offset(b, source, i, LANES * size))
            e.store(value, offset(b, target, i, VECTOR_BYTES))
        with vectors.loop(b, b.sub(count, whole)) as i:
            i = b.add(whole, i)
            one.store(load_numbers(one, pages, offset(b, source, i, size)), offset(b, target, i, 4))

    def gather(
        context: int,
        sequence: int,
        head: int,
        first: int,
        end: int,
        slot: int,
        k: int,
        v: int,
        scales: int,
        scales_apart: int,
    ) -> None:
        call = call_at(context)
        while first < end:
            count = smaller(end - first, call.page_size - first % call.page_size)
            token = token_in_pages(context, sequence, head, first)
            for i in range(count):
                place, done = size * (token + i) * call.H, 4 * (slot + i) * call.width
                to_floats(call.pages_k + place, k + done, call.H)
                to_floats(call.pages_v + place, v + done, call.H)
            if scaled:
                for i in range(count):
                    target = scales + 4 * (slot + i)
                    store_f32(target, load_f32(call.scales_k + 4 * (token + i)))
                    store_f32(target + scales_apart, load_f32(call.scales_v + 4 * (token + i)))
            first += count
            slot += count

    return compiled(named(gather, f"gather_{pages.name}"))


@compiled
def _to_fp8(value: Any) -> Any:
    """The nearest float8_e4m3fn of a float of at most 448 in size, ties to even: its bits."""
    bits = np.int64(bits_of_float(value))
    size = bits & 0x7FFFFFFF
    if value != value:
        code = np.int64(0x7F)
    elif size >= (127 - 6) << 23:
        code = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - ((127 - 7) << 3)
    else:
        small = np.float32(abs(value) * np.float32(512)) + np.float32(_ROUND)
        code = np.int64(np.float32(small - np.float32(_ROUND)))
    return np.int8(np.uint8(code | ((bits >> 24) & 0x80)))


@compiled
def _to_int8(value: Any) -> Any:
    rounded = np.float32(np.float32(value + np.float32(_ROUND)) - np.float32(_ROUND))
    return np.int8(rounded) if rounded == rounded else np.int8(0)


def _make_store_scaled(pages: PageFormat) -> Any:
    """Compiled: a row of `count` floats and its scale at a token's place, as `quantise` has them.

    XLA multiplies by the reciprocals of the limit and of the scale; so does this.
    """
    limit, share = np.float32(pages.limit), np.float32(1.0 / pages.limit)
    encode = _to_int8 if pages.name == "int8" else _to_fp8

    def store(source: int, is_bf16: int, pool: int, scales: int, token: int, count: int) -> None:
        top = np.float32(0)
        for i in range(count):
            value = abs(load_float(source, i, is_bf16))
            if value > top or value != value:
                top = value
        scale = np.float32(top * share)
        store_f32(scales + 4 * token, scale)
        factor = np.float32(1) / (np.float32(1) if scale == 0 else scale)
        for i in range(count):
            value = np.float32(load_float(source, i, is_bf16) * factor)
            if value > limit:
                value = limit
            if value < -limit:
                value = -limit
            store_i8(pool + token * count + i, encode(value))

    return compiled(named(store, f"store_scaled_{pages.name}"))


def _make_store_plain(pages: PageFormat) -> Any:
    """Compiled: a row of `count` floats at a token's place, converted where the types differ."""
    size = pages.bytes
    to_bf16: Any = np.int64(1 if pages.name == "bfloat16" else 0)

    def store(source: int, is_bf16: int, pool: int, scales: int, token: int, count: int) -> None:
        target = pool + size * token * count
        if is_bf16 == to_bf16:
            copy_bytes(source, target, count * size)
        else:
            for i in range(count):
                store_float(target, i, to_bf16, load_float(source, i, is_bf16))

    return compiled(named(store, f"store_plain_{pages.name}"))


def make_write_rows(pages: PageFormat) -> Callable[[int, int], None]:
    """Compiled `write_rows(context, item)`: stores k and v of WRITE_ROWS rows in their pages."""
    store_row = (_make_store_scaled if pages.limit > 0 else _make_store_plain)(pages)

    def write_rows(context: int, item: int) -> None:
        call = call_at(context)
        end = smaller((item + 1) * WRITE_ROWS, int_at(call.cu_q_lens, call.B))
        sequence = 0
        for row in range(item * WRITE_ROWS, end):
            while int_at(call.cu_q_lens, sequence + 1) <= row:
                sequence += 1
            position = int_at(call.kv_lens, sequence) - int_at(call.cu_q_lens, sequence + 1) + row
            for head in range(call.K):
                token = token_in_pages(context, sequence, head, position)
                start = (row * call.K + head) * call.H
                k = call.k + element_bytes(call.k_bf16) * start
                v = call.v + element_bytes(call.v_bf16) * start
                store_row(k, call.k_bf16, call.pages_k, call.scales_k, token, call.H)
                store_row(v, call.v_bf16, call.pages_v, call.scales_v, token, call.H)

    return merged(named(write_rows, f"write_rows_{pages.name}"))
