"""Answers batches, in one of the front-end workers, until none is left; goes on after a restart.

Which worker does it is settled by a lock on a file, which the kernel frees when its holder dies,
whatever the clock says. Servers with different models may share a data folder: each does the
batches that were handed in for its own. A disk that is full stops the work, not the answers: those
that wait are written once there is room.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import time
from collections.abc import Iterator
from typing import IO, Any

import flask
import gevent
from gevent.pool import Pool

from jaxserve.errors import ResourceError, StorageError
from jaxserve.offline.batch_input import InputLine, open_input, read_lines
from server.batches.batches import BatchStore, LineAnswer, Outcome
from server.batches.files import FileStore
from server.batches.line import answer_line, failed_line
from server.batches.results import ResultFiles
from server.batches.validate import check_file
from server.services import Services

logger = logging.getLogger("jaxserve.server")

EXTENSION = "jaxserve.batches"
#: Lines that are being answered at a time.
MAX_LINES_OPEN = 64
#: Bytes of a line around its body.
ENVELOPE_BYTES = 65536
_POLL_SECONDS = 0.5
_TROUBLE_SECONDS = 5.0
_SWEEP_SECONDS = 600.0
_LONGEST_PAUSE = 5.0
#: Statuses that say nothing about a line: too much at once, no engine, no room on the disk.
_PASSING = (429, 500, 503, 507)
#: Attempts at a line whose answer is a failure of the server's.
_ATTEMPTS = 3
Json = dict[str, Any]


class BatchWorker:
    """One per process; `start` makes it look for work."""

    def __init__(
        self, app: flask.Flask, services: Services, batches: BatchStore, files: FileStore
    ) -> None:
        self._app = app
        self._services = services
        self._batches = batches
        self._files = files
        self._results = ResultFiles(services.storage, files)
        self._lock: IO[bytes] | None = None
        self._next_sweep = 0.0

    def start(self) -> None:
        """Looks for work from now on, in a greenlet."""
        gevent.spawn(self._run)

    def _run(self) -> None:
        while not self._services.drain.started:
            pause = _POLL_SECONDS
            try:
                if self._may_work():
                    pause = 0.0 if self._work() else _POLL_SECONDS
            except Exception:
                logger.exception("a batch met trouble; it is tried again")
                pause = _TROUBLE_SECONDS
            gevent.sleep(pause)

    def _may_work(self) -> bool:
        """Whether there is something kept, an engine to ask, and nobody else at it."""
        if not self._services.storage.exists or self._services.not_ready_reason() is not None:
            return False
        if self._lock is None:
            name = hashlib.blake2b(self._services.served_name().encode(), digest_size=8).hexdigest()
            file = (self._services.storage.folder / f"batches-{name}.lock").open("ab")
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                file.close()
                return False
            self._lock = file
        return True

    def _work(self) -> bool:
        """Does one batch; False if there is none."""
        if time.monotonic() >= self._next_sweep:
            self._next_sweep = time.monotonic() + _SWEEP_SECONDS
            self._files.sweep()
            self._batches.sweep()
        found = self._batches.next(self._services.served_name())
        if found is None:
            return False
        batch, tenant = found
        if batch["status"] == "validating":
            batch = self._validate(batch)
        if batch["status"] in ("in_progress", "cancelling"):
            batch = self._answer_lines(batch, tenant)
        if batch["status"] in ("finalizing", "cancelling"):
            self._results.finish(batch, tenant)
        return True

    def _validate(self, batch: Json) -> Json:
        path = self._files.path(batch["input_file_id"])
        max_line = self._max_line()
        try:
            total, errors = self._services.storage.run_beside(
                lambda: check_file(path, batch["endpoint"], max_line)
            )
        except ResourceError as error:
            logger.error("%s: %s", batch["id"], error)
            total, errors = 0, [{"code": "file_unreadable", "message": "the file cannot be read"}]
        if errors:
            found = {"object": "list", "data": errors}
            return self._batches.move(batch["id"], "failed", errors=found)
        counts = {"total": total, "completed": 0, "failed": 0}
        return self._batches.move(batch["id"], "in_progress", request_counts=counts)

    def _answer_lines(self, batch: Json, tenant: str) -> Json:
        """Answers what has no answer yet. Returns the batch as it is then."""
        run = _Run(self, batch, tenant)
        with open_input(self._files.path(batch["input_file_id"])) as file:
            run.answer(read_lines(file, self._max_line()))
        if run.interrupted:
            return {**batch, "status": "in_progress"}
        if run.status == "cancelling":
            return {**batch, "status": "cancelling"}
        return self._batches.move(batch["id"], "finalizing")

    def _max_line(self) -> int:
        return self._services.config.max_body_bytes + ENVELOPE_BYTES

    def line(self, line: InputLine, tenant: str) -> LineAnswer | None:
        """A line's answer, asked for until there is one; None when the server shuts down."""
        pause, attempts = 0.1, 0
        while not self._services.drain.started:
            status, answer = answer_line(self._app, line, tenant)
            attempts += status == 500
            if status not in _PASSING or attempts >= _ATTEMPTS:
                return answer
            gevent.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
        return None

    def keep(self, batch_id: str, answers: list[LineAnswer]) -> str | None:
        """Writes answers, however long the disk is full. None when the server shuts down."""
        while True:
            try:
                return self._batches.add(batch_id, answers)
            except StorageError as error:
                logger.error("%s waits: %s", batch_id, error)
            if self.stopping:
                return None
            gevent.sleep(_TROUBLE_SECONDS)

    @property
    def stopping(self) -> bool:
        """Whether the server shuts down: what is not answered is left for the next start."""
        return self._services.drain.started


