"""The bodies of the TPU kernels: one block of the weight meets one block of rows (step 6).

The grid goes over blocks of rows, of outputs and, innermost, of columns; Pallas fetches the next
block while one is multiplied. Three ways for scales to meet products:

    end_kernel      whole rows of the weight share a scale: the sums are scaled at the end
    sums_kernel     groups share a scale, and each group's sum is scaled. The matrix unit takes at
                    least 128 columns, which may belong to several groups: x is multiplied once
                    for each of them, with zeros in the other groups' columns
    weights_kernel  weights are scaled, then multiplied as sums of two bfloat16 numbers, which hold
                    17 bits (of three and all 24 where x is float32): for many rows

No kernel mixes rows of x: a row's result depends on no other row. Must not know the layout of
models.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.quantized_matmul.tpu_blocks import WEIGHT_COLUMNS, Blocks
from pallas_kernels.quantized_matmul.tpu_facts import LANES, SUBLANES, Facts
from pallas_kernels.quantized_matmul.tpu_numbers import (
    EXACT_PLANES,
    halves,
    planes_of,
    to_bfloat16,
    to_float32,
)

Ref = Any
#: Of x as int16: values = 256 * first plane + second plane.
INT16_UPPER = 256.0


Size = int | jax.Array


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a program is compiled for."""

    facts: Facts
    blocks: Blocks

    @property
    def num_blocks(self) -> int:
        """Blocks of columns."""
        return self.facts.columns // self.blocks.columns

    @property
    def strips(self) -> int:
        """Strips in a block of columns."""
        return -(-self.blocks.columns // self.strip_columns)

    @property
    def strip_columns(self) -> int:
        """Columns that are multiplied together."""
        return WEIGHT_COLUMNS if self.blocks.way == "weights" else self.facts.sum_columns


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Refs:
    """Blocks of the operands, the result, and sums of earlier blocks of columns.

    x: [halves, planes, rows, all columns]; values: [outputs, columns]; scales and zeros: for
    "end" [1, outputs], else [outputs, groups]; row_scales: [rows, 1] float32; group_scales and
    group_sums, of x: float32 [strips, rows, groups of a strip], for "end" [1, rows, 1]; out, sums:
    [rows, outputs]; group_rows: of scales and of zeros, [groups, outputs] float32. None: not used.
    What `Facts` calls turned has its last two axes swapped. block: number of the block of columns.
    """

    block: jax.Array
    x: Ref
    values: Ref
    scales: Ref
    zeros: Ref | None
    row_scales: Ref | None
    group_scales: Ref | None
    group_sums: Ref | None
    out: Ref
    sums: Ref
    group_rows: tuple[Ref, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Strip:
    """Columns of a block that are multiplied together, and the groups they belong to.

    start: its first column in the block; group: its first group in the block, whose columns begin
    `before` columns before the strip.
    """

    number: Size
    start: Size
    size: int
    group: Size
    before: int
    num_groups: int


def end_kernel(plan: Plan, refs: Refs) -> None:
    """One scale per output."""
    _clear_sums(refs)
    columns = _x_columns(plan, refs, 0, plan.blocks.columns)
    for half, values in enumerate(halves(refs.values[...], plan.facts.scheme)):
        short = refs.x.dtype in (jnp.int8, jnp.float8_e4m3fn)
        right = values.astype(refs.x.dtype) if short else to_bfloat16(values)
        for plane in range(refs.x.shape[1]):
            refs.sums[...] += _times_weight(plan, refs.x[half, plane, :, columns], right)

    @pl.when(_is_last_block(plan, refs))
    def _() -> None:
        out = refs.sums[...].astype(jnp.float32)
        if refs.zeros is not None and refs.group_sums is not None:
            out -= refs.group_sums[0] * to_float32(refs.zeros[...])
        _finish(refs, out * to_float32(refs.scales[...]))


def sums_kernel(plan: Plan, refs: Refs) -> None:
    """A scale per group and output, which the group's sum meets."""
    _clear_sums(refs)
    _lay_group_rows(plan, refs)

    def add(strip: Strip) -> None:
        for number, group in enumerate(_strip_sums(plan, refs, strip)):
            rows = _groups(plan, refs, strip.group + number, 1)
            if refs.group_sums is not None:
                mine = refs.group_sums[strip.number, :, pl.ds(number, 1)]
                group -= mine * refs.group_rows[1][rows]
            group *= refs.group_rows[0][rows]
            if refs.group_scales is not None:
                group *= refs.group_scales[strip.number, :, pl.ds(number, 1)]
            refs.sums[...] += group

    _each_strip(plan, add)

    @pl.when(_is_last_block(plan, refs))
    def _() -> None:
        _finish(refs, refs.sums[...])


def _strip_sums(plan: Plan, refs: Refs, strip: Strip) -> list[jax.Array]:
    """For each of the groups of a strip, its sum of products [rows, outputs]."""
    rows, planes, count = plan.blocks.rows, refs.x.shape[1], strip.num_groups
    columns = _x_columns(plan, refs, strip.start, strip.size)
    column = strip.before + lax.broadcasted_iota(jnp.int32, (rows, strip.size), 1)
    total = jnp.zeros((planes * count * rows, plan.blocks.outputs), jnp.float32)
    for half, values in enumerate(_strip_values(plan, refs, strip)):
        left = []
        for plane in range(planes):
            x = refs.x[half, plane, :, columns].astype(jnp.float32)
            for number in range(count):
                mine = _in_group(plan, column, number)
                left.append(jnp.where(mine, x, 0.0) if count > 1 else x)
        together = jnp.concatenate(left).astype(jnp.bfloat16)
        total += _times_weight(plan, together, to_bfloat16(values))
    found = []
    for number in range(count):
        parts = [total[(plane * count + number) * rows :][:rows] for plane in range(planes)]
        if plan.facts.scheme.activations == "int16_group":
            parts[0] *= INT16_UPPER
        found.append(sum(parts[1:], parts[0]))
    return found


def weights_kernel(plan: Plan, refs: Refs) -> None:
    """A scale per group and output, which the weights meet."""
    _clear_sums(refs)
    _lay_group_rows(plan, refs)

    def add(strip: Strip) -> None:
        groups = _groups(plan, refs, strip.group, strip.num_groups)
        spread = [_spread(plan, rows[groups], strip) for rows in refs.group_rows]
        columns = _x_columns(plan, refs, strip.start, strip.size)
        for half, values in enumerate(_strip_values(plan, refs, strip)):
            weight = values.astype(jnp.float32)
            if len(spread) == 2:
                weight -= spread[1]
            weight *= spread[0]
            # As precise as x is: products of small planes are below the last bit.
            count = EXACT_PLANES if refs.x.shape[1] == EXACT_PLANES else 2
            for number, plane in enumerate(planes_of(weight, count)):
                for other in range(min(refs.x.shape[1], count - number)):
                    refs.sums[...] += _times_weight(plan, refs.x[half, other, :, columns], plane)

    _each_strip(plan, add)

    @pl.when(_is_last_block(plan, refs))
    def _() -> None:
        _finish(refs, refs.sums[...])


def _spread(plan: Plan, rows: jax.Array, strip: Strip) -> jax.Array:
    """Scales or zero points of a strip [groups, outputs] as [outputs, columns] (turned: swapped).

    A product with zeros and ones: exact, as all planes are kept.
    """
    shape, axis = (strip.num_groups, strip.size), 1
    if plan.facts.values_turned:
        shape, axis = shape[::-1], 0
    column = strip.before + lax.broadcasted_iota(jnp.int32, shape, axis)
    mine = _in_group(plan, column, lax.broadcasted_iota(jnp.int32, shape, 1 - axis))
    mask = jnp.where(mine, 1.0, 0.0).astype(jnp.bfloat16)
    planes = planes_of(rows, EXACT_PLANES)
    if plan.facts.values_turned:
        spread = [_dot(mask, plane, (1, 0)) for plane in planes]
    else:
        spread = [_dot(plane, mask, (0, 0)) for plane in planes]
    return sum(spread[1:], spread[0])


def _each_strip(plan: Plan, act: Callable[[Strip], None]) -> None:
    """Calls `act` with the strips of a block; equal ones are compiled once."""
    width, each, columns = plan.strip_columns, plan.facts.group_columns, plan.blocks.columns
    equal = columns // width if width % each == 0 else 0
    if equal < 2:
        equal = 0

    def one(number: jax.Array, _: None) -> None:
        groups = width // each
        start = pl.multiple_of(number * width, LANES)
        first = number * groups
        act(Strip(number=number, start=start, size=width, group=first, before=0, num_groups=groups))

    if equal:
        lax.fori_loop(0, equal, one, None)
    for number in range(equal, plan.strips):
        start = number * width
        size = min(width, columns - start)
        first, last = start // each, (start + size - 1) // each
        act(
            Strip(
                number=number,
                start=start,
                size=size,
                group=first,
                before=start - first * each,
                num_groups=last + 1 - first,
            )
        )


def _in_group(plan: Plan, column: jax.Array, number: Size) -> jax.Array:
    """Whether columns, counted from the first group's, are those of a group."""
    begin = number * plan.facts.group_columns
    return (column >= begin) & (column < begin + plan.facts.group_columns)


def _x_columns(plan: Plan, refs: Refs, start: Size, size: int) -> Any:
    """Of all columns, `size` that begin at column `start` of this step's block."""
    if plan.num_blocks == 1:
        return pl.ds(start, size)
    return pl.ds(pl.multiple_of(refs.block * plan.blocks.columns + start, LANES), size)


def _groups(plan: Plan, refs: Refs, first: Size, count: int) -> Any:
    """Of all groups, `count` that begin at the first of this step's block."""
    if plan.num_blocks > 1:
        first = refs.block * (plan.blocks.columns // plan.facts.group_columns) + first
    if count % SUBLANES == 0 and not isinstance(first, int):
        first = pl.multiple_of(first, SUBLANES)
    return pl.ds(first, count)


def _strip_values(plan: Plan, refs: Refs, strip: Strip) -> list[jax.Array]:
    """The weight's values in a strip, as `halves` has them."""
    columns = pl.ds(strip.start, strip.size)
    stored = refs.values[columns, :] if plan.facts.values_turned else refs.values[:, columns]
    return halves(stored, plan.facts.scheme)


def _lay_group_rows(plan: Plan, refs: Refs) -> None:
    """Scales and zero points as rows of a group each, once per block of outputs."""

    @pl.when(refs.block == 0)
    def _() -> None:
        for stored, rows in zip((refs.scales, refs.zeros), refs.group_rows, strict=False):
            numbers = to_float32(stored[...])
            rows[...] = numbers if plan.facts.scales_turned else numbers.T


def _clear_sums(refs: Refs) -> None:
    @pl.when(refs.block == 0)
    def _() -> None:
        refs.sums[...] = jnp.zeros(refs.sums.shape, refs.sums.dtype)


def _is_last_block(plan: Plan, refs: Refs) -> jax.Array:
    return refs.block == plan.num_blocks - 1


def _finish(refs: Refs, out: jax.Array) -> None:
    if refs.row_scales is not None:
        out *= refs.row_scales[...]
    refs.out[...] = out.astype(refs.out.dtype)


def _times_weight(plan: Plan, x: jax.Array, values: jax.Array) -> jax.Array:
    """x [rows, columns] times a block of the weight: [rows, outputs]."""
    return _dot(x, values, (1, 0 if plan.facts.values_turned else 1))


def _dot(left: jax.Array, right: jax.Array, contract: tuple[int, int]) -> jax.Array:
    """Sums over one axis of each side; int8 gives int32, bfloat16 and fp8 float32."""
    return lax.dot_general(
        left,
        right,
        (((contract[0],), (contract[1],)), ((), ())),
        preferred_element_type=jnp.int32 if left.dtype == jnp.int8 else jnp.float32,
    )
