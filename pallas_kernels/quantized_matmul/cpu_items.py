"""An item of a quantised product on CPUs: a block of rows times a run of panels (step 6).

Panel after panel, so that weights are read from memory in one stream; within a panel columns are
taken in blocks, and in each of them all rows, a tile at a time. Many rows have the block unpacked
for them first. Sums stand in memory of the item's own until a panel is done: rows of the result
lie far apart. Must not know XLA.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from pallas_kernels.ffi.abi import compiled, free, larger, malloc, named, smaller
from pallas_kernels.ffi.records import record, record_at
from pallas_kernels.quantized_matmul.cpu_dots import LANES, ROW_GROUP, Instructions
from pallas_kernels.quantized_matmul.cpu_tiles import (
    LINE,
    PANEL,
    PANEL_BYTES,
    STEP_BYTES,
    STEP_COLUMNS,
    Format,
    PairFormat,
    ask_for,
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
#: With AVX-512 a tile of 12 rows hides unpacking: storing what was unpacked takes longer.
NEVER = 2**62
MANY_ROWS: Mapping[Instructions, int] = {"avx512": NEVER, "avx2": 12, "portable": 12}
PAIR_COLUMNS = 512
#: Rows of the tiles, by what registers hold; the first reads what was unpacked for it, if that is
#: worth it.
TILE_ROWS: Mapping[Instructions, tuple[int, ...]] = {
    "avx512": (12, 8, 4, 2, 1),
    "avx2": (6, 4, 2, 1),
    "portable": (6, 4, 2, 1),
}
#: Vectors of outputs of a lone row of floats.
LONE_VECTORS = 4
#: Columns that are unpacked to float32 at a time.
FLOAT_COLUMNS = 256


def _chain(
    sizes: Sequence[int], make_rows: Callable[[int], Callable[..., None]], name: str
) -> Callable[..., None]:
    """Compiled function: rows row..end by the largest tiles that fit, then by smaller ones.

    sizes: rows of tiles, falling to 1; make_rows: makes a tile of so many.
    """
    size, *smaller_sizes = sizes
    multiply = make_rows(size)
    if not smaller_sizes:

        def last(
            context: int, row: int, end: int, first: int, units: int, w: int, scales: int, sums: int
        ) -> None:
            while row < end:
                multiply(context, row, first, units, w, scales, sums)
                row, sums = row + size, sums + size * PANEL_BYTES

        return compiled(named(last, f"{name}_{size}"))
    rest = _chain(smaller_sizes, make_rows, name)

    def rows_of_columns(
        context: int, row: int, end: int, first: int, units: int, w: int, scales: int, sums: int
    ) -> None:
        while row + size <= end:
            multiply(context, row, first, units, w, scales, sums)
            row, sums = row + size, sums + size * PANEL_BYTES
        rest(context, row, end, first, units, w, scales, sums)

    return compiled(named(rows_of_columns, f"{name}_{size}"))


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
def ask_for_scales(context: int, panel: int) -> None:
    """Asks for scales and zero points of a panel: too few bytes for the machine to foresee."""
    call = call_at(context)
    size = (2 + 2 * call.scales_f32) * PANEL * call.G
    ask_for(call.scales + panel * size, size)
    if call.has_zeros != 0:
        ask_for(call.zeros + panel * size, size)


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
    unpack = make_unpack_pairs(weights, instructions)
    step_columns, step_bytes = STEP_COLUMNS[weights], STEP_BYTES[weights]
    pair_bytes, row_group = STEP_BYTES["int16"], ROW_GROUP[instructions]

    def make_rows(rows: int, is_unpacked: bool) -> Callable[..., None]:
        """Compiled tile of a block of columns: units `first` on; w: where the block stands."""
        form: PairFormat = "int16" if is_unpacked else weights
        columns = STEP_COLUMNS[form]
        tile = make_integers_tile(rows, form, weights == "int4", instructions)

        def multiply(
            context: int, row: int, first: int, units: int, w: int, scales: int, sums: int
        ) -> None:
            call = call_at(context)
            group, place = row // row_group, row % row_group
            tile(
                call.rounded + 2 * row_group * (group * call.K + first * call.unit) + 4 * place,
                2 * row_group * call.K,
                w,
                units,
                call.unit // columns,
                call.x_scales + 4 * row_group * (group * call.units + first) + 4 * place,
                call.x_sums + 4 * row_group * (group * call.units + first) + 4 * place,
                4 * row_group * call.units,
                scales + first * PANEL_BYTES,
                scales + (call.units + first) * PANEL_BYTES,
                sums,
            )

        return compiled(named(multiply, f"multiply_{rows}_{form}_{name}"))

    many_rows, (most, *_) = MANY_ROWS[instructions], TILE_ROWS[instructions]
    multiply_many = make_rows(most, True)
    multiply_rest = _chain(
        TILE_ROWS[instructions], lambda rows: make_rows(rows, False), f"columns_{name}"
    )

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
            while row + most <= end:
                multiply_many(context, row, first, units, room, scales, sums)
                row, sums = row + most, sums + most * PANEL_BYTES
        multiply_rest(context, row, end, first, units, w, scales, sums)

    columns = compiled(named(block_of_columns, f"block_{name}"))

    def item(context: int, index: int) -> None:
        call = call_at(context)
        block, run = index // call.runs, index % call.runs
        row = block * call.block_rows
        rows = smaller(call.block_rows, call.M - row)
        units = call.units
        room_bytes = 0
        if rows >= many_rows and call.unit <= 4 * PAIR_COLUMNS:
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
            ask_for_scales(context, panel + 1)
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

    A lone row takes several panels at a time: independent sums hide the time that one takes.
    """
    spread = make_spread(weights, instructions, name, repeats=True)
    unpack = make_unpack(weights, instructions)
    step_columns, step_bytes = STEP_COLUMNS[weights], STEP_BYTES[weights]

    def make_rows(rows: int, panels: int) -> Callable[..., None]:
        """Compiled tile of a block of columns: units `first` on; w: the unpacked block."""
        tile = make_floats_tile(rows, panels, weights, instructions)

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

    lone_panels = LONE_VECTORS * LANES[instructions] // PANEL
    lone_row = make_rows(1, lone_panels)
    multiply_rows = _chain(TILE_ROWS[instructions], lambda rows: make_rows(rows, 1), f"rows_{name}")

    def item(context: int, index: int) -> None:
        call = call_at(context)
        block, run = index // call.runs, index % call.runs
        row = block * call.block_rows
        rows = smaller(call.block_rows, call.M - row)
        most = smaller(call.units, larger(1, FLOAT_COLUMNS // call.unit))
        size = call.units * PANEL_BYTES
        memory = room_for(context, rows, lone_panels, lone_panels * most * call.unit * PANEL_BYTES)
        if memory == 0:
            call.failed = 1
            return
        scales = (memory + LINE - 1) // LINE * LINE
        sums = scales + 2 * lone_panels * size
        w = sums + lone_panels * rows * PANEL_BYTES
        panel, last = run * call.run_panels, smaller((run + 1) * call.run_panels, call.N // PANEL)
        while panel < last:
            panels = 1
            if rows == 1 and last - panel >= lone_panels:
                panels = lone_panels
            for i in range(panels):
                spread(context, panel + i, scales + 2 * i * size, scales + (2 * i + 1) * size)
            clear(sums, panels * rows)
            for first in range(0, call.units, most):
                units = smaller(most, call.units - first)
                steps = units * call.unit // step_columns
                for i in range(panels):
                    start = ((panel + i) * call.K + first * call.unit) // step_columns * step_bytes
                    unpack(call.values + start, steps, w + i * units * call.unit * PANEL_BYTES)
                if panels == lone_panels:
                    lone_row(context, row, first, units, w, scales, sums)
                else:
                    multiply_rows(context, row, row + rows, first, units, w, scales, sums)
            place = call.out + 4 * (row * call.N + panel * PANEL)
            copy_rows(sums, rows, panels, place, 4 * call.N)
            panel += panels
        free(memory)

    return compiled(named(item, f"item_{name}"))
