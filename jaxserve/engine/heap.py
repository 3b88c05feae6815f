"""Memory of the host that loading and compiling used and nobody needs any more (before step 1)."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import sys


def return_freed_memory() -> None:
    """Gives it back to the operating system, where the C library can (Linux with glibc).

    A compiler's many small pieces stay with the process otherwise: hundreds of megabytes.
    """
    gc.collect()
    if sys.platform.startswith("linux"):
        with contextlib.suppress(AttributeError, OSError):
            ctypes.CDLL(None).malloc_trim(ctypes.c_size_t(0))
