"""The count of compilations after ready."""

from __future__ import annotations

import threading
from typing import Any

import jax

_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


class CompilationLog:
    """Counts what XLA compiled in this process since `start`.

    `after_ready` counts the programs that came once `mark_ready` was called: it must stay 0, since
    such a compilation stalls every request.
    """

    def __init__(self) -> None:
        self.total = 0
        self.after_ready = 0
        self._ready = False
        self._lock = threading.Lock()

    def start(self) -> None:
        """From now on, for the life of the process."""
        jax.monitoring.register_event_duration_secs_listener(self._on_duration)

    def mark_ready(self) -> None:
        """Everything is compiled."""
        self._ready = True

    def _on_duration(self, event: str, duration_secs: float, **_: Any) -> None:
        if event == _COMPILE_EVENT:
            with self._lock:
                self.total += 1
                self.after_ready += self._ready
