"""One tile of queries against a range of its sequence's keys, on a GPU (step 6b).

Plain values in registers: the queries of a tile are a matrix of rows (token, then query head of
the KV head), keys come block by block, each token's from wherever its page is. A page is looked up
and read only for tokens that the tile may see. Knows nothing of grids and results.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.paged_attention.gpu_sizes import Facts, Sizes, TileSize

Ref = Any
#: What a logit that is not seen counts as: finite, so that no difference of two is NaN.
LOWEST = -1e30


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Everything static about a call."""

    facts: Facts
    sizes: Sizes
    page_size: int
    scale: float
    window: int | None
    soft_cap: float | None
    has_sinks: bool


class Keys(NamedTuple):
    """Where keys are.

    tables: [B, max_pages]; k, v: [P, K, page_size, H]; k_scale, v_scale: [P, K, page_size] or
    None.
    """

    tables: Ref
    k: Ref
    v: Ref
    k_scale: Ref | None
    v_scale: Ref | None


class Tile(NamedTuple):
    """Scalars: as in `gpu_work.Tiles`, and the KV head."""

    sequence: jax.Array
    row: jax.Array
    position: jax.Array
    tokens: jax.Array
    head: jax.Array


class Sums(NamedTuple):
    """The online softmax of a tile: values [rows, lanes], largest logit and weights [rows]."""

    values: jax.Array
    top: jax.Array
    total: jax.Array


def iota(size: int) -> jax.Array:
    """0 to size - 1, int32."""
    return lax.iota(jnp.int32, size)


def row_places(plan: Plan, tile: Tile, size: TileSize) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Token within the tile, query head, and whether there is such a row: three arrays [rows]."""
    row, group = iota(size.rows), plan.facts.group
    token = lax.div(row, jnp.int32(group))
    head = tile.head * group + lax.rem(row, jnp.int32(group))
    return token, head, row < tile.tokens * group


def load_queries(plan: Plan, queries: Ref, tile: Tile, size: TileSize) -> jax.Array:
    """The tile's rows of q [T, N, H] as [rows, lanes] in the dtype of the products."""
    token, head, exists = row_places(plan, tile, size)
    lane = iota(plan.sizes.lanes)
    rows = plgpu.load(
        queries.at[(tile.row + token)[:, None], head[:, None], lane[None, :]],
        mask=exists[:, None] & (lane < plan.facts.head_size)[None, :],
        other=0.0,
    )
    return rows.astype(plan.facts.compute_dtype)


def no_sums(plan: Plan, size: TileSize) -> Sums:
    """Of a tile that has seen nothing."""
    return Sums(
        jnp.zeros((size.rows, plan.sizes.lanes), jnp.float32),
        jnp.full((size.rows,), LOWEST, jnp.float32),
        jnp.zeros((size.rows,), jnp.float32),
    )


def first_seen(plan: Plan, position: jax.Array) -> jax.Array:
    """The first token that the query at a position sees."""
    if plan.window is None:
        return jnp.zeros_like(position)
    return jnp.maximum(position - (plan.window - 1), 0)


def fold(
    plan: Plan,
    keys: Keys,
    tile: Tile,
    size: TileSize,
    query: jax.Array,
    start: Sums,
    limits: tuple[jax.Array, jax.Array],
) -> Sums:
    """`start` and the tokens of `limits` (first, end): the first a multiple of block_tokens."""
    block = plan.sizes.block_tokens
    token, *_ = row_places(plan, tile, size)
    position = tile.position + token
    lowest = first_seen(plan, tile.position)
    begin, end = limits

    def step(number: jax.Array, sums: Sums) -> Sums:
        tokens = begin + number * block + iota(block)
        needed = (tokens >= lowest) & (tokens < end)
        key, value, k_scale, v_scale = _load_block(plan, keys, tile, tokens, needed)
        logits = dot(query, key, transposed=True) * plan.scale
        if k_scale is not None:
            logits = logits * k_scale[None, :]
        if plan.soft_cap is not None:
            logits = plan.soft_cap * jnp.tanh(logits * (1.0 / plan.soft_cap))
        seen = needed[None, :] & sees(plan, position[:, None], tokens[None, :])
        logits = jnp.where(seen, logits, LOWEST)
        top = jnp.maximum(sums.top, jnp.max(logits, axis=1))
        weights = jnp.where(seen, exp(logits - top[:, None]), 0.0)
        shrink = exp(sums.top - top)
        total = sums.total * shrink + jnp.sum(weights, axis=1)
        if v_scale is not None:
            weights = jnp.where(seen, weights * v_scale[None, :], 0.0)
        value, broken = _without_broken(value)
        change = dot(weights.astype(value.dtype), value, transposed=False)
        sees_broken = jnp.max(jnp.where(seen, broken[None, :], 0.0), axis=1) > 0
        change = jnp.where(sees_broken[:, None], jnp.nan, change)
        return Sums(sums.values * shrink[:, None] + change, top, total)

    blocks = lax.div(jnp.maximum(end - begin, 0) + (block - 1), jnp.int32(block))
    return Sums(*lax.fori_loop(0, blocks, step, start))


