"""Puts a pool of KV pages on huge pages of the operating system, on Linux CPUs (step 6b).

Attention reads runs of a few KB all over the pool. With the system's 4 KiB pages each run misses
the TLB, which costs more than the run itself on virtual machines. Best effort: where the system
says no, everything works as before.
"""

from __future__ import annotations

import ctypes
import mmap
import sys

import jax

#: Bytes of a huge page.
HUGE_BYTES = 2 * 1024 * 1024
# <linux/mman.h>: from now on; since Linux 5.14, memory as writing takes it, without writing; and,
# since Linux 6.1, at once for memory in use.
_MADV_HUGEPAGE, _MADV_POPULATE_WRITE, _MADV_COLLAPSE = 14, 23, 25


def use(array: jax.Array, *, filled: bool = True) -> int:
    """Asks for huge pages under an array's CPU shards; returns for how many bytes it was granted.

    Whole huge pages only. Waits for the array to be there. filled: whether its memory is in use;
    if not, it comes in huge pages when it is written first.
    """
    if not sys.platform.startswith("linux") or isinstance(array, jax.core.Tracer):
        return 0
    library = ctypes.CDLL(None, use_errno=True)
    granted = 0
    for shard in array.addressable_shards:
        if shard.device.platform != "cpu":
            continue
        shard.data.block_until_ready()
        address = shard.data.unsafe_buffer_pointer()
        start = -(-address // HUGE_BYTES) * HUGE_BYTES
        size = (address + shard.data.nbytes) // HUGE_BYTES * HUGE_BYTES - start
        if size <= 0:
            continue
        place, length = ctypes.c_void_p(start), ctypes.c_size_t(size)
        if library.madvise(place, length, _MADV_HUGEPAGE) == 0:
            if filled:
                library.madvise(place, length, _MADV_COLLAPSE)
            granted += size
    return granted


def populate(address: int, size: int) -> bool:
    """Memory for [address, address + size), what it holds unchanged; False if the system cannot.

    Takes as long as the system needs to clear it; other threads go on.
    """
    if not sys.platform.startswith("linux"):
        return False
    start = address // mmap.PAGESIZE * mmap.PAGESIZE
    place, length = ctypes.c_void_p(start), ctypes.c_size_t(address + size - start)
    return int(ctypes.CDLL(None).madvise(place, length, _MADV_POPULATE_WRITE)) == 0
