"""gunicorn's gevent worker and its log: JSON for what is no HTTP, quiet about what needs no words."""

from __future__ import annotations

import contextlib
import socket
from typing import Any

import gevent
import msgspec
from gunicorn.glogging import Logger
from gunicorn.http.errors import (
    ConfigurationProblem,
    ExpectationFailed,
    InvalidResponseHeader,
    InvalidResponseHeaderName,
    LimitRequestHeaders,
    LimitRequestLine,
    ParseException,
    UnsupportedTransferCoding,
)
from gunicorn.workers.ggevent import GeventWorker

from server.children import USER_ERROR_EXIT

#: Statuses of what gunicorn's parser refuses, where they are not 400.
_STATUSES: dict[type[Exception], int] = {
    LimitRequestLine: 414,
    ExpectationFailed: 417,
    LimitRequestHeaders: 431,
    UnsupportedTransferCoding: 501,
}
_MAX_WORDS = 200
#: How long, and for how many reads, a client that was refused may go on sending.
_LINGER_SECONDS = 1.0
_LINGER_PIECES = 32
#: Raised by the parser's classes, too, but not about a request.
_OURS = (ConfigurationProblem, InvalidResponseHeader, InvalidResponseHeaderName)


class FrontWorker(GeventWorker):  # type: ignore[misc]
    """`server.disconnect` gives streams a send timeout; a reader that stalls is simply dropped."""

    def handle_request(self, listener_name: Any, req: Any, sock: Any, addr: Any) -> Any:
        """Serves one request. Raises StopIteration, as gunicorn's loop expects, to close."""
        try:
            return super().handle_request(listener_name, req, sock, addr)
        except TimeoutError:
            self.log.debug("a client stopped reading; its connection is closed")
            raise StopIteration from None

    def handle_error(self, req: Any, client: Any, addr: Any, exc: Any) -> None:
        """Answers what is no HTTP, before any route; gunicorn's own answers are pages of HTML."""
        # Not at the top: gunicorn's master reads this module, before gevent's patches.
        from werkzeug.exceptions import default_exceptions

        from server.errors import error_body

        if not isinstance(exc, ParseException) or isinstance(exc, _OURS):
            super().handle_error(req, client, addr, exc)
            return
        self.log.debug("a request was refused: %s", exc)
        status = _STATUSES.get(type(exc), 400)
        refusal = default_exceptions[status](str(exc)[:_MAX_WORDS])
        body = msgspec.json.encode(error_body(refusal))
        head = (
            f"HTTP/1.1 {status} {refusal.name}\r\nConnection: close\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        with contextlib.suppress(OSError), gevent.Timeout(_LINGER_SECONDS, False):
            client.sendall(head.encode() + body)
            client.shutdown(socket.SHUT_WR)
            # Closed with bytes unread, the connection is reset, often before the answer is read.
            for _ in range(_LINGER_PIECES):
                if not client.recv(65536):
                    break


class FrontLogger(Logger):  # type: ignore[misc]
    """A worker that cannot start has said why in one line; gunicorn adds nothing to it."""

    _explained = False

    def error(self, msg: str, *args: Any, **options: Any) -> None:
        """Logs an error, unless it only reports the end of such a worker."""
        if msg.startswith("Worker (pid") and args[1:] == (USER_ERROR_EXIT,):
            self._explained = True
        if not self._explained:
            super().error(msg, *args, **options)
