"""The engine: admits requests and turns them into tokens, one step at a time (steps 3 to 7).

A step is: schedule, dispatch, then read what the step before produced. So the device always has
the next step queued while the host looks at the last one's tokens.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable
from collections.abc import Sequence as Rows
from typing import Any, Protocol

from jaxserve.engine.accounting import Accounting
from jaxserve.engine.drafting import Drafting
from jaxserve.engine.metrics import EngineMetrics
from jaxserve.engine.scheduler import Scheduler
from jaxserve.engine.sequence import Sequence, SequenceStatus
from jaxserve.engine.step_plan import ScheduledRow, StepPlan
from jaxserve.engine.step_profile import StepClock, StepProfile
from jaxserve.errors import DeviceLostError, PromptTooLongError, RefusedError, RequestError
from jaxserve.request import FinishReason, GenerationRequest, TokenLogprobs, TokenOutput
from jaxserve.structured.matcher import Grammars, MatcherPool

logger = logging.getLogger("jaxserve.engine")

_MAX_FAILURES = 3


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SampledRow:
    """What a step sampled for one row: one token, more where guesses came true, none if it was a
    prompt's chunk that was not the last.

    ok: False when the logits after these tokens held NaN. logprobs: each token's and its top 20,
    None unless the request asked for them.
    """

    tokens: list[int]
    ok: bool = True
    logprobs: list[TokenLogprobs] | None = None


class StepRunner(Protocol):
    """The device's side of a step."""

    vocab_size: int

    def dispatch(self, plan: StepPlan, settle: Callable[[], None] | None = None) -> Any:
        """Starts a step and returns at once; the handle is for `read`.

        settle: called once the device computes logits and before it samples; matchers know their
        masks after it.
        """
        ...

    def read(self, handle: Any) -> Rows[SampledRow]:
        """Waits for a step: one entry per row of its plan."""
        ...

    def bucket_tokens(self, plan: StepPlan) -> int:
        """The padded number of tokens of a step."""
        ...

    def check_request(self, request: GenerationRequest) -> None:
        """Raises RequestError for what the compiled programs cannot honour."""
        ...

    def reset(self) -> None:
        """New device state after a failed step; all pages are lost."""
        ...

    def profile(self, profile: StepProfile) -> None:
        """Tells the profile of each call to the device from now on."""
        ...


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionLimits:
    """How long a request may be, and how much may wait. Lengths in tokens."""

    max_model_len: int
    max_queue_len: int
    max_queued_tokens: int
    eos_ids: frozenset[int]


@dataclasses.dataclass(slots=True, kw_only=True)
class _InFlight:
    plan: StepPlan
    handle: Any
    dispatched: float
    #: When the device could begin with it: the end of the step before, if there was one.
    begun: float
    read_first: bool


