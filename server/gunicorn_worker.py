"""gunicorn's gevent worker, quiet about clients that stop reading."""

from __future__ import annotations

from typing import Any

from gunicorn.workers.ggevent import GeventWorker


class FrontWorker(GeventWorker):  # type: ignore[misc]
    """`server.disconnect` gives streams a send timeout; a reader that stalls is simply dropped."""

    def handle_request(self, listener_name: Any, req: Any, sock: Any, addr: Any) -> Any:
        """Serves one request. Raises StopIteration, as gunicorn's loop expects, to close."""
        try:
            return super().handle_request(listener_name, req, sock, addr)
        except TimeoutError:
            self.log.debug("a client stopped reading; its connection is closed")
            raise StopIteration from None
