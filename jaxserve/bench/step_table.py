"""Step times by bucket, as a table for people and as JSON (see `engine.step_profile`). No jax."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxserve.engine.step_profile import StepTimes

#: What one thread, the host's, spends a step's time on: together the whole of it.
PHASES = ("schedule", "build", "dispatch", "wait", "read", "emit")
_COLUMNS = ("step", *PHASES, "device", "idle")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BucketTimes:
    """Means over the steps of one bucket, or of all: milliseconds per step.

    host_share: host work in the host's time. idle_share: idle in the device's time, which is host
    work that is not hidden. padding: share of padded tokens.
    """

    bucket: int | None
    steps: int
    tokens: float
    rows: float
    padding: float
    milliseconds: dict[str, float]
    host_share: float
    idle_share: float


def bucket_times(steps: Sequence[StepTimes]) -> list[BucketTimes]:
    """One entry per bucket, small to large, then one for all steps, whose `bucket` is None."""
    idle = _device_times(steps)
    buckets = sorted({step.bucket for step in steps})
    groups = [
        (bucket, [i for i, step in enumerate(steps) if step.bucket == bucket]) for bucket in buckets
    ]
    every = [_average(bucket, [(steps[i], *idle[i]) for i in chosen]) for bucket, chosen in groups]
    if steps:
        every.append(
            _average(None, [(step, *times) for step, times in zip(steps, idle, strict=True)])
        )
    return every


def _device_times(steps: Sequence[StepTimes]) -> list[tuple[float, float]]:
    """Seconds that the device computed each step, and was idle before it though there was work."""
    times, previous = [], 0.0
    for step in steps:
        began = step.began(previous)
        idle = began - previous if step.follows else 0.0
        times.append((step.ended - began, idle))
        previous = step.ended
    return times


def _average(bucket: int | None, steps: Sequence[tuple[StepTimes, float, float]]) -> BucketTimes:
    count = len(steps)
    sums = {name: sum(getattr(step, name) for step, _, _ in steps) for name in PHASES}
    sums["step"] = sum(sums.values())
    sums["device"] = sum(device for _, device, _ in steps)
    sums["idle"] = sum(idle for _, _, idle in steps)
    padded = sum(step.bucket for step, _, _ in steps)
    tokens = sum(step.tokens for step, _, _ in steps)
    return BucketTimes(
        bucket=bucket,
        steps=count,
        tokens=tokens / count,
        rows=sum(step.rows for step, _, _ in steps) / count,
        padding=1 - tokens / padded,
        milliseconds={name: 1000 * sums[name] / count for name in _COLUMNS},
        host_share=1 - sums["wait"] / sums["step"],
        idle_share=sums["idle"] / (sums["idle"] + sums["device"]),
    )


def to_json(times: Sequence[BucketTimes]) -> list[dict[str, Any]]:
    """Plain values."""
    return [dataclasses.asdict(each) for each in times]


def to_text(times: Sequence[BucketTimes]) -> Iterator[str]:
    """Lines: milliseconds, then the same as shares of the step, then what it comes to."""
    head = f"{'bucket':>7}{'steps':>7}{'tokens':>8}{'padding':>9}"
    yield head + "".join(f"{name:>10}" for name in _COLUMNS) + "   ms per step"
    for each in times:
        yield _row(each) + "".join(f"{each.milliseconds[name]:10.3f}" for name in _COLUMNS)
    yield head + "".join(f"{name:>10}" for name in _COLUMNS) + "   % of the step"
    for each in times:
        whole = each.milliseconds["step"]
        shares = (each.milliseconds[name] / whole for name in _COLUMNS)
        yield _row(each) + "".join(f"{share:10.1%}" for share in shares)
    if times:
        total = times[-1]
        yield (
            f"host work: {total.host_share:.1%} of step time; "
            f"not hidden behind the device: {total.idle_share:.1%}"
        )


def _row(times: BucketTimes) -> str:
    name = "all" if times.bucket is None else str(times.bucket)
    return f"{name:>7}{times.steps:7}{times.tokens:8.1f}{times.padding:9.1%}"
