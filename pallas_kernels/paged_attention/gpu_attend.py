"""The GPU kernels that attend: tiles at once, tiles split over their keys, and the joining (step 6b).

`attend_many` writes results; `attend_few` writes partial results, which `join` puts together.
Results go in place into arrays that are zero, and -inf, where no row of the batch is. Each is
one Pallas call with a static grid; see `gpu_work` for who does what.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.paged_attention.gpu_sizes import SMALLEST_DOT, TileSize, power_of_two
from pallas_kernels.paged_attention.gpu_tile import (
    LOWEST,
    Keys,
    Plan,
    Ref,
    Sums,
    Tile,
    exp,
    first_seen,
    fold,
    iota,
    load_queries,
    no_sums,
    row_places,
    store_rows,
)
from pallas_kernels.paged_attention.gpu_work import Parts, Splits, Tiles

#: Partial results that are joined at a time.
PARTS_TOGETHER = 16


class Results(NamedTuple):
    """out: [T, N, H] in q's dtype; lse: [T, N] float32."""

    out: jax.Array
    lse: jax.Array


def run(
    kernel: Callable[..., None],
    arguments: Any,
    results: Any,
    *,
    grid: tuple[int, ...],
    warps: int,
    stages: int,
    interpret: bool,
    in_place: bool = False,
    name: str,
) -> Any:
    """Calls a kernel that gets refs to whole arrays, shaped as `arguments` and `results` are.

    in_place: `results` are arrays to change, else shapes of new ones.
    """
    given, tree = jax.tree.flatten(arguments)
    changed, result_tree = jax.tree.flatten(results)
    count = len(changed) if in_place else 0

    def body(*refs: Ref) -> None:
        made = refs[len(given) + count :]
        kernel(jax.tree.unflatten(tree, refs[: len(given)]), jax.tree.unflatten(result_tree, made))

    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    made = pl.pallas_call(
        body,
        grid=grid,
        in_specs=[anywhere] * (len(given) + count),
        out_specs=[anywhere] * len(changed),
        out_shape=[
            jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)  # type: ignore[no-untyped-call]
            for leaf in changed
        ],
        input_output_aliases={len(given) + i: i for i in range(count)},
        compiler_params=plgpu.CompilerParams(num_warps=warps, num_stages=stages),
        interpret=interpret,
        name=name,
    )(*given, *(changed if in_place else ()))
    return jax.tree.unflatten(result_tree, made)


def _tile(tiles: Any, number: jax.Array, head: jax.Array) -> Tile:
    sequence, row, position, tokens = (leaf[number] for leaf in tiles)
    return Tile(sequence, row, position, tokens, head)


def _result_places(plan: Plan, tile: Tile, size: TileSize, results: Any) -> tuple[Any, Any]:
    token, head, _ = row_places(plan, tile, size)
    row, lane = tile.row + token, iota(plan.sizes.lanes)
    out = results.out.at[row[:, None], head[:, None], lane[None, :]]
    return out, results.lse.at[row, head]


def attend_many(
    plan: Plan,
    queries: jax.Array,
    keys: Keys,
    sinks: jax.Array,
    tiles: Tiles,
    results: Results,
    *,
    interpret: bool,
) -> Results:
    """`results` with the rows of `tiles`."""
    size, block = plan.sizes.many, plan.sizes.block_tokens

    def kernel(given: Any, made: Any) -> None:
        queries, keys, sinks, tiles = given
        tile = _tile(tiles, pl.program_id(0), pl.program_id(1))
        start = no_sums(plan, size)
        if plan.has_sinks:
            _, head, exists = row_places(plan, tile, size)
            top = plgpu.load(sinks.at[head], mask=exists, other=0.0)
            start = Sums(start.values, top, jnp.ones_like(top))
        begin = lax.div(first_seen(plan, tile.position), jnp.int32(block)) * block
        end = jnp.where(tile.tokens > 0, tile.position + tile.tokens, begin)
        query = load_queries(plan, queries, tile, size)
        sums = fold(plan, keys, tile, size, query, start, (begin, end))
        store_rows(plan, tile, size, sums, _result_places(plan, tile, size, made), tile.tokens > 0)

    made: Results = run(
        kernel,
        (queries, keys, sinks, tiles),
        results,
        grid=(len(tiles.row), plan.facts.num_kv_heads),
        warps=size.warps,
        stages=plan.sizes.stages,
        interpret=interpret,
        in_place=True,
        name="paged_attention_many",
    )
    return made


