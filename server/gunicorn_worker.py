"""gunicorn's gevent worker and its log, quiet about what needs no words."""

from __future__ import annotations

from typing import Any

from gunicorn.glogging import Logger
from gunicorn.workers.ggevent import GeventWorker

from server.children import USER_ERROR_EXIT


class FrontWorker(GeventWorker):  # type: ignore[misc]
    """`server.disconnect` gives streams a send timeout; a reader that stalls is simply dropped."""

    def handle_request(self, listener_name: Any, req: Any, sock: Any, addr: Any) -> Any:
        """Serves one request. Raises StopIteration, as gunicorn's loop expects, to close."""
        try:
            return super().handle_request(listener_name, req, sock, addr)
        except TimeoutError:
            self.log.debug("a client stopped reading; its connection is closed")
            raise StopIteration from None


class FrontLogger(Logger):  # type: ignore[misc]
    """A worker that cannot start has said why in one line; gunicorn adds nothing to it."""

    _explained = False

    def error(self, msg: str, *args: Any, **options: Any) -> None:
        """Logs an error, unless it only reports the end of such a worker."""
        if msg.startswith("Worker (pid") and args[1:] == (USER_ERROR_EXIT,):
            self._explained = True
        if not self._explained:
            super().error(msg, *args, **options)