def sees(plan: Plan, position: jax.Array, token: jax.Array) -> jax.Array:
    """Whether a query at a position sees a token."""
    seen = token <= position
    if plan.window is not None:
        seen &= token > position - plan.window
    return seen


def page_of(plan: Plan, keys: Keys, tile: Tile, tokens: jax.Array, needed: jax.Array) -> jax.Array:
    """Pages of the tile's tokens [block_tokens]; 0 where not needed."""
    number = lax.div(tokens, jnp.int32(plan.page_size))
    place = keys.tables.at[jnp.broadcast_to(tile.sequence, number.shape), number]
    return plgpu.load(place, mask=needed, other=0)


def _load_block(
    plan: Plan, keys: Keys, tile: Tile, tokens: jax.Array, needed: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array | None, jax.Array | None]:
    """Keys and values [block_tokens, lanes] in the dtype of the products, and their scales."""
    page = page_of(plan, keys, tile, tokens, needed)
    offset, lane = lax.rem(tokens, jnp.int32(plan.page_size)), iota(plan.sizes.lanes)
    mask = needed[:, None] & (lane < plan.facts.head_size)[None, :]
    key, value = (
        plgpu.load(
            leaf.at[page[:, None], tile.head, offset[:, None], lane[None, :]],
            mask=mask,
            other=jnp.zeros((), leaf.dtype),
        ).astype(plan.facts.compute_dtype)
        for leaf in (keys.k, keys.v)
    )
    k_scale, v_scale = (
        None
        if leaf is None
        else plgpu.load(leaf.at[page, tile.head, offset], mask=needed, other=0.0)
        for leaf in (keys.k_scale, keys.v_scale)
    )
    return key, value, k_scale, v_scale


def _without_broken(value: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Values [block_tokens, lanes] with 0 for NaN and infinity, and 1 where a token has any.

    A product with weight 0 would carry them to rows that do not see the token.
    """
    sound = jnp.abs(value.astype(jnp.float32)) < jnp.inf
    broken = jnp.max(jnp.where(sound, 0.0, 1.0), axis=1)
    return jnp.where(sound, value, jnp.zeros((), value.dtype)), broken


def exp(x: jax.Array) -> jax.Array:
    """e to the x, by the base that GPUs have."""
    return jnp.exp2(x * math.log2(math.e))


def dot(left: jax.Array, right: jax.Array, *, transposed: bool) -> jax.Array:
    """left times right, or right transposed: float32. float32 operands are not rounded to TF32."""
    exact = left.dtype == jnp.float32
    product: jax.Array = plgpu.dot(
        left,
        right,
        trans_b=transposed,
        precision=lax.Precision.HIGHEST if exact else lax.Precision.DEFAULT,
    )
    return product


def store_rows(
    plan: Plan,
    tile: Tile,
    size: TileSize,
    sums: Sums,
    places: tuple[Any, Any],
    wanted: jax.Array,
) -> None:
    """Divides and stores a tile's results, those rows that exist and are `wanted` (a scalar).

    places: of the values [rows, lanes] and of the log-sum-exps [rows], as refs with indices.
    """
    out, lse = places
    _, _, exists = row_places(plan, tile, size)
    exists &= wanted
    any_seen = sums.total != 0  # true for NaN, which must stay visible
    total = jnp.where(any_seen, sums.total, 1.0)
    lane = iota(plan.sizes.lanes)
    plgpu.store(
        out,
        (sums.values / total[:, None]).astype(out.dtype),
        mask=exists[:, None] & (lane < plan.facts.head_size)[None, :],
    )
    plgpu.store(lse, jnp.where(any_seen, sums.top + jnp.log(total), LOWEST), mask=exists)
