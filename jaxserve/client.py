"""The front-end worker's end of the line to the engine (between steps 3 and 4, and 7 and 8).

One `EngineClient` per worker process: a DEALER socket read by one greenlet, a heartbeat sent by
another. A `Submission` is what one HTTP request has open in the engine; its outputs arrive in
one queue. Everything runs in one thread under gevent's loop. Knows neither HTTP nor text.
"""

from __future__ import annotations

import itertools
import os
import uuid
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import gevent
import zmq.green as zmq
from gevent.event import AsyncResult, Event
from gevent.queue import Empty, SimpleQueue
from zmq.utils.monitor import parse_monitor_message

from jaxserve.errors import (
    EngineError,
    EngineGoneError,
    RefusedError,
    RequestError,
)
from jaxserve.messages import (
    BEAT_SECONDS,
    DEAD_AFTER_SECONDS,
    Abort,
    Beat,
    EngineInfo,
    Goodbye,
    Hello,
    MetricsReply,
    MetricsRequest,
    Orphan,
    Orphans,
    Output,
    StepOutputs,
    Submit,
    decode_from_engine,
    encode,
)
from jaxserve.request import GenerationRequest

#: How long an engine may take to say that it took or refused a request.
ACCEPT_SECONDS = 30.0
#: What a last goodbye may take.
LINGER_MILLISECONDS = 200
#: How often in a beat the line is listened to.
_ROUNDS_PER_BEAT = 4
#: Messages that are read before other greenlets get their turn.
_READ_IN_A_ROW = 16


class HungUpError(Exception):
    """The HTTP client of a submission left; nobody reads an answer any more."""


class EndListener(Protocol):
    """Hears of the end of each request, also of one whose answer nobody wants any more."""

    def ended(self, index: int, output: Output | None) -> None:
        """The last word on request `index`; None when the engine is gone and will not say it."""
        ...


class Submission:
    """The generation requests of one HTTP request, numbered 0, 1, ... as they were given."""

    def __init__(self, send: Callable[[object], None], forget: Callable[[int], None]) -> None:
        self._send = send
        self._forget = forget
        self._open: dict[int, int] = {}  # rid -> index, while the engine works on it
        self._queue = SimpleQueue()
        self._early: list[tuple[int, Output]] = []

    def accept(self, timeout: float = ACCEPT_SECONDS) -> None:
        """Waits until the engine took every request.

        Raises RefusedError or RequestError if it refused one, EngineError, or HungUpError.
        """
        missing = set(self._open.values())
        while missing:
            for index, output in self._next(timeout):
                missing.discard(index)
                if output.refused is not None:
                    raise refusal(output)
                if output.error is not None:
                    raise failure(output)
                if output.token_ids or output.finish_reason is not None:
                    self._early.append((index, output))

    def get(self) -> list[tuple[int, Output]]:
        """Waits for outputs and returns all that are there, each with its request's number.

        Raises EngineError if a request failed or the engine is gone, HungUpError.
        """
        outputs, self._early = (self._early, []) if self._early else (self._next(None), self._early)
        for _, output in outputs:
            if output.error is not None:
                raise failure(output)
        return outputs

    def _next(self, timeout: float | None) -> list[tuple[int, Output]]:
        outputs: list[tuple[int, Output]] = []
        try:
            item = self._queue.get(timeout=timeout)
            while True:
                if isinstance(item, Exception):
                    raise item
                outputs.append(item)
                item = self._queue.get_nowait()
        except Empty:
            if not outputs:
                raise EngineGoneError("the engine did not answer in time; try again") from None
        return outputs

    def deliver(self, rid: int, output: Output) -> None:
        """Called by the reading greenlet."""
        index = self._open.get(rid)
        if index is None:
            return
        if output.finish_reason is not None or output.refused is not None:
            self._close_one(rid)
        self._queue.put((index, output))

    def fail(self, error: Exception) -> None:
        """The engine is gone: whoever waits gets `error`."""
        self._open.clear()
        self._queue.put(error)

    def hang_up(self) -> None:
        """The HTTP client left: whoever waits gets HungUpError, and the engine stops at once."""
        self.close()
        self._queue.put(HungUpError())

    def stop(self, index: int) -> None:
        """Request `index` met a stop string: the engine need not go on with it."""
        for rid in [rid for rid, at in self._open.items() if at == index]:
            self._close_one(rid)
            self._send(Abort([rid], "stop"))

    def close(self) -> None:
        """Aborts whatever is still open. May be called again."""
        rids = list(self._open)
        for rid in rids:
            self._close_one(rid)
        if rids:
            self._send(Abort(rids, "abort"))

    def track(self, rid: int) -> None:
        """Called by the client, once for each request in order."""
        self._open[rid] = len(self._open)

    def _close_one(self, rid: int) -> None:
        del self._open[rid]
        self._forget(rid)


