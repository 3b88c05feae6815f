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
#: What is assumed for a size that was never run: this much more than the next smaller one's.
_HOPED = 1.1


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

    def hoped(self, size: int, read_first: bool) -> float | None:
        """`known`, or else what it would be if all went well; None where nothing is known."""
        known = self.known(size, read_first)
        if known is not None:
            return known
        other = self.known(size, not read_first)
        if other is not None:
            return other
        smaller = [known for at, _ in self._seconds if at < size and (known := self._any(at))]
        return max(smaller) * _HOPED if smaller else None

    def forget_read_first(self) -> None:
        """Steps of this order must be measured anew."""
        for kind in [kind for kind in self._seconds if kind[1]]:
            del self._seconds[kind]

    def _any(self, size: int) -> float | None:
        known = self.known(size, False)
        return known if known is not None else self.known(size, True)