class _Run:
    """One pass over the lines of a batch."""

    def __init__(self, worker: BatchWorker, batch: Json, tenant: str) -> None:
        self._worker = worker
        self._id: str = batch["id"]
        self._expires: int = batch["expires_at"]
        self._tenant = tenant
        self._waiting: list[LineAnswer] = []
        self._pool = Pool(MAX_LINES_OPEN)
        self.status: str = batch["status"]
        self.interrupted = False

    def answer(self, lines: Iterator[InputLine]) -> None:
        """Answers every line that has no answer; stops early when cancelled or shutting down."""
        done = self._worker._batches.done(self._id)
        last_kept = time.monotonic()
        try:
            for line in lines:
                if line.number in done:
                    continue
                if self.status != "in_progress" or self._worker.stopping:
                    break
                if time.time() >= self._expires:
                    words = "the batch's window was over before this line was begun"
                    late = failed_line(line, "batch_expired", words, Outcome.NOT_BEGUN)
                    self._waiting.append(late)
                else:
                    while not self._pool.wait_available(timeout=_POLL_SECONDS):
                        self._keep()
                    self._pool.spawn(self._one, line)
                if time.monotonic() - last_kept > _POLL_SECONDS:
                    self._keep()
                    last_kept = time.monotonic()
            while len(self._pool) and self.status == "in_progress" and not self._worker.stopping:
                self._pool.join(timeout=_POLL_SECONDS)
                self._keep()
        finally:
            self._pool.kill()  # cancelled or shutting down: the engine stops at once
            self._keep()
        self.interrupted = self._worker.stopping and self.status == "in_progress"

    def _one(self, line: InputLine) -> None:
        try:
            answer = self._worker.line(line, self._tenant)
        except Exception:
            logger.exception("line %d of %s could not be answered", line.number, self._id)
            answer = failed_line(line, "server_error", "internal error; the server's log says more")
        if answer is not None:
            self._waiting.append(answer)

    def _keep(self) -> None:
        """Writes what was answered, and hears whether the batch is still wanted."""
        answers, self._waiting = self._waiting, []
        status = self._worker.keep(self._id, answers)
        if status is not None:
            self.status = status
