"""Products with quantised weights on NVIDIA GPUs: a Triton kernel called from JAX (step 6).

Weights are read as they are stored, in the natural layout, once per tile of rows; activations are
rounded before, where the scheme says so, by the definition's own code. Must not know anything
outside pallas_kernels.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import operator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels import gpu_targets
from pallas_kernels.errors import KernelError
from pallas_kernels.quantized_matmul.gpu_blocks import STAGES, TILE_ROWS, WARPS, choose_blocks
from pallas_kernels.quantized_matmul.quantize import round_fp8, round_integers
from pallas_kernels.quantized_matmul.scheme import INT4_ZERO, QuantizedWeight, Scheme

DTYPES = ("float32", "bfloat16")
#: Groups that are a block of the kernel.
GROUPS = (32, 64, 128)


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
    if platform != "gpu":
        reasons.append(f"it runs on gpu, not on {platform}")
    for package in ("triton", "jax_triton"):
        if importlib.util.find_spec(package) is None:
            reasons.append(f"the package {package} is not installed")
    if (name := jnp.dtype(dtype).name) not in DTYPES:
        reasons.append(f"x of {name} is not among {', '.join(DTYPES)}")
    if scheme.activations == "int16_group":
        reasons.append("no tensor core multiplies int16 activations")
    if scheme.group is not None and scheme.group not in GROUPS:
        sizes = ", ".join(map(str, GROUPS))
        reasons.append(f"groups of {scheme.group} are not among {sizes}")
    if scheme.group is None and scheme.values == "int4":
        reasons.append("int4 needs groups")
    try:
        scheme.num_groups(in_size)
    except KernelError as error:
        reasons.append(str(error))
    if not reasons:
        is_float8 = scheme.values == "float8_e4m3fn"
        needed = gpu_targets.FLOAT8 if is_float8 else gpu_targets.BFLOAT16
        reasons.extend(gpu_targets.capability_refusals(needed=needed))
    return reasons


def quantized_matmul(
    x: jax.Array,
    weight: QuantizedWeight,
    scheme: Scheme,
    *,
    out_dtype: DTypeLike,
) -> jax.Array:
    """As `reference.quantized_matmul`.

    Activations of float32 are multiplied as three bfloat16 numbers that add up to them, which is
    exact; float8 activations as bfloat16 numbers, because the tensor cores' sums of float8
    products are shorter than float32. How the columns are cut depends on the weight's shape only.
    """
    if x.shape[0] == 0:
        return jnp.zeros((0, weight.scales.shape[0]), out_dtype)
    x, x_scales = _activations(x, scheme)
    return _call(x, x_scales, weight, scheme, jnp.dtype(out_dtype))


def _activations(x: jax.Array, scheme: Scheme) -> tuple[jax.Array, jax.Array | None]:
    """What the kernel multiplies, and scales [M] or [M, groups]."""
    match scheme.activations:
        case "int8_token":
            return round_integers(x, "int8")
        case "int8_group":
            parts = x.reshape(len(x), scheme.num_groups(x.shape[1]), -1)
            values, scales = round_integers(parts, "int8")
            return values.reshape(x.shape), scales
        case "fp8_token":
            values, scales = round_fp8(x)
            return values.astype(jnp.bfloat16), scales
    return x, None


class Call(NamedTuple):
    """A call of the kernel: arrays, the result's shape, the grid, and static arguments."""

    arguments: tuple[jax.Array, ...]
    out_shape: jax.ShapeDtypeStruct
    grid: tuple[int, int, int]
    settings: dict[str, Any]


def plan_call(
    x: jax.Array,
    x_scales: jax.Array | None,
    weight: QuantizedWeight,
    scheme: Scheme,
    out_dtype: jnp.dtype,
) -> Call:
    """How the kernel is called with what `_activations` made."""
    (rows, in_size), out_size = x.shape, weight.scales.shape[0]
    integers, grouped = x.dtype == jnp.int8, scheme.group is not None
    blocks = choose_blocks(
        scheme, rows=rows, out_size=out_size, in_size=in_size, wide=x.dtype == jnp.float32
    )
    shape: tuple[int, ...] = (rows, out_size)
    dtype = out_dtype
    if blocks.parts > 1:
        shape = (blocks.parts, *shape)
        dtype = jnp.dtype("int32" if integers and not grouped else "float32")
    zeros = weight.scales if weight.zeros is None else weight.zeros
    made: jax.ShapeDtypeStruct = jax.ShapeDtypeStruct(shape, dtype)  # type: ignore[no-untyped-call]
    return Call(
        (x, weight.values, weight.scales, zeros, weight.scales if x_scales is None else x_scales),
        made,
        (-(-out_size // blocks.outputs), -(-rows // TILE_ROWS), blocks.parts),
        {
            "ROWS": rows,
            "OUT_SIZE": out_size,
            "IN_SIZE": in_size,
            "INTEGERS": integers,
            "NIBBLES": scheme.values == "int4",
            "CENTRE": 0 if scheme.zeros else int(INT4_ZERO),
            "WIDE": x.dtype == jnp.float32,
            "GROUPED": grouped,
            "ZEROS": scheme.zeros,
            "X_SCALES": 0 if x_scales is None else x_scales.ndim,
            "BLOCK_M": TILE_ROWS,
            "BLOCK_N": blocks.outputs,
            "BLOCK_K": blocks.columns,
            "SPLIT": blocks.split,
            "SPLITS": blocks.splits // blocks.parts,
            "PARTS": blocks.parts,
            "UPCAST": False,
        },
    )


def finish(
    parts: jax.Array,
    x_scales: jax.Array | None,
    weight: QuantizedWeight,
    scheme: Scheme,
    out_dtype: jnp.dtype,
) -> jax.Array:
    """The result from raw sums [parts, M, N], added up in order."""
    total: jax.Array = functools.reduce(operator.add, parts)
    total = total.astype(jnp.float32)
    if scheme.group is None:
        total = total * weight.scales[:, 0].astype(jnp.float32)
    if x_scales is not None and x_scales.ndim == 1:
        total = total * x_scales[:, None]
    return total.astype(out_dtype)


def _call(
    x: jax.Array,
    x_scales: jax.Array | None,
    weight: QuantizedWeight,
    scheme: Scheme,
    out_dtype: jnp.dtype,
) -> jax.Array:
    # Triton is imported where it is used: asking for refusals stays cheap.
    jax_triton = importlib.import_module("jax_triton")
    kernel = importlib.import_module("pallas_kernels.quantized_matmul.gpu_kernel").matmul
    call = plan_call(x, x_scales, weight, scheme, out_dtype)
    out: jax.Array = jax_triton.triton_call(
        *call.arguments,
        kernel=kernel,
        out_shape=call.out_shape,
        grid=call.grid,
        num_warps=WARPS,
        num_stages=STAGES,
        compute_capability=gpu_targets.target_capability(),
        **call.settings,
    )
    return out if out.ndim == 2 else finish(out, x_scales, weight, scheme, out_dtype)
