"""Reads prompts without answering them: embeddings and log-probabilities of prompts (step 6).

Between the engine's steps it does one of its own: whole short prompts beside one another, a long
one chunk by chunk. Knows neither HTTP nor how a prompt came about.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable
from typing import Protocol

import numpy as np

from jaxserve.engine.account import Account
from jaxserve.engine.fair_queue import FairQueue
from jaxserve.engine.score_programs import EMBED, LOGPROBS, ScoreShape
from jaxserve.errors import PromptTooLongError, RefusedError, RequestError
from jaxserve.request import (
    FinishReason,
    GenerationRequest,
    RequestFacts,
    Score,
    StepStretch,
    TokenLogprobs,
    TokenOutput,
)

logger = logging.getLogger("jaxserve.engine")


class ScoreRunner(Protocol):
    """The device's side; see `score_programs.ScoreDevice`."""

    shapes: tuple[ScoreShape, ...]
    kinds: tuple[str, ...]
    page_size: int

    def run(
        self, kind: str, shape: ScoreShape, packed: np.ndarray | None
    ) -> tuple[np.ndarray, ...]: ...

    def renew(self) -> None: ...


@dataclasses.dataclass(slots=True, kw_only=True)
class _Job:
    request: GenerationRequest
    kind: str
    #: Its place among those of all tenants.
    turn: float
    begun: float = 0.0
    account: Account = dataclasses.field(default_factory=Account)
    computed: int = 0
    pages: list[int] = dataclasses.field(default_factory=list)
    total: np.ndarray | None = None
    last: np.ndarray | None = None
    logprobs: list[TokenLogprobs] = dataclasses.field(default_factory=list)

    @property
    def left(self) -> int:
        return len(self.request.prompt_ids) - self.computed


