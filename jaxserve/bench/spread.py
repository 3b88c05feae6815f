"""Mean and percentiles of many measurements, and how they are printed. No jax."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

PERCENTILES = (50, 90, 99)
_HEAD = f"{'':28}{'mean':>11}" + "".join(f"{f'p{p}':>11}" for p in PERCENTILES) + f"{'max':>11}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Of one quantity, in its own unit. Percentiles between two values are interpolated."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """values: at least one."""
        import numpy as np  # here, so that the command line's help does not wait for it

        p50, p90, p99 = np.percentile(values, PERCENTILES).tolist()
        return cls(
            count=len(values),
            mean=float(np.mean(values)),
            p50=p50,
            p90=p90,
            p99=p99,
            max=float(max(values)),
        )


def spread_table(spreads: Mapping[str, Spread | None]) -> Iterable[str]:
    """Lines: a head, then a row for each quantity; those without a value say so."""
    yield _HEAD
    for name, spread in spreads.items():
        if spread is None:
            yield f"{name:28}{'none':>11}"
            continue
        values = (spread.mean, spread.p50, spread.p90, spread.p99, spread.max)
        yield f"{name:28}" + "".join(f"{value:11.2f}" for value in values)
