"""Which engine answers (part of step 3)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

from jaxserve.errors import EngineGoneError


class EngineState(Protocol):
    """What choosing needs to know of an engine."""

    num_running: int
    num_waiting: int

    def not_ready_reason(self) -> str | None:
        """Why it cannot answer, None if it can."""
        ...


Engine = TypeVar("Engine", bound=EngineState)


def choose_engine(engines: Sequence[Engine]) -> Engine:
    """The ready engine with the least to do. Raises EngineGoneError with the reasons of all."""
    ready = [engine for engine in engines if engine.not_ready_reason() is None]
    if not ready:
        reasons = dict.fromkeys(engine.not_ready_reason() or "" for engine in engines)
        raise EngineGoneError(f"{'; '.join(reasons)}; try again in a moment")
    return min(ready, key=lambda engine: engine.num_running + engine.num_waiting)
