"""Products with quantised weights on CPUs: the kernels of `cpu_kernel` as JAX functions (step 6).

A weight is read in panels of 16 rows, interleaved so that one load holds the same few columns of
all of them (`pack`). Imports neither Numba nor the kernels before they are used, so that asking
for refusals is cheap. Must not know anything outside pallas_kernels.
"""

from __future__ import annotations

import functools
import pathlib
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from pallas_kernels.ffi.needs import machine_refusals
from pallas_kernels.quantized_matmul.quantize import dequantize, round_fp8
from pallas_kernels.quantized_matmul.scheme import LARGEST, QuantizedWeight, Scheme

if TYPE_CHECKING:
    from pallas_kernels.ffi.targets import Loaded
    from pallas_kernels.quantized_matmul.cpu_dots import Instructions
    from pallas_kernels.quantized_matmul.cpu_tiles import Format

DTYPES = ("float32", "bfloat16", "float16")
PANEL = 16
#: Rows of x that stand together once rounded, at most (`cpu_dots.ROW_GROUP`).
MOST_ROWS_OF_GROUP = 4
#: Columns that are read together; groups and rows are made of these.
CHUNK = 32
#: Most columns of a unit where x is not rounded.
LARGEST_FLOAT_UNIT = 256


def refusals(
    *,
    platform: str,
    dtype: DTypeLike,
    scheme: Scheme,
    out_size: int,
    in_size: int,
) -> list[str]:
    """Why this implementation cannot do such a call; empty when it can."""
    reasons = machine_refusals(platform)
    if (name := jnp.dtype(dtype).name) not in DTYPES:
        reasons.append(f"x of {name} is not among {', '.join(DTYPES)}")
    if out_size % PANEL:
        reasons.append(f"{out_size} outputs are no multiple of {PANEL}")
    group = scheme.group_size(in_size)
    if in_size % group:
        reasons.append(f"groups of {group} do not fill rows of {in_size}")
    if group % CHUNK:
        reasons.append(f"groups of {group} inputs are no multiple of {CHUNK}")
    return reasons


def load(
    scheme: Scheme,
    cache_dir: pathlib.Path | None = None,
    *,
    instructions: Instructions | None = None,
) -> Loaded:
    """Compiles the kernel that a scheme needs, or loads it, and tells XLA about it.

    The first call of a process does the work. `quantized_matmul` calls it when needed; call it
    before a serialised executable that holds the kernel is loaded, and to choose the folder (None:
    `ffi.targets.default_cache_dir`). instructions None: the best of this machine.
    """
    from pallas_kernels.ffi import records, targets
    from pallas_kernels.quantized_matmul import (
        cpu_dots,
        cpu_handlers,
        cpu_items,
        cpu_kernel,
        cpu_round,
        cpu_tiles,
    )

    chosen = instructions or cpu_dots.best_instructions()
    weights, rounds = _format(scheme), _rounds(scheme)
    handler = cpu_handlers.HANDLERS[weights, rounds, chosen]
    target = f"jaxserve_{cpu_kernel.kernel_name(weights, rounds, chosen)}"
    modules = (records, cpu_dots, cpu_round, cpu_tiles, cpu_items, cpu_kernel, cpu_handlers)
    return targets.load(target, handler, modules, cache_dir)


def pack(weight: QuantizedWeight, scheme: Scheme) -> QuantizedWeight:
    """Panels of PANEL rows: values [N / PANEL, steps, PANEL, columns], scales [N / PANEL, G, PANEL].

    A step is two columns, and eight for int4, whose four bytes hold columns 0 to 3 in their low
    and 4 to 7 in their high nibbles. Shapes stay [N, K], [N, K / 2] and [N, G].
    """
    packed: QuantizedWeight = _pack(weight, _format(scheme))
    return packed


