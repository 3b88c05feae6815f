"""The arithmetic of one tile in the TPU kernel: an online softmax over KV blocks (step 6b).

Per KV head, a tile's queries are a matrix [pack * rows, lanes]; row t * group + g of each of the
`pack` parts is query head g of token t. Where two tokens share a row of a page (pack = 2), the
first part has zeros in the second half of its lanes and sees even tokens, the second part is the
other way round; each keeps its own maximum and sum, and they are put together at the end. Must
not know where queries, keys and values come from: all of them are in VMEM here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.paged_attention.tpu_blocks import Blocks, Facts
from pallas_kernels.paged_attention.tpu_layout import LANES
from pallas_kernels.paged_attention.tpu_scales import block_scales, only_needed
from pallas_kernels.paged_attention.tpu_schedule import Plan, Ref, Tile, divide, remainder

#: Stands for minus infinity, which minus itself would be NaN.
LOWEST = -0.7 * float(np.finfo(np.float32).max)
#: Heads whose code is written out side by side, so that their work can overlap: at most so many,
#: and fewer where the rows of one head are work enough.
HEADS_TOGETHER, ROWS_TOGETHER = 4, 128


class TileRefs(NamedTuple):
    """Buffers of tiles and blocks.

    blocks: keys and values [2, K, block rows, lanes]; scales: theirs, of 8-bit pages, [2, K, pages,
    1, lanes] float32; query_in: [2, K, rows, 1, lanes] and out_tile: [K, rows, 1, out_lanes], both
    float32; matrix: [K, pack * rows, lanes]; top, total: [K, pack * rows, 128] float32; sums:
    [K, pack * rows, lanes] float32; limit: [pack * rows, 128] int32.
    """

    blocks: tuple[Ref, Ref]
    scales: tuple[Ref, Ref] | None
    query_in: Ref
    out_tile: Ref
    matrix: Ref
    top: Ref
    total: Ref
    sums: Ref
    limit: Ref


def buffers(facts: Facts, blocks: Blocks) -> TileRefs:
    """What `TileRefs` is made of."""
    heads, lanes, pack = facts.num_kv_heads, facts.layout.lanes, facts.layout.pack
    rows, float32 = facts.rows(blocks.tile_tokens), jnp.float32
    block = pltpu.VMEM((2, heads, blocks.block_tokens // pack, lanes), facts.page_dtype)
    pages = blocks.block_tokens // facts.page_size
    scales = pltpu.VMEM((2, heads, pages, 1, facts.scale_lanes), float32)
    column = pltpu.VMEM((heads, pack * rows, LANES), float32)
    return TileRefs(
        blocks=(block, block),
        scales=(scales, scales) if facts.scaled else None,
        query_in=pltpu.VMEM((2, heads, rows, 1, lanes), float32),
        out_tile=pltpu.VMEM((heads, rows, 1, facts.out_lanes), float32),
        matrix=pltpu.VMEM((heads, pack * rows, lanes), facts.compute_dtype),
        top=column,
        total=column,
        sums=pltpu.VMEM((heads, pack * rows, lanes), float32),
        limit=pltpu.VMEM((pack * rows, LANES), jnp.int32),
    )


class TileSize(NamedTuple):
    """Static sizes of a kind of tile: its query tokens, and the rows of one part."""

    tokens: int
    rows: int

    def part(self, number: int) -> Any:
        """The rows of one part."""
        return pl.ds(number * self.rows, self.rows)

    def every(self, plan: Plan) -> Any:
        """The rows of all parts."""
        return pl.ds(0, plan.facts.layout.pack * self.rows)


def each_head(plan: Plan, size: TileSize, act: Callable[[jax.Array], None]) -> None:
    """Calls `act` with each KV head's number."""
    heads = plan.facts.num_kv_heads
    most = max(1, min(HEADS_TOGETHER, ROWS_TOGETHER // (size.rows * plan.facts.layout.pack)))
    together = next(n for n in range(most, 0, -1) if heads % n == 0)

    def step(number: jax.Array, _: None) -> None:
        for head in range(together):
            act(number * together + head)

    lax.fori_loop(0, heads // together, step, None)


def begin_tile(refs: TileRefs, sinks: Ref, plan: Plan, side: jax.Array, size: TileSize) -> None:
    """The queries on one side of `query_in` as matrices, empty sums, and how far each row sees."""
    facts, layout = plan.facts, plan.facts.layout
    row = lax.broadcasted_iota(jnp.int32, (size.rows, LANES), 0)
    for part in range(layout.pack):
        refs.limit[size.part(part)] = divide(row, facts.group) - part
    lane = lax.broadcasted_iota(jnp.int32, (size.rows, layout.lanes), 1)
    every = size.every(plan)

    def begin(head: jax.Array) -> None:
        query = refs.query_in[side, head, pl.ds(0, size.rows), 0, :]
        for part in range(layout.pack):
            mine = query
            if layout.pack == 2:
                mine = jnp.where((lane >= layout.head_size) == bool(part), query, 0.0)
            refs.matrix[head, size.part(part)] = mine.astype(refs.matrix.dtype)
        for ref, value in ((refs.sums, 0.0), (refs.top, LOWEST), (refs.total, 0.0)):
            ref[head, every] = jnp.full((every.size, ref.shape[-1]), value, jnp.float32)
        if plan.has_sinks:
            _begin_with_sinks(refs, sinks, plan, head, size)

    each_head(plan, size, begin)


def _begin_with_sinks(
    refs: TileRefs, sinks: Ref, plan: Plan, head: jax.Array, size: TileSize
) -> None:
    """The first part has seen one more logit, which brought no value."""
    group, shape = plan.facts.group, (size.rows, LANES)
    member = remainder(lax.broadcasted_iota(jnp.int32, shape, 0), group)
    top = jnp.full(shape, LOWEST, jnp.float32)
    for number in range(group):
        top = jnp.where(member == number, sinks[head * group + number], top)
    refs.top[head, size.part(0)] = top
    refs.total[head, size.part(0)] = jnp.ones(shape, jnp.float32)


def clear_edges(refs: TileRefs, plan: Plan, tile: Tile, block: jax.Array, slot: jax.Array) -> None:
    """Zeros where the block holds no tokens of the tile: what is there may be NaN, which a weight
    of zero does not make good. Integers are never NaN. A key alone in its row may be anything: its
    logits are thrown away."""
    layout = plan.facts.layout
    if jnp.issubdtype(plan.facts.page_dtype, jnp.integer):
        return
    unclean = refs.blocks if layout.pack == 2 else refs.blocks[1:]
    begin, end = block * plan.blocks.block_tokens, (block + 1) * plan.blocks.block_tokens

    @pl.when((begin < tile.begin) | (end > tile.end))
    def _() -> None:
        shape = (plan.blocks.block_tokens // layout.pack, layout.lanes)
        position = begin + lax.broadcasted_iota(jnp.int32, shape, 0) * layout.pack
        if layout.pack == 2:
            lane = lax.broadcasted_iota(jnp.int32, shape, 1)
            position = position + (lane >= layout.head_size).astype(jnp.int32)
        needed = (position >= tile.begin) & (position < tile.end)

        def clear(head: jax.Array, _: None) -> None:
            for ref in unclean:
                kept = jnp.where(needed, ref[slot, head].astype(jnp.float32), 0.0)
                ref[slot, head] = kept.astype(ref.dtype)

        lax.fori_loop(0, plan.facts.num_kv_heads, clear, None)


def fold_block(
    refs: TileRefs, plan: Plan, tile: Tile, block: jax.Array, slot: jax.Array, size: TileSize
) -> None:
    """Adds the block in a slot to the sums of all heads."""
    every = size.every(plan)
    # The last token that a row sees, as a token of the block, is its limit and this.
    offset = tile.position - block * plan.blocks.block_tokens

    def fold(head: jax.Array) -> None:
        keys, values = (ref[slot, head].astype(refs.matrix.dtype) for ref in refs.blocks)
        logits = _dot(refs.matrix[head, every], keys, contract=1)
        key_scales, value_scales = _scales(refs, plan, tile, block, slot, head, size)
        logits = logits * key_scales
        if plan.soft_cap is not None:
            logits = plan.soft_cap * jnp.tanh(logits / plan.soft_cap)
        furthest = refs.limit[every, pl.ds(0, 1)] + offset
        seen = _seen(plan, logits.shape, furthest)
        logits = jnp.where(seen, logits, LOWEST)
        old_top = refs.top[head, every]
        top = jnp.maximum(old_top, jnp.max(logits, axis=1, keepdims=True))
        weights = jnp.where(seen, jnp.exp(logits - top[:, :1]), 0.0)
        shrink = jnp.exp(old_top - top)
        refs.top[head, every] = top
        total = jnp.sum(weights, axis=1, keepdims=True)
        refs.total[head, every] = shrink * refs.total[head, every] + total
        if value_scales is not None:
            weights = weights * value_scales
        change = _dot(weights.astype(values.dtype), values, contract=0)
        refs.sums[head, every] = shrink[:, :1] * refs.sums[head, every] + change

    each_head(plan, size, fold)


def _scales(
    refs: TileRefs,
    plan: Plan,
    tile: Tile,
    block: jax.Array,
    slot: jax.Array,
    head: jax.Array,
    size: TileSize,
) -> tuple[jax.Array | float, jax.Array | None]:
    """What logits are multiplied with, and weights (None: nothing)."""
    if refs.scales is None:
        return plan.scale, None
    facts, blocks = plan.facts, plan.blocks
    keys, values = (block_scales(ref, facts, blocks, slot, head) for ref in refs.scales)
    keys = tuple(scale * plan.scale for scale in keys)
    values = only_needed(values, facts, blocks, tile, block)
    if facts.layout.pack == 1:
        return keys[0], values[0]
    shape = (size.rows, keys[0].shape[1])
    key_scales, value_scales = (
        jnp.concatenate([jnp.broadcast_to(scale, shape) for scale in parts])
        for parts in (keys, values)
    )
    return key_scales, value_scales


def _seen(plan: Plan, shape: tuple[int, ...], furthest: jax.Array) -> jax.Array:
    """Which tokens of a block each row sees; furthest: [rows, 1], the last one, itself included."""
    token = lax.broadcasted_iota(jnp.int32, shape, 1) * plan.facts.layout.pack
    seen = token <= furthest
    if plan.window is not None:
        seen &= token > furthest - plan.window
    return seen


def _dot(left: jax.Array, right: jax.Array, *, contract: int) -> jax.Array:
    """left [m, c] times right, over right's axis `contract`; float32 [m, n]."""
    exact = left.dtype == jnp.float32
    return lax.dot_general(
        left,
        right,
        (((1,), (contract,)), ((), ())),
        precision=lax.Precision.HIGHEST if exact else None,
        preferred_element_type=jnp.float32,
    )


def end_tile(refs: TileRefs, plan: Plan, size: TileSize) -> None:
    """Puts the parts together, divides, and leaves the result, and the log-sum if it is asked for,
    in `out_tile`."""
    layout = plan.facts.layout

    def end(head: jax.Array) -> None:
        parts = [size.part(number) for number in range(layout.pack)]
        tops = [refs.top[head, rows] for rows in parts]
        top = tops[0] if layout.pack == 1 else jnp.maximum(tops[0], tops[1])
        shrinks = [jnp.exp(mine - top) for mine in tops]
        sums = [
            shrink[:, :1] * refs.sums[head, rows]
            for shrink, rows in zip(shrinks, parts, strict=True)
        ]
        totals = [
            shrink * refs.total[head, rows] for shrink, rows in zip(shrinks, parts, strict=True)
        ]
        out, total = sums[0], totals[0]
        if layout.pack == 2:
            lane = lax.broadcasted_iota(jnp.int32, out.shape, 1)
            out = jnp.where(lane < layout.head_size, sums[0], sums[1])
            out = out + pltpu.roll(out, layout.head_size, 1)
            total = totals[0] + totals[1]
        rows = pl.ds(0, size.rows)
        refs.out_tile[head, rows, 0, pl.ds(0, layout.lanes)] = out / total[:, :1]
        if plan.facts.with_lse:
            refs.out_tile[head, rows, 0, pl.ds(layout.lanes, LANES)] = top + jnp.log(total)

    each_head(plan, size, end)
