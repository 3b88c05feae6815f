"""Attention over pages: what the model calls (step 6b).

    choice = dispatch.choose("paged_attention", platform=..., dtype=..., ...)
    pages = make_pages(num_pages, num_kv_heads, page_size, head_size, dtype, implementation=choice)
    out, pages = paged_attention(q, k, v, pages, batch, scale=..., implementation=choice)

A pool is [P, K, page_size, H], or what the implementation's own `page_shape` makes of that, and so
are its scales [P, K, page_size] and `scale_shape`; pages and KV heads are always the first two axes. Must not know models, the engine or the mesh: each device
runs it on its own KV heads (`jax.shard_map`).
"""

from __future__ import annotations

import importlib
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.dispatch import Choice
from pallas_kernels.paged_attention import fresh_memory, huge_pages
from pallas_kernels.paged_attention.reference import QUANTISED, KVPages, PagedBatch

#: A page size that every layout can hold.
_ANY_PAGE = 256

__all__ = [
    "QUANTISED",
    "KVPages",
    "PagedBatch",
    "make_pages",
    "merge",
    "page_shape",
    "paged_attention",
    "paged_attention_with_lse",
    "pool_leaves",
]


def page_shape(
    num_pages: int,
    num_kv_heads: int,
    page_size: int,
    head_size: int,
    *,
    implementation: Choice | str,
) -> tuple[int, int, int, int]:
    """Shape of the leaves of a pool that `implementation` reads and writes."""
    shape = (num_pages, num_kv_heads, page_size, head_size)
    own = getattr(_module(implementation), "page_shape", None)
    made: tuple[int, int, int, int] = shape if own is None else own(*shape)
    return made


def pool_leaves(
    num_pages: int,
    num_kv_heads: int,
    page_size: int,
    head_size: int,
    dtype: DTypeLike,
    *,
    implementation: Choice | str,
) -> KVPages:
    """Shapes and dtypes of a pool's leaves, as jax.ShapeDtypeStruct; no arrays."""
    shape = page_shape(num_pages, num_kv_heads, page_size, head_size, implementation=implementation)
    leaf: Any = jax.ShapeDtypeStruct(shape, dtype)  # type: ignore[no-untyped-call]
    if jnp.dtype(dtype).name not in QUANTISED:
        return KVPages(leaf, leaf)
    own = getattr(_module(implementation), "scale_shape", None)
    plain = (num_pages, num_kv_heads, page_size)
    scales = plain if own is None else own(*plain, head_size)
    scale: Any = jax.ShapeDtypeStruct(scales, jnp.float32)  # type: ignore[no-untyped-call]
    return KVPages(leaf, leaf, scale, scale)


def make_pages(
    num_pages: int,
    num_kv_heads: int,
    page_size: int,
    head_size: int,
    dtype: DTypeLike = jnp.float32,
    *,
    implementation: Choice | str,
    sharding: jax.sharding.Sharding | None = None,
) -> KVPages:
    """A pool of zeros, page 0 included; sharding is that of pages and KV heads (None: default).

    Pages of a dtype among QUANTISED come with their scales.

    On a CPU the pool is placed on the system's huge pages where it has them: scattered reads are
    up to twice as fast. A large one takes memory only where it is written.
    """
    leaves = pool_leaves(
        num_pages, num_kv_heads, page_size, head_size, dtype, implementation=implementation
    )
    pages: KVPages = jax.tree.map(lambda leaf: _make_zeros(leaf, sharding), leaves)
    return pages


