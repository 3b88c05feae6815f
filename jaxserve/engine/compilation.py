"""The persistent compilation cache, and the count of compilations after ready."""

from __future__ import annotations

import pathlib
import threading
from typing import Any

import jax

_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"
_HIT_EVENT = "/jax/compilation_cache/cache_hits"


class CompilationLog:
    """Counts what XLA compiled in this process since `start`, and how much came from the cache.

    `after_ready` counts programs that were compiled (or fetched) once `mark_ready` was called:
    it must stay 0, since such a compilation stalls every request.
    """

    def __init__(self) -> None:
        self.total = 0
        self.cache_hits = 0
        self.after_ready = 0
        self._ready = False
        self._lock = threading.Lock()

    def start(self) -> None:
        jax.monitoring.register_event_duration_secs_listener(self._on_duration)
        jax.monitoring.register_event_listener(self._on_event)

    def mark_ready(self) -> None:
        self._ready = True

    def _on_duration(self, event: str, duration_secs: float, **_: Any) -> None:
        if event == _COMPILE_EVENT:
            with self._lock:
                self.total += 1
                self.after_ready += self._ready

    def _on_event(self, event: str, **_: Any) -> None:
        if event == _HIT_EVENT:
            with self._lock:
                self.cache_hits += 1


def use_persistent_cache(folder: pathlib.Path) -> None:
    """Keeps every compiled program in `folder`, so that a second start compiles nothing."""
    folder.mkdir(parents=True, exist_ok=True)
    settings = {
        "jax_compilation_cache_dir": str(folder),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    for name, value in settings.items():
        jax.config.update(name, value)  # type: ignore[no-untyped-call]
