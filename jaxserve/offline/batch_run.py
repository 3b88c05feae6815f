"""Keeps an engine busy with the lines of a batch file until every one has its answer.

At any time only as many lines are open as keep the engine's slots full. What a body means and
how an answer or an error is written is given from outside (the server's way, for the command line).
"""

from __future__ import annotations

import dataclasses
import logging
import uuid
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from jaxserve.errors import EngineError, JaxserveError, RequestError
from jaxserve.offline.batch_input import InputLine, LineRequest, find_custom_id, parse_line
from jaxserve.offline.batch_output import BatchOutput
from jaxserve.request import FinishReason, GenerationRequest, TokenOutput

logger = logging.getLogger("jaxserve.offline")


class BatchEngine(Protocol):
    """What is needed of `jaxserve.engine.engine.Engine`."""

    @property
    def broken(self) -> str | None: ...

    def add(self, request: GenerationRequest) -> None: ...

    def abort(self, request_id: str, reason: FinishReason = ...) -> TokenOutput | None: ...

    def step(self) -> list[TokenOutput]: ...


class OpenAnswer(Protocol):
    """One body that was accepted, and its answers while they grow."""

    @property
    def requests(self) -> Sequence[GenerationRequest]:
        """What the engine has to do for it, at least one request."""
        ...

    def read(self, index: int, output: TokenOutput) -> bool:
        """Takes in what came for request `index`; True when that one needs no more."""
        ...

    def whole(self) -> dict[str, Any]:
        """The answer's body, once all is read."""
        ...


class Api(Protocol):
    """What requests and answers look like."""

    def read_body(self, request: LineRequest, request_id: str) -> OpenAnswer:
        """Raises RequestError for a url or a body that cannot be honoured."""
        ...

    def describe(self, error: Exception) -> tuple[int, dict[str, Any]]:
        """Status and `{"error": {...}}` of a request that failed."""
        ...


class Progress(Protocol):
    """Is told what happens."""

    def made(self, tokens: int) -> None: ...

    def finished(self, *, failed: bool) -> None: ...


@dataclasses.dataclass(slots=True, kw_only=True)
class _OpenLine:
    line: InputLine
    custom_id: str
    request_id: str
    answer: OpenAnswer
    left: set[str]  # ids of the engine's requests that are not finished


class BatchRun:
    """One run over (the rest of) a file. max_open: requests that the engine holds at a time."""

    def __init__(
        self,
        engine: BatchEngine,
        api: Api,
        output: BatchOutput,
        progress: Progress,
        *,
        max_open: int,
    ) -> None:
        self._engine = engine
        self._api = api
        self._output = output
        self._progress = progress
        self._max_open = max_open
        #: The engine's requests: whose they are, and which of theirs.
        self._open: dict[str, tuple[_OpenLine, int]] = {}

    def run(self, lines: Iterable[InputLine]) -> None:
        """Answers every line that is not done yet, bad ones with an error.

        Raises EngineError if the engine breaks, ResourceError if an answer cannot be written: the
        lines that are open then are not done.
        """
        for line in lines:
            if line.number in self._output.done:
                continue
            self._begin(line)
            while len(self._open) >= self._max_open:
                self._step()
        while self._open:
            self._step()

    def _begin(self, line: InputLine) -> None:
        """Gives a line's requests to the engine, or writes why that cannot be."""
        request_id = uuid.uuid4().hex
        if line.data is None:
            error = RequestError("the line is too long", code="line_too_long")
            self._write_bad_line(line, None, error)
            return
        try:
            request = parse_line(line.data)
        except RequestError as error:
            self._write_bad_line(line, find_custom_id(line.data), error)
            return
        try:
            answer = self._api.read_body(request, request_id)
        except Exception as error:
            if not isinstance(error, JaxserveError):
                logger.exception("line %d could not be read", line.number)
            self._write_failure(line, request.custom_id, request_id, error)
            return
        opened = _OpenLine(
            line=line,
            custom_id=request.custom_id,
            request_id=request_id,
            answer=answer,
            left=set(),
        )
        self._submit(opened)

    def _submit(self, opened: _OpenLine) -> None:
        for index, request in enumerate(opened.answer.requests):
            try:
                self._engine.add(request)
            except JaxserveError as error:
                self._fail(opened, error)
                return
            opened.left.add(request.request_id)
            self._open[request.request_id] = (opened, index)

    def _step(self) -> None:
        """One step of the engine; lines whose last request ends in it are written."""
        outputs = self._engine.step()
        if self._engine.broken is not None:
            raise EngineError(self._engine.broken)
        for output in outputs:
            if output.request_id in self._open:
                self._take(output)
        self._progress.made(sum(len(output.token_ids) for output in outputs))

    def _take(self, output: TokenOutput) -> None:
        opened, index = self._open[output.request_id]
        if output.finish_reason is FinishReason.ERROR:
            self._fail(opened, EngineError(output.error or "the engine failed"))
            return
        if not opened.answer.read(index, output):
            return
        if output.finish_reason is None:  # a stop string ended it, which the engine cannot know
            self._engine.abort(output.request_id, FinishReason.STOP)
        del self._open[output.request_id]
        opened.left.remove(output.request_id)
        if not opened.left:
            self._write_answer(opened)

    def _fail(self, opened: _OpenLine, error: Exception) -> None:
        """Ends a whole line, what else it has in the engine too."""
        for request_id in opened.left:
            self._engine.abort(request_id)
            del self._open[request_id]
        self._write_failure(opened.line, opened.custom_id, opened.request_id, error)

    def _write_answer(self, opened: _OpenLine) -> None:
        self._write(
            opened.line, opened.custom_id, opened.request_id, 200, opened.answer.whole(), None
        )

    def _write_failure(
        self, line: InputLine, custom_id: str | None, request_id: str, failure: Exception
    ) -> None:
        """A request that an HTTP server would have answered with an error status."""
        status, body = self._api.describe(failure)
        error = {key: body["error"][key] for key in ("code", "message")}
        self._write(line, custom_id, request_id, status, body, error)

    def _write(
        self,
        line: InputLine,
        custom_id: str | None,
        request_id: str,
        status: int,
        body: dict[str, Any],
        error: dict[str, Any] | None,
    ) -> None:
        response = {"status_code": status, "request_id": request_id, "body": body}
        self._output.write(line, custom_id=custom_id, response=response, error=error)
        self._progress.finished(failed=error is not None)

    def _write_bad_line(
        self, line: InputLine, custom_id: str | None, failure: RequestError
    ) -> None:
        """A line that is no request at all has no response."""
        error = {
            "code": failure.code or "invalid_value",
            "message": f"line {line.number}: {failure}",
        }
        self._output.write(line, custom_id=custom_id, response=None, error=error)
        self._progress.finished(failed=True)
