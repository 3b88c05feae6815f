"""Paged attention on TPUs, in Pallas (step 6b).

One program takes decodes, prefill chunks and drafts as they come: it first writes the new keys
and values into their pages (`tpu_write`), then computes tile after tile (`tpu_attend`); what it
does in which order is worked out in scalar memory (`tpu_schedule`). Pages are laid out as
`tpu_layout` says: a pool for this implementation is made with `page_shape` and `scale_shape`.
Must not know anything outside pallas_kernels.

Pages of int8 and of float8_e4m3fn become q's dtype in registers, which is exact, and are then
computed with like others: a token's scale multiplies its column of logits, and its weights. Every
chip takes either, but vector instructions for 1,024 numbers, in the compiler's listing, are

                               v5e    v6e    7x
    int8 -> bfloat16           2.5    1.5    1.5
    float8_e4m3fn -> bfloat16  7.5    7.5    1.5

v5e goes by way of int32 and float32; v5e and v6e have another 8-bit format in hardware (e4m3b11),
whose results the compiler corrects. So on v5e and v6e int8 is the cheaper one to read.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import tpu as pltpu
from jax.typing import DTypeLike

from pallas_kernels.errors import KernelError
from pallas_kernels.paged_attention.reference import (
    QUANTISED,
    KVPages,
    PagedBatch,
    row_positions,
)
from pallas_kernels.paged_attention.tpu_blocks import Blocks, Facts, check, choose_blocks, rule
from pallas_kernels.paged_attention.tpu_call import Scalars, run_kernel, stage
from pallas_kernels.paged_attention.tpu_layout import (
    HEAD_SIZES,
    LANES,
    page_shape,
    scale_shape,
    token_layout,
)
from pallas_kernels.paged_attention.tpu_schedule import Plan

__all__ = ["page_shape", "paged_attention", "paged_attention_with_lse", "refusals", "scale_shape"]

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
    pages = jnp.dtype(page_dtype).name
    for what, given, allowed in (
        ("q, k and v", jnp.dtype(dtype).name, DTYPES),
        ("pages", pages, (*DTYPES, *QUANTISED)),
    ):
        if given not in allowed:
            reasons.append(f"{what} of {given} are not among {', '.join(allowed)}")
    if num_heads % num_kv_heads:
        reasons.append(f"{num_heads} query heads do not share {num_kv_heads} KV heads evenly")
    if head_size not in HEAD_SIZES:
        sizes = ", ".join(map(str, HEAD_SIZES))
        reasons.append(f"head size {head_size} is not among {sizes}")
    if page_size % SMALLEST_PAGE or not SMALLEST_PAGE <= page_size <= LARGEST_PAGE:
        reasons.append(
            f"page size {page_size} is not a multiple of {SMALLEST_PAGE} up to {LARGEST_PAGE}"
        )
    elif pages in QUANTISED and page_size & (page_size - 1):
        reasons.append(
            f"page size {page_size} is not a power of two, which the scales of {pages} pages need"
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
            compute_dtype=_compute_dtype(dtype, page_dtype),
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
    float32, and softmax weights are rounded to bfloat16 before they meet the values; so it is where
    q is bfloat16 and pages have 8 bits, scales being multiplied in float32; else all is float32.
    A row's result depends, bit for bit, on its own sequence only.
    blocks: sizes to use instead of the table's or the rule's. interpret: run on any platform, for
    tests: True as plain XLA, InterpretParams in a simulator of copies and semaphores.
    Raises KernelError when blocks do not fit VMEM, or tables scalar memory.
    """
    plan = _plan(q, k, pages, batch, blocks, interpret, scale, window, soft_cap, sinks, lse=False)
    out, _, pages = _attend(plan, q, k, v, pages, batch, sinks, interpret)
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
    blocks: Blocks | None = None,
    interpret: bool | pltpu.InterpretParams = False,
) -> tuple[jax.Array, KVPages, jax.Array]:
    """As `paged_attention`, and the log-sums [T, N] float32, -inf in rows of padding.

    Another program: each row of the output has 128 lanes more, which hold the log-sum.
    """
    plan = _plan(q, k, pages, batch, blocks, interpret, scale, window, soft_cap, sinks, lse=True)
    out, lse, pages = _attend(plan, q, k, v, pages, batch, sinks, interpret)
    return out, pages, lse


