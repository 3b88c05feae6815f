"""What this machine can do at most, measured: bytes read and operations done in a second.

On a CPU bytes are read by one plain loop per core; on an accelerator by a sum over a large array.
Arithmetic is a large square matmul of the compiler's own. Both are measured in the same rounds as
what they are compared with, because machines drift.
"""

from __future__ import annotations

import concurrent.futures
import os
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numba
import numpy as np
from jax.typing import DTypeLike

MEBIBYTE = 2**20
Runner = Callable[[], object]


def seconds(run: Runner, repeat: int, calls: int = 1) -> float:
    """Best of `repeat` times, each of `calls` calls after one another and one wait, per call.

    Best, because other programs only ever add time.
    """
    times = []
    for _ in range(repeat):
        started = time.perf_counter()
        for _ in range(calls):
            result = run()
        jax.block_until_ready(result)
        times.append((time.perf_counter() - started) / calls)
    return min(times)


@numba.njit(fastmath=True, nogil=True)  # type: ignore[untyped-decorator]
def total(x: np.ndarray) -> np.float32:
    """The sum of a flat array: a loop that memory bounds."""
    result = np.float32(0)
    for i in range(x.shape[0]):
        result += x[i]
    return result


def make_cpu_reader(threads: int) -> Callable[[], float]:
    """Measures bytes/s of sequential reads of memory that is much larger than the caches."""
    data = np.ones(256 * MEBIBYTE // 4, np.float32)
    total(data[:8])
    pool = concurrent.futures.ThreadPoolExecutor(threads)
    parts = np.array_split(data, threads)

    def read() -> float:
        return data.nbytes / seconds(lambda: list(pool.map(total, parts)), 3)

    read()
    return read


def make_reader() -> Callable[[], float]:
    """Measures bytes/s that the device reads."""
    if jax.default_backend() == "cpu":
        return make_cpu_reader(os.cpu_count() or 1)
    data = jnp.ones((1024, MEBIBYTE // 4), jnp.float32)
    add_up = jax.jit(jnp.sum)

    def read() -> float:
        return data.nbytes / seconds(lambda: add_up(data), 3, 5)

    read()
    return read


def make_multiplier(dtype: DTypeLike) -> Callable[[], float]:
    """Measures operations/s of a matmul (a multiplication and an addition count as two)."""
    size = 1024 if jax.default_backend() == "cpu" else 8192
    one = jnp.ones((size, size), dtype)
    wide = jnp.int32 if jnp.issubdtype(dtype, jnp.integer) else jnp.float32
    multiply = jax.jit(lambda a, b: jnp.dot(a, b, preferred_element_type=wide))

    def rate() -> float:
        return 2 * size**3 / seconds(lambda: multiply(one, one), 3)

    rate()
    return rate
