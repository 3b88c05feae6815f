"""A few rows times a matrix on CPUs: an XLA handler in Numba (step 6).

Operands  x [M, K], weight [N, K] (float32; N and K multiples of LANES, M at most 16)
Result    out [M, N] (float32)

The matrix is read once, in the order in which it stands: LANES of its rows at a time, PAIR of
them against PASS_ROWS rows of x, with all sums in registers. Lanes are LANES inputs side by side;
a sum is LANES chains of multiply-adds, joined as a tree (`Emitter.sum_each`), so that a result
depends on its row of x and its row of the matrix alone. What comes next is asked for evenly
through all passes: asked for faster than memory delivers, it would hold up the arithmetic.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types

from pallas_kernels.ffi import abi, vectors
from pallas_kernels.ffi.abi import (
    argument,
    compiled,
    data_of,
    free,
    larger,
    make_error,
    malloc,
    must_run,
    result,
    size_of,
    smaller,
    store_f32,
    text,
)
from pallas_kernels.ffi.pool import make_parallel_for, num_threads
from pallas_kernels.ffi.records import record, record_at
from pallas_kernels.ffi.vectors import LANES, Emitter, offset, procedure, variable

ADDRESS, SIZE = types.intp, types.intp
VECTOR_BYTES = 4 * LANES
#: Rows of the matrix and of x that meet in one pass: their sums must fit into 16 registers.
PAIR, PASS_ROWS = 2, 4
MOST_ROWS = 16
SUMS_BYTES = LANES * MOST_ROWS * VECTOR_BYTES
#: Inputs that are worked on at a time: PASS_ROWS and PAIR rows of them fit into the first cache.
BLOCK = 768
#: Bytes of the matrix in one item, at most, and items per thread where it is small.
ITEM_BYTES, ITEMS_PER_THREAD = 256 * 1024, 6
#: Below so many bytes, waking other threads costs more than it saves.
SERIAL_BYTES = 64 * 1024
LINE = 64

CALL = record("x weight out M N K step failed")
CALL_BYTES = CALL.itemsize
call_at = record_at(CALL)


def _make_tile(rows: int) -> Any:
    """sums[i, r] = start[i, r] + lanes of weight[i] * x[r], PAIR rows of the matrix, `rows` of x.

    `count` inputs of rows in_size long are worked on. sums: [PAIR, MOST_ROWS] vectors; start: the
    same, or one vector for all where `step` is 0. Asks, chunk by chunk, for `stride` bytes from
    `ahead` on.
    """

    @procedure(ADDRESS, ADDRESS, SIZE, SIZE, ADDRESS, SIZE, ADDRESS, ADDRESS, SIZE)
    def tile(
        b: Any,
        weight: Any,
        x: Any,
        in_size: Any,
        count: Any,
        start: Any,
        step: Any,
        sums: Any,
        ahead: Any,
        stride: Any,
    ) -> None:
        e = Emitter(b, LANES)
        row_bytes = b.mul(in_size, vectors.int64(4))
        totals = [
            [variable(e, e.load(offset(b, start, i * MOST_ROWS + r, step))) for i in range(PAIR)]
            for r in range(rows)
        ]
        weights = [offset(b, weight, i, row_bytes) for i in range(PAIR)]
        inputs = [offset(b, x, row, row_bytes) for row in range(rows)]
        with vectors.loop(b, b.udiv(count, vectors.int64(LANES))) as chunk:
            vectors.emit_prefetch(b, offset(b, ahead, chunk, stride))
            left = [e.load(offset(b, start, chunk, VECTOR_BYTES)) for start in weights]
            for start, row in zip(inputs, totals, strict=True):
                numbers = e.load(offset(b, start, chunk, VECTOR_BYTES))
                for factor, total in zip(left, row, strict=True):
                    b.store(e.muladd(factor, numbers, b.load(total)), total)
        for r, row in enumerate(totals):
            for i, total in enumerate(row):
                e.store(b.load(total), offset(b, sums, i * MOST_ROWS + r, VECTOR_BYTES))

    return tile


_tile_1, _tile_2, _tile_3, _tile_4 = (_make_tile(rows + 1) for rows in range(PASS_ROWS))


@procedure(ADDRESS, ADDRESS)
def _join(b: Any, sums: Any, out: Any) -> None:
    """out [LANES] = the sums of one row of x with LANES rows of the matrix, each joined."""
    e = Emitter(b, LANES)
    parts = [e.load(offset(b, sums, i * MOST_ROWS, VECTOR_BYTES)) for i in range(LANES)]
    e.store(e.sum_each(parts), out)


@compiled
def _multiply_block(
    weight: int, x: int, in_size: int, count: int, rows: int, first: bool, sums: int, ahead: int
) -> None:
    """sums [LANES, MOST_ROWS] of LANES rows of the matrix over `count` inputs are made or added to.

    Fetches meanwhile as much as it reads of the matrix, from `ahead` on. Behind the sums stands a
    vector of zeros.
    """
    passes = (rows + PASS_ROWS - 1) // PASS_ROWS
    stride = PAIR * VECTOR_BYTES // passes
    step = 0 if first else VECTOR_BYTES
    for i in range(0, LANES, PAIR):
        for row in range(0, rows, PASS_ROWS):
            factors, inputs = weight + 4 * i * in_size, x + 4 * row * in_size
            totals, left = sums + (i * MOST_ROWS + row) * VECTOR_BYTES, rows - row
            start = sums + SUMS_BYTES if first else totals
            if left == 1:
                _tile_1(factors, inputs, in_size, count, start, step, totals, ahead, stride)
            elif left == 2:
                _tile_2(factors, inputs, in_size, count, start, step, totals, ahead, stride)
            elif left == 3:
                _tile_3(factors, inputs, in_size, count, start, step, totals, ahead, stride)
            else:
                _tile_4(factors, inputs, in_size, count, start, step, totals, ahead, stride)
            ahead += count // LANES * stride


@compiled
def multiply_item(context: int, item: int) -> None:
    """The outputs of `step` rows of the matrix."""
    call = call_at(context)
    memory = malloc(SUMS_BYTES + VECTOR_BYTES + LINE)
    if memory == 0:
        call.failed = 1
        return
    sums = (memory + LINE - 1) // LINE * LINE
    for lane in range(LANES):
        store_f32(sums + SUMS_BYTES + 4 * lane, np.float32(0))
    group_bytes = 4 * LANES * call.K
    for n in range(item * call.step, smaller((item + 1) * call.step, call.N), LANES):
        weight = call.weight + 4 * n * call.K
        ahead = weight + group_bytes
        for k in range(0, call.K, BLOCK):
            count = smaller(BLOCK, call.K - k)
            place, inputs = weight + 4 * k, call.x + 4 * k
            _multiply_block(place, inputs, call.K, count, call.M, k == 0, sums, ahead)
            ahead += 4 * LANES * count
        for row in range(call.M):
            _join(sums + row * VECTOR_BYTES, call.out + 4 * (row * call.N + n))
    free(memory)


run_items = make_parallel_for(multiply_item, "float_matmul")


def multiply_few_rows(frame: int) -> int:
    """The XLA handler; compiled and kept by `ffi.targets`."""
    if not must_run(frame):
        return 0
    x, weight = argument(frame, 0), argument(frame, 1)
    rows, in_size, out_size = size_of(x, 0), size_of(x, 1), size_of(weight, 0)
    if rows > MOST_ROWS or in_size % LANES != 0 or out_size % LANES != 0:
        return make_error(frame, abi.INVALID_ARGUMENT, text("float_matmul: sizes do not fit"))
    context = malloc(CALL_BYTES)
    if context == 0:
        return make_error(frame, abi.RESOURCE_EXHAUSTED, text("float_matmul: no memory"))
    call = call_at(context)
    call.x, call.weight, call.out = data_of(x), data_of(weight), data_of(result(frame, 0))
    call.M, call.N, call.K, call.failed = rows, out_size, in_size, 0
    size = 4 * out_size * in_size
    share = smaller(ITEM_BYTES, size // (ITEMS_PER_THREAD * num_threads(frame)))
    call.step = larger(LANES, share // (4 * in_size) // LANES * LANES)
    items = (out_size + call.step - 1) // call.step
    run_items(frame if size >= SERIAL_BYTES else 0, context, items)
    failed = call.failed
    free(context)
    if failed != 0:
        return make_error(frame, abi.RESOURCE_EXHAUSTED, text("float_matmul: no memory"))
    return 0
