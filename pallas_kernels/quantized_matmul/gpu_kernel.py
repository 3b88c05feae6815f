"""The product with a quantised weight as a Triton kernel (step 6).

A program computes a tile of rows by outputs: block after block of the columns, values become
bfloat16 (which holds int8, nibbles and float8 exactly), or stay int8 beside int8 activations, and
go to the tensor cores; sums are float32, or int32 and exact. Where scales belong to groups a block
is a group, and its sums are scaled and added up in float32. Imported only where Triton is installed
and used. Knows no JAX.
"""

# ruff: noqa: N803 - static arguments of Triton kernels have capitals
# mypy: disable-error-code="untyped-decorator,valid-type,name-defined"

import importlib
from typing import Any

triton = importlib.import_module("triton")
tl = importlib.import_module("triton.language")

#: A pointer to the first number of an array. In quotes, because Triton's compiler looks names up.
Pointer = Any


@triton.jit
def _no_sums(BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WHOLE: tl.constexpr) -> "Any":
    """Zeros, int32 or float32."""
    if WHOLE:
        sums = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.int32)
    else:
        sums = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    return sums


@triton.jit
def _add_dot(total: "Any", x: "Any", y: "Any", UPCAST: tl.constexpr) -> "Any":
    """total + x [m, k] times y [n, k] transposed."""
    if UPCAST:
        total = tl.dot(x.to(tl.float32), tl.trans(y), total, input_precision="ieee")
    else:
        total = tl.dot(x, tl.trans(y), total)
    return total


