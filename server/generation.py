"""One HTTP request's answers at work, whichever route asked for them (steps 3 to 9).

Whatever happens to the request, `close` runs and leaves nothing at work in the engine.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import time
from collections.abc import Callable, Iterator
from typing import Self

import flask

from jaxserve.client import HungUpError
from jaxserve.errors import EngineError
from jaxserve.request import RequestOutput
from jaxserve.routing.requests import MAX_PRIORITY, Ask, make_generation_requests
from server import sse
from server.answers import AnswerReader, join, read_answers
from server.disconnect import ConnectionWatch
from server.errors import error_body
from server.services import Services
from server.tenant import BACKGROUND_PRIORITY, is_background
from server.usage.meter import current_measured

logger = logging.getLogger("jaxserve.server")


def error_event(error: Exception) -> bytes:
    """How a stream of chunks ends that cannot go on."""
    return sse.event(error_body(error))


class Generation:
    """Submits `ask` and waits until the engine took it, so that a refusal still has its status.

    Raises RequestError, RefusedError, EngineError, or HungUpError.
    """

    def __init__(self, services: Services, ask: Ask) -> None:
        client, info = services.engine()
        if is_background():
            later = min(ask.priority + BACKGROUND_PRIORITY, MAX_PRIORITY)
            ask = dataclasses.replace(ask, priority=max(ask.priority, later))
        requests = make_generation_requests(ask, info)
        self.readers = [
            AnswerReader(services.tokenizer, request, shown=ask.shown_ids) for request in requests
        ]
        self.n = ask.n
        self._submission = services.meter.submit(
            client, requests, answers_per_prompt=ask.n, max_tokens=ask.sampling.max_tokens
        )
        self._measured = current_measured()
        self._watch = ConnectionWatch(flask.request.environ, self._submission.hang_up)
        try:
            self._submission.accept()
            self._measured.accepted = time.monotonic()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def pieces(self) -> Iterator[tuple[int, RequestOutput]]:
        """Pieces of all answers with their numbers, as they come."""
        measured = self._measured
        for indexed_piece in read_answers(self._submission, self.readers):
            measured.num_pieces += 1
            if not measured.first_piece:
                measured.first_piece = time.monotonic()
            yield indexed_piece
        measured.last_piece = time.monotonic()
        measured.release()

    def whole(self) -> list[RequestOutput]:
        """All answers, complete; nothing stays at work."""
        with self:
            answers: dict[int, RequestOutput] = {}
            for index, piece in self.pieces():
                answers[index] = join(answers[index], piece) if index in answers else piece
        return [answers[index] for index in range(len(self.readers))]

    def stream(
        self,
        events: Iterator[bytes],
        *,
        done: bytes = sse.DONE,
        failed: Callable[[Exception], bytes] = error_event,
    ) -> flask.Response:
        """The response that sends `events`, which are made from `pieces`, and then `done`.

        An engine that fails meanwhile ends it with the event that `failed` makes, without `done`.
        """
        self._watch.limit_slow_reader()
        response = sse.event_stream(self._guard(events, done, failed))
        response.call_on_close(self.close)
        return response

    def _guard(
        self, events: Iterator[bytes], done: bytes, failed: Callable[[Exception], bytes]
    ) -> Iterator[bytes]:
        measured, size = self._measured, 0
        try:
            for number, event in enumerate(itertools.chain(events, [done] if done else []), 1):
                yield event
                size += len(event)
                if number == 1:
                    measured.first_written = time.monotonic()
                measured.num_events, measured.num_bytes = number, size
        except HungUpError:
            return
        except Exception as error:
            if not isinstance(error, EngineError):
                logger.exception("a stream failed")
            yield failed(error)
        finally:
            measured.last_written = time.monotonic()
            self.close()

    def close(self) -> None:
        """Aborts what is still at work. May be called again."""
        self._watch.stop()
        self._submission.close()