class Scorer:
    """Not thread-safe: one thread adds, steps and aborts. Every accepted request ends once."""

    def __init__(
        self, runner: ScoreRunner, *, max_model_len: int, vocab_size: int, max_queue_len: int
    ) -> None:
        self._runner = runner
        self._max_model_len = max_model_len
        self._vocab_size = vocab_size
        self._max_queue_len = max_queue_len
        #: Is told of every prompt that ended, and how.
        self.on_end: Callable[[GenerationRequest, FinishReason], None] = _nobody
        self._queue: dict[str, _Job] = {}
        self._fair = FairQueue()
        self._free = list(range(1, runner.shapes[0].num_pages))

    @property
    def has_work(self) -> bool:
        return bool(self._queue)

    @property
    def num_waiting(self) -> int:
        """Prompts that are not read to their end."""
        return len(self._queue)

    def add(self, request: GenerationRequest) -> None:
        """Accepts a prompt. Raises RequestError and RefusedError."""
        kind = LOGPROBS if request.score is Score.LOGPROBS else EMBED
        if kind not in self._runner.kinds:
            raise not_available(kind)
        ids = request.prompt_ids
        if not ids or min(ids) < 0 or max(ids) >= self._vocab_size:
            raise RequestError(
                f"the prompt must hold token ids of 0 to {self._vocab_size - 1}", param="prompt"
            )
        if len(ids) > self._max_model_len:
            raise PromptTooLongError(
                f"the prompt has {len(ids)} tokens; the limit is {self._max_model_len}",
                param="prompt",
                code="context_length_exceeded",
            )
        if len(self._queue) >= self._max_queue_len:
            raise RefusedError(
                f"{len(self._queue)} prompts are waiting, which is the limit; try later",
                reason="queue_full",
            )
        turn = self._fair.start(request.tenant, len(ids), request.weight)
        job = _Job(request=request, kind=kind, turn=turn)
        if request.trace:
            job.account.trace()
        self._queue[request.request_id] = job

    def abort(self, request_id: str) -> bool:
        """Forgets a prompt; False if there is none."""
        return self._leave(request_id, FinishReason.ABORT)

    def _leave(self, request_id: str, reason: FinishReason) -> bool:
        job = self._queue.pop(request_id, None)
        if job is not None:
            self._free += job.pages
            self.on_end(job.request, reason)
        return job is not None

    def step(self) -> list[TokenOutput]:
        """Reads as many tokens as one program takes; what is finished by that."""
        parts = self._choose()
        kind = parts[0][0].kind
        shape = self._shape(sum(count for _, count in parts))
        begun = time.monotonic()
        try:
            results = self._runner.run(kind, shape, self._pack(shape, parts))
        except Exception as error:
            logger.exception("reading prompts failed; ending the requests that it held")
            self._runner.renew()
            return [self._end(job, error=str(error)) for job in self._begun()]
        self._share(parts, shape, begun)
        end = 0
        for row, (job, count) in enumerate(parts):
            if kind == EMBED:
                _add_hidden(job, results, row)
            else:
                _add_logprobs(job, results, slice(end, end + count))
            job.computed += count
            end += count
        return [self._end(job) for job, _ in parts if job.left == 0]

    def _choose(self) -> list[tuple[_Job, int]]:
        """The first prompt and what fits beside it: jobs of one kind, with their tokens."""
        parts: list[tuple[_Job, int]] = []
        largest = self._runner.shapes[-1]
        room, may_begin = largest.tokens, True
        for job in sorted(self._queue.values(), key=lambda job: job.turn):
            if room == 0 or len(parts) == largest.rows:
                break
            if parts and job.kind != parts[0][0].kind:
                continue
            if not job.pages and not (may_begin and self._take_pages(job)):
                may_begin = False  # or short prompts would keep a long one from its pages for ever
                continue
            parts.append((job, min(job.left, room)))
            room -= parts[-1][1]
        assert parts, "the pool holds the longest prompt, and nobody else keeps pages"
        return parts

    def _take_pages(self, job: _Job) -> bool:
        wanted = -(-len(job.request.prompt_ids) // self._runner.page_size)
        if wanted > len(self._free):
            return False
        job.pages = [self._free.pop() for _ in range(wanted)]
        job.begun = time.monotonic()
        self._fair.admitted(job.turn)
        return True

    def _share(self, parts: list[tuple[_Job, int]], shape: ScoreShape, begun: float) -> None:
        """A program has run: everybody in it pays for its tokens."""
        ended, tokens = time.monotonic(), sum(count for _, count in parts)
        for job, count in parts:
            job.account.add(
                StepStretch(
                    kind="prefill",
                    begun=begun,
                    ended=ended,
                    steps=1,
                    tokens=count,
                    bucket_tokens=shape.tokens,
                    rows=len(parts),
                    padding_tokens=(shape.tokens - tokens) * count / tokens,
                    device_seconds=(ended - begun) * count / tokens,
                )
            )

    def _shape(self, tokens: int) -> ScoreShape:
        return next(shape for shape in self._runner.shapes if shape.tokens >= tokens)

    def _pack(self, shape: ScoreShape, parts: list[tuple[_Job, int]]) -> np.ndarray:
        packed, views = shape.layout.make_buffer()
        end = 0
        for row, (job, count) in enumerate(parts):
            ids, stop = job.request.prompt_ids, job.computed + count
            views["token_ids"][end : end + count] = ids[job.computed : stop]
            following = ids[job.computed + 1 : stop + 1]
            views["targets"][end : end + len(following)] = following
            end += count
            views["cu_q_lens"][row + 1] = end
            views["kv_lens"][row] = stop
            views["block_tables"][row, : len(job.pages)] = job.pages
        views["cu_q_lens"][len(parts) + 1 :] = end
        return packed

    def _begun(self) -> list[_Job]:
        return [job for job in self._queue.values() if job.pages]

    def _end(self, job: _Job, *, error: str | None = None) -> TokenOutput:
        reason = FinishReason.STOP if error is None else FinishReason.ERROR
        self._leave(job.request.request_id, reason)
        return TokenOutput(
            request_id=job.request.request_id,
            token_ids=[],
            finish_reason=reason,
            logprobs=job.logprobs if error is None and job.kind == LOGPROBS else None,
            embedding=_pooled(job) if error is None and job.kind == EMBED else None,
            error=error and f"the engine failed while it read this prompt: {error}",
            facts=_facts(job, reason),
        )


def _facts(job: _Job, reason: FinishReason) -> RequestFacts:
    account, now = job.account, time.monotonic()
    return RequestFacts(
        finish_reason=reason,
        num_prefill_tokens=account.prefill_tokens,
        num_pages=len(job.pages),
        padding_tokens=account.padding_tokens,
        queue_seconds=max(0.0, (job.begun or now) - (job.request.arrival or now)),
        device_seconds=account.device_seconds,
        steps=account.steps,
        scheduled=job.begun,
        ended=now,
        stretches=[] if account.prefill is None else account.prefill.entries,
    )


def _nobody(request: GenerationRequest, reason: FinishReason) -> None:
    """Hears of it when nobody else does."""


def not_available(kind: str) -> RequestError:
    """The refusal of what the engine was not started for."""
    if kind == EMBED:
        return RequestError(
            "this server makes no embeddings; start it with --embeddings mean or last",
            param="model",
            code="unsupported",
        )
    return RequestError(
        "log-probabilities of the prompt are not available; start the server with "
        "--prompt-logprobs",
        param="prompt_logprobs",
        code="unsupported_parameter",
    )


def _add_hidden(job: _Job, results: tuple[np.ndarray, ...], row: int) -> None:
    sums, last = results
    job.total = sums[row] if job.total is None else job.total + sums[row]
    job.last = last[row]


def _add_logprobs(job: _Job, results: tuple[np.ndarray, ...], span: slice) -> None:
    """Of the tokens after those in `span`; after the prompt's last one there is none."""
    ids, wanted = job.request.prompt_ids, job.request.sampling.logprobs or 0
    following = ids[job.computed + 1 : job.computed + 1 + span.stop - span.start]
    chosen, top_ids, top_logprobs = (result[span] for result in results)
    job.logprobs += [
        TokenLogprobs(
            token_id=token,
            logprob=float(chosen[index]),
            top_ids=top_ids[index, :wanted].tolist(),
            top_logprobs=top_logprobs[index, :wanted].tolist(),
        )
        for index, token in enumerate(following)
    ]


def _pooled(job: _Job) -> bytes:
    """The pooled hidden state, float32 in the machine's order, of any length (norm)."""
    if job.request.score is Score.LAST:
        assert job.last is not None
        return job.last.astype(np.float32).tobytes()
    assert job.total is not None
    return (job.total / len(job.request.prompt_ids)).astype(np.float32).tobytes()
