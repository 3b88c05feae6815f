"""The engine thread: takes messages, steps, sends what came out (joins steps 3, 4 to 7 and 8)."""

from __future__ import annotations

import dataclasses
import logging
import queue
import threading
import time

from jaxserve import messages
from jaxserve.engine.engine import Engine
from jaxserve.engine.grammar_compiler import GrammarCompiler
from jaxserve.engine.link import Compiled, EngineLink, Received, WorkerGone
from jaxserve.engine.score_programs import EMBED, LOGPROBS
from jaxserve.engine.scorer import Scorer, not_available
from jaxserve.errors import EngineError, RefusedError, RequestError
from jaxserve.request import FinishReason, GenerationRequest, Score, TokenOutput

logger = logging.getLogger("jaxserve.engine")

_IDLE_SECONDS = 0.5
#: Requests of workers that are gone, kept until another one is there to write them down.
_MAX_ORPHANS = 10_000


class EngineLoop:
    """Serves the workers of one link until `stop` is set."""

    def __init__(
        self,
        engine: Engine,
        link: EngineLink,
        info: messages.EngineInfo,
        stop: threading.Event,
        scorer: Scorer | None = None,
    ) -> None:
        self._scorer = scorer
        if scorer is not None:
            scorer.on_end = engine.metrics.on_read
        self._engine = engine
        self._link = link
        self._info = info
        self._owner: dict[str, tuple[bytes, int, GenerationRequest]] = {}
        self._orphans: list[messages.Orphan] = []
        self._of_worker: dict[bytes, set[str]] = {}
        self._stop = stop
        self._compiler = GrammarCompiler(engine.grammars, link.inbox)

    def run(self) -> None:
        """Returns when stopped; raises EngineError when the engine can no longer run."""
        status = self._link.status
        status.last_turn = time.monotonic()
        status.info = self._info
        while not self._stop.is_set():
            self._take_messages()
            if self._engine.has_work:
                self._deliver(self._engine.step())
                if self._engine.broken:
                    raise EngineError(self._engine.broken)
            if self._scorer is not None and self._scorer.has_work:
                self._deliver(self._scorer.step())
            status.last_turn = time.monotonic()
            status.num_running = len(self._engine.scheduler.running)
            status.num_waiting = self._engine.scheduler.num_waiting + self._num_unread

    @property
    def _num_unread(self) -> int:
        """Prompts that are only read and not read to their end."""
        return 0 if self._scorer is None else self._scorer.num_waiting

    def _take_messages(self) -> None:
        """Everything that has arrived; waits only when there is nothing else to do."""
        wait = None if self._engine.has_work or self._num_unread else _IDLE_SECONDS
        while True:
            try:
                received = self._link.inbox.get(block=wait is not None, timeout=wait)
            except queue.Empty:
                return
            self._handle(received)
            wait = None

    def _handle(self, received: Received) -> None:
        worker, message = received
        if isinstance(message, messages.Submit):
            if not self._compiler.takes(worker, message):
                self._submit(worker, message)
        elif isinstance(message, Compiled):
            if self._compiler.gives_back(worker, message.submit):
                self._submit(worker, message.submit)
        elif isinstance(message, messages.Abort):
            for rid in message.rids:
                self._compiler.drop(worker, rid)
                self._end(worker, rid, FinishReason(message.reason))
        elif isinstance(message, messages.MetricsRequest):
            text = self._engine.metrics.text(self._engine.scheduler)
            self._link.send(worker, messages.MetricsReply(message.rid, text))
        elif isinstance(message, WorkerGone):
            self._compiler.drop(worker)
            for key in list(self._of_worker.get(worker, ())):
                self._orphans += self._abort(key, FinishReason.ABORT)
            del self._orphans[:-_MAX_ORPHANS]
            return
        self._hand_over(worker)

    def _submit(self, worker: bytes, message: messages.Submit) -> None:
        answer = messages.Output(message.rid, [])  # the acknowledgement
        if message.epoch != self._link.epoch:
            answer = messages.Output(
                message.rid, [], FinishReason.ERROR, error="the engine was restarted", status=503
            )
        else:
            key = _key(worker, message.rid)
            try:
                self._add(dataclasses.replace(message.request, request_id=key))
            except RefusedError as error:
                answer = _failure(message.rid, error, error.status, refused=error.reason)
            except RequestError as error:
                answer = _failure(
                    message.rid, error, error.status, refused=error.code or "", param=error.param
                )
            else:
                self._owner[key] = (worker, message.rid, message.request)
                self._of_worker.setdefault(worker, set()).add(key)
        self._link.send(worker, messages.StepOutputs([answer]))

    def _add(self, request: GenerationRequest) -> None:
        if request.score is None:
            self._engine.add(request)
        elif self._scorer is None:
            raise not_available(LOGPROBS if request.score is Score.LOGPROBS else EMBED)
        else:
            self._scorer.add(request)

    def _end(self, worker: bytes, rid: int, reason: FinishReason) -> None:
        """Ends a request whose worker no longer wants it, and tells what it cost."""
        ended = self._abort(_key(worker, rid), reason)
        facts = ended[0].facts if ended else None
        answer = messages.Output(rid, [], reason, facts=facts)
        self._link.send(worker, messages.StepOutputs([answer]))

    def _abort(self, key: str, reason: FinishReason) -> list[messages.Orphan]:
        """Ends a request. What it was and took; nothing if it is not, or no longer, ours."""
        read = self._scorer is not None and self._scorer.abort(key)
        output = None if read else self._engine.abort(key, reason)
        if not read and output is None:
            return []
        request = self._owner[key][2]
        self._forget(key)
        facts = None if output is None else output.facts
        length = len(request.prompt_ids)
        return [messages.Orphan(request.tenant, request.request_id, length, facts)]

    def _hand_over(self, worker: bytes) -> None:
        """Tells a worker that has just been heard of what others left behind."""
        if self._orphans:
            self._link.send(worker, messages.Orphans(self._orphans))
            self._orphans = []

    def _forget(self, key: str) -> tuple[bytes, int]:
        worker, rid, _ = self._owner.pop(key)
        keys = self._of_worker[worker]
        keys.discard(key)
        if not keys:
            del self._of_worker[worker]
        return worker, rid

    def _deliver(self, outputs: list[TokenOutput]) -> None:
        """One message per worker and step."""
        by_worker: dict[bytes, list[messages.Output]] = {}
        for output in outputs:
            key = output.request_id
            final = output.finish_reason is not None
            worker, rid = self._forget(key) if final else self._owner[key][:2]
            by_worker.setdefault(worker, []).append(
                messages.Output(
                    rid,
                    output.token_ids,
                    output.finish_reason,
                    output.num_cached_tokens,
                    output.logprobs,
                    output.error,
                    status=500 if output.error else 0,
                    embedding=output.embedding,
                    facts=output.facts,
                )
            )
        for worker, items in by_worker.items():
            self._link.send(worker, messages.StepOutputs(items))


def _key(worker: bytes, rid: int) -> str:
    return f"{worker.decode()}:{rid}"


def _failure(
    rid: int, error: Exception, status: int, *, refused: str, param: str | None = None
) -> messages.Output:
    return messages.Output(
        rid,
        [],
        FinishReason.ERROR,
        error=str(error),
        refused=refused,
        status=status,
        param=param,
    )