def take_rows(weight: QuantizedWeight, scheme: Scheme, row_ids: jax.Array) -> jax.Array:
    """float32 [T, K]: rows of a packed weight, dequantised; row_ids [T] within bounds."""
    panel, row = row_ids // PANEL, row_ids % PANEL
    out_size, row_bytes = weight.values.shape
    columns = 4 if scheme.values == "int4" else 2
    steps = weight.values.reshape(out_size // PANEL, -1, PANEL, columns)
    values = steps[panel, :, row].reshape(-1, row_bytes)
    if scheme.values == "int4":
        values = _natural_nibbles(values)
    scales, zeros = (
        None if leaf is None else leaf.reshape(out_size // PANEL, -1, PANEL)[panel, :, row]
        for leaf in weight[1:]
    )
    assert scales is not None
    return dequantize(QuantizedWeight(values, scales, zeros), scheme)


def quantized_matmul(
    x: jax.Array,
    weight: QuantizedWeight,
    scheme: Scheme,
    *,
    out_dtype: DTypeLike,
    instructions: Instructions | None = None,
) -> jax.Array:
    """As `reference.quantized_matmul`, with a weight that `pack` made.

    A row's result, bit for bit, depends on that row of x and the weight only. instructions None:
    the best of this machine.
    """
    rows, in_size = x.shape
    group = scheme.group_size(in_size)
    unit, x_group, top = group, group, 0.0
    factors = None
    match scheme.activations:
        case "float" | "fp8_token":
            chunks = group // CHUNK
            most = LARGEST_FLOAT_UNIT // CHUNK
            unit = CHUNK * max(n for n in range(1, most + 1) if chunks % n == 0)
            if scheme.activations == "fp8_token":
                x, factors = round_fp8(x)
        case "int8_token":
            x_group, top = in_size, LARGEST["int8"]
        case "int8_group" | "int16_group":
            top = LARGEST[scheme.activations.removesuffix("_group")]
    whole_groups = -(-rows // MOST_ROWS_OF_GROUP) * MOST_ROWS_OF_GROUP
    work = whole_groups if top or scheme.values == "int4" else 0
    results = (
        jax.ShapeDtypeStruct((rows, weight.scales.shape[0]), jnp.float32),  # type: ignore[no-untyped-call]
        jax.ShapeDtypeStruct((whole_groups if top else 0, in_size), jnp.int16),  # type: ignore[no-untyped-call]
        jax.ShapeDtypeStruct((work, in_size // unit), jnp.float32),  # type: ignore[no-untyped-call]
        jax.ShapeDtypeStruct((work, in_size // unit), jnp.float32),  # type: ignore[no-untyped-call]
    )
    zeros = jnp.zeros((0, 0), weight.scales.dtype) if weight.zeros is None else weight.zeros
    target = load(scheme, instructions=instructions).target
    out, *_ = jax.ffi.ffi_call(target, results)(
        x.astype(jnp.float32),
        weight.values,
        weight.scales,
        zeros,
        top=np.int64(top),
        unit=np.int64(unit),
        x_group=np.int64(x_group),
    )
    if factors is not None:
        out = out * factors[:, None]
    return out.astype(out_dtype)


def _format(scheme: Scheme) -> Format:
    return "fp8" if scheme.values == "float8_e4m3fn" else scheme.values


def _rounds(scheme: Scheme) -> bool:
    return scheme.activations.startswith("int")


@functools.partial(jax.jit, static_argnums=1)
def _pack(weight: QuantizedWeight, weights: Format) -> QuantizedWeight:
    values, scales, zeros = weight
    if weights == "int4":
        values = _step_nibbles(values)
    panels = values.shape[0] // PANEL
    parts = values.reshape(panels, PANEL, -1, 4 if weights == "int4" else 2)
    values = parts.transpose(0, 2, 1, 3).reshape(values.shape)

    def interleave(leaf: jax.Array) -> jax.Array:
        return leaf.reshape(panels, PANEL, -1).transpose(0, 2, 1).reshape(leaf.shape)

    return QuantizedWeight(values, interleave(scales), None if zeros is None else interleave(zeros))


def _step_nibbles(values: jax.Array) -> jax.Array:
    """Bytes of columns (0, 1), (2, 3), ... as bytes of (0, 4), (1, 5), (2, 6), (3, 7), ..."""
    columns = jnp.stack([values & 15, values >> 4], -1).reshape(values.shape[0], -1, 2, 4)
    return (columns[:, :, 0] | (columns[:, :, 1] << 4)).reshape(values.shape)


def _natural_nibbles(values: jax.Array) -> jax.Array:
    """What undoes `_step_nibbles`."""
    steps = values.reshape(values.shape[0], -1, 4)
    columns = jnp.concatenate([steps & 15, steps >> 4], -1).reshape(values.shape[0], -1, 2)
    return columns[..., 0] | (columns[..., 1] << 4)
