"""One call of the TPU kernel: arguments in its form, its buffers, and the pallas_call (step 6b).

Rows are brought to float32 with an axis of size one before the lanes, so that any row can be
copied alone: bfloat16 has two rows in one. 8-bit pages get new numbers as the definition's
`quantise` makes them; the kernel only puts them in place. Must not know which calls are possible.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.paged_attention import tpu_attend, tpu_scales, tpu_tile, tpu_write
from pallas_kernels.paged_attention.reference import KVPages, quantise
from pallas_kernels.paged_attention.tpu_attend import AttendRefs, AttendSemaphores, attend_all
from pallas_kernels.paged_attention.tpu_blocks import Facts
from pallas_kernels.paged_attention.tpu_layout import to_lanes
from pallas_kernels.paged_attention.tpu_scales import ScaleBuffers, ScaleWriteRefs
from pallas_kernels.paged_attention.tpu_schedule import Plan, Ref, Schedule
from pallas_kernels.paged_attention.tpu_tile import TileRefs
from pallas_kernels.paged_attention.tpu_write import WriteBuffers, WriteRefs, write_all


class Scalars(NamedTuple):
    """What lies in scalar memory: tables [B * pages_per_sequence], cu_q_lens, kv_lens: int32;
    sinks: [N] float32, or [1] where there are none."""

    tables: jax.Array
    cu_q_lens: jax.Array
    kv_lens: jax.Array
    sinks: jax.Array


class Rows(NamedTuple):
    """New rows as the kernel takes them, all float32.

    queries: [K, (T + tile_tokens) * group, 1, lanes]; new: keys and values [K, write_tokens + T +
    write_tokens, 1, lanes]; scales: of keys and values, `Facts.staged_scales`, for 8-bit pages.
    """

    queries: jax.Array
    new: tuple[jax.Array, jax.Array]
    scales: tuple[jax.Array, jax.Array] | None


class Scratch(NamedTuple):
    """All buffers of the kernel, or what they are made of."""

    write: WriteBuffers
    scales: ScaleBuffers | None
    tile: TileRefs
    done: AttendSemaphores


def stage(q: jax.Array, k: jax.Array, v: jax.Array, plan: Plan) -> Rows:
    """q [T, N, H], k and v [T, K, H] in the kernel's form."""
    facts = plan.facts
    queries = _queries(q, plan)
    if not facts.scaled:
        return Rows(queries, (_new_rows(k, facts), _new_rows(v, facts)), None)
    (k, k_scale), (v, v_scale) = (quantise(x, facts.page_dtype) for x in (k, v))
    # Rounding to 8 bits and back to 32 must not be taken for nothing to do.
    k, v = lax.optimization_barrier((k, v))  # type: ignore[no-untyped-call]
    scales = (_stage_scales(k_scale, facts), _stage_scales(v_scale, facts))
    return Rows(queries, (_new_rows(k, facts), _new_rows(v, facts)), scales)


def _queries(q: jax.Array, plan: Plan) -> jax.Array:
    """The last rows are padding."""
    facts = plan.facts
    heads = q.reshape(facts.num_rows, facts.num_kv_heads, facts.group, facts.head_size)
    heads = to_lanes(heads.transpose(1, 0, 2, 3).astype(jnp.float32), facts.layout)
    heads = jnp.pad(heads, ((0, 0), (0, plan.blocks.tile_tokens), (0, 0), (0, 0)))
    return heads.reshape(facts.num_kv_heads, -1, 1, facts.layout.lanes)


def _new_rows(x: jax.Array, facts: Facts) -> jax.Array:
    rows = to_lanes(x.transpose(1, 0, 2).astype(jnp.float32), facts.layout)
    size = facts.write_tokens
    return jnp.pad(rows, ((0, 0), (size, size), (0, 0)))[:, :, None]