def attend_few(
    plan: Plan,
    queries: jax.Array,
    keys: Keys,
    tiles: Tiles,
    splits: Splits,
    *,
    num_parts: int,
    num_splits: int,
    interpret: bool,
) -> tuple[jax.Array, jax.Array]:
    """Partial results of `tiles`: values [R, N, splits, H] and log-sum-exps [R, N, splits], float32.

    Splits that a sequence does not have hold anything; one that a row sees nothing of has zeros
    and LOWEST.
    """
    size, block = plan.sizes.few, plan.sizes.block_tokens
    num_heads, head_size = queries.shape[1:]

    def kernel(given: Any, made: Any) -> None:
        queries, keys, tiles, splits = given
        number, split = pl.program_id(0), pl.program_id(2)
        tile = _tile(tiles, number, pl.program_id(1))
        length, part_row = splits.length[number], splits.part_row[number]
        first = lax.div(first_seen(plan, tile.position), jnp.int32(block)) * block
        begin = jnp.maximum(split * length, first)
        end = jnp.minimum((split + 1) * length, tile.position + tile.tokens)
        exists = (tile.tokens > 0) & (begin < end)
        end = jnp.where(exists, end, begin)
        query = load_queries(plan, queries, tile, size)
        sums = fold(plan, keys, tile, size, query, no_sums(plan, size), (begin, end))
        token, head, _ = row_places(plan, tile, size)
        row, lane = part_row + token, iota(plan.sizes.lanes)
        out, lse = made
        places = (
            out.at[row[:, None], head[:, None], split, lane[None, :]],
            lse.at[row, head, jnp.broadcast_to(split, row.shape)],
        )
        store_rows(plan, tile, size, sums, places, exists)

    shape = (num_parts, num_heads, num_splits)
    made: tuple[jax.Array, jax.Array] = run(
        kernel,
        (queries, keys, tiles, splits),
        (
            jax.ShapeDtypeStruct((*shape, head_size), jnp.float32),  # type: ignore[no-untyped-call]
            jax.ShapeDtypeStruct(shape, jnp.float32),  # type: ignore[no-untyped-call]
        ),
        grid=(len(tiles.row), plan.facts.num_kv_heads, num_splits),
        warps=size.warps,
        stages=plan.sizes.stages,
        interpret=interpret,
        name="paged_attention_few",
    )
    return made


def join(
    plan: Plan,
    parts: tuple[jax.Array, jax.Array],
    sinks: jax.Array,
    places: Parts,
    results: Results,
    *,
    interpret: bool,
) -> Results:
    """`results` with the rows whose partial results are in `parts`; a program per row and head."""
    num_rows, num_heads, num_splits, head_size = parts[0].shape

    def kernel(given: Any, made: Any) -> None:
        (values, lses), sinks, places = given
        part, head = pl.program_id(0), pl.program_id(1)
        row, first, end = (leaf[part] for leaf in places)
        number, lane = iota(power_of_two(max(num_splits, SMALLEST_DOT))), iota(plan.sizes.lanes)
        own = (number >= first) & (number < end)
        every = plgpu.load(_lses(lses, part, head, number), mask=own, other=LOWEST)
        top = jnp.max(every)
        start = jnp.zeros((), jnp.float32)
        if plan.has_sinks:
            sink = sinks[head]
            top = jnp.maximum(top, sink)
            start = exp(sink - top)

        def add(step: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            out, total = carry
            number = first + step * PARTS_TOGETHER + iota(PARTS_TOGETHER)
            own = number < end
            lse = plgpu.load(_lses(lses, part, head, number), mask=own, other=LOWEST)
            weight = jnp.where(own & (lse != LOWEST), exp(lse - top), 0.0)
            value = plgpu.load(
                values.at[part, head, number[:, None], lane[None, :]],
                mask=own[:, None] & (lane < head_size)[None, :],
                other=0.0,
            )
            return out + jnp.sum(weight[:, None] * value, axis=0), total + jnp.sum(weight)

        steps = lax.div(jnp.maximum(end - first, 0) + PARTS_TOGETHER - 1, jnp.int32(PARTS_TOGETHER))
        empty = jnp.zeros((plan.sizes.lanes,), jnp.float32)
        out, total = lax.fori_loop(0, steps, add, (empty, start))
        used = first < end
        total = jnp.where(total == 0, 1.0, total)
        mask = (lane < head_size) & used
        plgpu.store(made.out.at[row, head, lane], (out / total).astype(made.out.dtype), mask=mask)
        plgpu.store(made.lse.at[row, head], top + jnp.log(total), mask=used)

    made: Results = run(
        kernel,
        (parts, sinks, places),
        results,
        grid=(num_rows, num_heads),
        warps=1,
        stages=plan.sizes.stages,
        interpret=interpret,
        in_place=True,
        name="paged_attention_join",
    )
    return made


def _lses(lses: Ref, part: jax.Array, head: jax.Array, number: jax.Array) -> Any:
    return lses.at[part, head, number]