def _make_zeros(leaf: jax.Array, sharding: jax.sharding.Sharding | None) -> jax.Array:
    """What the stand-in `leaf` stands for."""
    fresh = fresh_memory.works_for(math.prod(leaf.shape) * leaf.dtype.itemsize, sharding)
    if fresh:
        zeros = fresh_memory.zeros(leaf.shape, leaf.dtype, sharding)
    else:
        zeros = jnp.zeros(leaf.shape, leaf.dtype, device=sharding)
    huge_pages.use(zeros, filled=not fresh)
    return zeros


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
    implementation: Choice | str,
) -> tuple[jax.Array, KVPages]:
    """Writes k and v into the pages, then attends. Donate `pages` to have that done in place.

    q: [T, N, H], k and v: [T, K, H], pages: [P, K, page_size, H]; see `reference` for the
    definition and for `batch`. scale multiplies q . k; window: tokens that a row sees, itself
    included; soft_cap: c in c * tanh(logit / c); sinks: [N] float32, one more logit per head that
    takes weight and adds no value. Returns [T, N, H] in q's dtype (rows of padding are zero) and
    the pages. Contents of page 0, the trash page, mean nothing.
    Raises ValueError when shapes or options contradict one another.
    """
    lanes = page_shape(1, 1, _ANY_PAGE, q.shape[2], implementation=implementation)[3]
    _check(q, k, v, pages, batch, window, soft_cap, sinks, lanes)
    result: tuple[jax.Array, KVPages] = _module(implementation).paged_attention(
        q, k, v, pages, batch, scale=scale, window=window, soft_cap=soft_cap, sinks=sinks
    )
    return result


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
    implementation: Choice | str,
) -> tuple[jax.Array, KVPages, jax.Array]:
    """As `paged_attention`, and the log of the softmax's sum: [T, N] float32, -inf in padding.

    With it, results over parts of the same keys can be joined (`merge`).
    """
    lanes = page_shape(1, 1, _ANY_PAGE, q.shape[2], implementation=implementation)[3]
    _check(q, k, v, pages, batch, window, soft_cap, sinks, lanes)
    result: tuple[jax.Array, KVPages, jax.Array] = _module(implementation).paged_attention_with_lse(
        q, k, v, pages, batch, scale=scale, window=window, soft_cap=soft_cap, sinks=sinks
    )
    return result


def merge(outs: jax.Array, lses: jax.Array) -> jax.Array:
    """Attention over all keys from attention over disjoint parts of them.

    outs: [parts, T, N, H], lses: [parts, T, N]; a sink may have taken part in one of them only.
    Returns [T, N, H] in outs' dtype; rows without a key in any part are zero.
    """
    top = jnp.max(lses, axis=0)
    weights = jnp.exp(lses - jnp.where(jnp.isfinite(top), top, 0.0))
    total = weights.sum(0)
    shares = weights / jnp.where(total == 0, 1.0, total)
    return jnp.sum(outs.astype(jnp.float32) * shares[..., None], axis=0).astype(outs.dtype)


def _module(implementation: Choice | str) -> Any:
    name = implementation.implementation if isinstance(implementation, Choice) else implementation
    return importlib.import_module(f"pallas_kernels.paged_attention.{name}")


def _check(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    pages: KVPages,
    batch: PagedBatch,
    window: int | None,
    soft_cap: float | None,
    sinks: jax.Array | None,
    lanes: int,
) -> None:
    num_rows, num_heads, head_size = q.shape
    num_kv_heads = pages.k.shape[1]
    rows = (num_rows, num_kv_heads, head_size)
    num_sequences = batch.block_tables.shape[0]
    scales = pages.k_scale is not None and pages.v_scale is not None
    scaled = jnp.dtype(pages.k.dtype).name in QUANTISED
    problems = [
        (k.shape != rows or v.shape != rows, f"k {k.shape} and v {v.shape} must be {rows}"),
        (pages.k.shape != pages.v.shape, f"pages k {pages.k.shape} and v {pages.v.shape} differ"),
        (pages.k.shape[3] != lanes, f"q {q.shape} and pages {pages.k.shape} differ in H"),
        (pages.k.dtype != pages.v.dtype, f"pages k {pages.k.dtype} and v {pages.v.dtype} differ"),
        (scaled != scales, f"pages of {pages.k.dtype} {'need' if scaled else 'have no'} scales"),
        (num_heads % num_kv_heads != 0, f"{num_heads} heads do not share {num_kv_heads} KV heads"),
        (batch.cu_q_lens.shape != (num_sequences + 1,), f"cu_q_lens is {batch.cu_q_lens.shape}"),
        (batch.kv_lens.shape != (num_sequences,), f"kv_lens is {batch.kv_lens.shape}"),
        (window is not None and window < 1, f"window is {window}; it must be at least 1"),
        (soft_cap is not None and soft_cap <= 0, f"soft_cap is {soft_cap}; it must be positive"),
        (sinks is not None and sinks.shape != (num_heads,), f"sinks must be [{num_heads}]"),
    ]
    found = [text for wrong, text in problems if wrong]
    if found:
        raise ValueError(f"paged_attention: {'; '.join(found)}")
