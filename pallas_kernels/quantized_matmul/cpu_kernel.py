"""Products with quantised weights for CPUs: XLA handlers in Numba (step 6).

Operands  x [M, K] (float32), values, scales, zeros as `cpu.pack` made them; zeros [0] without
Results   out [M, N] (float32), and room to work, with rows up to a multiple of 4: rounded [M, K]
          (int16; [0] where x is used as it is), x_scales and x_sums [M, units] (float32; [0] where
          they are not used); where x is rounded, rows of all three stand in groups (ROW_GROUP)
Attributes, sorted by name: top (int64: 127 or 32767; 0: x is used as it is), unit (columns per
          unit), x_group (columns that share a scale of x)

The work: rows of x are rounded first; then items of (block of rows, run of panels) are shared
among XLA's threads (`cpu_items`). A block is what fits into a core's own cache; weights are read
from memory once per block. How rows are blocked and tiled changes no bit of a row's result (see
`cpu_tiles`). Must not know anything outside pallas_kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from pallas_kernels.ffi import abi
from pallas_kernels.ffi.abi import (
    argument,
    attribute,
    compiled,
    data_of,
    dtype_of,
    float_of_bits,
    free,
    larger,
    load_i32,
    load_i64,
    make_error,
    malloc,
    must_run,
    named,
    result,
    size_of,
    smaller,
    stack_slots,
    store_f32,
    text,
)
from pallas_kernels.ffi.pool import make_parallel_for, num_threads
from pallas_kernels.quantized_matmul.cpu_dots import ROW_GROUP, Instructions
from pallas_kernels.quantized_matmul.cpu_items import (
    CALL_BYTES,
    call_at,
    make_floats_item,
    make_integers_item,
)
from pallas_kernels.quantized_matmul.cpu_round import largest_bits, make_round, sum_unit
from pallas_kernels.quantized_matmul.cpu_tiles import PANEL, Format
from pallas_kernels.quantized_matmul.quantize import SMALLEST

#: Bytes of x that a block of rows may take: half of a core's second-level cache.
BLOCK_BYTES = 256 * 1024
FEWEST_ROWS, MOST_ROWS, ROW_STEP = 24, 240, 12
#: An item is worth so many bytes of weights, or multiplications by 16, at least.
ITEM_WORK = 64 * 1024
ITEMS_PER_THREAD = 12
#: Rows of x per item of rounding, and the elements from which threads share it.
ROUND_ROWS, ROUND_ELEMENTS = 8, 32 * 1024
F32, BF16, F16 = abi.F32, abi.BF16, 10
INFINITY_BITS = 0x7F800000


@compiled
def scale_of(bits: Any, top: Any) -> Any:
    """What x is multiplied by before rounding, and the scale that undoes it; bits: largest |x|."""
    if bits >= INFINITY_BITS:
        return np.float32(0), np.float32(np.nan)
    largest = float_of_bits(np.uint32(bits))
    if largest < np.float32(SMALLEST):
        return np.float32(0), np.float32(0)
    limit = np.float32(top)
    return limit / largest, largest / limit


def make_prepare(
    weights: Format, instructions: Instructions, name: str
) -> Callable[[int, int], None]:
    """Compiled function that rounds ROUND_ROWS rows, an item of `make_parallel_for`."""
    row_group = ROW_GROUP[instructions]
    round_unit = make_round(weights == "int4", row_group)

    def prepare(context: int, item: int) -> None:
        call = call_at(context)
        slot = stack_slots(1)
        for row in range(item * ROUND_ROWS, smaller((item + 1) * ROUND_ROWS, call.M)):
            group, lane = row // row_group, row % row_group
            for first in range(0, call.K, call.x_group):
                x = call.x + 4 * (row * call.K + first)
                largest_bits(x, call.x_group // 8, slot)
                factor, scale = scale_of(load_i32(slot), call.top)
                for column in range(first, first + call.x_group, call.unit):
                    source = call.x + 4 * (row * call.K + column)
                    place = row_group * (group * call.K + column) + 2 * lane
                    target = call.rounded + 2 * place
                    round_unit(source, call.unit // 8, factor, target, slot)
                    place = row_group * (group * call.units + column // call.unit) + lane
                    unit = 4 * place
                    store_f32(call.x_scales + unit, scale)
                    store_f32(call.x_sums + unit, -scale * np.float32(load_i32(slot)))

    return compiled(named(prepare, f"prepare_{name}"))


def make_sums(name: str) -> Callable[[int, int], None]:
    """Compiled function that sums up the units of ROUND_ROWS rows of float32 x."""

    def prepare(context: int, item: int) -> None:
        call = call_at(context)
        for row in range(item * ROUND_ROWS, smaller((item + 1) * ROUND_ROWS, call.M)):
            for unit in range(call.units):
                x = call.x + 4 * (row * call.K + unit * call.unit)
                sum_unit(x, call.unit // 8, call.x_sums + 4 * (row * call.units + unit))

    return compiled(named(prepare, f"sums_{name}"))


@compiled
def fill_call(frame: int, context: int) -> None:
    """Reads operands, results and attributes of a call frame."""
    call = call_at(context)
    x, scales, zeros = argument(frame, 0), argument(frame, 2), argument(frame, 3)
    call.x, call.values, call.scales = data_of(x), data_of(argument(frame, 1)), data_of(scales)
    call.zeros, call.has_zeros = data_of(zeros), size_of(zeros, 0)
    call.out, call.rounded = data_of(result(frame, 0)), data_of(result(frame, 1))
    call.x_scales, call.x_sums = data_of(result(frame, 2)), data_of(result(frame, 3))
    call.M, call.K = size_of(x, 0), size_of(x, 1)
    call.N, call.G = size_of(scales, 0), size_of(scales, 1)
    call.top, call.unit = load_i64(attribute(frame, 0)), load_i64(attribute(frame, 1))
    call.x_group = load_i64(attribute(frame, 2))
    call.units = call.K // call.unit
    call.repeat = call.units // call.G
    call.scales_f32 = np.int64(dtype_of(scales) == F32)
    call.scales_bf16 = np.int64(dtype_of(scales) == BF16)
    call.failed = 0


@compiled
def plan_items(context: int, threads: int, x_bytes: int) -> int:
    """Blocks of rows and runs of panels; returns the number of items."""
    call = call_at(context)
    rows = BLOCK_BYTES // (x_bytes * call.K) // ROW_STEP * ROW_STEP
    rows = smaller(larger(rows, FEWEST_ROWS), MOST_ROWS)
    call.blocks = (call.M + rows - 1) // rows
    even = (call.M + call.blocks - 1) // call.blocks
    call.block_rows = (even + ROW_STEP - 1) // ROW_STEP * ROW_STEP
    if call.blocks == 1:
        call.block_rows = call.M
    call.blocks = (call.M + call.block_rows - 1) // call.block_rows
    panels = call.N // PANEL
    work = call.K * (PANEL + call.block_rows)
    per_item = (panels * call.blocks + threads * ITEMS_PER_THREAD - 1) // (
        threads * ITEMS_PER_THREAD
    )
    call.run_panels = larger(larger(1, per_item), (ITEM_WORK + work - 1) // work)
    call.runs = (panels + call.run_panels - 1) // call.run_panels
    return call.blocks * call.runs  # type: ignore[no-any-return]


def make_body(weights: Format, rounds: bool, instructions: Instructions) -> Callable[[int], int]:
    """Compiled body of the XLA handler for a format of weights.

    rounds: x is rounded to integers, else used as it is.
    """
    name = kernel_name(weights, rounds, instructions)
    prepare = make_prepare(weights, instructions, name) if rounds else make_sums(name)
    make_item = make_integers_item if rounds else make_floats_item
    run_prepare = make_parallel_for(prepare, f"prepare_{name}")
    run_items = make_parallel_for(make_item(weights, instructions, name), name)
    x_bytes, is_needed = (2 if rounds else 4), rounds or weights == "int4"

    def body(frame: int) -> int:
        if not must_run(frame):
            return 0
        context = malloc(CALL_BYTES)
        if context == 0:
            return make_error(frame, abi.RESOURCE_EXHAUSTED, text("quantized_matmul: no memory"))
        fill_call(frame, context)
        call = call_at(context)
        if call.M > 0:
            if is_needed:
                parts = (call.M + ROUND_ROWS - 1) // ROUND_ROWS
                if call.M * call.K < ROUND_ELEMENTS:
                    for part in range(parts):
                        prepare(context, part)
                else:
                    run_prepare(frame, context, parts)
            run_items(frame, context, plan_items(context, num_threads(frame), x_bytes))
        failed = call.failed
        free(context)
        if failed != 0:
            return make_error(frame, abi.RESOURCE_EXHAUSTED, text("quantized_matmul: no memory"))
        return 0

    return compiled(named(body, f"body_{name}"))


def kernel_name(weights: Format, rounds: bool, instructions: Instructions) -> str:
    """A name that determines what the kernel does."""
    return f"quantized_matmul_{weights}_{'integers' if rounds else 'floats'}_{instructions}"