def _stage_scales(scale: jax.Array, facts: Facts) -> jax.Array:
    """[T, K] -> [pack, groups, K, 128]: of each pair of tokens (pack = 2), the first ones apart
    from the second ones; tokens as lanes; padding before, behind, and up to a tile of heads."""
    pack, groups, heads, lanes = facts.staged_scales
    before = facts.scales_before
    behind = groups * lanes * pack - before - facts.num_rows
    padded = jnp.pad(scale, ((before, behind), (0, heads - facts.num_kv_heads)))
    return padded.reshape(groups, lanes, pack, heads).transpose(2, 0, 3, 1)


def scratch(plan: Plan) -> Scratch:
    """Buffers of the kernel."""
    facts, blocks = plan.facts, plan.blocks
    return Scratch(
        tpu_write.buffers(facts, blocks),
        tpu_scales.buffers(facts, blocks) if facts.scaled else None,
        tpu_tile.buffers(facts, blocks),
        tpu_attend.semaphores(),
    )


def _kernel(plan: Plan, num_sequences: int, *refs: Ref) -> None:
    """The whole call; `refs` as `run_kernel` passes them. The pool comes twice, as argument and as
    result, and is one."""
    *scalar_refs, rows, _, out, pages, write, scales, tile, done = refs
    scalars = Scalars(*scalar_refs)
    schedule = Schedule(plan, scalars.cu_q_lens, scalars.kv_lens, num_sequences)
    scale_refs = None
    if scales is not None:
        scale_refs = ScaleWriteRefs(rows.scales, pages[2:], scales)
    write_all(schedule, WriteRefs(scalars.tables, rows.new, pages[:2], write, scale_refs))
    attend_all(
        schedule,
        AttendRefs(scalars.tables, scalars.sinks, rows.queries, out, pages, tile, done),
    )


def run_kernel(
    plan: Plan,
    scalars: Scalars,
    rows: Rows,
    pages: KVPages,
    interpret: bool | pltpu.InterpretParams,
) -> tuple[jax.Array, KVPages]:
    """Output rows [K, T * group, 1, out_lanes] float32, and the pool, changed in place."""
    facts = plan.facts
    num_sequences = scalars.kv_lens.shape[0]
    out_shape = (facts.num_kv_heads, facts.num_rows * facts.group, 1, facts.out_lanes)
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    leaves = len(jax.tree.leaves(pages))
    before = len(jax.tree.leaves((scalars, rows)))
    result: tuple[jax.Array, KVPages] = pl.pallas_call(
        functools.partial(_kernel, plan, num_sequences),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(1,),
            in_specs=jax.tree.map(lambda _: anywhere, (rows, pages)),
            out_specs=(anywhere, jax.tree.map(lambda _: anywhere, pages)),
            scratch_shapes=tuple(scratch(plan)),
        ),
        out_shape=(
            jax.ShapeDtypeStruct(out_shape, jnp.float32),  # type: ignore[no-untyped-call]
            # Left free, XLA copies a small pool to VMEM and back.
            jax.tree.map(lambda leaf: pltpu.MemorySpace.HBM(leaf.shape, leaf.dtype), pages),
        ),
        input_output_aliases={before + number: 1 + number for number in range(leaves)},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",), vmem_limit_bytes=plan.blocks.vmem_limit_bytes
        ),
        cost_estimate=_most(facts, pages, num_sequences),
        interpret=interpret,
        name=f"paged_attention_h{facts.head_size}_p{facts.page_size}_{facts.page_dtype.name}",
    )(*scalars, rows, pages)
    return result


def _most(facts: Facts, pages: KVPages, num_sequences: int) -> pl.CostEstimate:
    """XLA cannot see into the call; lengths are not known, so this is the most it can be."""
    longest = facts.pages_per_sequence * facts.page_size
    logits = facts.num_rows * facts.num_kv_heads * facts.group * longest
    page: Any = sum(
        leaf.size // leaf.shape[0] * leaf.dtype.itemsize for leaf in jax.tree.leaves(pages)
    )
    return pl.CostEstimate(
        flops=4 * logits * facts.layout.lanes,
        transcendentals=logits,
        bytes_accessed=num_sequences * facts.pages_per_sequence * page,
    )
