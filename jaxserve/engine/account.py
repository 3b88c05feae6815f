"""What one request has taken so far, in constant memory (beside steps 4 to 7). Pure arithmetic.

Steps of an answer are summed up in stretches: first one step each, then, whenever there would be
too many, neighbours become one.
"""

from __future__ import annotations

import dataclasses

from jaxserve.request import StepStretch

#: Stretches kept of one request's prompt, and of its answer.
MAX_STRETCHES = 32


class Stretches:
    """Steps in the order in which they came, in at most `MAX_STRETCHES` entries."""

    def __init__(self) -> None:
        self.entries: list[StepStretch] = []
        self._steps_each = 1

    def add(self, stretch: StepStretch) -> None:
        """What came next."""
        entries = self.entries
        if entries and entries[-1].steps + stretch.steps <= self._steps_each:
            entries[-1] = _join(entries[-1], stretch)
            return
        if len(entries) == MAX_STRETCHES:
            self._steps_each *= 2
            self.entries = entries = [
                _join(first, second)
                for first, second in zip(entries[::2], entries[1::2], strict=True)
            ]
        entries.append(stretch)


@dataclasses.dataclass(frozen=True, slots=True)
class StepSums:
    """A step, and the sums of all steps up to it: the time and the padding that fell to one token
    of each, their rows and their buckets."""

    begun: float
    ended: float
    seconds: float = 0.0
    padding: float = 0.0
    rows: int = 0
    bucket_tokens: int = 0


@dataclasses.dataclass(slots=True, eq=False)
class Account:
    """One request's shares. Lists of steps only for a request that is traced.

    While it computes one token in every step, only `next_step` moves: what it took is the
    difference of two sums. before: the sums when that began, at step `first_step`.
    """

    device_seconds: float = 0.0
    padding_tokens: float = 0.0
    prefill_tokens: int = 0
    steps: int = 0
    prefill: Stretches | None = None
    decode: Stretches | None = None
    before: StepSums | None = None
    first_step: int = -1
    next_step: int = -1

    def trace(self) -> None:
        """Keeps steps from now on."""
        self.prefill, self.decode = Stretches(), Stretches()

    def add(self, stretch: StepStretch) -> None:
        """More steps that were this request's, too."""
        self.steps += stretch.steps
        self.device_seconds += stretch.device_seconds
        self.padding_tokens += stretch.padding_tokens
        reads = stretch.kind == "prefill"
        if reads:
            self.prefill_tokens += stretch.tokens
        stretches = self.prefill if reads else self.decode
        if stretches is not None:
            stretches.add(stretch)


def between(
    before: StepSums, last: StepSums, begun: float, *, kind: str, steps: int
) -> StepStretch:
    """The steps after `before` up to `last`, of one token each, the first of which began then."""
    return StepStretch(
        kind=kind,
        begun=begun,
        ended=last.ended,
        steps=steps,
        tokens=steps,
        bucket_tokens=last.bucket_tokens - before.bucket_tokens,
        rows=last.rows - before.rows,
        padding_tokens=last.padding - before.padding,
        device_seconds=last.seconds - before.seconds,
    )


def _join(first: StepStretch, second: StepStretch) -> StepStretch:
    return StepStretch(
        kind=first.kind,
        begun=first.begun,
        ended=second.ended,
        steps=first.steps + second.steps,
        tokens=first.tokens + second.tokens,
        bucket_tokens=first.bucket_tokens + second.bucket_tokens,
        rows=first.rows + second.rows,
        padding_tokens=first.padding_tokens + second.padding_tokens,
        device_seconds=first.device_seconds + second.device_seconds,
    )