class Engine:
    """One model on one mesh. Not thread-safe: one thread adds, steps and aborts."""

    def __init__(
        self,
        runner: StepRunner,
        scheduler: Scheduler,
        limits: AdmissionLimits,
        metrics: EngineMetrics,
        *,
        asynchronous: bool = True,
        drafting: Drafting | None = None,
        grammars: Grammars | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.metrics = metrics
        self.limits = limits
        self._runner = runner
        self._asynchronous = asynchronous
        self._drafting = drafting
        self.grammars = grammars
        self._matchers = MatcherPool()
        self._sequences: dict[str, Sequence] = {}
        self._in_flight: _InFlight | None = None
        self._order = 0
        self._failures = 0
        self._clock = StepClock()
        self._accounting = Accounting()
        #: Why the engine can no longer run, None while it can. Everything was ended then.
        self.broken: str | None = None

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or self._in_flight is not None

    @property
    def num_requests(self) -> int:
        """Requests that were accepted and have no final output yet."""
        return len(self._sequences)

    def add(self, request: GenerationRequest) -> None:
        """Accepts a request: from now on it gets exactly one final output.

        Raises RequestError when it can never run, RefusedError when too much is waiting.
        """
        self._check(request)
        room = self.limits.max_model_len - len(request.prompt_ids)
        wanted = request.sampling.max_tokens
        sequence = Sequence.from_request(
            request, max_tokens=room if wanted is None else min(wanted, room), order=self._order
        )
        if request.grammar is not None:
            if self.grammars is None:
                raise RequestError("this engine enforces no grammars", param=request.grammar.param)
            sequence.matcher = self.grammars.matcher(request.grammar)
        self._order += 1
        self._sequences[request.request_id] = sequence
        self._accounting.open(sequence)
        self.scheduler.add(sequence)

    def abort(
        self, request_id: str, reason: FinishReason = FinishReason.ABORT
    ) -> TokenOutput | None:
        """Ends a request now, wherever it is. None when it is not (or no longer) ours."""
        sequence = self._sequences.get(request_id)
        return None if sequence is None else self._finish(sequence, reason)

    def profile_steps(self) -> StepProfile:
        """Measures every step from now on, until the profile's `steps` is asked."""
        self._clock = profile = StepProfile()
        self._runner.profile(profile)
        return profile

    def step(self) -> list[TokenOutput]:
        """One step of the loop; what it returns was computed by the step before."""
        self._clock.start()
        outputs: list[TokenOutput] = []
        try:
            early = self._begin_drafts(outputs)
            plan = self.scheduler.schedule()
            self._clock.scheduled(plan)
            previous, self._in_flight = self._in_flight, None
            if plan.rows and previous is not None and plan.constrained:
                self._in_flight, previous = self._dispatch_between(plan, previous, outputs), None
            elif plan.rows:
                self._in_flight = self._dispatch(plan, early)
            self._count(plan)
            if previous is not None:
                outputs += self._collect(previous)
            if not self._asynchronous and self._in_flight is not None:
                previous, self._in_flight = self._in_flight, None
                outputs += self._collect(previous)
            self._failures = 0
            return outputs
        except Exception as error:
            lost = isinstance(error, DeviceLostError)  # which has said all there is to say
            logger.error("a step failed; ending the requests that it held", exc_info=not lost)
            return outputs + self._fail(error)

    def check_integrity(self) -> None:
        """Asserts that pages, slots and requests balance."""
        self.scheduler.check_integrity()
        for sequence in self._sequences.values():
            assert sequence.status is not SequenceStatus.FINISHED

    def _check(self, request: GenerationRequest) -> None:
        ids, limits = request.prompt_ids, self.limits
        if request.request_id in self._sequences:
            raise RequestError(f"request id {request.request_id!r} is running already")
        if not ids:
            raise RequestError("the prompt is empty; it needs at least one token", param="prompt")
        if len(ids) >= limits.max_model_len:
            raise PromptTooLongError(
                f"the prompt has {len(ids)} tokens; with at least one token of answer the limit "
                f"of {limits.max_model_len} tokens allows {limits.max_model_len - 1}: shorten it, "
                "or start the engine with a larger --max-model-len",
                param="prompt",
                code="context_length_exceeded",
            )
        if min(ids) < 0 or max(ids) >= self._runner.vocab_size:
            raise RequestError(
                f"the prompt holds a token id outside 0 to {self._runner.vocab_size - 1}",
                param="prompt",
            )
        request.sampling.validate(vocab_size=self._runner.vocab_size)
        self._runner.check_request(request)
        self._check_queue(len(ids), request.tenant)

    def _check_queue(self, num_tokens: int, tenant: str) -> None:
        """A tenant with a name takes at most as much of the queue as it leaves to others."""
        waiting, queued = self.scheduler.num_waiting, self.scheduler.num_waiting_tokens
        own = self.scheduler.num_waiting_of(tenant)
        if tenant and own >= max(1, self.limits.max_queue_len - waiting):
            self.metrics.on_refused("tenant_queue_full")
            raise RefusedError(
                f"{own} of your requests are waiting, which is your share of the queue; try later",
                reason="tenant_queue_full",
            )
        if waiting >= self.limits.max_queue_len:
            self.metrics.on_refused("queue_full")
            raise RefusedError(
                f"{waiting} requests are waiting, which is the limit (--max-queue-len); try later",
                reason="queue_full",
            )
        if waiting and queued + num_tokens > self.limits.max_queued_tokens:
            self.metrics.on_refused("queue_tokens")
            raise RefusedError(
                f"{queued} prompt tokens are waiting and this one has {num_tokens}; the limit is "
                f"{self.limits.max_queued_tokens} (--max-queued-tokens); try later",
                reason="queue_tokens",
            )

    def _count(self, plan: StepPlan) -> None:
        if plan.rows:
            self.metrics.on_step(plan, self._runner.bucket_tokens(plan))
        for sequence in plan.admitted:
            if sequence.num_preemptions == 0:
                self.metrics.on_admitted(sequence)

    def _begin_drafts(self, outputs: list[TokenOutput]) -> float | None:
        """Gives sequences their guesses for the next step, where they pay.

        Guesses follow the newest token, so the step in flight is read first then: its end, if so.
        """
        drafting = self._drafting
        if drafting is None:
            return None
        step, end = self._in_flight, None
        if step is not None and drafting.must_read_first(self.scheduler, step.plan):
            self._in_flight = None
            outputs += self._collect(step)
            end = time.monotonic()
        if self._in_flight is None:
            drafting.draft(self.scheduler)
        return end

    def _dispatch(self, plan: StepPlan, early: float | None) -> _InFlight:
        """early: when the step before was read, if it was read already."""
        begun = time.monotonic() if early is None else early
        handle = self._runner.dispatch(plan)
        return _InFlight(
            plan=plan,
            handle=handle,
            dispatched=time.monotonic(),
            begun=begun,
            read_first=early is not None,
        )

    def _dispatch_between(
        self, plan: StepPlan, previous: _InFlight, outputs: list[TokenOutput]
    ) -> _InFlight:
        """Dispatches a step whose masks depend on the tokens of the step before.

        Reads those, and makes the masks, while the device computes the new step's logits.
        """
        settled = time.monotonic()

        def settle() -> None:
            nonlocal settled
            outputs.extend(self._collect(previous))
            settled = time.monotonic()

        handle = self._runner.dispatch(plan, settle)
        return _InFlight(
            plan=plan,
            handle=handle,
            dispatched=time.monotonic(),
            begun=settled,
            read_first=False,
        )

    def _collect(self, step: _InFlight) -> list[TokenOutput]:
        self._clock.reading()
        sampled = self._runner.read(step.handle)
        self._clock.read()
        self._time(step)
        outputs: list[TokenOutput] = []
        self._matchers.advance(
            [
                (row.sequence.matcher, result.tokens[0])
                for row, result in zip(step.plan.rows, sampled, strict=True)
                if row.sequence.matcher is not None and row.samples and result.tokens
                if row.sequence.status is not SequenceStatus.FINISHED
            ]
        )
        for row, result in zip(step.plan.rows, sampled, strict=True):
            if row.samples:
                row.sequence.num_pending -= 1
                if row.sequence.status is not SequenceStatus.FINISHED:
                    outputs += self._accept(row, result)
        return outputs

    def _time(self, step: _InFlight) -> None:
        """A step has just been read."""
        now = time.monotonic()
        self.metrics.step_time.observe(now - step.dispatched)
        if self._in_flight is not None:
            self._in_flight.begun = now
        size = self._runner.bucket_tokens(step.plan)
        self._accounting.count_step(step.plan, size, step.begun, now)
        self.scheduler.chunks.costs.observe(size, step.plan.num_pairs, now - step.begun)
        if self._drafting is not None:
            self._drafting.count_step(size, step.read_first, now - step.begun)

    def _accept(self, row: ScheduledRow, result: SampledRow) -> list[TokenOutput]:
        sequence = row.sequence
        if row.draft:
            num_true = max(len(result.tokens) - 1, 0)
            sequence.num_computed_tokens = row.num_known + num_true
            self.metrics.on_draft(len(row.draft), num_true)
        if self._drafting is not None:
            self._drafting.learn(sequence, result.tokens)
        tokens, reason = self._append(sequence, result.tokens)
        logprobs = None if result.logprobs is None else result.logprobs[: len(tokens)]
        if reason is not None:
            return [self._finish(sequence, reason, token_ids=tokens, logprobs=logprobs)]
        outputs = []
        if tokens:
            outputs.append(
                TokenOutput(
                    request_id=sequence.request.request_id,
                    token_ids=tokens,
                    logprobs=logprobs,
                    num_cached_tokens=sequence.num_cached_tokens,
                )
            )
        error = _complaint(sequence, result)
        if error is not None:
            outputs.append(self._finish(sequence, FinishReason.ERROR, error=error))
        return outputs

    def _append(
        self, sequence: Sequence, tokens: list[int]
    ) -> tuple[list[int], FinishReason | None]:
        """The tokens up to the one that ends the answer, and why it does."""
        reason = None
        for count, token in enumerate(tokens, 1):
            sequence.tokens.append(token)
            reason = self._stop_reason(sequence, token)
            if reason is not None:
                tokens = tokens[:count]
                break
        if tokens:
            self.metrics.on_tokens(sequence, len(tokens))
        return tokens, reason

    def _stop_reason(self, sequence: Sequence, token: int) -> FinishReason | None:
        request = sequence.request
        sampling = request.sampling
        if sequence.num_output_tokens >= sampling.min_tokens:
            ends = token in self.limits.eos_ids or token in request.eos_ids
            if (ends and not sampling.ignore_eos) or token in sampling.stop_token_ids:
                return FinishReason.STOP
        matcher = sequence.matcher
        if matcher is not None and matcher.finished and matcher.error is None:
            return FinishReason.STOP
        if sequence.num_output_tokens >= sequence.max_tokens:
            return FinishReason.LENGTH
        return None

    def _finish(
        self,
        sequence: Sequence,
        reason: FinishReason,
        *,
        token_ids: list[int] | None = None,
        logprobs: list[TokenLogprobs] | None = None,
        error: str | None = None,
    ) -> TokenOutput:
        self.scheduler.finish(sequence)
        if self._drafting is not None:
            self._drafting.forget(sequence)
        sequence.finish_reason = reason
        del self._sequences[sequence.request.request_id]
        self.metrics.on_finished(sequence, reason)
        facts = self._accounting.close(sequence, reason, self.scheduler.pool.page_size)
        self.metrics.on_device_time(sequence.request.tenant, facts.device_seconds)
        return TokenOutput(
            request_id=sequence.request.request_id,
            token_ids=token_ids or [],
            logprobs=logprobs,
            finish_reason=reason,
            num_cached_tokens=sequence.num_cached_tokens,
            error=error,
            facts=facts,
        )

    def _fail(self, error: Exception) -> list[TokenOutput]:
        """Ends what was running with an error; what waits stays, unless the engine is broken."""
        self._failures += 1
        self._in_flight = None
        self._clock.forget()
        text = f"the engine failed on the step that held this request: {error}"
        outputs = [
            self._finish(sequence, FinishReason.ERROR, error=text)
            for sequence in list(self._sequences.values())
            if sequence.status is SequenceStatus.RUNNING or sequence.num_pending
        ]
        self.scheduler.pool.forget_all()
        lost = isinstance(error, DeviceLostError)
        if lost or self._failures >= _MAX_FAILURES:
            failures = f"{self._failures} steps in a row failed, the last with: {error}"
            self.broken = str(error) if lost else failures
            outputs += [
                self._finish(sequence, FinishReason.ERROR, error=self.broken)
                for sequence in list(self._sequences.values())
            ]
        else:
            self._runner.reset()
        return outputs


def _complaint(sequence: Sequence, result: SampledRow) -> str | None:
    """Why a sequence cannot go on after this row; None if it can."""
    matcher = sequence.matcher
    if matcher is not None and matcher.error is not None:
        return matcher.error
    if result.ok:
        return None
    if matcher is not None:
        return "no token was left to choose that the answer's grammar and the other fields allow"
    return "the model's output was not a number for this request"
