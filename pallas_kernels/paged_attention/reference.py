"""Definition of ragged paged attention in plain jnp.

A batch is flat: the query tokens of all sequences stand one after the other; sequence b owns
rows cu_q_lens[b] to cu_q_lens[b + 1], which are the last rows of its kv_lens[b] tokens.
Keys and values live in pages; block_tables[b, i] is the page that holds the sequence's tokens
i * page_size to (i + 1) * page_size - 1. Page 0 is the trash page: padding rows write there.

    out[t] = softmax(scale * q[t] . k[j] (capped) for allowed j) . v[j]
    lse[t] = log(sum of exp(scale * q[t] . k[j] (capped)) for allowed j, and of exp(sink))
    allowed: j <= position(t), and j > position(t) - window where a window is given

Pages of int8 or float8_e4m3fn hold each token's head divided by a scale of its own (`quantise`);
keys and values are then what they stand for, number times scale, in float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

#: KV tokens folded per step of the online softmax; bounds the memory of the definition.
BLOCK_TOKENS = 128


#: Page dtypes that need scales, and the largest number that each can hold.
QUANTISED: Mapping[str, float] = {"int8": 127.0, "float8_e4m3fn": 448.0}


class KVPages(NamedTuple):
    """A pool of pages: k and v of shape [P, K, page_size, H].

    k_scale, v_scale: [P, K, page_size] float32, what each stored head is multiplied with; None
    unless the pages' dtype is among QUANTISED.
    """

    k: jax.Array
    v: jax.Array
    k_scale: jax.Array | None = None
    v_scale: jax.Array | None = None


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
        name = jnp.dtype(given).name
        if not jnp.issubdtype(given, jnp.floating) and (what != "pages" or name not in QUANTISED):
            reasons.append(f"{what} of {name} are not floating-point numbers")
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


def quantise(x: jax.Array, dtype: DTypeLike) -> tuple[jax.Array, jax.Array]:
    """[.., H] -> what is stored, in `dtype` (among QUANTISED), and its scales [..] float32.

    scale = max |x| / largest number of dtype, stored = x / scale rounded to nearest even; a head
    of zeros has scale 0 and zeros.
    """
    limit = QUANTISED[jnp.dtype(dtype).name]
    x = x.astype(jnp.float32)
    scale = jnp.max(jnp.abs(x), axis=-1) / limit
    stored = x / jnp.where(scale == 0, 1.0, scale)[..., None]
    if jnp.issubdtype(dtype, jnp.integer):
        stored = jnp.round(stored)
    return jnp.clip(stored, -limit, limit).astype(dtype), scale


def write_pages(pages: KVPages, k: jax.Array, v: jax.Array, batch: PagedBatch) -> KVPages:
    """Pages with the rows' k and v [T, K, H] stored at their places."""
    sequence, position, valid = row_positions(batch, k.shape[0])
    page_size = pages.k.shape[2]
    page = jnp.where(valid, batch.block_tables[sequence, position // page_size], 0)
    place = page, slice(None), position % page_size
    if pages.k_scale is None or pages.v_scale is None:
        return KVPages(
            pages.k.at[place].set(k.astype(pages.k.dtype)),
            pages.v.at[place].set(v.astype(pages.v.dtype)),
        )
    stored_k, k_scale = quantise(k, pages.k.dtype)
    stored_v, v_scale = quantise(v, pages.v.dtype)
    return KVPages(
        pages.k.at[place].set(stored_k),
        pages.v.at[place].set(stored_v),
        pages.k_scale.at[place].set(k_scale),
        pages.v_scale.at[place].set(v_scale),
    )


def _read(leaf: jax.Array, scale: jax.Array | None, ids: jax.Array) -> jax.Array:
    """The tokens of pages `ids`, float32 [.., K, page_size, H]."""
    tokens = leaf[ids].astype(jnp.float32)
    return tokens if scale is None else tokens * scale[ids][..., None]


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
        keys = _read(pages.k, pages.k_scale, ids)  # [T, pages_per_block, K, page_size, H]
        values = _read(pages.v, pages.v_scale, ids)
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
    empty = jnp.zeros((*shape, head_size))
    out, top, total = lax.fori_loop(0, needed, fold, (empty, top, total))
    out = out / jnp.where(total == 0, 1.0, total)[..., None]
    lse = jnp.where(valid[:, None, None], top + jnp.log(total), -jnp.inf)
    return out.reshape(q.shape).astype(q.dtype), pages, lse.reshape(q.shape[:2])
