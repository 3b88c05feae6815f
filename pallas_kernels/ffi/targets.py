"""Compiles an XLA handler once, keeps its machine code in a folder, and registers it with XLA.

Serves step 6b. The folder holds one folder per content of the sources, so code of another version
is never loaded; Numba adds the machine's features to the key and writes files whole, so several
processes may start at once, and the package itself may be read-only. Must not know any op.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import pathlib
import threading
import time
from collections.abc import Callable, Sequence
from types import ModuleType

import jax
import numba
from numba import cfunc, types

from pallas_kernels.ffi import abi, pool, vectors

_SHARED: tuple[ModuleType, ...] = (abi, pool, vectors)
_SIGNATURE = types.intp(types.intp)
# numba.config.CACHE_DIR is one setting of the process: it is changed under this lock only.
_LOCK = threading.Lock()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A handler that XLA knows. seconds and cpu_seconds: what compiling or loading took."""

    target: str
    from_cache: bool
    seconds: float
    cpu_seconds: float
    folder: pathlib.Path | None
    handler: object


# XLA's table of targets is one per process, cannot be undone, and holds pointers to our code: this
# is its mirror, which keeps that code alive. Written under the lock.
_REGISTERED: dict[str, Loaded] = {}


def default_cache_dir() -> pathlib.Path:
    """NUMBA_CACHE_DIR, or a folder in the user's cache: where nothing else was said."""
    named = os.environ.get("NUMBA_CACHE_DIR")
    if named:
        return pathlib.Path(named)
    base = os.environ.get("XDG_CACHE_HOME")
    return (pathlib.Path(base) if base else pathlib.Path.home() / ".cache") / "jaxserve" / "numba"


def content_key(modules: Sequence[ModuleType]) -> str:
    """A name for what these modules and the shared ones say, and for Numba's version."""
    digest = hashlib.sha256(numba.__version__.encode())
    for module in (*_SHARED, *modules):
        assert module.__file__ is not None, module
        digest.update(pathlib.Path(module.__file__).read_bytes())
    return digest.hexdigest()[:16]


def load(
    target: str,
    handler: Callable[[int], int],
    modules: Sequence[ModuleType],
    cache_dir: pathlib.Path | None = None,
) -> Loaded:
    """Compiles `handler` (or loads its code) and registers it for the CPU as `target`.

    modules: the op's modules from which the handler is made. The code is kept under `cache_dir`
    (None: `default_cache_dir`); where that cannot be written, it is compiled for this process
    only. The first call for a target does the work, later ones return its result.
    """
    with _LOCK:
        if target not in _REGISTERED:
            folder = (cache_dir or default_cache_dir()) / f"{target}-{content_key(modules)}"
            _REGISTERED[target] = _compile_and_register(target, handler, folder)
        return _REGISTERED[target]


def _compile_and_register(
    target: str, handler: Callable[[int], int], folder: pathlib.Path
) -> Loaded:
    started, cpu_started = time.perf_counter(), time.process_time()
    writable = _make_folder(folder)
    options = {"nopython": True, "error_model": "numpy", "boundscheck": False}
    before = numba.config.CACHE_DIR
    numba.config.CACHE_DIR = str(folder)
    try:
        code = cfunc(_SIGNATURE, cache=writable, **options)(handler)
    finally:
        numba.config.CACHE_DIR = before
    capsule = jax.ffi.pycapsule(code.ctypes)  # type: ignore[no-untyped-call]
    jax.ffi.register_ffi_target(target, capsule, platform="cpu")
    return Loaded(
        target=target,
        from_cache=code.cache_hits > 0,
        seconds=time.perf_counter() - started,
        cpu_seconds=time.process_time() - cpu_started,
        folder=folder if writable else None,
        handler=code,
    )


def _make_folder(folder: pathlib.Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK)
