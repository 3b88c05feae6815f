"""When requests start, as vLLM's benchmark defines it."""

from __future__ import annotations

import itertools
import math
import random


def start_times(count: int, rate: float, burstiness: float, seed: int) -> list[float]:
    """Seconds after the beginning at which each request starts.

    rate: requests per second; infinite: all at once. burstiness: the shape of the gamma
    distribution of the gaps: 1 makes a Poisson process, less comes in bursts, more is steadier.
    Gaps are scaled so that the last request starts at count / rate.
    """
    if math.isinf(rate) or count == 0:
        return [0.0] * count
    rng = random.Random(f"arrivals-{seed}")
    gaps = [rng.gammavariate(burstiness, 1.0) for _ in range(count)]
    times = list(itertools.accumulate(gaps))
    scale = count / rate / times[-1]
    return [time * scale for time in times]
