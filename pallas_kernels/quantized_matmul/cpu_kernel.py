"""Products with quantised weights for CPUs: XLA handlers in Numba (step 6).

Operands  x [M, K] (float32), values, scales, zeros as `cpu.pack` made them; zeros [0] without
Results   out [M, N] (float32), and room to work: rounded [M, K] (int16; [0] where x is used as it
          is), x_scales and x_sums [M, units] (float32; [0] where they are not used)
Attributes, sorted by name: top (int64: 127 or 32767; 0: x is used as it is), unit (columns per
          unit), x_group (columns that share a scale of x)

The work: rows of x are rounded first; then items of (block of rows, run of panels) are shared
among XLA's threads. An item takes one panel after the other, so that weights are read from memory
in one stream, once per block of rows, and multiplies it with all rows of its block, a tile of rows
at a time. A block is what fits into a core's own cache. How rows are blocked and tiled changes no
bit of a row's result (see `cpu_tiles`). Must not know anything outside pallas_kernels.
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
from pallas_kernels.ffi.records import record, record_at
from pallas_kernels.quantized_matmul.cpu_dots import Instructions
from pallas_kernels.quantized_matmul.cpu_round import largest_bits, make_round, sum_unit
from pallas_kernels.quantized_matmul.cpu_tiles import (
    PANEL,
    PANEL_BYTES,
    STEP_BYTES,
    STEP_COLUMNS,
    Format,
    biases_of_one,
    clear_rows,
    make_expand,
    make_floats_tile,
    make_integers_tile,
    make_unpack,
)
from pallas_kernels.quantized_matmul.quantize import SMALLEST
from pallas_kernels.quantized_matmul.scheme import INT4_ZERO

CALL = record(
    "x values scales zeros out rounded x_scales x_sums M N K G units unit repeat x_group top "
    "scales_f32 scales_bf16 has_zeros block_rows blocks run_panels runs failed"
)
call_at = record_at(CALL)
CALL_BYTES = CALL.itemsize

#: Bytes of x that a block of rows may take: half of a core's second-level cache.
BLOCK_BYTES = 256 * 1024
FEWEST_ROWS, MOST_ROWS, ROW_STEP = 24, 240, 12
#: An item is worth so many bytes of weights, or multiplications by 16, at least.
ITEM_WORK = 64 * 1024
ITEMS_PER_THREAD = 12
#: Rows of x per item of rounding, and the elements from which threads share it.
ROUND_ROWS, ROUND_ELEMENTS = 8, 32 * 1024
#: Columns of a panel that are unpacked to float32 at a time.
UNPACK_COLUMNS = 256
LINE = 64
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


def make_prepare(weights: Format, name: str) -> Callable[[int, int], None]:
    """Compiled function that rounds ROUND_ROWS rows, an item of `make_parallel_for`."""
    round_unit = make_round(weights == "int4")

    def prepare(context: int, item: int) -> None:
        call = call_at(context)
        slot = stack_slots(1)
        for row in range(item * ROUND_ROWS, smaller((item + 1) * ROUND_ROWS, call.M)):
            for first in range(0, call.K, call.x_group):
                x = call.x + 4 * (row * call.K + first)
                largest_bits(x, call.x_group // 8, slot)
                factor, scale = scale_of(load_i32(slot), call.top)
                for column in range(first, first + call.x_group, call.unit):
                    place = row * call.K + column
                    round_unit(
                        call.x + 4 * place, call.unit // 8, factor, call.rounded + 2 * place, slot
                    )
                    unit = 4 * (row * call.units + column // call.unit)
                    store_f32(call.x_scales + unit, scale)
                    store_f32(call.x_sums + unit, scale * np.float32(load_i32(slot)))

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


def make_spread(weights: Format, instructions: Instructions, name: str) -> Callable[..., None]:
    """Compiled function: scales and biases [units, PANEL] of a panel, as float32."""
    scales_f32, scales_bf16, scales_f16 = (
        make_expand(dtype, instructions, biases=False)
        for dtype in ("float32", "bfloat16", "float16")
    )
    biases_f32, biases_bf16, biases_f16 = (
        make_expand(dtype, instructions, biases=True)
        for dtype in ("float32", "bfloat16", "float16")
    )
    has_biases = weights == "int4"

    def spread(context: int, panel: int, scales: int, biases: int) -> None:
        call = call_at(context)
        groups, repeat, first = call.G, call.repeat, panel * PANEL * call.G
        if call.scales_f32 != 0:
            scales_f32(call.scales + 4 * first, groups, repeat, scales, scales)
        elif call.scales_bf16 != 0:
            scales_bf16(call.scales + 2 * first, groups, repeat, scales, scales)
        else:
            scales_f16(call.scales + 2 * first, groups, repeat, scales, scales)
        if has_biases:
            if call.has_zeros == 0:
                biases_of_one(scales, call.units, np.float32(INT4_ZERO), biases)
            elif call.scales_f32 != 0:
                biases_f32(call.zeros + 4 * first, groups, repeat, scales, biases)
            elif call.scales_bf16 != 0:
                biases_bf16(call.zeros + 2 * first, groups, repeat, scales, biases)
            else:
                biases_f16(call.zeros + 2 * first, groups, repeat, scales, biases)

    return compiled(named(spread, f"spread_{name}"))


def make_integers_item(
    weights: Format, instructions: Instructions, name: str
) -> Callable[[int, int], None]:
    """Compiled item: rounded x times int8 or int4."""
    spread = make_spread(weights, instructions, name)
    step_columns, step_bytes = STEP_COLUMNS[weights], STEP_BYTES[weights]

    def make_rows(rows: int) -> Callable[..., None]:
        tile = make_integers_tile(rows, weights, instructions)

        def multiply(context: int, row: int, panel: int, scales: int, biases: int) -> None:
            call = call_at(context)
            tile(
                call.rounded + 2 * row * call.K,
                2 * call.K,
                call.values + panel * (call.K // step_columns) * step_bytes,
                call.units,
                call.unit // step_columns,
                call.x_scales + 4 * row * call.units,
                call.x_sums + 4 * row * call.units,
                4 * call.units,
                scales,
                biases,
                call.out + 4 * (row * call.N + panel * PANEL),
                4 * call.N,
            )

        return compiled(named(multiply, f"multiply_{rows}_{name}"))

    rows_6, rows_4, rows_2, rows_1 = (make_rows(rows) for rows in (6, 4, 2, 1))

    def item(context: int, index: int) -> None:
        call = call_at(context)
        block, run = index // call.runs, index % call.runs
        end = smaller((block + 1) * call.block_rows, call.M)
        size = call.units * PANEL_BYTES
        memory = malloc(2 * size + LINE)
        if memory == 0:
            call.failed = 1
            return
        scales = (memory + LINE - 1) // LINE * LINE
        biases = scales + size
        last = smaller((run + 1) * call.run_panels, call.N // PANEL)
        for panel in range(run * call.run_panels, last):
            spread(context, panel, scales, biases)
            row = block * call.block_rows
            clear_rows(call.out + 4 * (row * call.N + panel * PANEL), end - row, 4 * call.N)
            while row + 6 <= end:
                rows_6(context, row, panel, scales, biases)
                row += 6
            if row + 4 <= end:
                rows_4(context, row, panel, scales, biases)
                row += 4
            if row + 2 <= end:
                rows_2(context, row, panel, scales, biases)
                row += 2
            if row < end:
                rows_1(context, row, panel, scales, biases)
        free(memory)

    return compiled(named(item, f"item_{name}"))


def make_floats_item(
    weights: Format, instructions: Instructions, name: str
) -> Callable[[int, int], None]:
    """Compiled item: float32 x times a weight that is unpacked to float32, block by block.

    A lone row takes two panels at a time: more independent sums hide the time that one takes.
    """
    spread, unpack = make_spread(weights, instructions, name), make_unpack(weights)
    step_columns, step_bytes = STEP_COLUMNS[weights], STEP_BYTES[weights]

    def make_rows(rows: int, panels: int) -> Callable[..., None]:
        tile = make_floats_tile(rows, panels, weights)

        def multiply(
            context: int,
            row: int,
            panel: int,
            first: int,
            units: int,
            w: int,
            w_bytes: int,
            scales: int,
        ) -> None:
            call = call_at(context)
            size = call.units * PANEL_BYTES
            here = scales + first * PANEL_BYTES
            tile(
                call.x + 4 * (row * call.K + first * call.unit),
                4 * call.K,
                w,
                w_bytes,
                units,
                call.unit,
                call.x_sums + 4 * (row * call.units + first),
                4 * call.units,
                here,
                here + size,
                2 * size,
                call.out + 4 * (row * call.N + panel * PANEL),
                4 * call.N,
            )

        return compiled(named(multiply, f"multiply_{rows}x{panels}_{name}"))

    rows_6, rows_4, rows_2, rows_1 = (make_rows(rows, 1) for rows in (6, 4, 2, 1))
    lone_row = make_rows(1, 2)

    def block_of_columns(
        context: int, row: int, end: int, panel: int, panels: int, first: int, w: int, scales: int
    ) -> None:
        call = call_at(context)
        units = smaller(larger(1, UNPACK_COLUMNS // call.unit), call.units - first)
        w_bytes = units * call.unit * PANEL_BYTES
        steps = units * call.unit // step_columns
        for i in range(panels):
            place = (panel + i) * (call.K // step_columns) + first * call.unit // step_columns
            unpack(call.values + place * step_bytes, steps, w + i * w_bytes)
        if panels == 2:
            lone_row(context, row, panel, first, units, w, w_bytes, scales)
            return
        while row + 6 <= end:
            rows_6(context, row, panel, first, units, w, w_bytes, scales)
            row += 6
        if row + 4 <= end:
            rows_4(context, row, panel, first, units, w, w_bytes, scales)
            row += 4
        if row + 2 <= end:
            rows_2(context, row, panel, first, units, w, w_bytes, scales)
            row += 2
        if row < end:
            rows_1(context, row, panel, first, units, w, w_bytes, scales)

    columns = compiled(named(block_of_columns, f"columns_{name}"))

    def item(context: int, index: int) -> None:
        call = call_at(context)
        block, run = index // call.runs, index % call.runs
        row = block * call.block_rows
        end = smaller((block + 1) * call.block_rows, call.M)
        size = call.units * PANEL_BYTES
        room = larger(UNPACK_COLUMNS, call.unit) * PANEL_BYTES
        memory = malloc(4 * size + 2 * room + LINE)
        if memory == 0:
            call.failed = 1
            return
        scales = (memory + LINE - 1) // LINE * LINE
        w = scales + 4 * size
        panel, last = run * call.run_panels, smaller((run + 1) * call.run_panels, call.N // PANEL)
        while panel < last:
            panels = 1
            if end - row == 1:
                panels = smaller(2, last - panel)
            for i in range(panels):
                spread(context, panel + i, scales + 2 * i * size, scales + (2 * i + 1) * size)
            place = call.out + 4 * (row * call.N + panel * PANEL)
            clear_rows(place, end - row, 4 * call.N)
            if panels == 2:
                clear_rows(place + PANEL_BYTES, end - row, 4 * call.N)
            for first in range(0, call.units, larger(1, UNPACK_COLUMNS // call.unit)):
                columns(context, row, end, panel, panels, first, w, scales)
            panel += panels
        free(memory)

    return compiled(named(item, f"item_{name}"))


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


def make_handler(
    weights: Format, rounds: bool, instructions: Instructions, name: str
) -> Callable[[int], int]:
    """The XLA handler of a format of weights, compiled and kept by `ffi.targets`.

    rounds: x is rounded to integers, else used as it is. name: belongs to these three.
    """
    prepare = make_prepare(weights, name) if rounds else make_sums(name)
    make_item = make_integers_item if rounds else make_floats_item
    run_prepare = make_parallel_for(prepare, f"prepare_{name}")
    run_items = make_parallel_for(make_item(weights, instructions, name), name)
    x_bytes, is_needed = (2 if rounds else 4), rounds or weights == "int4"

    def handler(frame: int) -> int:
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

    return named(handler, f"handler_{name}")