def _attend(
    plan: Plan,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    pages: KVPages,
    batch: PagedBatch,
    sinks: jax.Array | None,
    interpret: bool | pltpu.InterpretParams,
) -> tuple[jax.Array, jax.Array, KVPages]:
    """Output, log-sums (if the plan has none: something else) and pages."""
    facts = plan.facts
    scalars = Scalars(
        batch.block_tables.astype(jnp.int32).reshape(-1),
        batch.cu_q_lens.astype(jnp.int32),
        batch.kv_lens.astype(jnp.int32),
        jnp.zeros((1,), jnp.float32) if sinks is None else sinks.astype(jnp.float32),
    )
    _check_scalars(scalars, facts)
    rows, pages = run_kernel(plan, scalars, stage(q, k, v, plan), pages, interpret)
    rows = rows.reshape(facts.num_kv_heads, facts.num_rows, facts.group, -1).transpose(1, 0, 2, 3)
    rows = rows.reshape(*q.shape[:2], -1)
    *_, valid = row_positions(batch, facts.num_rows)
    out = jnp.where(valid[:, None, None], rows[..., : facts.head_size], 0.0)
    lse = jnp.where(valid[:, None], rows[..., -1], -jnp.inf)
    return out.astype(q.dtype), lse, pages


def _plan(
    q: jax.Array,
    k: jax.Array,
    pages: KVPages,
    batch: PagedBatch,
    blocks: Blocks | None,
    interpret: bool | pltpu.InterpretParams,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    sinks: jax.Array | None,
    *,
    lse: bool,
) -> Plan:
    num_rows, num_heads, head_size = q.shape
    layout = token_layout(head_size)
    assert pages.k.shape[3] == layout.lanes, (pages.k.shape, head_size)
    facts = Facts(
        num_rows=num_rows,
        num_kv_heads=k.shape[1],
        group=num_heads // k.shape[1],
        head_size=head_size,
        page_size=pages.k.shape[2] * layout.pack,
        pages_per_sequence=batch.block_tables.shape[1],
        page_dtype=np.dtype(pages.k.dtype),
        compute_dtype=_compute_dtype(q.dtype, pages.k.dtype),
        with_lse=lse,
    )
    if blocks is None:
        blocks = choose_blocks(facts, "interpreter" if interpret else _device_kind())
    check(blocks, facts)
    return Plan(
        facts=facts,
        blocks=blocks,
        scale=scale,
        window=window,
        soft_cap=soft_cap,
        has_sinks=sinks is not None,
    )


def _compute_dtype(dtype: DTypeLike, page_dtype: DTypeLike) -> np.dtype:
    """Of products: both of q and of pages fit it."""
    if jnp.dtype(page_dtype).name in QUANTISED:
        return np.dtype(dtype)
    return np.dtype(jnp.promote_types(dtype, page_dtype))


def _device_kind() -> str:
    """Of the device that this is compiled for."""
    target = jax.sharding.get_abstract_mesh().abstract_device
    return str(target.device_kind if target else jax.devices()[0].device_kind)


def _check_scalars(scalars: Scalars, facts: Facts) -> None:
    needed = sum(-(-array.size // LANES) * LANES * 4 for array in scalars)
    if needed > SMEM_BYTES:
        sequences = scalars.kv_lens.shape[0]
        raise KernelError(
            f"block tables of {sequences} sequences with {facts.pages_per_sequence} pages each do "
            f"not fit a TPU's scalar memory ({needed:,} of {SMEM_BYTES:,} bytes); use larger pages "
            f"than {facts.page_size} tokens, fewer sequences, or a shorter context"
        )
