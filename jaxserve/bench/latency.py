"""Latency of one request at a time through `LLM`, many times over (steps 4 to 8)."""

from __future__ import annotations

import dataclasses
import itertools
from typing import TYPE_CHECKING

from jaxserve.bench.offline import stream_times
from jaxserve.bench.spread import Spread
from jaxserve.bench.workloads import make_random

if TYPE_CHECKING:
    from jaxserve.llm import LLM


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Latencies:
    """Milliseconds over all repeats; definitions as in `serving.metrics`. tpot: None for answers
    of one token."""

    ttft: Spread
    tpot: Spread | None
    itl: Spread | None
    e2el: Spread


def measure(
    llm: LLM, *, input_tokens: int, output_tokens: int, repeats: int, vocab_size: int
) -> Latencies:
    """Every repeat has a fresh prompt. Raises EngineError where an answer fails."""
    runs = []
    for seed in range(1, repeats + 1):
        (request,) = make_random(1, input_tokens, output_tokens, seed, vocab_size)
        runs.append([1000 * time for time in stream_times(request, llm)])
    gaps = [later - earlier for run in runs for earlier, later in itertools.pairwise(run)]
    decodes = [(run[-1] - run[0]) / (len(run) - 1) for run in runs if len(run) > 1]
    return Latencies(
        ttft=Spread.of([run[0] for run in runs]),
        tpot=Spread.of(decodes) if decodes else None,
        itl=Spread.of(gaps) if gaps else None,
        e2el=Spread.of([run[-1] for run in runs]),
    )
