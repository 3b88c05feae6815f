"""Large arrays of zeros on Linux CPUs that take memory only where they are written (step 6b).

XLA makes zeros by writing them. A pool of KV pages is gigabytes, mostly unused: here XLA only
allocates the array, and the operating system, which hands out zeroed memory on first use, is told
that nothing of it is needed yet. Must not know what the array is for.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import mmap
import sys
from typing import Any

import jax
from jax.typing import DTypeLike

TARGET = "jaxserve_fresh_memory"
#: Smaller arrays are not worth it.
LEAST_BYTES = 16 * 2**20
_MADV_DONTNEED = 4  # <linux/mman.h>: private memory reads as zeros afterwards


def works_for(num_bytes: int, sharding: jax.sharding.Sharding | None) -> bool:
    """Whether `zeros` can make such an array: a large one on one CPU device of Linux."""
    devices = jax.devices()[:1] if sharding is None else list(sharding.device_set)
    return (
        num_bytes >= LEAST_BYTES
        and sys.platform.startswith("linux")
        and len(devices) == 1
        and devices[0].platform == "cpu"
        and importlib.util.find_spec("numba") is not None
    )


def zeros(
    shape: tuple[int, ...], dtype: DTypeLike, sharding: jax.sharding.Sharding | None
) -> jax.Array:
    """An array as `jnp.zeros` makes it; only where `works_for` says so."""
    array = _allocate(shape, dtype, sharding).block_until_ready()
    (shard,) = array.addressable_shards
    _release(shard.data.unsafe_buffer_pointer(), array.nbytes)
    return array


def _allocate(
    shape: tuple[int, ...], dtype: DTypeLike, sharding: jax.sharding.Sharding | None
) -> jax.Array:
    _register()
    output = jax.ShapeDtypeStruct(shape, dtype)  # type: ignore[no-untyped-call]
    call = jax.jit(jax.ffi.ffi_call(TARGET, output), out_shardings=sharding)
    array: jax.Array = call()
    return array


def _release(address: int, size: int) -> None:
    """Makes [address, address + size) zeros, whole pages of the system without touching them."""
    first = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    last = (address + size) // mmap.PAGESIZE * mmap.PAGESIZE
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    place, length = ctypes.c_void_p(first), ctypes.c_size_t(last - first)
    if madvise(place, length, _MADV_DONTNEED) != 0:
        ctypes.memset(address, 0, size)
        return
    ctypes.memset(address, 0, first - address)
    ctypes.memset(last, 0, address + size - last)


@functools.cache
def _register() -> Any:
    """Tells XLA of a function that leaves its result as it is; returns what keeps it alive."""
    from pallas_kernels.ffi import abi

    def leave(address: int) -> int:
        frame = abi.CallFrame.from_address(address)
        if frame.extension_start:
            extension = abi.MetadataExtension.from_address(frame.extension_start)
            if extension.extension_base.type == abi.EXTENSION_METADATA:
                metadata = abi.Metadata.from_address(extension.metadata)
                metadata.api_version.major_version, metadata.api_version.minor_version = (
                    abi.API_VERSION
                )
        return 0

    handler = ctypes.CFUNCTYPE(ctypes.c_ssize_t, ctypes.c_ssize_t)(leave)
    capsule = jax.ffi.pycapsule(handler)  # type: ignore[no-untyped-call]
    jax.ffi.register_ffi_target(TARGET, capsule, platform="cpu")
    return handler
