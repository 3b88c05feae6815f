"""Paged attention on TPUs, in Pallas (step 6b).

One program takes decodes, prefill chunks and drafts as they come: it first writes the new keys
and values into their pages (`tpu_write`), then computes tile after tile (`tpu_attend`); what it
does in which order is worked out in scalar memory (`tpu_schedule`). Pages are laid out as
`tpu_layout` says: a pool for this implementation is made with `page_shape`. Must not know
anything outside pallas_kernels.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.typing import DTypeLike

from pallas_kernels.errors import KernelError
from pallas_kernels.paged_attention.reference import KVPages, PagedBatch, row_positions
from pallas_kernels.paged_attention.tpu_attend import AttendRefs, attend_all
from pallas_kernels.paged_attention.tpu_blocks import Blocks, Facts, check, choose_blocks, rule
from pallas_kernels.paged_attention.tpu_layout import (
    HEAD_SIZES,
    LANES,
    page_shape,
    to_lanes,
    token_layout,
)
from pallas_kernels.paged_attention.tpu_schedule import Plan, Ref, Schedule
from pallas_kernels.paged_attention.tpu_tile import TileRefs
from pallas_kernels.paged_attention.tpu_write import WriteRefs, write_all

__all__ = ["page_shape", "paged_attention", "refusals"]

DTYPES = ("float32", "bfloat16")
SMALLEST_PAGE, LARGEST_PAGE = 16, 256
#: Scalar memory of a TPU core, less what the compiler keeps for itself.
SMEM_BYTES = 2**20 - 2**16


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
    if platform != "tpu":
        reasons.append(f"it runs on tpu, not on {platform}")
    for what, given in (("q, k and v", dtype), ("pages", page_dtype)):
        if (name := jnp.dtype(given).name) not in DTYPES:
            reasons.append(f"{what} of {name} are not among {', '.join(DTYPES)}")
    if num_heads % num_kv_heads:
        reasons.append(f"{num_heads} query heads do not share {num_kv_heads} KV heads evenly")
    if head_size not in HEAD_SIZES:
        sizes = ", ".join(map(str, HEAD_SIZES))
        reasons.append(f"head size {head_size} is not among {sizes}")
    if page_size % SMALLEST_PAGE or not SMALLEST_PAGE <= page_size <= LARGEST_PAGE:
        reasons.append(
            f"page size {page_size} is not a multiple of {SMALLEST_PAGE} up to {LARGEST_PAGE}"
        )
    if not reasons:
        smallest = Facts(
            num_rows=1,
            num_kv_heads=num_kv_heads,
            group=num_heads // num_kv_heads,
            head_size=head_size,
            page_size=page_size,
            pages_per_sequence=1,
            page_dtype=np.dtype(page_dtype),
            compute_dtype=np.dtype(jnp.promote_types(dtype, page_dtype)),
        )
        try:
            check(rule(smallest), smallest)
        except KernelError as error:
            reasons.append(str(error))
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
    blocks: Blocks | None = None,
    interpret: bool | pltpu.InterpretParams = False,
) -> tuple[jax.Array, KVPages]:
    """As `reference.paged_attention`, with pages of `page_shape`; rows of padding write nowhere.

    Where q and the pages are bfloat16 the products are those of bfloat16 numbers, summed in
    float32, and softmax weights are rounded to bfloat16 before they meet the values; else all is
    float32. A row's result depends, bit for bit, on its own sequence only.
    blocks: sizes to use instead of the table's or the rule's. interpret: run on any platform, for
    tests: True as plain XLA, InterpretParams in a simulator of copies and semaphores. Raises KernelError when blocks do not fit VMEM, or tables scalar memory.
    """
    facts = _facts(q, k, pages, batch)
    if blocks is None:
        blocks = choose_blocks(facts, "interpreter" if interpret else _device_kind())
    check(blocks, facts)
    plan = Plan(
        facts=facts,
        blocks=blocks,
        scale=scale,
        window=window,
        soft_cap=soft_cap,
        has_sinks=sinks is not None,
    )
    scalars = (
        batch.block_tables.astype(jnp.int32).reshape(-1),
        batch.cu_q_lens.astype(jnp.int32),
        batch.kv_lens.astype(jnp.int32),
        jnp.zeros((1,), jnp.float32) if sinks is None else sinks.astype(jnp.float32),
    )
    _check_scalars(scalars, facts)
    new = (_rows(k, plan), _rows(v, plan))
    out, *written = _call(plan, scalars, _queries(q, plan), new, pages, interpret)
    out = out.reshape(facts.num_kv_heads, facts.num_rows, facts.group, -1)[..., : facts.head_size]
    out = out.transpose(1, 0, 2, 3).reshape(q.shape)
    *_, valid = row_positions(batch, facts.num_rows)
    return jnp.where(valid[:, None, None], out, 0.0).astype(q.dtype), KVPages(*written)


def _facts(q: jax.Array, k: jax.Array, pages: KVPages, batch: PagedBatch) -> Facts:
    num_rows, num_heads, head_size = q.shape
    layout = token_layout(head_size)
    assert pages.k.shape[3] == layout.lanes, (pages.k.shape, head_size)
    return Facts(
        num_rows=num_rows,
        num_kv_heads=k.shape[1],
        group=num_heads // k.shape[1],
        head_size=head_size,
        page_size=pages.k.shape[2] * layout.pack,
        pages_per_sequence=batch.block_tables.shape[1],
        page_dtype=np.dtype(pages.k.dtype),
        compute_dtype=np.dtype(jnp.promote_types(q.dtype, pages.k.dtype)),
    )


def _device_kind() -> str:
    """Of the device that this is compiled for."""
    target = jax.sharding.get_abstract_mesh().abstract_device
    return str(target.device_kind if target else jax.devices()[0].device_kind)


def _check_scalars(scalars: tuple[jax.Array, ...], facts: Facts) -> None:
    needed = sum(-(-array.size // LANES) * LANES * 4 for array in scalars)
    if needed > SMEM_BYTES:
        sequences = scalars[2].shape[0]
        raise KernelError(
            f"block tables of {sequences} sequences with {facts.pages_per_sequence} pages each do "
            f"not fit a TPU's scalar memory ({needed:,} of {SMEM_BYTES:,} bytes); use larger pages "
            f"than {facts.page_size} tokens, fewer sequences, or a shorter context"
        )


def _queries(q: jax.Array, plan: Plan) -> jax.Array:
    """q [T, N, H] -> [K, (T + tile_tokens) * group, 1, lanes] float32; the last rows are padding."""
    facts = plan.facts
    heads = q.reshape(facts.num_rows, facts.num_kv_heads, facts.group, facts.head_size)
    heads = to_lanes(heads.transpose(1, 0, 2, 3).astype(jnp.float32), facts.layout)
    heads = jnp.pad(heads, ((0, 0), (0, plan.blocks.tile_tokens), (0, 0), (0, 0)))
    return heads.reshape(facts.num_kv_heads, -1, 1, facts.layout.lanes)


def _rows(x: jax.Array, plan: Plan) -> jax.Array:
    """k or v [T, K, H] -> [K, write_tokens + T + write_tokens, 1, lanes] float32."""
    rows = to_lanes(x.transpose(1, 0, 2).astype(jnp.float32), plan.facts.layout)
    size = plan.facts.write_tokens
    return jnp.pad(rows, ((0, 0), (size, size), (0, 0)))[:, :, None]


def _kernel(plan: Plan, num_sequences: int, *refs: Ref) -> None:
    """The whole call; `refs` as `_call` passes them."""
    tables, cu_q_lens, kv_lens, sinks, queries, new_k, new_v, _, _, out, *rest = refs
    pages, runs, fresh, write_sems = (tuple(rest[i : i + 2]) for i in (0, 2, 4, 6))
    schedule = Schedule(plan, cu_q_lens, kv_lens, num_sequences)
    write_all(schedule, WriteRefs(tables, (new_k, new_v), pages, runs, fresh, *write_sems))
    tile = TileRefs(sinks, (rest[8], rest[9]), *rest[10:17])
    attend_all(schedule, AttendRefs(tables, queries, out, pages, tile, *rest[17:]))


def _scratch(plan: Plan) -> list[Any]:
    """Buffers of the kernel: those of the writes, then those of the tiles."""
    facts, blocks = plan.facts, plan.blocks
    heads, lanes, pack = facts.num_kv_heads, facts.layout.lanes, facts.layout.pack
    rows, float32 = facts.rows(blocks.tile_tokens), jnp.float32
    run = pltpu.VMEM((blocks.writes, heads, facts.write_rows, lanes), facts.page_dtype)
    fresh = pltpu.VMEM((blocks.writes, heads, facts.write_tokens, 1, lanes), float32)
    block = pltpu.VMEM((2, heads, blocks.block_tokens // pack, lanes), facts.page_dtype)
    column = pltpu.VMEM((heads, pack * rows, LANES), float32)
    sems = pltpu.SemaphoreType.DMA
    return [
        *(run, run, fresh, fresh),
        *(sems((blocks.writes,)), sems((blocks.writes,))),
        *(block, block),
        pltpu.VMEM((2, heads, rows, 1, lanes), float32),
        pltpu.VMEM((heads, rows, 1, lanes), float32),
        pltpu.VMEM((heads, pack * rows, lanes), facts.compute_dtype),
        *(column, column),
        pltpu.VMEM((heads, pack * rows, lanes), float32),
        pltpu.VMEM((pack * rows, LANES), jnp.int32),
        *(sems((2,)), sems((2,)), sems),
    ]


def _call(
    plan: Plan,
    scalars: tuple[jax.Array, ...],
    queries: jax.Array,
    new: tuple[jax.Array, jax.Array],
    pages: KVPages,
    interpret: bool | pltpu.InterpretParams,
) -> list[jax.Array]:
    """Output rows [K, T * group, 1, lanes] float32, and both leaves of the pool, in place."""
    facts = plan.facts
    longest = facts.pages_per_sequence * facts.page_size
    out_shape = (facts.num_kv_heads, facts.num_rows * facts.group, 1, facts.layout.lanes)
    num_sequences = scalars[2].shape[0]
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    logits = facts.num_rows * facts.num_kv_heads * facts.group * longest
    result: list[jax.Array] = pl.pallas_call(
        functools.partial(_kernel, plan, num_sequences),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(1,),
            in_specs=[anywhere] * 5,
            out_specs=[anywhere] * 3,
            scratch_shapes=_scratch(plan),
        ),
        out_shape=[
            jax.ShapeDtypeStruct(out_shape, jnp.float32),  # type: ignore[no-untyped-call]
            # Left free, XLA copies a small pool to VMEM and back.
            *(pltpu.MemorySpace.HBM(leaf.shape, leaf.dtype) for leaf in pages[:2]),
        ],
        input_output_aliases={len(scalars) + 3: 1, len(scalars) + 4: 2},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",), vmem_limit_bytes=plan.blocks.vmem_limit_bytes
        ),
        # XLA cannot see into the call; lengths are not known, so this is the most it can be.
        cost_estimate=pl.CostEstimate(
            flops=4 * logits * facts.layout.lanes,
            transcendentals=logits,
            bytes_accessed=2
            * num_sequences
            * longest
            * pages.k[0, :, 0].size
            * pages.k.dtype.itemsize,
        ),
        interpret=interpret,
        name=f"paged_attention_h{facts.head_size}_p{facts.page_size}",
    )(*scalars, queries, *new, *pages[:2])
    return result
