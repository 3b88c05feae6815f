"""Notices that a client left while its request is being worked on, without writing to it.

gunicorn passes the connection in the WSGI environment; a read watcher of gevent's loop costs
nothing while the client is silent and fires when it closes or resets the connection.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from typing import Any

import gevent

#: Kernel memory that one stalled reader may hold, in bytes.
SEND_BUFFER = 128 * 1024
#: Seconds after which a reader that takes nothing is dropped.
SEND_TIMEOUT = 5.0
_READ = 1


class ConnectionWatch:
    """Calls `on_leave` once if the client goes away before `stop`."""

    def __init__(self, environ: Mapping[str, Any], on_leave: Callable[[], None]) -> None:
        self._connection = environ.get("gunicorn.socket")
        self._on_leave = on_leave
        self._watcher: Any = None
        self._timeout: float | None = None
        if self._connection is not None:
            hub = gevent.get_hub()
            self._watcher = hub.loop.io(self._connection.fileno(), _READ)
            self._watcher.start(self._readable)

    def limit_slow_reader(self) -> None:
        """For streams: bounds what a client that reads slowly or not at all can hold up."""
        if self._connection is not None:
            self._connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
            self._timeout = self._connection.gettimeout()
            self._connection.settimeout(SEND_TIMEOUT)

    def stop(self) -> None:
        """Ends the watch and its limits. May be called again."""
        watcher, self._watcher = self._watcher, None
        if watcher is not None:
            watcher.stop()
            watcher.close()
        if self._connection is not None and self._connection.fileno() >= 0:
            self._connection.settimeout(self._timeout)
        self._connection = None

    def _readable(self) -> None:
        # gevent's own recv would wait; the plain socket underneath does not.
        plain: Any = getattr(self._connection, "_sock", self._connection)
        try:
            if plain.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT):
                self._watcher.stop()  # a pipelined request, which is not ours to read
                return
        except BlockingIOError:
            return
        except OSError:
            pass
        self._watcher.stop()
        self._on_leave()
