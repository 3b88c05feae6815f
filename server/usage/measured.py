"""What one HTTP request that asks the engine took, step by step, until all of it is over.

Over means: every answer has ended in the engine, and the response has been sent or dropped,
whichever comes last. A tenant's limits are settled before an answer is complete, so that a client
that waits for one answer before it asks again is never counted twice.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import flask
import gevent
import msgspec

from jaxserve.messages import Output
from jaxserve.request import RequestFacts
from server.access.limits import Admission, LimitBook
from server.tenant import current_tenant
from server.trace.otlp import read_traceparent
from server.trace.timeline import make_trace
from server.usage.ledger import Ledger, TraceRow, UsageRow
from server.usage.prices import Prices


@dataclasses.dataclass(slots=True)
class Answer:
    """One of a request's answers. prompt_tokens: 0 where another answer counts them."""

    prompt_length: int
    prompt_tokens: int
    submitted: float
    reason: str | None = None
    facts: RequestFacts | None = None

    @property
    def generated(self) -> int:
        return 0 if self.facts is None else self.facts.num_generated_tokens

    @property
    def cached(self) -> int:
        """Of the prompt tokens that are counted."""
        known = 0 if self.facts is None else self.facts.num_cached_tokens
        return min(known, self.prompt_tokens)


class Measured:
    """Made in a request's context. Times are seconds of `time.monotonic()`."""

    def __init__(
        self,
        ledger: Ledger,
        limits: LimitBook,
        prices: Prices,
        admission: Admission | None,
        on_over: Callable[[Measured], None],
    ) -> None:
        self.received: float = flask.g.arrival
        self.began = time.time() - (time.monotonic() - self.received)
        self.request_id: str = flask.g.request_id
        self.tenant = current_tenant()
        self.model = ""
        self.route = f"{flask.request.method} {flask.request.path}"
        self.context = read_traceparent(flask.request.headers.get("traceparent", ""))
        self.marks: list[tuple[str, float]] = flask.g.marks
        self.admitted = time.monotonic()
        self.answers: list[Answer] = []
        self.status = 0
        self.accepted = self.first_piece = self.last_piece = 0.0
        self.first_written = self.last_written = self.finished = 0.0
        self.num_pieces = self.num_events = self.num_bytes = 0
        self.headers = {} if admission is None else admission.headers
        self._ledger = ledger
        self._limits = limits
        self._prices = prices
        self._admission = admission
        self._on_over = on_over

    @property
    def engine_done(self) -> bool:
        """Whether the engine has said its last word on every answer."""
        return all(answer.reason is not None for answer in self.answers)

    @property
    def cost(self) -> float:
        """By the server's prices, as far as it is known."""
        answers = self.answers
        return self._prices.cost(
            prompt=sum(answer.prompt_tokens for answer in answers),
            cached=sum(answer.cached for answer in answers),
            generated=sum(answer.generated for answer in answers),
            device_seconds=self.device_seconds,
        )

    @property
    def device_seconds(self) -> float:
        """The share of device time of all answers."""
        return sum(answer.facts.device_seconds for answer in self.answers if answer.facts)

    def add(self, prompt_lengths: Sequence[int], answers_per_prompt: int) -> Part:
        """More answers that are asked for; who hears of their ends."""
        first, now = len(self.answers), time.monotonic()
        self.answers += [
            Answer(length, 0 if number % answers_per_prompt else length, now)
            for number, length in enumerate(prompt_lengths)
        ]
        return Part(self, first)

    def release(self) -> None:
        """The answer is about to be complete: the limits need not wait for its last byte."""
        if self._admission is None:
            return
        if self.engine_done:
            self._settle()
        else:
            self._limits.release(self._admission)

    def sent(self) -> None:
        """The response is complete, or nobody reads it any more."""
        if not self.finished:
            self.finished = time.monotonic()
            self.finish_if_over()

    def finish_if_over(self) -> None:
        """Writes everything down, once. Called where nothing may wait."""
        if not self.finished or not self.engine_done:
            return
        self._on_over(self)
        if self._admission is not None:
            gevent.spawn(self._settle)
        self._ledger.add(self._row())
        self._ledger.add(TraceRow(self.request_id, self.tenant, self._encode_trace))

    def give_up(self) -> None:
        """This process ends: nobody will hear more of this request."""
        for answer in self.answers:
            answer.reason = answer.reason or "abort"
        self._settle()
        self.finished = self.finished or time.monotonic()
        self.finish_if_over()

    def _settle(self) -> None:
        admission, self._admission = self._admission, None
        if admission is not None:
            tokens = sum(answer.prompt_tokens + answer.generated for answer in self.answers)
            self._limits.settle(admission, tokens, self.cost)

    def trace(self) -> dict[str, Any]:
        """Every step with its time, once it is over."""
        return make_trace(self)

    def _encode_trace(self) -> bytes:
        return msgspec.json.encode(self.trace())

    def _row(self) -> UsageRow:
        facts = [answer.facts for answer in self.answers if answer.facts is not None]
        ended = self.began + self.finished - self.received
        return UsageRow(
            ended=ended,
            day=time.strftime("%Y-%m-%d", time.gmtime(ended)),
            request_id=self.request_id,
            tenant=self.tenant,
            model=self.model,
            route=self.route,
            answers=len(self.answers),
            prompt_tokens=sum(answer.prompt_tokens for answer in self.answers),
            cached_tokens=sum(answer.cached for answer in self.answers),
            generated_tokens=sum(answer.generated for answer in self.answers),
            queue_seconds=sum(each.queue_seconds for each in facts),
            device_seconds=self.device_seconds,
            finish_reason=self.finish_reason,
            price=self.cost,
        )

    @property
    def finish_reason(self) -> str:
        """Of the whole request: what went wrong with any answer, or how the first one ended."""
        reasons = [answer.reason or "" for answer in self.answers]
        for worst in ("error", "refused", "abort"):
            if worst in reasons:
                return worst
        return reasons[0] if reasons else ""


class Part:
    """The answers of one submission; told by the client of each one's end."""

    def __init__(self, measured: Measured, first: int) -> None:
        self._measured = measured
        self._first = first

    def ended(self, index: int, output: Output | None) -> None:
        """The engine's last word on an answer; None when the engine is gone."""
        answer = self._measured.answers[self._first + index]
        if answer.reason is None:
            refused = output is not None and output.refused is not None
            reason = "error" if output is None else str(output.finish_reason)
            answer.reason = "refused" if refused else reason
            answer.facts = None if output is None else output.facts
            self._measured.finish_if_over()

    def never_sent(self) -> None:
        """The engine was not there to be asked."""
        for answer in self._measured.answers[self._first :]:
            answer.reason = answer.reason or "error"
