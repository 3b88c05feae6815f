"""An item of a quantised product on CPUs: a block of rows times a run of panels (step 6).

Panel after panel, so that weights are read from memory in one stream; within a panel columns are
taken in blocks, and in each of them all rows, a tile at a time. Many rows have the block unpacked
for them first. Sums stand in memory of the item's own until a panel is done: rows of the result
lie far apart. Must not know XLA.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from pallas_kernels.ffi.abi import compiled, free, larger, malloc, named, smaller
from pallas_kernels.ffi.records import record, record_at
from pallas_kernels.quantized_matmul.cpu_dots import Instructions
from pallas_kernels.quantized_matmul.cpu_tiles import (
    PANEL,
    PANEL_BYTES,
    STEP_BYTES,
    STEP_COLUMNS,
    Format,
    PairFormat,
    biases_of_one,
    clear,
    copy_rows,
    make_expand,
    make_floats_tile,
    make_integers_tile,
    make_unpack,
    make_unpack_pairs,
)
from pallas_kernels.quantized_matmul.scheme import INT4_ZERO

#: One call: addresses of operands and results, sizes by their letters, and the plan.
CALL = record(
    "x values scales zeros out rounded x_scales x_sums M N K G units unit repeat x_group top "
    "scales_f32 scales_bf16 has_zeros block_rows blocks run_panels runs failed"
)
call_at = record_at(CALL)
CALL_BYTES = CALL.itemsize

#: Rows from which a block of columns is unpacked to int16 first, and the columns of such a block.
MANY_ROWS, PAIR_COLUMNS = 12, 512
#: Columns that are unpacked to float32 at a time.
FLOAT_COLUMNS = 256
LINE = 64


def make_spread(
    weights: Format, instructions: Instructions, name: str, *, repeats: bool
) -> Callable[..., None]:
    """Compiled function: scales and biases [units, PANEL] of a panel, as float32."""
    scales_f32, scales_bf16, scales_f16 = (
        make_expand(dtype, instructions, biases=False, repeats=repeats)
        for dtype in ("float32", "bfloat16", "float16")
    )
    biases_f32, biases_bf16, biases_f16 = (
        make_expand(dtype, instructions, biases=True, repeats=repeats)
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


@compiled
def room_for(context: int, rows: int, panels: int, room: int) -> int:
    """Address of memory for an item: scales and biases of the panels, sums, and `room` bytes."""
    call = call_at(context)
    return malloc(panels * (2 * call.units + rows) * PANEL_BYTES + room + LINE)  # type: ignore[no-any-return]


def make_integers_item(
    weights: Format, instructions: Instructions, name: str
) -> Callable[[int, int], None]:
    """Compiled item: x rounded to int16 times int8 or int4."""
    spread = make_spread(weights, instructions, name, repeats=False)
    unpack = make_unpack_pairs(weights)
    step_columns, step_bytes = STEP_COLUMNS[weights], STEP_BYTES[weights]
    pair_bytes = STEP_BYTES["int16"]

    def make_rows(rows: int, is_unpacked: bool) -> Callable[..., None]:
        """Compiled tile of a block of columns: units `first` on; w: where the block stands."""
        form: PairFormat = "int16" if is_unpacked else weights
        columns = STEP_COLUMNS[form]
        tile = make_integers_tile(rows, form, weights == "int4", instructions)

        def multiply(
            context: int, row: int, first: int, units: int, w: int, scales: int, sums: int
        ) -> None:
            call = call_at(context)
            tile(
                call.rounded + 2 * (row * call.K + first * call.unit),
                2 * call.K,
                w,
                units,
                call.unit // columns,
                call.x_scales + 4 * (row * call.units + first),
                call.x_sums + 4 * (row * call.units + first),
                4 * call.units,
                scales + first * PANEL_BYTES,
                scales + (call.units + first) * PANEL_BYTES,
                sums,
                PANEL_BYTES,
            )

        return compiled(named(multiply, f"multiply_{rows}_{form}_{name}"))

    rows_6, rows_4, rows_2, rows_1 = (make_rows(rows, rows == 6) for rows in (6, 4, 2, 1))

    def block_of_columns(
        context: int,
        row: int,
        end: int,
        first: int,
        units: int,
        w: int,
        scales: int,
        sums: int,
        room: int,
    ) -> None:
        call = call_at(context)
        if room != 0:
            unpack(w, units * call.unit // step_columns, room)
            while row + 6 <= end:
                rows_6(context, row, first, units, room, scales, sums)
                row, sums = row + 6, sums + 6 * PANEL_BYTES
        while row + 4 <= end:
            rows_4(context, row, first, units, w, scales, sums)
            row, sums = row + 4, sums + 4 * PANEL_BYTES
        if row + 2 <= end:
            rows_2(context, row, first, units, w, scales, sums)
            row, sums = row + 2, sums + 2 * PANEL_BYTES
        if row < end:
            rows_1(context, row, first, units, w, scales, sums)

    columns = compiled(named(block_of_columns, f"columns_{name}"))

    def item(context: int, index: int) -> None:
        call = call_at(context)
        block, run = index // call.runs, index % call.runs
        row = block * call.block_rows
        rows = smaller(call.block_rows, call.M - row)
        units = call.units
        room_bytes = 0
        if rows >= MANY_ROWS and call.unit <= 4 * PAIR_COLUMNS:
            units = smaller(units, larger(1, PAIR_COLUMNS // call.unit))
            room_bytes = units * call.unit // 2 * pair_bytes
        memory = room_for(context, rows, 1, room_bytes)
        if memory == 0:
            call.failed = 1
            return
        scales = (memory + LINE - 1) // LINE * LINE
        sums = scales + 2 * call.units * PANEL_BYTES
        room = 0
        if room_bytes != 0:
            room = sums + rows * PANEL_BYTES
        for panel in range(
            run * call.run_panels, smaller((run + 1) * call.run_panels, call.N // PANEL)
        ):
            spread(context, panel, scales, scales + call.units * PANEL_BYTES)
            clear(sums, rows)
            start = call.values + panel * (call.K // step_columns) * step_bytes
            for first in range(0, call.units, units):
                w = start + first * call.unit // step_columns * step_bytes
                count = smaller(units, call.units - first)
                columns(context, row, row + rows, first, count, w, scales, sums, room)
            copy_rows(sums, rows, 1, call.out + 4 * (row * call.N + panel * PANEL), 4 * call.N)
        free(memory)

    return compiled(named(item, f"item_{name}"))


def make_floats_item(
    weights: Format, instructions: Instructions, name: str
) -> Callable[[int, int], None]:
    """Compiled item: float32 x times a weight that is unpacked to float32, block by block.

    A lone row takes two panels at a time: more independent sums hide the time that one takes.
    """
    spread = make_spread(weights, instructions, name, repeats=True)
    unpack = make_unpack(weights)
    step_columns, step_bytes = STEP_COLUMNS[weights], STEP_BYTES[weights]

    def make_rows(rows: int, panels: int) -> Callable[..., None]:
        """Compiled tile of a block of columns: units `first` on; w: the unpacked block."""
        tile = make_floats_tile(rows, panels, weights)

        def multiply(
            context: int, row: int, first: int, units: int, w: int, scales: int, sums: int
        ) -> None:
            call = call_at(context)
            size = call.units * PANEL_BYTES
            here = scales + first * PANEL_BYTES
            tile(
                call.x + 4 * (row * call.K + first * call.unit),
                4 * call.K,
                w,
                units * call.unit * PANEL_BYTES,
                units,
                call.unit,
                call.x_sums + 4 * (row * call.units + first),
                4 * call.units,
                here,
                here + size,
                2 * size,
                sums,
                panels * PANEL_BYTES,
            )

        return compiled(named(multiply, f"multiply_{rows}x{panels}_{name}"))

    rows_6, rows_4, rows_2, rows_1 = (make_rows(rows, 1) for rows in (6, 4, 2, 1))
    lone_row = make_rows(1, 2)

    def rows_of_columns(
        context: int, row: int, end: int, first: int, units: int, w: int, scales: int, sums: int
    ) -> None:
        while row + 6 <= end:
            rows_6(context, row, first, units, w, scales, sums)
            row, sums = row + 6, sums + 6 * PANEL_BYTES
        if row + 4 <= end:
            rows_4(context, row, first, units, w, scales, sums)
            row, sums = row + 4, sums + 4 * PANEL_BYTES
        if row + 2 <= end:
            rows_2(context, row, first, units, w, scales, sums)
            row, sums = row + 2, sums + 2 * PANEL_BYTES
        if row < end:
            rows_1(context, row, first, units, w, scales, sums)

    multiply_rows = compiled(named(rows_of_columns, f"rows_{name}"))

    def item(context: int, index: int) -> None:
        call = call_at(context)
        block, run = index // call.runs, index % call.runs
        row = block * call.block_rows
        rows = smaller(call.block_rows, call.M - row)
        most = smaller(call.units, larger(1, FLOAT_COLUMNS // call.unit))
        size = call.units * PANEL_BYTES
        memory = room_for(context, rows, 2, 2 * most * call.unit * PANEL_BYTES)
        if memory == 0:
            call.failed = 1
            return
        scales = (memory + LINE - 1) // LINE * LINE
        sums = scales + 4 * size
        w = sums + 2 * rows * PANEL_BYTES
        panel, last = run * call.run_panels, smaller((run + 1) * call.run_panels, call.N // PANEL)
        while panel < last:
            panels = 1
            if rows == 1:
                panels = smaller(2, last - panel)
            for i in range(panels):
                spread(context, panel + i, scales + 2 * i * size, scales + (2 * i + 1) * size)
            clear(sums, panels * rows)
            for first in range(0, call.units, most):
                units = smaller(most, call.units - first)
                steps = units * call.unit // step_columns
                for i in range(panels):
                    start = ((panel + i) * call.K + first * call.unit) // step_columns * step_bytes
                    unpack(call.values + start, steps, w + i * units * call.unit * PANEL_BYTES)
                if panels == 2:
                    lone_row(context, row, first, units, w, scales, sums)
                else:
                    multiply_rows(context, row, row + rows, first, units, w, scales, sums)
            place = call.out + 4 * (row * call.N + panel * PANEL)
            copy_rows(sums, rows, panels, place, 4 * call.N)
            panel += panels
        free(memory)

    return compiled(named(item, f"item_{name}"))