@triton.jit
def _load_values(
    values: "Pointer",
    n: "Any",
    k0: "Any",
    IN_SIZE: tl.constexpr,
    OUT_SIZE: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NIBBLES: tl.constexpr,
    CENTRE: tl.constexpr,
) -> "Any":
    """Values [BLOCK_N, BLOCK_K] as they are stored, nibbles as int8."""
    row = n.to(tl.int64)[:, None]
    if NIBBLES:
        j = k0 // 2 + tl.arange(0, BLOCK_K // 2)
        packed = tl.load(
            values + row * (IN_SIZE // 2) + j[None, :], mask=(n < OUT_SIZE)[:, None], other=0
        )
        found = tl.interleave(packed & 15, packed >> 4).to(tl.int8) - CENTRE
    else:
        k = k0 + tl.arange(0, BLOCK_K)
        mask = (n < OUT_SIZE)[:, None] & (k < IN_SIZE)[None, :]
        found = tl.load(values + row * IN_SIZE + k[None, :], mask=mask, other=0.0)
    return found


@triton.jit
def _add_float(
    total: "Any", x: "Any", values: "Any", WIDE: tl.constexpr, UPCAST: tl.constexpr
) -> "Any":
    """total + x times values, float32: x of float32 as three bfloat16 numbers that add up to it."""
    y = values.to(tl.float32) if UPCAST else values.to(tl.bfloat16)
    if WIDE:
        high = x.to(tl.bfloat16)
        rest = x - high.to(tl.float32)
        middle = rest.to(tl.bfloat16)
        low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
        total = _add_dot(total, low, y, UPCAST)
        total = _add_dot(total, middle, y, UPCAST)
        total = _add_dot(total, high, y, UPCAST)
    else:
        total = _add_dot(total, x, y, UPCAST)
    return total


@triton.jit
def matmul(
    x: "Pointer",
    values: "Pointer",
    scales: "Pointer",
    zeros: "Pointer",
    x_scales: "Pointer",
    out: "Pointer",
    ROWS: tl.constexpr,
    OUT_SIZE: tl.constexpr,
    IN_SIZE: tl.constexpr,
    INTEGERS: tl.constexpr,
    NIBBLES: tl.constexpr,
    CENTRE: tl.constexpr,
    WIDE: tl.constexpr,
    GROUPED: tl.constexpr,
    ZEROS: tl.constexpr,
    X_SCALES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT: tl.constexpr,
    SPLITS: tl.constexpr,
    PARTS: tl.constexpr,
    UPCAST: tl.constexpr,
) -> None:
    """out [ROWS, OUT_SIZE], or its raw sums [PARTS, ROWS, OUT_SIZE] where PARTS is not 1.

    x: [ROWS, IN_SIZE] float32, bfloat16, or int8 (INTEGERS). values, scales, zeros: as in
    `QuantizedWeight`; CENTRE is taken off nibbles. WIDE: x is float32. GROUPED: scales belong to groups of
    BLOCK_K columns, else to whole rows. X_SCALES: 0 none, 1 x_scales [ROWS], 2 [ROWS, groups].
    A split is SPLIT columns, summed up by itself; a program does SPLITS of them. UPCAST: multiply
    bfloat16 numbers as float32, for Triton's interpreter, which takes their bits for integers.
    """
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    part = tl.program_id(2)
    x_row = x + m.to(tl.int64)[:, None] * IN_SIZE
    result = _no_sums(BLOCK_M, BLOCK_N, INTEGERS and not GROUPED)
    for split in range(SPLITS):
        first = (part * SPLITS + split) * SPLIT
        total = _no_sums(BLOCK_M, BLOCK_N, INTEGERS and not GROUPED)
        for offset in range(0, SPLIT, BLOCK_K):
            k0 = first + offset
            k = k0 + tl.arange(0, BLOCK_K)
            some_x = tl.load(
                x_row + k[None, :], mask=(m < ROWS)[:, None] & (k < IN_SIZE)[None, :], other=0
            )
            some = _load_values(values, n, k0, IN_SIZE, OUT_SIZE, BLOCK_K, NIBBLES, CENTRE)
            if GROUPED:
                group = k0 // BLOCK_K
                if INTEGERS:
                    whole = _no_sums(BLOCK_M, BLOCK_N, True)
                    product = tl.dot(some_x, tl.trans(some), whole).to(tl.float32)
                    x_sum = tl.sum(some_x.to(tl.int32), axis=1).to(tl.float32)
                else:
                    start = _no_sums(BLOCK_M, BLOCK_N, False)
                    product = _add_float(start, some_x, some, WIDE, UPCAST)
                    x_sum = tl.sum(some_x.to(tl.float32), axis=1)
                place = n.to(tl.int64) * (IN_SIZE // BLOCK_K) + group
                if ZEROS:
                    zero = tl.load(zeros + place, mask=n < OUT_SIZE, other=0.0).to(tl.float32)
                    product -= x_sum[:, None] * zero[None, :]
                scale = tl.load(scales + place, mask=n < OUT_SIZE, other=0.0).to(tl.float32)
                product *= scale[None, :]
                if X_SCALES == 2:
                    x_scale = tl.load(
                        x_scales + m * (IN_SIZE // BLOCK_K) + group, mask=m < ROWS, other=0.0
                    )
                    product *= x_scale[:, None]
                total += product
            elif INTEGERS:
                total = tl.dot(some_x, tl.trans(some), total)
            else:
                total = _add_float(total, some_x, some, WIDE, UPCAST)
        result += total
    place = m.to(tl.int64)[:, None] * OUT_SIZE + n[None, :]
    mask = (m < ROWS)[:, None] & (n < OUT_SIZE)[None, :]
    if PARTS == 1:
        final = result.to(tl.float32)
        if not GROUPED:
            final *= tl.load(scales + n, mask=n < OUT_SIZE, other=0.0).to(tl.float32)[None, :]
        if X_SCALES == 1:
            final *= tl.load(x_scales + m, mask=m < ROWS, other=0.0)[:, None]
        tl.store(out + place, final.to(out.dtype.element_ty), mask=mask)
    else:
        tl.store(out + part.to(tl.int64) * ROWS * OUT_SIZE + place, result, mask=mask)
