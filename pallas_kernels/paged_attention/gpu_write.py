"""New keys and values go into their pages, in place, before the GPU kernels attend (step 6b).

The kernel only moves: numbers are rounded, and quantised, by the definition's own code before.
Rows of padding write nowhere.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.paged_attention.gpu_attend import run
from pallas_kernels.paged_attention.gpu_sizes import SMALLEST_DOT, power_of_two
from pallas_kernels.paged_attention.gpu_tile import iota
from pallas_kernels.paged_attention.reference import (
    KVPages,
    PagedBatch,
    quantise,
    row_positions,
)

#: Query tokens that a program writes.
ROWS = 16


def write_pages(
    pages: KVPages, k: jax.Array, v: jax.Array, batch: PagedBatch, *, interpret: bool
) -> KVPages:
    """Pages with the rows' k and v [T, K, H] stored at their places."""
    num_rows, num_kv_heads, head_size = k.shape
    page_size = pages.k.shape[2]
    sequence, position, valid = row_positions(batch, num_rows)
    page = batch.block_tables[sequence, position // page_size]
    places = jnp.where(valid, page, -1), position % page_size
    new = KVPages(k.astype(pages.k.dtype), v.astype(pages.v.dtype))
    if pages.k_scale is not None:
        stored = (quantise(x, pages.k.dtype) for x in (k, v))
        (new_k, k_scale), (new_v, v_scale) = stored
        new = KVPages(new_k, new_v, k_scale, v_scale)
    lanes = max(SMALLEST_DOT, power_of_two(head_size))

    def kernel(given: Any, pages: Any) -> None:
        new, (page_ids, offsets) = given
        head = pl.program_id(1)
        row, lane = pl.program_id(0) * ROWS + iota(ROWS), iota(lanes)
        page = plgpu.load(page_ids.at[row], mask=row < num_rows, other=-1)
        valid, page = page >= 0, jnp.maximum(page, 0)
        offset = plgpu.load(offsets.at[row], mask=valid, other=0)
        mask = valid[:, None] & (lane < head_size)[None, :]
        for source, leaf in zip(new[:2], pages[:2], strict=True):
            numbers = plgpu.load(source.at[row[:, None], head, lane[None, :]], mask=mask)
            place = leaf.at[page[:, None], head, offset[:, None], lane[None, :]]
            plgpu.store(place, numbers, mask=mask)
        if new.k_scale is not None:
            for source, leaf in zip(new[2:], pages[2:], strict=True):
                scale = plgpu.load(source.at[row, head], mask=valid)
                plgpu.store(leaf.at[page, head, offset], scale, mask=valid)

    made: KVPages = run(
        kernel,
        (new, places),
        pages,
        grid=(-(-num_rows // ROWS), num_kv_heads),
        warps=4,
        stages=1,
        interpret=interpret,
        in_place=True,
        name="paged_attention_write",
    )
    return made
