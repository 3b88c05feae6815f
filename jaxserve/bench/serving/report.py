"""A run's summary as text for people."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from jaxserve.bench.serving.metrics import Summary
from jaxserve.bench.spread import spread_table

TITLES: Mapping[str, str] = {
    "ttft": "time to first token (ms)",
    "tpot": "time per output token (ms)",
    "itl": "inter-token latency (ms)",
    "e2el": "end to end (ms)",
}


def to_text(summary: Summary, objectives: Mapping[str, float]) -> Iterator[str]:
    """Lines of at most about a hundred columns."""
    total = summary.completed + summary.failed
    yield f"requests                {summary.completed} of {total} completed, {summary.failed} failed"
    for error, count in sorted(summary.errors.items(), key=lambda item: -item[1]):
        yield f"  {count:5} x {error}"
    yield f"duration                {summary.duration:.2f} s"
    counted = "" if summary.counted else " (chunks: the server does not count tokens)"
    yield (
        f"tokens                  {summary.input_tokens} in, {summary.output_tokens} out{counted}"
    )
    yield f"request throughput      {summary.request_rate:.3f} /s"
    yield f"output throughput       {summary.output_rate:.1f} tokens/s"
    yield f"total throughput        {summary.total_rate:.1f} tokens/s"
    if summary.goodput is not None and summary.good_share is not None:
        limits = ", ".join(f"{name} <= {limit:g} ms" for name, limit in objectives.items())
        yield (
            f"goodput                 {summary.goodput:.3f} /s; {summary.good_share:.1%} of all "
            f"requests kept {limits}"
        )
    yield from spread_table({TITLES[name]: spread for name, spread in summary.spreads.items()})
