"""What a turn of the step loop costs, measured (after step 7): seconds by size and order of its step.

A step that may hold guesses is planned after the step before it was read, so the device waits for
the host a little; others are planned while the device works. Both kinds are timed from one read
to the next, hence with all that the host does in between.
"""

from __future__ import annotations

import collections
import statistics

_KEPT = 9
#: Before so many steps of a kind were seen, its cost is only assumed.
_ENOUGH = 3


class TurnCosts:
    """Medians of the last steps of each kind."""

    def __init__(self) -> None:
        self._seconds: dict[tuple[int, bool], collections.deque[float]] = {}

    def count(self, size: int, read_first: bool, seconds: float) -> None:
        """A step of `size` padded tokens took so long."""
        kind = (size, read_first)
        kept = self._seconds.setdefault(kind, collections.deque(maxlen=_KEPT))
        kept.append(seconds)

    def known(self, size: int, read_first: bool) -> float | None:
        """Seconds, None before enough steps of this kind were seen."""
        kept = self._seconds.get((size, read_first), ())
        return statistics.median(kept) if len(kept) >= _ENOUGH else None

    def read_first(self, size: int) -> float | None:
        """Seconds of a step planned late, or else of one planned early; None if neither is known."""
        known = self.known(size, True)
        return known if known is not None else self.known(size, False)

    def forget_read_first(self) -> None:
        """Steps of this order must be measured anew."""
        for kind in [kind for kind in self._seconds if kind[1]]:
            del self._seconds[kind]
