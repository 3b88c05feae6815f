"""Products with quantised weights on TPUs, in Pallas (step 6).

Weights are read as they are stored, block after block, once for up to 512 rows of x; nothing of a
weight is copied or converted outside the kernel's fast memory. Here the call is put together: x as
`tpu_rows` makes it, block sizes of `tpu_blocks`, a kernel of `tpu_kernels`. Must not know
anything outside pallas_kernels.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.typing import DTypeLike

from pallas_kernels.errors import KernelError
from pallas_kernels.quantized_matmul.quantize import dequantize
from pallas_kernels.quantized_matmul.scheme import QuantizedWeight, Scheme
from pallas_kernels.quantized_matmul.tpu_blocks import Blocks, check, choose_blocks, rule
from pallas_kernels.quantized_matmul.tpu_facts import Facts
from pallas_kernels.quantized_matmul.tpu_kernels import (
    Plan,
    Ref,
    Refs,
    end_kernel,
    sums_kernel,
    weights_kernel,
)
from pallas_kernels.quantized_matmul.tpu_numbers import float16_bits, to_float32
from pallas_kernels.quantized_matmul.tpu_rows import Rows, prepare

__all__ = ["pack", "quantized_matmul", "refusals", "take_rows"]

DTYPES = ("float32", "bfloat16")
KERNELS = {"end": end_kernel, "sums": sums_kernel, "weights": weights_kernel}
#: Whole numbers below this are added exactly in float32.
EXACT_SUM = 2**24
#: Largest products of a rounded x (a plane of int16) and a weight.
LARGEST_PRODUCTS = {"int8_group": 127, "int16_group": 255}


def refusals(
    *,
    platform: str,
    dtype: DTypeLike,
    scheme: Scheme,
    out_size: int,
    in_size: int,
) -> list[str]:
    """Why this implementation cannot do such a product; empty when it can."""
    reasons = []
    if platform != "tpu":
        reasons.append(f"it runs on tpu, not on {platform}")
    if (name := jnp.dtype(dtype).name) not in DTYPES:
        reasons.append(f"x of {name} is not among {', '.join(DTYPES)}")
    try:
        size = in_size // scheme.num_groups(in_size)
    except KernelError as error:
        return [*reasons, str(error)]
    largest = LARGEST_PRODUCTS.get(scheme.activations, 0) * (15 if scheme.values == "int4" else 127)
    if largest * size >= EXACT_SUM:
        reasons.append(f"sums of groups of {size} with {scheme.activations} are not exact")
    if not reasons:
        facts = Facts(
            rows=1,
            out_size=out_size,
            in_size=in_size,
            scheme=scheme,
            dtype=np.dtype(dtype),
            out_dtype=np.dtype(dtype),
        )
        try:
            check(rule(facts), facts)
        except KernelError as error:
            reasons.append(str(error))
    return reasons


def pack(weight: QuantizedWeight, scheme: Scheme) -> QuantizedWeight:
    """float16 scales and zero points as uint16: kernels cannot load float16, and do the rest."""
    values, scales, zeros = weight
    return QuantizedWeight(
        values, float16_bits(scales), None if zeros is None else float16_bits(zeros)
    )


def take_rows(weight: QuantizedWeight, scheme: Scheme, row_ids: jax.Array) -> jax.Array:
    """float32 [T, K]: rows of a packed weight, dequantised; row_ids [T] within bounds.

    XLA first copies a table that lies column after column (`Facts.values_turned`): one whose rows
    do not fill vectors of 128 stored columns.
    """
    values, scales, zeros = weight
    taken = None if zeros is None else to_float32(zeros[row_ids])
    return dequantize(QuantizedWeight(values[row_ids], to_float32(scales[row_ids]), taken), scheme)


def quantized_matmul(
    x: jax.Array,
    weight: QuantizedWeight,
    scheme: Scheme,
    *,
    out_dtype: DTypeLike,
    blocks: Blocks | None = None,
    interpret: bool | pltpu.InterpretParams = False,
) -> jax.Array:
    """x [M, K] times weight [N, K] transposed: [M, N] of out_dtype, as `reference` defines it.

    One program per M. A row's result does not depend, bit for bit, on the other rows; it may
    depend on M, which decides on block sizes and so on the order of additions. With many rows of
    bfloat16 and scales of small groups weights count with 17 bits (see `tpu_kernels`).
    weight: as `pack` makes it; with float16 scales XLA copies them first.
    blocks: sizes to use instead of the table's or the rule's. interpret: run on any platform, for
    tests: True as plain XLA, InterpretParams in a simulator of copies.
    Raises KernelError when blocks do not fit VMEM.
    """
    facts = Facts(
        rows=x.shape[0],
        out_size=weight.values.shape[0],
        in_size=x.shape[1],
        scheme=scheme,
        dtype=np.dtype(x.dtype),
        out_dtype=np.dtype(out_dtype),
    )
    if 0 in (facts.rows, facts.out_size):
        return jnp.zeros((facts.rows, facts.out_size), out_dtype)
    if blocks is None:
        blocks = choose_blocks(facts, "interpreter" if interpret else _device_kind())
    check(blocks, facts)
    plan = Plan(facts=facts, blocks=blocks)
    x = jnp.pad(x, ((0, facts.padded_rows - facts.rows), (0, 0)))
    return _call(plan, prepare(x, plan), weight, interpret)[: facts.rows]


def _device_kind() -> str:
    """Of the device that this is compiled for."""
    target = jax.sharding.get_abstract_mesh().abstract_device
    return str(target.device_kind if target else jax.devices()[0].device_kind)


def _operands(
    plan: Plan, rows: Rows, weight: QuantizedWeight
) -> dict[str, tuple[jax.Array, pl.BlockSpec]]:
    """Arrays by the names of `Refs`, each with the block that a step of the grid reads."""
    facts, blocks = plan.facts, plan.blocks
    x_block = (*rows.values.shape[:2], blocks.rows, facts.columns)
    found = {
        "x": (rows.values, pl.BlockSpec(x_block, lambda m, n, k: (0, 0, m, 0))),
        "values": _weight_operand(
            weight.values, (blocks.outputs, blocks.columns), facts.values_turned
        ),
    }
    for name, stored in (("scales", weight.scales), ("zeros", weight.zeros)):
        if stored is None:
            continue
        stored = float16_bits(stored)
        if facts.num_groups == 1:
            spec = pl.BlockSpec((1, blocks.outputs), lambda m, n, k: (0, n))
            found[name] = (stored.reshape(1, -1), spec)
        else:
            block = (blocks.outputs, facts.num_groups)
            found[name] = _weight_operand(stored, block, facts.scales_turned)
    if rows.row_scales is not None:
        spec = pl.BlockSpec((blocks.rows, 1), lambda m, n, k: (m, 0))
        found["row_scales"] = (rows.row_scales, spec)
    for name, array in (("group_scales", rows.group_scales), ("group_sums", rows.group_sums)):
        if array is not None:
            shape = (array.shape[0] // plan.num_blocks, blocks.rows, array.shape[2])
            if facts.num_groups == 1:
                spec = pl.BlockSpec((1, *shape[1:]), lambda m, n, k: (0, m, 0))
            else:
                spec = pl.BlockSpec(shape, lambda m, n, k: (k, m, 0))
            found[name] = (array, spec)
    return found


def _weight_operand(
    stored: jax.Array, block: tuple[int, int], turned: bool
) -> tuple[jax.Array, pl.BlockSpec]:
    """An array [outputs, ...] of a weight as it lies in memory: turning it moves nothing."""
    several = stored.shape[1] > block[1]
    if turned:
        return stored.T, pl.BlockSpec(block[::-1], lambda m, n, k: (k if several else 0, n))
    return stored, pl.BlockSpec(block, lambda m, n, k: (n, k if several else 0))


def _kernel(plan: Plan, names: tuple[str, ...], *refs: Ref) -> None:
    """The call's kernel; `refs` as `_call` passes them."""
    count = len(names)
    out, sums, *group_rows = refs[count:]
    given: dict[str, Any] = dict.fromkeys(field.name for field in dataclasses.fields(Refs))
    given.update(zip(names, refs, strict=False))
    given.update(block=pl.program_id(2), out=out, sums=sums, group_rows=tuple(group_rows))
    KERNELS[plan.blocks.way](plan, Refs(**given))


