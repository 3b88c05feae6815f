"""Block sizes, page layout and refusals of the TPU implementation; nothing is compiled here."""

from __future__ import annotations

import dataclasses
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.errors import KernelError
from pallas_kernels.paged_attention import cases, tpu, tpu_blocks, tpu_call
from pallas_kernels.paged_attention.reference import KVPages, PagedBatch
from pallas_kernels.paged_attention.tpu_blocks import Blocks, Facts
from pallas_kernels.paged_attention.tpu_layout import (
    HEAD_SIZES,
    from_pages,
    from_scales,
    page_shape,
    scale_shape,
    to_pages,
    to_scales,
)
from pallas_kernels.paged_attention.tpu_schedule import Plan

LLAMA = Facts(
    num_rows=512,
    num_kv_heads=8,
    group=4,
    head_size=128,
    page_size=16,
    pages_per_sequence=512,
    page_dtype=np.dtype(jnp.bfloat16),
    compute_dtype=np.dtype(jnp.bfloat16),
)
CALL = {
    "platform": "tpu",
    "dtype": "bfloat16",
    "page_dtype": "bfloat16",
    "num_heads": 32,
    "num_kv_heads": 8,
    "head_size": 128,
    "page_size": 16,
}

#: KV heads, head size, page size, dtype: the smallest block, 384 tokens, takes 48 MiB.
TOO_LARGE = (32, 256, 48, "float32")
SIZES_AND_DTYPES = [
    *((size, dtype) for size in (16, 48, 256) for dtype in ("float32", "bfloat16")),
    *((size, "int8") for size in (16, 64, 256)),
]


@pytest.mark.parametrize("head_size", HEAD_SIZES)
@pytest.mark.parametrize(("page_size", "dtype"), SIZES_AND_DTYPES)
@pytest.mark.parametrize(("num_kv_heads", "group"), [(1, 1), (1, 71), (3, 3), (8, 4), (32, 1)])
def test_the_rule_fits(
    head_size: int, page_size: int, num_kv_heads: int, group: int, dtype: str
) -> None:
    for num_rows in (1, 8, 48, 4096):
        facts = dataclasses.replace(
            LLAMA,
            num_rows=num_rows,
            num_kv_heads=num_kv_heads,
            group=group,
            head_size=head_size,
            page_size=page_size,
            page_dtype=np.dtype(dtype),
            compute_dtype=np.dtype(jnp.bfloat16 if dtype == "int8" else dtype),
        )
        blocks = tpu_blocks.rule(facts)
        if (num_kv_heads, head_size, page_size, dtype) == TOO_LARGE:
            continue
        tpu_blocks.check(blocks, facts)
        assert blocks.tile_tokens <= num_rows
        assert blocks.block_tokens % page_size == 0


@pytest.mark.parametrize("page_dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("head_size", [64, 128])
@pytest.mark.parametrize("with_lse", [False, True])
def test_every_buffer_is_counted(page_dtype: str, head_size: int, with_lse: bool) -> None:
    """What a call allocates is what was computed beforehand, less what only values take."""
    facts = dataclasses.replace(
        LLAMA, page_dtype=np.dtype(page_dtype), head_size=head_size, with_lse=with_lse
    )
    blocks = tpu_blocks.rule(facts)
    plan = Plan(facts=facts, blocks=blocks, scale=1.0, window=None, soft_cap=None, has_sinks=False)
    buffers = [
        buffer
        for buffer in jax.tree.leaves(tpu_call.scratch(plan))
        if getattr(buffer, "memory_space", None) == pltpu.MemorySpace.VMEM
    ]
    allocated = sum(np.prod(each.shape) * np.dtype(each.dtype).itemsize for each in buffers)
    counted = sum(tpu_blocks.vmem_bytes(blocks, facts).values())
    rows = blocks.block_tokens // facts.layout.pack
    of_values = 3 * facts.rows(blocks.tile_tokens) * facts.layout.pack * rows * 4
    of_values += 2 * rows * facts.layout.lanes * facts.compute_dtype.itemsize
    assert counted == allocated + of_values


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"tile_tokens": 1024}, "shrink tile_tokens (it is 1024"),
        ({"block_tokens": 16384}, "shrink block_tokens (it is 16384"),
        ({"writes": 4096}, "shrink writes (it is 4096"),
        ({"tile_tokens": 24}, "tile_tokens is 24; it must be a power of two"),
        ({"block_tokens": 200}, "block_tokens is 200; it must be a multiple of 128"),
        ({"writes": 1}, "writes is 1; it must be at least 2"),
    ],
)
def test_blocks_that_cannot_be_are_named(change: dict[str, int], words: str) -> None:
    blocks = dataclasses.replace(tpu_blocks.rule(LLAMA), **change)
    with pytest.raises(KernelError) as caught:
        tpu_blocks.check(blocks, LLAMA)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_measured_blocks_come_before_the_rule(tmp_path: pathlib.Path) -> None:
    call = {
        "device_kind": "TPU v5 lite",
        "num_kv_heads": 8,
        "group": 4,
        "head_size": 128,
        "page_size": 16,
        "page_dtype": "bfloat16",
    }
    measured = Blocks(tile_tokens=64, block_tokens=512, writes=8, vmem_limit_bytes=2**26)
    table = tmp_path / "blocks.json"
    entry = {"call": call, "blocks": dataclasses.asdict(measured), "measured": {}}
    table.write_text(json.dumps({"entries": [entry]}))
    assert tpu_blocks.choose_blocks(LLAMA, "TPU v5 lite", table) == measured
    assert tpu_blocks.choose_blocks(LLAMA, "TPU v6 lite", table) == tpu_blocks.rule(LLAMA)
    others = dataclasses.replace(LLAMA, group=8)
    assert tpu_blocks.choose_blocks(others, "TPU v5 lite", table) == tpu_blocks.rule(others)


