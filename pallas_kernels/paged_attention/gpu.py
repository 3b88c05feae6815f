"""Paged attention on NVIDIA GPUs, in Pallas for Triton (step 6b).

First the new keys and values go into their pages (`gpu_write`); then rows attend (`gpu_attend`):
sequences with a few query tokens, decodes and drafts, have their keys split over many programs,
so that a few long ones still fill the chip; the others are cut into tiles of query tokens. Pages
have the plain shape. Must not know anything outside pallas_kernels.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from pallas_kernels import gpu_targets
from pallas_kernels.errors import KernelError
from pallas_kernels.paged_attention.reference import QUANTISED, KVPages, PagedBatch

DTYPES = ("float32", "bfloat16")
LARGEST_HEAD = 256
#: Offsets are 32 bits wide in arrays of up to 4 GiB, whatever the size of an element.
LARGEST_OFFSET, WIDE_OFFSETS = 2**31, 2**32


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
    if platform != "gpu":
        reasons.append(f"it runs on gpu, not on {platform}")
    if (name := jnp.dtype(dtype).name) not in DTYPES:
        reasons.append(f"q, k and v of {name} are not among {', '.join(DTYPES)}")
    stored, page_name = (*DTYPES, *QUANTISED), jnp.dtype(page_dtype).name
    if page_name not in stored:
        reasons.append(f"pages of {page_name} are not among {', '.join(stored)}")
    if num_heads % num_kv_heads:
        reasons.append(f"{num_heads} query heads do not share {num_kv_heads} KV heads evenly")
    if not 1 <= head_size <= LARGEST_HEAD:
        reasons.append(f"head size {head_size} is not 1 to {LARGEST_HEAD}")
    if page_size < 1:
        reasons.append(f"page size {page_size} must be positive")
    if not reasons:
        is_float8 = page_name.startswith("float8")
        needed = gpu_targets.FLOAT8 if is_float8 else gpu_targets.BFLOAT16
        reasons.extend(gpu_targets.capability_refusals(needed=needed))
    return reasons


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
    interpret: bool = False,
) -> tuple[jax.Array, KVPages]:
    """As `reference.paged_attention`, but rows of padding write nowhere.

    Where q is bfloat16 and pages are bfloat16 or quantised, products are those of bfloat16 numbers
    summed in float32 (stored int8 and float8 numbers are bfloat16 numbers too), and softmax
    weights, times the values' scales, are rounded to bfloat16; else all is float32, never TF32.
    A row's result depends, bit for bit, on its own sequence only. Lengths and tables must agree:
    they are not checked. interpret: run on any platform, for tests. Raises KernelError for pools
    of one-byte numbers of more than 2 and up to 4 GiB a leaf, whose offsets the compiler cuts.
    """
    out, pages, _ = paged_attention_with_lse(
        q,
        k,
        v,
        pages,
        batch,
        scale=scale,
        window=window,
        soft_cap=soft_cap,
        sinks=sinks,
        interpret=interpret,
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
    interpret: bool = False,
) -> tuple[jax.Array, KVPages, jax.Array]:
    """As `paged_attention`, and the log of the softmax's sum [T, N] float32, -inf in padding."""
    # Pallas's Triton part is imported where it is used: asking for refusals stays cheap.
    from pallas_kernels.paged_attention import gpu_attend, gpu_work
    from pallas_kernels.paged_attention.gpu_sizes import Facts, choose_sizes
    from pallas_kernels.paged_attention.gpu_tile import Keys, Plan
    from pallas_kernels.paged_attention.gpu_write import write_pages

    _check_offsets(pages)
    num_rows, num_heads, head_size = q.shape
    num_kv_heads, page_size = pages.k.shape[1:3]
    num_sequences, width = batch.block_tables.shape
    facts = Facts(
        num_kv_heads=num_kv_heads,
        group=num_heads // num_kv_heads,
        head_size=head_size,
        page_dtype=np.dtype(pages.k.dtype),
        compute_dtype=np.dtype(_compute_dtype(q.dtype, pages.k.dtype)),
    )
    sizes = choose_sizes(facts)
    plan = Plan(
        facts=facts,
        sizes=sizes,
        page_size=page_size,
        scale=scale,
        window=window,
        soft_cap=soft_cap,
        has_sinks=sinks is not None,
    )
    pages = write_pages(pages, k, v, batch, interpret=interpret)
    keys = Keys(batch.block_tables, *pages)
    sink = jnp.zeros((1,), jnp.float32) if sinks is None else sinks.astype(jnp.float32)
    results = gpu_attend.Results(
        jnp.zeros_like(q), jnp.full((num_rows, num_heads), -jnp.inf, jnp.float32)
    )
    if (count := gpu_work.most_many_tiles(sizes, num_rows, num_sequences)) > 0:
        tiles = gpu_work.many_tiles(batch, sizes, count)
        results = gpu_attend.attend_many(plan, q, keys, sink, tiles, results, interpret=interpret)
    tiles = gpu_work.few_tiles(batch, sizes)
    splits, places = gpu_work.make_splits(batch, tiles, sizes, window, num_rows)
    parts = gpu_attend.attend_few(
        plan,
        q,
        keys,
        tiles,
        splits,
        num_parts=len(places.row),
        num_splits=gpu_work.num_splits(sizes, width * page_size),
        interpret=interpret,
    )
    results = gpu_attend.join(plan, parts, sink, places, results, interpret=interpret)
    return results.out, pages, results.lse


def _compute_dtype(dtype: DTypeLike, page_dtype: DTypeLike) -> jnp.dtype:
    """Of the products."""
    if jnp.dtype(page_dtype).name in QUANTISED:
        return jnp.dtype(dtype)
    return jnp.promote_types(dtype, page_dtype)


def _check_offsets(pages: KVPages) -> None:
    size = pages.k.size
    if size > LARGEST_OFFSET and size * pages.k.dtype.itemsize <= WIDE_OFFSETS:
        raise KernelError(
            f"a leaf of {size:,} numbers of {pages.k.dtype.name} cannot be addressed on a GPU; "
            f"use a pool of at most {LARGEST_OFFSET:,} numbers a leaf, or of more than "
            f"{WIDE_OFFSETS:,}"
        )
