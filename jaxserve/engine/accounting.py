"""What each request cost: its share, by tokens, of every step's time and padding (steps 4 to 7).

Costs next to nothing per row: an answer that grows by one token a step is only noticed when that
ends, and reckoned up then from sums over all steps.
"""

from __future__ import annotations

import time

from jaxserve.engine.account import MAX_STRETCHES, Account, StepSums, between
from jaxserve.engine.sequence import Sequence
from jaxserve.engine.step_plan import ScheduledRow, StepPlan
from jaxserve.request import FinishReason, RequestFacts, StepStretch

#: Steps whose sums are kept one by one; of answers that are longer the beginning is told as a whole.
_RING = 4096


class Accounting:
    """Keeps the accounts of all requests that are in the engine, each on its sequence."""

    def __init__(self) -> None:
        self._number = 0
        self._ring: list[StepSums] = [StepSums(0.0, 0.0)] * _RING
        self._last = self._ring[0]

    def open(self, sequence: Sequence) -> None:
        """A request has been accepted."""
        if sequence.request.trace:
            sequence.account.trace()

    def count_step(self, plan: StepPlan, bucket_tokens: int, begun: float, ended: float) -> None:
        """A step has been read: everybody in it pays for its tokens."""
        before, number = self._last, self._number
        tokens, rows = max(1, plan.num_tokens), len(plan.rows)
        self._last = last = StepSums(
            begun,
            ended,
            before.seconds + max(0.0, ended - begun) / tokens,
            before.padding + max(0, bucket_tokens - tokens) / tokens,
            before.rows + rows,
            before.bucket_tokens + bucket_tokens,
        )
        self._ring[number % _RING] = last
        self._number = following = number + 1
        for row in plan.rows:
            account = row.sequence.account
            if account.next_step == number and row.count == 1:
                account.next_step = following
            else:
                self._count_row(row, account, before)

    def close(self, sequence: Sequence, reason: FinishReason, page_size: int) -> RequestFacts:
        """A request has ended: what it cost."""
        account, times, now = sequence.account, sequence.times, time.monotonic()
        self._end_run(account)
        kept = [each.entries for each in (account.prefill, account.decode) if each is not None]
        return RequestFacts(
            finish_reason=reason,
            num_cached_tokens=sequence.num_cached_tokens,
            num_generated_tokens=sequence.num_output_tokens,
            num_prefill_tokens=account.prefill_tokens,
            num_preemptions=sequence.num_preemptions,
            num_pages=-(-len(sequence.tokens) // page_size) if times.scheduled else 0,
            num_cached_pages=sequence.num_cached_tokens // page_size,
            padding_tokens=account.padding_tokens,
            queue_seconds=max(0.0, (times.scheduled or now) - times.arrival),
            device_seconds=account.device_seconds,
            steps=account.steps,
            scheduled=times.scheduled,
            first_token=times.first_token,
            last_token=times.last_token,
            ended=now,
            stretches=[stretch for entries in kept for stretch in entries],
        )

    def _count_row(self, row: ScheduledRow, account: Account, before: StepSums) -> None:
        """A row that goes on with nothing: a prompt's, an answer's first, one with guesses."""
        self._end_run(account)
        reads = row.start < row.sequence.num_prompt_tokens
        if not reads and row.count == 1:
            account.before = before
            account.first_step, account.next_step = self._number - 1, self._number
            return
        last, count = self._last, row.count
        account.add(
            StepStretch(
                kind="prefill" if reads else "decode",
                begun=last.begun,
                ended=last.ended,
                steps=1,
                tokens=count,
                bucket_tokens=last.bucket_tokens - before.bucket_tokens,
                rows=last.rows - before.rows,
                padding_tokens=(last.padding - before.padding) * count,
                device_seconds=(last.seconds - before.seconds) * count,
            )
        )

    def _end_run(self, account: Account) -> None:
        """Reckons up the steps in which a sequence computed one token each, in equal stretches."""
        before, first, end = account.before, account.first_step, account.next_step
        account.before, account.next_step = None, -1
        if before is None:
            return
        parts = min(end - first, MAX_STRETCHES) if account.decode is not None else 1
        oldest, done = self._number - _RING, first
        begun = self._ring[first % _RING].begun if first >= oldest else before.ended
        for part in range(1, parts + 1):
            stop = first + (end - first) * part // parts
            if stop - 1 < oldest:
                continue  # its sums are gone; the next part begins where this one does
            last = self._ring[(stop - 1) % _RING]
            account.add(between(before, last, begun, kind="decode", steps=stop - done))
            before, begun, done = last, self._ring[stop % _RING].begun, stop
