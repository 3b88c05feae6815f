"""One TCP connection between two processes of an engine, watched by a thread of its own.

A connection's life is a membership's life: it is never made again, so its end means that the other
process is gone. Sends beats, takes what arrives, and notices an end that is closed or silent. Knows
how messages are framed, not what they mean.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec

from jaxserve.engine.hosts.messages import Beat, encode

BEAT_SECONDS = 1.0
#: Silence after which the other process counts as gone.
DEAD_AFTER_SECONDS = 10.0
#: How long `close` waits for the other end to close, too.
CLOSE_SECONDS = 2.0
#: The largest frame before `trust`, in bytes.
STRANGER_LIMIT = 2**20
TRUSTED_LIMIT = 2**30

_LENGTH = struct.Struct("<I")
_CHUNK = 2**20

OnMessage = Callable[["Line", Any], None]
OnLost = Callable[["Line", str], None]


class LineLostError(Exception):
    """The other end is closed, silent, or not one of ours; the text says which."""


def frame(message: Any) -> bytes:
    """A message as it goes over the wire; one for several lines is made once."""
    data = encode(message)
    return _LENGTH.pack(len(data)) + data


class Line:
    """Messages over one connected socket. Any thread may send.

    on_message and on_lost run in the line's thread; on_lost at most once, and not after `close`.
    """

    def __init__(
        self,
        connection: socket.socket,
        decode: Callable[[bytes], Any],
        on_message: OnMessage,
        on_lost: OnLost,
    ) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setblocking(True)
        self.peer = connection.getpeername()[0]
        self._socket = connection
        self._decode = decode
        self._on_message = on_message
        self._on_lost = on_lost
        self._limit = STRANGER_LIMIT
        self._sending = threading.Lock()
        self._closed = threading.Event()
        self._heard = time.monotonic()
        self._buffer = bytearray()
        self._thread = threading.Thread(target=self._run, name=f"line-{self.peer}", daemon=True)
        self._thread.start()

    def trust(self) -> None:
        """The other end is one of ours: it may send long messages."""
        self._limit = TRUSTED_LIMIT

    def send(self, data: bytes) -> None:
        """Sends a `frame`. Waits while the connection is full; OSError once it is lost or closed."""
        with self._sending:
            self._socket.sendall(data)

    def try_send(self, message: Any) -> None:
        """Never waits: does nothing where something else is being sent or nothing can be."""
        data = frame(message)
        if not self._sending.acquire(blocking=False):
            return
        try:
            with contextlib.suppress(OSError):
                sent = self._socket.send(data, socket.MSG_DONTWAIT)
                if sent < len(data):  # a frame is never left half sent
                    self._socket.sendall(data[sent:])
        finally:
            self._sending.release()

    def close(self) -> None:
        """Ends the connection; what was sent before still arrives, what comes now is left aside."""
        self._closed.set()
        with contextlib.suppress(OSError):
            # Only our direction: closing with something unread would take back what was sent.
            self._socket.shutdown(socket.SHUT_WR)
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=CLOSE_SECONDS)
        self._socket.close()

    def _hang_up(self) -> None:
        with contextlib.suppress(OSError):  # wakes whoever waits in sendall or poll
            self._socket.shutdown(socket.SHUT_RDWR)

    def _run(self) -> None:
        try:
            self._watch()
        except LineLostError as error:
            reason = str(error)
        except OSError as error:
            reason = f"cannot be reached any more ({error.strerror or error})"
        if not self._closed.is_set():
            self._hang_up()
            self._on_lost(self, reason)

    def _watch(self) -> None:
        poller = select.poll()
        poller.register(self._socket, select.POLLIN)
        next_beat = 0.0
        while True:
            now = time.monotonic()
            if now >= next_beat:
                next_beat = now + BEAT_SECONDS
                self.try_send(Beat())
            if poller.poll(1000 * max(0.0, next_beat - time.monotonic())):
                self._receive()
            elif time.monotonic() - self._heard > DEAD_AFTER_SECONDS:
                raise LineLostError(f"has been silent for {DEAD_AFTER_SECONDS:g} seconds")

    def _receive(self) -> None:
        received = self._socket.recv(_CHUNK)
        if not received:
            raise LineLostError("closed its connection")
        self._heard = time.monotonic()
        self._buffer += received
        while len(self._buffer) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer)
            if length > self._limit:
                raise LineLostError(f"sent a message of {length} bytes, which none of ours has")
            end = _LENGTH.size + length
            if len(self._buffer) < end:
                return
            data = bytes(memoryview(self._buffer)[_LENGTH.size : end])
            del self._buffer[:end]
            try:
                message = self._decode(data)
            except msgspec.MsgspecError as error:
                raise LineLostError(f"sent a message that is not ours ({error})") from None
            if not isinstance(message, Beat) and not self._closed.is_set():
                self._on_message(self, message)
