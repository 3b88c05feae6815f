"""A histogram that one thread fills, many times per step (beside `metrics`).

prometheus_client's own takes a lock per bucket, some microseconds per value; here a value is a list
index. The exposition is the same, without the `_created` series.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.utils import floatToGoString


class TallyHistogram:
    """bounds: upper ends of the buckets, rising, without infinity. labels: fixed for all values."""

    def __init__(
        self,
        name: str,
        text: str,
        bounds: Sequence[float],
        labels: Mapping[str, str],
        registry: CollectorRegistry,
    ) -> None:
        self._name = name
        self._text = text
        self._bounds = tuple(bounds)
        self._labels = dict(labels)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0
        registry.register(self)

    def observe(self, value: float) -> None:
        """Counts a value in the first bucket whose bound is not below it."""
        self._counts[bisect.bisect_left(self._bounds, value)] += 1
        self._sum += value

    def collect(self) -> Iterator[HistogramMetricFamily]:
        """The values so far, for the exposition."""
        family = HistogramMetricFamily(self._name, self._text, labels=list(self._labels))
        ends = [*map(floatToGoString, self._bounds), "+Inf"]
        totals = itertools.accumulate(self._counts)
        family.add_metric(
            list(self._labels.values()), list(zip(ends, totals, strict=True)), self._sum
        )
        yield family
