"""The pool's memory is there before steps write to it, and no more of it than that."""

from __future__ import annotations

import ctypes
import mmap
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxserve.engine.page_memory import PageMemory
from jaxserve.kv.page_pool import PagePool
from pallas_kernels.paged_attention import fresh_memory
from pallas_kernels.paged_attention.api import KVPages, make_pages
from pallas_kernels.paged_attention.huge_pages import HUGE_BYTES

LAYERS, PAGES = 2, 4096
#: [PAGES, 1, 16, 64] float32: 16 MiB of each layer.
PAGE_BYTES = 4 * 16 * 64
STRETCH = PAGES * PAGE_BYTES


def make_state() -> tuple[KVPages, Any]:
    return make_pages(LAYERS * PAGES, 1, 16, 64, jnp.float32, implementation="cpu"), None


def in_memory(address: int, size: int) -> int:
    """Bytes of [address, address + size) that the system has given."""
    count = size // mmap.PAGESIZE
    found = (ctypes.c_ubyte * count)()
    start = ctypes.c_void_p(-(-address // mmap.PAGESIZE) * mmap.PAGESIZE)
    assert ctypes.CDLL(None).mincore(start, ctypes.c_size_t(count * mmap.PAGESIZE), found) == 0
    return sum(byte & 1 for byte in found) * mmap.PAGESIZE


def given(leaf: jax.Array, layer: int, begin: int, end: int) -> int:
    (shard,) = leaf.addressable_shards
    start = shard.data.unsafe_buffer_pointer() + layer * STRETCH
    return in_memory(start + begin, end - begin)


@pytest.mark.skipif(
    not sys.platform.startswith("linux") or not fresh_memory.works_for(LAYERS * STRETCH, None),
    reason="memory that comes when it is written is Linux's",
)
def test_memory_comes_a_huge_page_ahead_of_the_pages_in_use() -> None:
    memory = PageMemory()
    pool = PagePool(PAGES, 16, on_growth=memory.expect)
    pages, _ = memory.following(make_state, LAYERS)()
    leaves = [leaf for leaf in (pages.k, pages.v) for _ in range(LAYERS)]
    layers = list(range(LAYERS)) * 2

    def wait_for(end: int) -> None:
        until = time.monotonic() + 20
        while sum(given(x, n, 0, end) for x, n in zip(leaves, layers, strict=True)) < (
            end * len(leaves)
        ):
            assert time.monotonic() < until, "the memory did not come"
            time.sleep(0.01)

    wait_for(HUGE_BYTES)
    time.sleep(0.1)
    # An array begins in the middle of a huge page, and so does each layer: up to one more on both sides.
    for leaf, layer in zip(leaves, layers, strict=True):
        assert given(leaf, layer, 3 * HUGE_BYTES, STRETCH - HUGE_BYTES) == 0
    count = 2 * HUGE_BYTES // PAGE_BYTES
    assert pool.allocate(count) is not None
    wait_for(3 * HUGE_BYTES)
    assert not any(x.any() for x in (pages.k, pages.v)), "asking for memory must not write"


def test_a_pool_tells_of_its_growth_and_of_nothing_else() -> None:
    told: list[int] = []
    pool = PagePool(10, 16, on_growth=told.append)
    first = pool.allocate(3)
    assert first == [1, 2, 3]
    pool.free(first)
    pool.allocate(3)
    assert told == [3]
    pool.allocate(0)
    pool.allocate(2)
    assert told == [3, 5]