def _call(
    plan: Plan, rows: Rows, weight: QuantizedWeight, interpret: bool | pltpu.InterpretParams
) -> jax.Array:
    """[padded M, N] of out_dtype."""
    facts, blocks = plan.facts, plan.blocks
    operands = _operands(plan, rows, weight)
    arrays = [array for array, _ in operands.values()]
    whole = jnp.int32 if rows.values.dtype == jnp.int8 else jnp.float32
    scratch = [pltpu.VMEM((blocks.rows, blocks.outputs), whole)]
    if blocks.way != "end":
        group_rows = pltpu.VMEM((facts.num_groups, blocks.outputs), jnp.float32)
        scratch += [group_rows] * (1 + facts.scheme.zeros)
    row_blocks, output_blocks = (
        pl.cdiv(facts.padded_rows, blocks.rows),
        pl.cdiv(facts.out_size, blocks.outputs),
    )
    out: jax.Array = pl.pallas_call(
        functools.partial(_kernel, plan, tuple(operands)),
        grid=(row_blocks, output_blocks, plan.num_blocks),
        in_specs=[spec for _, spec in operands.values()],
        out_specs=pl.BlockSpec((blocks.rows, blocks.outputs), lambda m, n, k: (m, n)),
        out_shape=jax.ShapeDtypeStruct(  # type: ignore[no-untyped-call]
            (facts.padded_rows, facts.out_size), facts.out_dtype
        ),
        scratch_shapes=scratch,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"),
            vmem_limit_bytes=blocks.vmem_limit_bytes,
        ),
        # XLA cannot see into the call.
        cost_estimate=pl.CostEstimate(
            flops=2 * facts.padded_rows * facts.out_size * facts.in_size,
            transcendentals=0,
            bytes_accessed=sum(leaf.nbytes for leaf in weight if leaf is not None) * row_blocks
            + rows.values.nbytes
            + facts.padded_rows * facts.out_size * facts.out_dtype.itemsize,
        ),
        interpret=interpret,
        name=f"quantized_matmul_{facts.scheme.name}",
    )(*arrays)
    return out
