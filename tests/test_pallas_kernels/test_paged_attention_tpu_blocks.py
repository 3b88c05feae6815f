"""Block sizes, page layout and refusals of the TPU implementation; nothing is compiled here."""

from __future__ import annotations

import dataclasses
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.errors import KernelError
from pallas_kernels.paged_attention import cases, tpu, tpu_blocks
from pallas_kernels.paged_attention.reference import KVPages, PagedBatch
from pallas_kernels.paged_attention.tpu_blocks import Blocks, Facts
from pallas_kernels.paged_attention.tpu_layout import HEAD_SIZES, from_pages, page_shape, to_pages

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


@pytest.mark.parametrize("head_size", HEAD_SIZES)
@pytest.mark.parametrize("page_size", [16, 48, 256])
@pytest.mark.parametrize(("num_kv_heads", "group"), [(1, 1), (1, 71), (3, 3), (8, 4), (32, 1)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
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
            compute_dtype=np.dtype(dtype),
        )
        blocks = tpu_blocks.rule(facts)
        if (num_kv_heads, head_size, page_size, dtype) == TOO_LARGE:
            continue
        tpu_blocks.check(blocks, facts)
        assert blocks.tile_tokens <= num_rows
        assert blocks.block_tokens % page_size == 0


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


def test_refuses_nothing_that_was_compiled() -> None:
    assert tpu.refusals(**CALL) == []


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
        ({"page_dtype": "int8"}, "pages of int8 are not among float32, bfloat16"),
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
