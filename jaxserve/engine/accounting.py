"""What each request cost: its share of every step, kept in constant memory (observes steps 4 to 7).

A step's time and its padding are divided by tokens. The steps of an answer are summed up in
stretches: first one step each, then, whenever there would be too many, two neighbours become one.
"""

from __future__ import annotations

import dataclasses
import time

from jaxserve.engine.sequence import Sequence
from jaxserve.engine.step_plan import StepPlan
from jaxserve.request import FinishReason, RequestFacts, StepStretch

#: Stretches kept of one request's prompt, and of its answer.
MAX_STRETCHES = 32


class Stretches:
    """Steps in the order in which they came, at most `MAX_STRETCHES` entries."""

    def __init__(self, kind: str) -> None:
        self.entries: list[StepStretch] = []
        self._kind = kind
        self._steps_each = 1

    def add(self, step: StepShare, tokens: int, padding: float) -> None:
        """One more step, of which `tokens` were this request's."""
        if not self.entries or self.entries[-1].steps >= self._steps_each:
            if len(self.entries) == MAX_STRETCHES:
                self._halve()
            self.entries.append(StepStretch(kind=self._kind, begun=step.begun, ended=step.ended))
        last = self.entries[-1]
        last.ended = step.ended
        last.steps += 1
        last.tokens += tokens
        last.bucket_tokens += step.bucket_tokens
        last.rows += step.rows
        last.padding_tokens += padding
        last.device_seconds += step.seconds_each * tokens

    def _halve(self) -> None:
        self._steps_each *= 2
        pairs = zip(self.entries[::2], self.entries[1::2], strict=True)
        self.entries = [_join(first, second) for first, second in pairs]


@dataclasses.dataclass(frozen=True, slots=True)
class StepShare:
    """One step, as every row of it sees it."""

    begun: float
    ended: float
    bucket_tokens: int
    rows: int
    seconds_each: float
    padding_each: float


@dataclasses.dataclass(slots=True, eq=False)
class Account:
    """One request's shares so far. Lists of steps only for a request that is traced."""

    device_seconds: float = 0.0
    padding_tokens: float = 0.0
    prefill_tokens: int = 0
    steps: int = 0
    prefill: Stretches | None = None
    decode: Stretches | None = None


class Accounting:
    """Keeps the accounts of all requests that are in the engine."""

    def __init__(self) -> None:
        self._accounts: dict[str, Account] = {}

    def open(self, sequence: Sequence) -> None:
        """A request has been accepted."""
        account = Account()
        if sequence.request.trace:
            account.prefill, account.decode = Stretches("prefill"), Stretches("decode")
        self._accounts[sequence.request.request_id] = account

    def count_step(self, plan: StepPlan, bucket_tokens: int, begun: float, ended: float) -> None:
        """A step has been read: everybody in it pays for its tokens."""
        tokens = max(1, plan.num_tokens)
        step = StepShare(
            begun,
            ended,
            bucket_tokens,
            len(plan.rows),
            max(0.0, ended - begun) / tokens,
            max(0, bucket_tokens - tokens) / tokens,
        )
        accounts = self._accounts
        for row in plan.rows:
            sequence, count = row.sequence, row.count
            account = accounts.get(sequence.request.request_id)
            if account is None:
                continue  # it was aborted while the step ran
            padding = step.padding_each * count
            account.device_seconds += step.seconds_each * count
            account.padding_tokens += padding
            account.steps += 1
            reads = row.start < sequence.num_prompt_tokens
            if reads:
                account.prefill_tokens += count
            stretches = account.prefill if reads else account.decode
            if stretches is not None:
                stretches.add(step, count, padding)

    def close(self, sequence: Sequence, reason: FinishReason, page_size: int) -> RequestFacts:
        """A request has ended: what it cost."""
        account = self._accounts.pop(sequence.request.request_id, None) or Account()
        times, now = sequence.times, time.monotonic()
        begun = times.scheduled or now
        stretches = [*_entries(account.prefill), *_entries(account.decode)]
        return RequestFacts(
            finish_reason=reason,
            num_cached_tokens=sequence.num_cached_tokens,
            num_generated_tokens=sequence.num_output_tokens,
            num_prefill_tokens=account.prefill_tokens,
            num_preemptions=sequence.num_preemptions,
            num_pages=-(-len(sequence.tokens) // page_size) if times.scheduled else 0,
            num_cached_pages=sequence.num_cached_tokens // page_size,
            padding_tokens=account.padding_tokens,
            queue_seconds=max(0.0, begun - times.arrival),
            device_seconds=account.device_seconds,
            steps=account.steps,
            scheduled=times.scheduled,
            first_token=times.first_token,
            last_token=times.last_token,
            ended=now,
            stretches=[stretch for stretch in stretches if stretch.steps],
        )


def _entries(stretches: Stretches | None) -> list[StepStretch]:
    return [] if stretches is None else stretches.entries


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
