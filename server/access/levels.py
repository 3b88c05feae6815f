"""A level of use that sinks with time: how long until more fits, and what HTTP says of it."""

from __future__ import annotations

import dataclasses

MINUTE = 60.0


@dataclasses.dataclass(slots=True)
class Level:
    """How much of a minute's allowance is used now. limit: None for no limit."""

    used: float
    limit: float | None

    def seconds_until(self, more: float) -> float:
        """How long until `more` fits; what is larger than the limit must wait for all of it."""
        if self.limit is None:
            return 0.0
        excess = self.used + min(more, self.limit) - self.limit
        return excess * MINUTE / self.limit if excess > 1e-9 else 0.0


def sunk(used: float, limit: float | None, passed: float) -> Level:
    """A level that was at `used` so many seconds ago."""
    left = used if limit is None else used - max(0.0, passed) * limit / MINUTE
    return Level(max(0.0, left), limit)


def rate_headers(requests: Level, tokens: Level) -> dict[str, str]:
    """OpenAI's names; only for limits that there are."""
    headers = {}
    for what, level in (("requests", requests), ("tokens", tokens)):
        if level.limit is not None:
            left = max(0.0, level.limit - level.used)
            headers[f"x-ratelimit-limit-{what}"] = str(int(level.limit))
            headers[f"x-ratelimit-remaining-{what}"] = str(int(left))
            seconds = max(0.0, level.used) * MINUTE / level.limit
            headers[f"x-ratelimit-reset-{what}"] = f"{seconds:.3f}s"
    return headers
