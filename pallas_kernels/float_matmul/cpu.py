"""Rows times a float32 matrix on CPUs: the kernel of `cpu_kernel` as a JAX function (step 6).

XLA reads a matrix at full speed for one row, and multiplies many rows at full speed; between the
two it copies the matrix into panels for each call, which takes two to four times as long as
reading it. For 2 to FEW_ROWS rows this kernel is called, for other numbers XLA. Imports neither
Numba nor the kernel before it is used. Must not know anything outside pallas_kernels.
"""

from __future__ import annotations

import pathlib
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.ffi.needs import machine_refusals
from pallas_kernels.float_matmul import reference

if TYPE_CHECKING:
    from pallas_kernels.ffi.targets import Loaded

TARGET = "jaxserve_float_matmul"
#: Most rows that the kernel takes; beyond them XLA is as fast.
FEW_ROWS = 16
#: Sizes are multiples of this: vectors of the widest machine.
STEP = 16


def refusals(*, platform: str, dtype: DTypeLike, out_size: int, in_size: int) -> list[str]:
    """Why this implementation cannot do such a product; empty when it can."""
    reasons = machine_refusals(platform)
    if (name := jnp.dtype(dtype).name) != "float32":
        reasons.append(f"{name} is not float32")
    for what, size in (("outputs", out_size), ("inputs", in_size)):
        if size % STEP or size < STEP:
            reasons.append(f"{size} {what} are no multiple of {STEP}")
    return reasons


def load(cache_dir: pathlib.Path | None = None) -> Loaded:
    """Compiles the kernel, or loads it, and tells XLA about it.

    The first call of a process does the work. `float_matmul` calls it when needed; call it before a
    serialised executable that holds the kernel is loaded, and to choose the folder (None:
    `ffi.targets.default_cache_dir`).
    """
    from pallas_kernels.ffi import records, targets
    from pallas_kernels.float_matmul import cpu_kernel

    return targets.load(TARGET, cpu_kernel.multiply_few_rows, (records, cpu_kernel), cache_dir)


def float_matmul(x: jax.Array, weight: jax.Array) -> jax.Array:
    """As `reference.float_matmul`. From 2 to FEW_ROWS rows, a row's result, bit for bit, depends on
    that row only."""
    rows, out_size = x.shape[0], weight.shape[0]
    if not 2 <= rows <= FEW_ROWS:
        return reference.float_matmul(x, weight)
    load()
    output = jax.ShapeDtypeStruct((rows, out_size), jnp.float32)  # type: ignore[no-untyped-call]
    product: jax.Array = jax.ffi.ffi_call(TARGET, output)(x, weight)
    return product