def refusal(output: Output) -> RefusedError | RequestError:
    """The error for a request that the engine did not take."""
    text = output.error or f"the engine refused the request: {output.refused}"
    if 400 <= output.status < RefusedError.status:
        return RequestError(text, param=output.param, code=output.refused or None)
    error = RefusedError(text, reason=output.refused or "refused")
    error.status = output.status or RefusedError.status
    return error


def failure(output: Output) -> EngineError:
    """The error for a request that the engine took but could not finish."""
    text = output.error or "the engine ended the request"
    return EngineGoneError(text) if output.status == EngineGoneError.status else EngineError(text)


class EngineClient:
    """The line to one engine process; reconnects by itself when the engine is restarted.

    address: a ZeroMQ address, `ipc://...`. dead_after: seconds of silence after which the engine
    counts as gone; a closed connection is noticed at once.
    """

    def __init__(self, address: str, *, dead_after: float = DEAD_AFTER_SECONDS) -> None:
        self.num_running = 0
        self.num_waiting = 0
        self._info: EngineInfo | None = None
        self._epoch: str | None = None
        self._engine_ready = False
        self._silence = 0.0
        self._num_heard = 0
        self._dead_after = dead_after
        self._submissions: dict[int, Submission] = {}
        #: Told of the requests that another worker left behind when it died.
        self.on_orphans: Callable[[Sequence[Orphan]], None] | None = None
        self._listeners: dict[int, tuple[int, EndListener]] = {}
        self._metrics: dict[int, AsyncResult] = {}
        self._rids = itertools.count(1)
        self._heard_event, self._ready_event = Event(), Event()
        self._context = zmq.Context()
        self._socket = self._connect(address)
        self._greenlets = [gevent.spawn(work) for work in (self._read, self._beat, self._monitor)]

    def _connect(self, address: str) -> Any:
        socket = self._context.socket(zmq.DEALER)
        socket.identity = f"{os.getpid()}-{uuid.uuid4().hex[:8]}".encode()
        socket.linger = LINGER_MILLISECONDS
        socket.sndhwm = socket.rcvhwm = 0
        socket.immediate = 1  # never queue for an engine that is not there
        events = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
        self._events = socket.get_monitor_socket(events)
        socket.connect(address)
        return socket

    @property
    def info(self) -> EngineInfo | None:
        """What the engine told of itself when it was last ready."""
        return self._info

    @property
    def ready(self) -> bool:
        """Whether a request would be taken now."""
        return self.not_ready_reason() is None

    def not_ready_reason(self) -> str | None:
        """Why the engine cannot answer, in words; None if it can."""
        if self._epoch is None:
            return "the engine is not running; it is starting or being restarted"
        if self._silence >= self._dead_after:
            return f"the engine has not been heard of for {self._dead_after:g} seconds"
        if not self._engine_ready or self._info is None:
            return "the engine is loading the model"
        return None

    def wait_heard(self, timeout: float) -> bool:
        """Waits until the engine was heard of, whatever it said."""
        return bool(self._heard_event.wait(timeout))

    def wait_ready(self, timeout: float | None = None) -> bool:
        """Waits until the engine was ready once."""
        return bool(self._ready_event.wait(timeout))

    def submit(
        self, requests: Sequence[GenerationRequest], listener: EndListener | None = None
    ) -> Submission:
        """Sends `requests` to the engine. listener: hears of each one's end. EngineGoneError."""
        reason = self.not_ready_reason()
        if reason is not None or self._epoch is None:
            raise EngineGoneError(f"{reason}; try again in a moment")
        submission = Submission(self._send, self._forget)
        for index, request in enumerate(requests):
            rid = next(self._rids)
            if listener is not None:
                self._listeners[rid] = index, listener
            submission.track(rid)
            self._submissions[rid] = submission
            self._send(Submit(rid, self._epoch, request))
        return submission

    def metrics(self, timeout: float = 2.0) -> str:
        """The engine's metrics in Prometheus' text format. Raises EngineGoneError."""
        if self._epoch is None:
            raise EngineGoneError("the engine is not running")
        rid = next(self._rids)
        self._metrics[rid] = answer = AsyncResult()
        try:
            self._send(MetricsRequest(rid))
            return str(answer.get(timeout=timeout))
        except gevent.Timeout as error:
            raise EngineGoneError("the engine did not send its metrics in time") from error
        finally:
            self._metrics.pop(rid, None)

    def fail_all(self, reason: str) -> None:
        """Ends every open submission with EngineGoneError(reason), telling the engine."""
        submissions = set(self._submissions.values())
        for submission in submissions:
            submission.close()
            submission.fail(EngineGoneError(reason))

    def close(self) -> None:
        """Says goodbye; the engine aborts what is still open."""
        self._send(Goodbye())
        gevent.killall(self._greenlets)
        self._socket.disable_monitor()
        self._events.close(0)
        self._context.destroy(LINGER_MILLISECONDS)

    def _send(self, message: object) -> None:
        try:
            self._socket.send(encode(message), zmq.NOBLOCK)
        except zmq.Again:  # no engine there: `_monitor` or `_beat` ends what is open
            return

    def _forget(self, rid: int) -> None:
        self._submissions.pop(rid, None)

    def _tell(self, rid: int, output: Output | None) -> None:
        index, listener = self._listeners.pop(rid, (0, None))
        if listener is not None:
            listener.ended(index, output)

    def _read(self) -> None:
        for number in itertools.count(1):
            if number % _READ_IN_A_ROW == 0:
                gevent.sleep(0)  # receiving does not wait while messages are there
            message = decode_from_engine(self._socket.recv())
            self._num_heard += 1
            self._silence = 0.0
            if isinstance(message, StepOutputs):
                for output in message.outputs:
                    submission = self._submissions.get(output.rid)
                    if submission is not None:
                        submission.deliver(output.rid, output)
                    if output.finish_reason is not None or output.refused is not None:
                        self._tell(output.rid, output)
            elif isinstance(message, MetricsReply):
                if message.rid in self._metrics:
                    self._metrics[message.rid].set(message.text)
            elif isinstance(message, Orphans):
                if self.on_orphans is not None:
                    self.on_orphans(message.orphans)
            else:
                self._heard(message)

    def _heard(self, beat: Beat) -> None:
        if beat.epoch != self._epoch:
            self._lost("the engine was restarted")
            self._epoch = beat.epoch
        if self._engine_ready and not beat.ready:
            self.fail_all("the engine's step loop stands still")
        self._engine_ready = beat.ready
        self.num_running, self.num_waiting = beat.num_running, beat.num_waiting
        if beat.info is not None:
            self._info = beat.info
        self._heard_event.set()
        if self.ready:
            self._ready_event.set()

    def _lost(self, reason: str) -> None:
        """The engine that knew our requests is no more."""
        self._epoch = None
        lost, self._submissions = set(self._submissions.values()), {}
        for submission in lost:
            submission.fail(EngineGoneError(reason))
        for rid in list(self._listeners):
            self._tell(rid, None)
        for answer in self._metrics.values():
            answer.set_exception(EngineGoneError(reason))

    def _beat(self) -> None:
        """Greets the engine each beat, and listens for its silence in rounds of this loop.

        A round is one turn of the event loop, in which `_read` was given whatever had come. When
        thousands of requests arrive at once turns are long: the clock alone would take our own
        slowness for the engine's.
        """
        for number in itertools.count():
            if number % _ROUNDS_PER_BEAT == 0:
                self._send(Hello(os.getpid()))
            heard = self._num_heard
            gevent.sleep(BEAT_SECONDS / _ROUNDS_PER_BEAT)
            if self._num_heard == heard:
                self._silence += BEAT_SECONDS / _ROUNDS_PER_BEAT
            if self._epoch is not None and self._silence >= self._dead_after:
                self._lost("the engine stopped answering")

    def _monitor(self) -> None:
        """Notices at once when the engine's end of the connection opens or closes."""
        while True:
            event = parse_monitor_message(self._events.recv_multipart())["event"]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._send(Hello(os.getpid()))
            elif event == zmq.EVENT_DISCONNECTED and self._epoch is not None:
                self._lost("the engine died")
