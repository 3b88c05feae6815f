"""What a run comes to, as vLLM's benchmark defines it; times in milliseconds.

TTFT: from a request to its first text. TPOT: (latency - TTFT) / (output tokens - 1), one value per
request. ITL: every gap between two chunks of text, of all requests together. E2EL: latency, from a
request to its last chunk. Failed requests have none of these, and are counted.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from jaxserve.bench.serving.answers import Record
from jaxserve.bench.spread import Spread
from jaxserve.errors import UsageError

#: Objective -> what it bounds. A request has one TTFT, TPOT and E2EL; of its ITLs the largest counts.
OBJECTIVES = ("ttft", "tpot", "itl", "e2el")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """One run. Rates are per second of `duration`; goodput: requests per second that met every
    objective, None without objectives. counted: the server counted the tokens itself."""

    duration: float
    completed: int
    failed: int
    errors: dict[str, int]
    input_tokens: int
    output_tokens: int
    counted: bool
    request_rate: float
    output_rate: float
    total_rate: float
    goodput: float | None
    good_share: float | None
    spreads: dict[str, Spread | None]


def parse_objectives(texts: Sequence[str]) -> dict[str, float]:
    """["ttft:2000", "itl:200"], in milliseconds. Raises UsageError."""
    objectives = {}
    for text in texts:
        name, _, limit = text.partition(":")
        try:
            objectives[name] = float(limit)
        except ValueError:
            objectives[name] = -1.0
        if name not in OBJECTIVES or not objectives[name] > 0:
            raise UsageError(
                f"--goodput is {text!r}; it must be like ttft:2000, in milliseconds, of "
                + ", ".join(OBJECTIVES)
            )
    return objectives


def milliseconds(records: Sequence[Record]) -> dict[str, list[float]]:
    """All values of each quantity, of the requests that succeeded."""
    values: dict[str, list[float]] = {name: [] for name in OBJECTIVES}
    for record in records:
        if record.error is None:
            for name, each in _values(record).items():
                values[name] += each
    return values


def is_good(record: Record, objectives: Mapping[str, float]) -> bool:
    """Whether a request succeeded and kept every objective."""
    if record.error is not None:
        return False
    values = _values(record)
    return all(max(values[name], default=0) <= limit for name, limit in objectives.items())


def _values(record: Record) -> dict[str, list[float]]:
    assert record.ttft is not None
    tpot = record.tpot
    return {
        "ttft": [1000 * record.ttft],
        "tpot": [] if tpot is None else [1000 * tpot],
        "itl": [1000 * gap for gap in record.gaps],
        "e2el": [1000 * record.latency],
    }


def summarise(
    records: Sequence[Record], duration: float, objectives: Mapping[str, float]
) -> Summary:
    """records: all that were meant to be sent; duration: seconds."""
    done = [record for record in records if record.error is None]
    inputs = sum(record.prompt_tokens for record in done)
    outputs = sum(record.output_tokens for record in done)
    good = sum(is_good(record, objectives) for record in records)
    return Summary(
        duration=duration,
        completed=len(done),
        failed=len(records) - len(done),
        errors=dict(collections.Counter(r.error for r in records if r.error is not None)),
        input_tokens=inputs,
        output_tokens=outputs,
        counted=all(record.counted for record in done),
        request_rate=len(done) / duration,
        output_rate=outputs / duration,
        total_rate=(inputs + outputs) / duration,
        goodput=good / duration if objectives else None,
        good_share=good / len(records) if objectives else None,
        spreads={
            name: Spread.of(values) if values else None
            for name, values in milliseconds(records).items()
        },
    )


def to_json(summary: Summary, records: Sequence[Record]) -> dict[str, Any]:
    """Plain values, under the names that vLLM's benchmark writes; every request in `requests`."""
    made: dict[str, Any] = {
        "duration": summary.duration,
        "completed": summary.completed,
        "failed": summary.failed,
        "errors": summary.errors,
        "total_input_tokens": summary.input_tokens,
        "total_output_tokens": summary.output_tokens,
        "request_throughput": summary.request_rate,
        "output_throughput": summary.output_rate,
        "total_token_throughput": summary.total_rate,
        "request_goodput": summary.goodput,
        "good_share": summary.good_share,
    }
    for name, spread in summary.spreads.items():
        for field in ("mean", "p50", "p90", "p99", "max"):
            made[f"{field}_{name}_ms"] = None if spread is None else getattr(spread, field)
        made[f"median_{name}_ms"] = made[f"p50_{name}_ms"]
    kept = ("started", "ttft", "latency", "gaps", "prompt_tokens", "output_tokens", "error")
    made["requests"] = [{name: getattr(record, name) for name in kept} for record in records]
    return made
