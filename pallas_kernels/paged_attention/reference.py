"""Definition of ragged paged attention in plain jnp.

A batch is flat: the query tokens of all sequences stand one after the other; sequence b owns
rows cu_q_lens[b] to cu_q_lens[b + 1], which are the last rows of its kv_lens[b] tokens.
Keys and values live in pages; block_tables[b, i] is the page that holds the sequence's tokens
i * page_size to (i + 1) * page_size - 1. Page 0 is the trash page: padding rows write there.

    out[t] = softmax(scale * q[t] . k[j] (capped) for allowed j) . v[j]
    allowed: j <= position(t), and j > position(t) - window where a window is given
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

#: KV tokens folded per step of the online softmax; bounds the memory of the definition.
BLOCK_TOKENS = 128


class KVPages(NamedTuple):
    """A pool of pages: k and v of shape [P, K, page_size, H]."""

    k: jax.Array
    v: jax.Array


class PagedBatch(NamedTuple):
    """Where the rows of a flat batch belong.

    block_tables: [B, max_pages] int32, cu_q_lens: [B + 1] int32, kv_lens: [B] int32, the length
    of each sequence including this step's tokens. Unused sequences have no rows and kv_len 0;
    rows from cu_q_lens[B] on are padding.
    """

    block_tables: jax.Array
    cu_q_lens: jax.Array
    kv_lens: jax.Array


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
    """What has no meaning; the platform and the sizes make no difference."""
    reasons = []
    for what, given in (("q, k and v", dtype), ("pages", page_dtype)):
        if not jnp.issubdtype(given, jnp.floating):
            reasons.append(f"{what} of {jnp.dtype(given).name} are not floating-point numbers")
    if num_heads % num_kv_heads:
        reasons.append(f"{num_heads} query heads do not share {num_kv_heads} KV heads evenly")
    if head_size < 1 or page_size < 1:
        reasons.append(f"head size {head_size} and page size {page_size} must be positive")
    return reasons


def row_positions(batch: PagedBatch, num_rows: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Sequence, position and validity of each of the T rows: three arrays [T]."""
    rows = jnp.arange(num_rows, dtype=jnp.int32)
    ends = batch.cu_q_lens[1:]
    sequence = jnp.sum(rows[:, None] >= ends[None, :], axis=1, dtype=jnp.int32)
    valid = rows < batch.cu_q_lens[-1]
    sequence = jnp.where(valid, sequence, 0)
    starts, lengths = batch.cu_q_lens[sequence], batch.kv_lens[sequence]
    query_lengths = batch.cu_q_lens[sequence + 1] - starts
    position = lengths - query_lengths + rows - starts
    return sequence, jnp.where(valid, position, 0), valid


def write_pages(pages: KVPages, k: jax.Array, v: jax.Array, batch: PagedBatch) -> KVPages:
    """Pages with the rows' k and v [T, K, H] stored at their places."""
    sequence, position, valid = row_positions(batch, k.shape[0])
    page_size = pages.k.shape[2]
    page = jnp.where(valid, batch.block_tables[sequence, position // page_size], 0)
    offset = position % page_size
    return KVPages(
        pages.k.at[page, :, offset].set(k.astype(pages.k.dtype)),
        pages.v.at[page, :, offset].set(v.astype(pages.v.dtype)),
    )


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
    """Writes k and v into the pages, then attends.

    q: [T, N, H], k and v: [T, K, H]; sinks: [N] float32 or None, one extra logit per head that
    takes probability but gives no value. Returns the attention output [T, N, H] in q's dtype
    (padding rows hold zeros) and the updated pages. Arithmetic is float32.
    """
    num_rows, num_heads, head_size = q.shape
    num_kv_heads, page_size = pages.k.shape[1:3]
    group = num_heads // num_kv_heads
    pages = write_pages(pages, k, v, batch)
    sequence, position, valid = row_positions(batch, num_rows)
    tables = batch.block_tables[sequence]  # [T, max_pages]
    pages_per_block = max(1, BLOCK_TOKENS // page_size)
    num_blocks = -(-tables.shape[1] // pages_per_block)
    tables = jnp.pad(tables, ((0, 0), (0, num_blocks * pages_per_block - tables.shape[1])))
    query = q.astype(jnp.float32).reshape(num_rows, num_kv_heads, group, head_size) * scale

    def fold(
        block: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        out, top, total = carry
        ids = lax.dynamic_slice_in_dim(tables, block * pages_per_block, pages_per_block, 1)
        keys, values = (  # [T, pages_per_block, K, page_size, H]
            leaf[ids].astype(jnp.float32) for leaf in pages
        )
        logits = jnp.einsum("tkgh,tpksh->tkgps", query, keys)
        logits = logits.reshape(*logits.shape[:3], -1)
        if soft_cap is not None:
            logits = soft_cap * jnp.tanh(logits / soft_cap)
        key_position = block * pages_per_block * page_size + jnp.arange(logits.shape[-1])
        allowed = (key_position <= position[:, None]) & valid[:, None]
        if window is not None:
            allowed &= key_position > position[:, None] - window
        allowed = allowed[:, None, None, :]
        logits = jnp.where(allowed, logits, -jnp.inf)
        new_top = jnp.maximum(top, logits.max(-1))
        safe_top = jnp.where(jnp.isfinite(new_top), new_top, 0.0)
        shrink = jnp.exp(top - safe_top)
        weights = jnp.exp(logits - safe_top[..., None])
        weights = jnp.where(allowed, weights, 0.0)
        # A page that is not ours may hold anything, NaN included: 0 * NaN must not enter the sum.
        ours = allowed.reshape(num_rows, 1, 1, pages_per_block, page_size)
        values = jnp.where(ours[:, :, 0, :, :].transpose(0, 2, 1, 3)[..., None], values, 0.0)
        add = jnp.einsum(
            "tkgps,tpksh->tkgh", weights.reshape(*weights.shape[:3], pages_per_block, -1), values
        )
        return out * shrink[..., None] + add, new_top, total * shrink + weights.sum(-1)

    shape = (num_rows, num_kv_heads, group)
    if sinks is None:
        top, total = jnp.full(shape, -jnp.inf), jnp.zeros(shape)
    else:
        top = jnp.broadcast_to(sinks.astype(jnp.float32).reshape(1, *shape[1:]), shape)
        total = jnp.ones(shape)
    needed = (jnp.max(batch.kv_lens) + pages_per_block * page_size - 1) // (
        pages_per_block * page_size
    )
    out, _, total = lax.fori_loop(0, needed, fold, (jnp.zeros((*shape, head_size)), top, total))
    out = out / jnp.where(total == 0, 1.0, total)[..., None]
    return out.reshape(q.shape).astype(q.dtype), pages
