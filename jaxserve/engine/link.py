"""The engine process's side of the line to the front-end workers.

A thread of its own owns the ROUTER socket, so beats go out while the engine loads, compiles or
sits in a long step. What workers send lands in `inbox`; what the engine thread sends goes through
an in-process socket pair. Knows messages, not requests.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import queue
import threading
import time
import uuid

import msgspec
import zmq

from jaxserve import messages
from jaxserve.messages import BEAT_SECONDS, WORKER_DEAD_AFTER_SECONDS

logger = logging.getLogger("jaxserve.engine")

#: A step loop that has not come round for this long counts as stuck.
STUCK_AFTER_SECONDS = 60.0
#: How often the link looks whether the engine has become ready.
_STARTING_MILLISECONDS = 20


@dataclasses.dataclass(frozen=True, slots=True)
class WorkerGone:
    """A worker said goodbye, fell silent or cannot be reached."""


@dataclasses.dataclass(frozen=True, slots=True)
class Compiled:
    """A request whose grammar was compiled, or could not be: it comes a second time."""

    submit: messages.Submit


Received = tuple[bytes, messages.FromWorker | WorkerGone | Compiled]


@dataclasses.dataclass(slots=True)
class EngineStatus:
    """What beats tell; written by the engine thread, read by the link's. `info` is None until ready."""

    info: messages.EngineInfo | None = None
    num_running: int = 0
    num_waiting: int = 0
    last_turn: float = 0.0

    @property
    def ready(self) -> bool:
        return self.info is not None and time.monotonic() - self.last_turn < STUCK_AFTER_SECONDS


class EngineLink:
    """Binds `address` and starts the thread. `send` may be called from one thread only."""

    def __init__(self, address: str) -> None:
        self.epoch = uuid.uuid4().hex
        self.status = EngineStatus()
        self.inbox: queue.SimpleQueue[Received] = queue.SimpleQueue()
        self._last_seen: dict[bytes, float] = {}
        self._context = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._router.setsockopt(zmq.LINGER, 500)
        self._router.setsockopt(zmq.SNDHWM, 0)
        self._router.setsockopt(zmq.RCVHWM, 0)
        self._router.bind(address)
        self._out = self._context.socket(zmq.PAIR)
        self._in = self._context.socket(zmq.PAIR)
        for socket in (self._out, self._in):
            socket.setsockopt(zmq.SNDHWM, 0)
            socket.setsockopt(zmq.RCVHWM, 0)
        self._in.bind("inproc://outgoing")
        self._out.connect("inproc://outgoing")
        self._thread = threading.Thread(target=self._run, name="engine-link", daemon=True)
        self._thread.start()

    def send(self, worker: bytes, message: messages.FromEngine) -> None:
        """Queues a message; a worker that is gone is reported through `inbox`."""
        self._out.send_multipart([worker, messages.encode(message)])

    def close(self) -> None:
        """Sends what is queued, then stops the thread."""
        self._out.send_multipart([b"", b""])
        self._thread.join(timeout=2.0)
        self._context.destroy(linger=500)

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._router, zmq.POLLIN)
        poller.register(self._in, zmq.POLLIN)
        next_beat, was_ready = 0.0, False
        while True:
            wait = max(0, int(1000 * (next_beat - time.monotonic())) + 1)
            # Workers hear at once that the engine is ready.
            events = dict(poller.poll(wait if was_ready else min(wait, _STARTING_MILLISECONDS)))
            if self._in in events and not self._forward():
                return
            if self._router in events:
                self._receive()
            became_ready, was_ready = self.status.ready and not was_ready, self.status.ready
            if became_ready or time.monotonic() >= next_beat:
                next_beat = time.monotonic() + BEAT_SECONDS
                self._beat_all()

    def _forward(self) -> bool:
        while True:
            try:
                worker, data = self._in.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return True
            if not worker:
                return False
            self._send_now(worker, data)

    def _receive(self) -> None:
        while True:
            try:
                worker, data = self._router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            except ValueError:
                continue  # not two frames: not one of ours
            self._handle(worker, data)

    def _handle(self, worker: bytes, data: bytes) -> None:
        try:
            message = messages.decode_from_worker(data)
        except msgspec.MsgspecError as error:
            logger.warning("dropped a message that is not ours: %s", error)
            return
        self._last_seen[worker] = time.monotonic()
        if isinstance(message, messages.Hello):
            self._send_now(worker, messages.encode(self._beat()))
        elif isinstance(message, messages.Goodbye):
            self._drop(worker)
        else:
            self.inbox.put((worker, message))

    def _beat(self) -> messages.Beat:
        status = self.status
        return messages.Beat(
            epoch=self.epoch,
            ready=status.ready,
            info=status.info,
            num_running=status.num_running,
            num_waiting=status.num_waiting,
        )

    def _beat_all(self) -> None:
        data = messages.encode(self._beat())
        silent_since = time.monotonic() - WORKER_DEAD_AFTER_SECONDS
        for worker, seen in list(self._last_seen.items()):
            if seen < silent_since:
                self._drop(worker)
            else:
                self._send_now(worker, data)

    def _send_now(self, worker: bytes, data: bytes) -> None:
        try:
            self._router.send_multipart([worker, data])
        except zmq.ZMQError:
            self._drop(worker)

    def _drop(self, worker: bytes) -> None:
        with contextlib.suppress(KeyError):
            del self._last_seen[worker]
            self.inbox.put((worker, WorkerGone()))
