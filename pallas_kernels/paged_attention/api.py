"""Attention over pages: what the model calls (step 6b).

    choice = dispatch.choose("paged_attention", platform=..., dtype=..., ...)
    pages = make_pages(num_pages, num_kv_heads, page_size, head_size, dtype, implementation=choice)
    out, pages = paged_attention(q, k, v, pages, batch, scale=..., implementation=choice)

A pool is [P, K, page_size, H], or what the implementation's own `page_shape` makes of that; pages and
KV heads are always the first two axes. Must not know models, the engine or the mesh: each device
runs it on its own KV heads (`jax.shard_map`).
"""

from __future__ import annotations

import importlib
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.dispatch import Choice
from pallas_kernels.paged_attention import huge_pages
from pallas_kernels.paged_attention.reference import KVPages, PagedBatch

#: A page size that every layout can hold.
_ANY_PAGE = 256

__all__ = ["KVPages", "PagedBatch", "make_pages", "page_shape", "paged_attention"]


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
    """A pool of zeros, page 0 included; sharding is that of its four axes (None: default).

    On a CPU the pool is placed on the system's huge pages where it has them: scattered reads are
    up to twice as fast.
    """
    shape = page_shape(num_pages, num_kv_heads, page_size, head_size, implementation=implementation)
    leaves = (jnp.zeros(shape, dtype, device=sharding) for _ in KVPages._fields)
    pages = KVPages(*leaves)
    for leaf in pages:
        huge_pages.use(leaf)
    return pages


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
    problems = [
        (k.shape != rows or v.shape != rows, f"k {k.shape} and v {v.shape} must be {rows}"),
        (pages.k.shape != pages.v.shape, f"pages k {pages.k.shape} and v {pages.v.shape} differ"),
        (pages.k.shape[3] != lanes, f"q {q.shape} and pages {pages.k.shape} differ in H"),
        (pages.k.dtype != pages.v.dtype, f"pages k {pages.k.dtype} and v {pages.v.dtype} differ"),
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
