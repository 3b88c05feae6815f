"""The parent's ear at the engine: notices an engine that lives but no longer works.

The engine sends a beat every second from a thread of its own. Silence means that the process stands
still; a beat that says `not ready` after it was ready, that its step loop does. Imports neither
gevent nor jax. Ends nothing itself.
"""

from __future__ import annotations

import contextlib
import os
import time

import zmq

from jaxserve.messages import BEAT_SECONDS, Beat, Goodbye, Hello, decode_from_engine, encode

#: Silence after which an engine that was ready is stuck. Workers give up sooner (their clients want
#: an answer); ending a process needs more certainty.
STUCK_AFTER_SECONDS = 8.0
#: Longest time between two looks that counts: if this process itself stood still, nobody was silent.
_LONGEST_LOOK = 0.5
#: Seconds until an engine that was not there is greeted again.
_GREET_AGAIN = 0.1


class EngineWatch:
    """Listens to one engine address, whichever process answers there."""

    def __init__(self, address: str, *, stuck_after: float = STUCK_AFTER_SECONDS) -> None:
        self._stuck_after = stuck_after
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IDENTITY, f"parent-{os.getpid()}".encode())
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.IMMEDIATE, 1)
        self._socket.connect(address)
        self._next_hello = 0.0
        self._looked = time.monotonic()
        self.forget()

    def forget(self) -> None:
        """A new engine process: what the last one said no longer counts."""
        self._was_ready = False
        self._silence = 0.0
        self._idle_loop = False

    def look(self) -> str | None:
        """Reads what came. Why the engine counts as stuck, None while it does not."""
        now = time.monotonic()
        self._silence += min(now - self._looked, _LONGEST_LOOK)
        self._looked = now
        if now >= self._next_hello:
            try:
                self._socket.send(encode(Hello(os.getpid())), zmq.NOBLOCK)
                self._next_hello = now + BEAT_SECONDS
            except zmq.Again:
                # Nobody is there to greet yet; an engine is to be watched from its first moment.
                self._next_hello = now + _GREET_AGAIN
        self._read()
        if not self._was_ready:
            return None
        if self._idle_loop:
            return "its step loop stands still"
        if self._silence >= self._stuck_after:
            return f"it gave no sign of life for {self._stuck_after:g} seconds"
        return None

    def close(self) -> None:
        """Says goodbye."""
        with contextlib.suppress(zmq.Again):
            self._socket.send(encode(Goodbye()), zmq.NOBLOCK)
        self._context.destroy(linger=0)

    def _read(self) -> None:
        while True:
            try:
                message = decode_from_engine(self._socket.recv(zmq.NOBLOCK))
            except zmq.Again:
                return
            self._silence = 0.0
            if isinstance(message, Beat):
                self._idle_loop = self._was_ready and not message.ready
                self._was_ready = self._was_ready or message.ready
