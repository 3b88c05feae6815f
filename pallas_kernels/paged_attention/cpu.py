"""Paged attention on CPUs: the kernel of `cpu_kernel` as a JAX function (step 6b).

Reads pages where they are and writes new rows into them in place (jit with the pool donated).
Imports neither Numba nor the kernel before it is used, so that asking for refusals is cheap. Must
not know anything outside pallas_kernels.
"""

from __future__ import annotations

import pathlib
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from pallas_kernels.ffi.needs import machine_refusals
from pallas_kernels.paged_attention.reference import QUANTISED, KVPages, PagedBatch

if TYPE_CHECKING:
    from pallas_kernels.ffi.targets import Loaded

#: What q, k and v may be, and the pages.
DTYPES = ("float32", "bfloat16")
PAGE_DTYPES = (*DTYPES, *QUANTISED)


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
    reasons = machine_refusals(platform)
    for what, given, known in (("q, k and v", dtype, DTYPES), ("pages", page_dtype, PAGE_DTYPES)):
        if (name := jnp.dtype(given).name) not in known:
            reasons.append(f"{what} of {name} are not among {', '.join(known)}")
    if num_heads % num_kv_heads:
        reasons.append(f"{num_heads} query heads do not share {num_kv_heads} KV heads evenly")
    if head_size < 1 or page_size < 1:
        reasons.append(f"head size {head_size} and page size {page_size} must be positive")
    return reasons


def load(cache_dir: pathlib.Path | None = None, *, page_dtype: DTypeLike = jnp.float32) -> Loaded:
    """Compiles the kernel for pages of a dtype, or loads it, and tells XLA about it.

    The first call of a process for a dtype does the work. `paged_attention` calls it when needed;
    call it before a serialised executable that holds the kernel is loaded, and to choose the folder
    (None: `ffi.targets.default_cache_dir`).
    """
    from pallas_kernels.ffi import records, targets
    from pallas_kernels.paged_attention import (
        cpu_call,
        cpu_few,
        cpu_handlers,
        cpu_kernel,
        cpu_pages,
        cpu_panels,
        cpu_parts,
        cpu_rows,
        cpu_tile,
        reference,
    )

    handler = cpu_handlers.HANDLERS[jnp.dtype(page_dtype).name]
    modules = [records, reference, cpu_call, cpu_pages, cpu_rows, cpu_panels, cpu_parts]
    modules += [cpu_few, cpu_tile, cpu_kernel, cpu_handlers]
    return targets.load(target(page_dtype), handler, modules, cache_dir)


def target(page_dtype: DTypeLike) -> str:
    """The name under which XLA knows the kernel for pages of a dtype."""
    return f"jaxserve_paged_attention_{jnp.dtype(page_dtype).name}"


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
    out, pages, _ = paged_attention_with_lse(
        q, k, v, pages, batch, scale=scale, window=window, soft_cap=soft_cap, sinks=sinks
    )
    return out, pages


def paged_attention_with_lse(
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
) -> tuple[jax.Array, KVPages, jax.Array]:
    """As `paged_attention`, and `lse` [T, N] float32: -inf in rows of padding."""
    load(page_dtype=pages.k.dtype)
    if sinks is None:
        sinks = jnp.zeros((0,), jnp.float32)
    leaves = [leaf for leaf in pages if leaf is not None]
    outputs = tuple(
        jax.ShapeDtypeStruct(shape, dtype)  # type: ignore[no-untyped-call]
        for shape, dtype in (
            *((leaf.shape, leaf.dtype) for leaf in leaves),
            (q.shape, q.dtype),
            (q.shape[:2], jnp.float32),
        )
    )
    aliases = {7 + i: i for i in range(len(leaves))}
    call = jax.ffi.ffi_call(target(pages.k.dtype), outputs, input_output_aliases=aliases)
    *new_leaves, out, lse = call(
        q,
        k,
        v,
        batch.block_tables.astype(jnp.int32),
        batch.cu_q_lens.astype(jnp.int32),
        batch.kv_lens.astype(jnp.int32),
        sinks.astype(jnp.float32),
        *leaves,
        scale=np.float64(scale),
        soft_cap=np.float64(soft_cap or 0.0),
        window=np.int64(window or 0),
    )
    return out, KVPages(*new_leaves), lse
