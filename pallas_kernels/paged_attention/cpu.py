"""Paged attention on CPUs: the kernel of `cpu_kernel` as a JAX function (step 6b).

Reads pages where they are and writes new rows into them in place (jit with the pool donated).
Imports neither Numba nor the kernel before it is used, so that asking for refusals is cheap. Must
not know anything outside pallas_kernels.
"""

from __future__ import annotations

import importlib.util
import pathlib
import sys
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from pallas_kernels.paged_attention.reference import KVPages, PagedBatch

if TYPE_CHECKING:
    from pallas_kernels.ffi.targets import Loaded

TARGET = "jaxserve_paged_attention"
DTYPES = ("float32", "bfloat16")


def refusals(
    *,
    platform: str,
    dtype: DTypeLike,
    page_dtype: DTypeLike,
    num_heads: int,
    num_kv_heads: int,
    head_size: int,
    page_size: int,
) -> list[str]:
    """Why this implementation cannot do such a call; empty when it can."""
    reasons = []
    if platform != "cpu":
        reasons.append(f"it runs on cpu, not on {platform}")
    for package in ("numba", "llvmlite"):
        if importlib.util.find_spec(package) is None:
            reasons.append(f"the package {package} is not installed")
    if sys.maxsize < 2**62 or sys.byteorder != "little":
        reasons.append("it needs a 64-bit little-endian machine")
    for what, given in (("q, k and v", dtype), ("pages", page_dtype)):
        if (name := jnp.dtype(given).name) not in DTYPES:
            reasons.append(f"{what} of {name} are not among {', '.join(DTYPES)}")
    if num_heads % num_kv_heads:
        reasons.append(f"{num_heads} query heads do not share {num_kv_heads} KV heads evenly")
    if head_size < 1 or page_size < 1:
        reasons.append(f"head size {head_size} and page size {page_size} must be positive")
    return reasons


def load(cache_dir: pathlib.Path | None = None) -> Loaded:
    """Compiles the kernel, or loads it from `cache_dir`, and tells XLA about it.

    The first call of a process does the work. `paged_attention` calls it when needed; call it before a serialised executable that
    holds the kernel is loaded, and to choose the folder (None: `ffi.targets.default_cache_dir`).
    """
    from pallas_kernels.ffi import targets
    from pallas_kernels.paged_attention import cpu_call, cpu_kernel, cpu_tiles

    return targets.load(TARGET, cpu_kernel.handler, (cpu_tiles, cpu_call, cpu_kernel), cache_dir)


def paged_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    pages: KVPages,
    batch: PagedBatch,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
) -> tuple[jax.Array, KVPages]:
    """As `reference.paged_attention`, but rows of padding write nowhere.

    A row's result, bit for bit, depends on its own query and on the keys and values before it
    only. Block tables that name a page outside of the pool, and lengths that contradict one
    another, end in an error of the step.
    """
    load()
    if sinks is None:
        sinks = jnp.zeros((0,), jnp.float32)
    outputs = tuple(
        jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)  # type: ignore[no-untyped-call]
        for leaf in (pages.k, pages.v, q)
    )
    call = jax.ffi.ffi_call(TARGET, outputs, input_output_aliases={7: 0, 8: 1})
    new_k, new_v, out = call(
        q,
        k,
        v,
        batch.block_tables.astype(jnp.int32),
        batch.cu_q_lens.astype(jnp.int32),
        batch.kv_lens.astype(jnp.int32),
        sinks.astype(jnp.float32),
        pages.k,
        pages.v,
        scale=np.float64(scale),
        soft_cap=np.float64(soft_cap or 0.0),
        window=np.int64(window or 0),
    )
    return out, KVPages(new_k, new_v)
