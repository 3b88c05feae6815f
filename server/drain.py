"""Shutting down without cutting anybody off: refuse what is new, let open answers finish.

SIGTERM makes gunicorn's worker stop accepting; `Drain` tells the routes, and ends what is still
open at the deadline with an error event.
"""

from __future__ import annotations

from typing import Any

import gevent

from jaxserve.client import EngineClient

EXTENSION = "jaxserve.drain"
SHUTTING_DOWN = "the server is shutting down"


class Drain:
    """Whether this worker is shutting down. seconds: how long open answers may take to finish."""

    def __init__(self, client: EngineClient, seconds: float) -> None:
        self.started = False
        self._client = client
        self._seconds = seconds

    def run(self) -> None:
        """From now on nothing new is taken; returns when the deadline has passed."""
        self.started = True
        gevent.sleep(self._seconds)
        self._client.fail_all(SHUTTING_DOWN)


def follow_worker(worker: Any) -> None:
    """Starts the application's drain when gunicorn tells `worker` to end."""
    drain: Drain = worker.wsgi.extensions[EXTENSION]

    def wait() -> None:
        while worker.alive:
            gevent.sleep(0.05)
        drain.run()

    gevent.spawn(wait)
