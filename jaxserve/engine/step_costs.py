"""What a step takes, learned from the steps that were run (beside step 4). Knows numbers only.

seconds = base of its bucket + slope * pairs, where pairs are the query-key pairs of its attention.
Each bucket's mean follows the last few steps of that bucket; the slope is shared, because only the
chunks of long prompts show it. A bucket that has not run yet is estimated from those that have.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence, Set

#: Weight of a new step in its bucket's means, and in what the slope is made from, once there are
#: more than 1 / this.
_RATE, _SLOPE_RATE = 0.15, 0.03
#: A bucket's pairs must vary by about this many per token before its times count for the slope.
_LEAST_SPREAD = 50
#: A step that took this many times what was expected counts as if it had taken just so many.
_CLIP = 2.0
#: A bucket that did not run in so many steps is believed to be slow only if smaller ones say so, too.
_STALE = 300


@dataclasses.dataclass(slots=True)
class _Means:
    """Of one bucket: running means of seconds and pairs, their (co)variance, its last step."""

    seconds: float
    pairs: float
    last: int
    count: int = 1
    variance: float = 0.0
    covariance: float = 0.0

    def add(self, pairs: float, seconds: float, number: int) -> None:
        self.count += 1
        self.last = number
        more_pairs, more_seconds = pairs - self.pairs, seconds - self.seconds
        rate = max(_SLOPE_RATE, 1 / self.count)
        self.variance += rate * (more_pairs**2 - self.variance)
        self.covariance += rate * (more_pairs * more_seconds - self.covariance)
        rate = max(_RATE, 1 / self.count)
        self.pairs += rate * more_pairs
        self.seconds += rate * more_seconds


class StepCosts:
    """Predicts the seconds of a step. sizes: the buckets' tokens, from small to large."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = tuple(sizes)
        self._means: dict[int, _Means] = {}
        self._num_steps = 0
        self._slope = 0.0
        self._bases: dict[int, float] = {}

    @property
    def measured(self) -> Set[int]:
        """Sizes of which a step has been measured."""
        return self._means.keys()

    def observe(self, size: int, pairs: float, seconds: float) -> None:
        """A step of the bucket of `size` tokens took so long on the device."""
        self._num_steps += 1
        means = self._means.get(size)
        if means is None or (means.count == 1 and seconds < means.seconds):
            # a first run is slower than those after it
            self._means[size] = _Means(seconds, pairs, self._num_steps)
        else:
            expected = max(means.seconds + self._slope * (pairs - means.pairs), 0.0)
            limit = _CLIP * expected if means.count > 1 else seconds
            means.add(pairs, min(seconds, limit), self._num_steps)
        self._fit_slope()

    def predict(self, size: int, pairs: float) -> float:
        """Seconds of a step; at least one step must have been measured."""
        if not self._bases:
            self._estimate()
        return self._bases[size] + self._slope * pairs

    def _fit_slope(self) -> None:
        telling = [
            means
            for size, means in self._means.items()
            if means.variance > (_LEAST_SPREAD * size) ** 2
        ]
        if telling:
            covariance = sum(means.covariance for means in telling)
            self._slope = max(0.0, covariance / sum(means.variance for means in telling))
        self._bases.clear()

    def _estimate(self) -> None:
        measured = [
            (size, max(0.0, means.seconds - self._slope * means.pairs))
            for size, means in sorted(self._means.items())
        ]
        fastest = float("inf")  # per token: twice the tokens never take more than twice the time
        for size in self.sizes:
            base, means = _interpolate(measured, size), self._means.get(size)
            if means is None or self._num_steps - means.last > _STALE:
                base = min(base, fastest * size)
            else:
                fastest = min(fastest, base / size)
            self._bases[size] = base


def _interpolate(measured: list[tuple[int, float]], size: int) -> float:
    """Between two measured buckets on a line, above all of them in proportion, below: the first."""
    below: tuple[int, float] | None = None
    for tokens, base in measured:
        if tokens == size or (tokens > size and below is None):
            return base
        if tokens > size and below is not None:
            share = (size - below[0]) / (tokens - below[0])
            return below[1] + share * (base - below[1])
        below = (tokens, base)
    assert below is not None, "no step has been measured"
    return below[1] * size / below[0]
