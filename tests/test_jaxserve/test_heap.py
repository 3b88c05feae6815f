"""Freed memory goes back to the operating system."""

from __future__ import annotations

import pathlib
import sys

import pytest

from jaxserve.engine.heap import return_freed_memory


def resident_bytes() -> int:
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS"))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only on Linux")
def test_small_pieces_that_were_freed_are_given_back() -> None:
    # Larger than what Python's own allocator serves, smaller than what has a mapping of its own.
    pieces = [bytearray(4000) for _ in range(50_000)]
    full = resident_bytes()
    kept = pieces[-1]  # the end of the heap stays in use: nothing shrinks by itself
    del pieces
    return_freed_memory()
    assert full - resident_bytes() > 0.7 * 50_000 * 4000
    assert len(kept) == 4000
