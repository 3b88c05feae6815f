"""Zeros that take memory only where they are written."""

from __future__ import annotations

import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.paged_attention import api, fresh_memory

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only on Linux")

#: Neither whole pages of the system nor whole huge pages.
SHAPE = (40_003, 1, 16, 64)


def resident_bytes() -> int:
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS"))


def test_large_pools_are_zeros_that_take_no_memory_yet_and_are_written_in_place() -> None:
    api.make_pages(*SHAPE, implementation="reference")  # what all later ones need
    before = resident_bytes()
    pool = api.make_pages(*SHAPE, implementation="reference").k
    assert pool.nbytes > 150e6
    assert resident_bytes() - before < 0.2 * pool.nbytes
    assert not np.asarray(pool[::1000]).any()
    assert not np.asarray(pool[jnp.array([0, -1])]).any()  # parts of pages at both ends
    address = pool.unsafe_buffer_pointer()
    ones = jax.jit(lambda x: x + 1.0, donate_argnums=0)(pool)
    assert ones.unsafe_buffer_pointer() == address
    assert float(ones.min()) == 1.0


def test_memory_that_was_in_use_becomes_zeros() -> None:
    used = np.full(3 * 2**20, 7, np.uint8)
    address = used.ctypes.data + 5
    fresh_memory._release(address, used.nbytes - 11)
    assert used[:5].tolist() == [7] * 5
    assert used[-6:].tolist() == [7] * 6
    assert not used[5:-6].any()


def test_small_pools_and_pools_of_several_devices_are_plain_zeros() -> None:
    assert not fresh_memory.works_for(fresh_memory.LEAST_BYTES - 1, None)
    mesh = jax.make_mesh((2,), ("x",), devices=jax.devices()[:2])
    both = jax.NamedSharding(mesh, jax.P("x"))
    assert not fresh_memory.works_for(10 * fresh_memory.LEAST_BYTES, both)
    assert fresh_memory.works_for(fresh_memory.LEAST_BYTES, None)