def test_every_entry_of_the_table_is_sound() -> None:
    for entry in json.loads(tpu_blocks.TABLE.read_text())["entries"]:
        assert {"call", "blocks", "measured"} == set(entry)
        assert {"date", "jax", "by", "microseconds", "rule_microseconds"} <= set(entry["measured"])
        Blocks(**entry["blocks"])


@pytest.mark.parametrize("head_size", HEAD_SIZES)
def test_the_layout_loses_nothing(head_size: int) -> None:
    leaf = jnp.arange(3 * 2 * 16 * head_size, dtype=jnp.float32).reshape(3, 2, 16, head_size)
    moved = to_pages(leaf)
    assert moved.shape == page_shape(3, 2, 16, head_size)
    assert moved.shape[-1] % 128 == 0
    np.testing.assert_array_equal(from_pages(moved, head_size), leaf)


def test_only_odd_head_sizes_cost_memory() -> None:
    for head_size in (64, 128, 256):
        assert np.prod(page_shape(10, 2, 16, head_size)) == 10 * 2 * 16 * head_size


@pytest.mark.parametrize("head_size", HEAD_SIZES)
@pytest.mark.parametrize("page_size", [16, 32, 64, 128, 256])
def test_scales_fill_their_lanes(head_size: int, page_size: int) -> None:
    leaf = jnp.arange(3 * 2 * page_size, dtype=jnp.float32).reshape(3, 2, page_size)
    moved = to_scales(leaf, head_size)
    assert moved.shape == scale_shape(3, 2, page_size, head_size)
    np.testing.assert_array_equal(from_scales(moved, page_size, head_size), leaf)
    copies = moved.reshape(3, 2, -1, page_size)
    assert (copies == copies[:, :, :1]).all()
    # What the layout says that a token's scale takes.
    assert moved.nbytes // leaf.size == {16: 32, 32: 16, 64: 8, 128: 4, 256: 4}[page_size]


@pytest.mark.parametrize("page_dtype", ["float32", "bfloat16", "int8", "float8_e4m3fn"])
def test_refuses_nothing_that_was_compiled(page_dtype: str) -> None:
    assert tpu.refusals(**(CALL | {"page_dtype": page_dtype})) == []  # type: ignore[arg-type]


def test_refuses_what_never_fits_vmem() -> None:
    heads, head_size, page_size, dtype = TOO_LARGE
    sizes = {"num_heads": heads, "num_kv_heads": heads, "head_size": head_size}
    dtypes = {"dtype": dtype, "page_dtype": dtype}
    (reason,) = tpu.refusals(**(CALL | sizes | dtypes | {"page_size": page_size}))  # type: ignore[arg-type]
    assert "shrink block_tokens (it is 384" in reason


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"platform": "gpu"}, "it runs on tpu, not on gpu"),
        ({"dtype": "float16"}, "q, k and v of float16 are not among float32, bfloat16"),
        (
            {"page_dtype": "int4"},
            "pages of int4 are not among float32, bfloat16, int8, float8_e4m3fn",
        ),
        (
            {"page_dtype": "int8", "page_size": 48},
            "page size 48 is not a power of two, which the scales of int8 pages need",
        ),
        ({"num_heads": 30}, "30 query heads do not share 8 KV heads evenly"),
        ({"head_size": 72}, "head size 72 is not among 64, 80, 96, 128, 256"),
        ({"page_size": 8}, "page size 8 is not a multiple of 16 up to 256"),
        ({"page_size": 24}, "page size 24 is not a multiple of 16 up to 256"),
        ({"page_size": 512}, "page size 512 is not a multiple of 16 up to 256"),
    ],
)
def test_refuses_with_a_reason(change: dict[str, object], words: str) -> None:
    assert tpu.refusals(**(CALL | change)) == [words]  # type: ignore[arg-type]


def test_tables_that_do_not_fit_scalar_memory_are_refused() -> None:
    case = cases.Case(
        name="wide", num_heads=1, num_kv_heads=1, head_size=128, q_lens=(1,), kv_lens=(16,)
    )
    inputs = cases.make_inputs(case)
    tables = jnp.zeros((64, 8192), jnp.int32)
    batch = PagedBatch(tables, jnp.zeros(65, jnp.int32), jnp.zeros(64, jnp.int32))
    call = jax.jit(
        lambda q, k, v, pages: tpu.paged_attention(
            q, k, v, KVPages(*pages), batch, scale=1.0, interpret=True
        )
    )
    with pytest.raises(KernelError, match="64 sequences with 8192 pages each do not fit"):
        call.trace(inputs.q, inputs.k, inputs.v, tuple(inputs.pages))
