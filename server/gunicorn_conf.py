"""gunicorn's settings for the front-end workers; each was measured under thousands of streams."""

from __future__ import annotations

import os
import signal
from typing import Any

from server.children import die_with_parent
from server.drain import follow_worker
from server.settings import FrontSettings
from server.usage.meter import EXTENSION as METER

_settings = FrontSettings.from_environment()

bind = f"fd://{_settings.listen_fd}"
workers = _settings.server.workers
worker_class = "server.gunicorn_worker.FrontWorker"
logger_class = "server.gunicorn_worker.FrontLogger"
worker_connections = 8000  # open connections per worker; one more would wait
backlog = 4096
keepalive = 5  # seconds; an idle connection delays the end of a drain by as much
timeout = 60  # a worker whose loop stands still for so long is replaced
# The drain ends streams that are still open at its deadline; this only has to come later.
graceful_timeout = int(_settings.server.drain_seconds) + 3
preload_app = False  # the ZeroMQ context and gevent's patches belong into the worker
forwarder_headers = ""  # no header moves the application to another path, whoever sends it
control_socket_disable = True  # gunicorn would write a socket into the home folder
worker_tmp_dir = "/dev/shm" if os.path.isdir("/dev/shm") else None
loglevel = "debug" if _settings.server.log_level == "debug" else "warning"
proc_name = "jaxserve-front"


def post_fork(arbiter: Any, worker: Any) -> None:
    """A worker does not outlive gunicorn's master."""
    die_with_parent(signal.SIGKILL)


def post_worker_init(worker: Any) -> None:
    """The application hears of SIGTERM through the worker."""
    follow_worker(worker)


def worker_exit(arbiter: Any, worker: Any) -> None:
    """What the worker has measured last is written down; one that never began has nothing."""
    app = getattr(worker, "wsgi", None)
    if app is not None:
        app.extensions[METER].write_last()


def child_exit(arbiter: Any, worker: Any) -> None:
    """A dead worker is not ready."""
    _settings.ready_file(worker.pid).unlink(missing_ok=True)
