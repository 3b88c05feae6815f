"""The ledger: a row for every request, and the traces of the last ones, in one SQLite file.

Requests only leave their row here; a thread writes what has come together, for all workers into the
same file. A disk that is full costs no request anything: the log says so, rows wait for room, and
those that are too many are counted as lost. A worker that is killed takes with it what it has not
written yet, a fifth of a second's at most.
"""

from __future__ import annotations

import collections
import dataclasses
import logging
import pathlib
import sqlite3
import time
from collections.abc import Callable
from typing import TypeVar

import gevent
from gevent.threadpool import ThreadPool

from server.database import open_shared
from server.usage.ledger_file import FILE, SCHEMA

logger = logging.getLogger("jaxserve.server")

#: Rows that wait for a disk; older ones are lost then.
MAX_WAITING = 10_000
_WRITE_SECONDS = 0.2
_TROUBLE_SECONDS = 5.0
_BUSY_SECONDS = 10.0

Result = TypeVar("Result")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class UsageRow:
    """One HTTP request. ended: Unix time; day: of UTC. Seconds and tokens of all its answers."""

    ended: float
    day: str
    request_id: str
    tenant: str
    model: str
    route: str
    answers: int
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    queue_seconds: float
    device_seconds: float
    finish_reason: str
    price: float


@dataclasses.dataclass(frozen=True, slots=True)
class TraceRow:
    """A finished trace; `encode` is called in the thread that writes."""

    request_id: str
    tenant: str
    encode: Callable[[], bytes]


class Ledger:
    """rows: whether usage is kept. traces: how many of them are."""

    def __init__(self, folder: pathlib.Path, *, rows: bool, traces: int) -> None:
        self.keeps_rows = rows
        self.max_traces = traces
        self.num_lost = 0
        self._folder = folder
        self._waiting: collections.deque[UsageRow | TraceRow] = collections.deque()
        self._thread = ThreadPool(1)
        self._connection: sqlite3.Connection | None = None
        self._writer: gevent.Greenlet | None = None
        self._complained = float("-inf")

    def add(self, row: UsageRow | TraceRow) -> None:
        """Leaves a row to be written soon. Never waits, never fails."""
        if isinstance(row, UsageRow) and not self.keeps_rows:
            return
        if isinstance(row, TraceRow) and not self.max_traces:
            return
        self._waiting.append(row)
        if len(self._waiting) > MAX_WAITING:
            self._waiting.popleft()
            self.num_lost += 1
        if self._writer is None:
            self._writer = gevent.spawn(self._write_on)

    def flush(self) -> None:
        """Writes what waits, now, as far as that can be done."""
        self._thread.apply(self._write)

    def read(self, work: Callable[[sqlite3.Connection], Result]) -> Result | None:
        """What `work` finds in the file; None if there is no file that can be read."""
        result: Result | None = self._thread.apply(self._read, (work,))
        return result

    def _write_on(self) -> None:
        """While rows come, writes them a few times a second."""
        try:
            while self._waiting:
                gevent.sleep(_WRITE_SECONDS)
                if not self._thread.apply(self._write):
                    gevent.sleep(_TROUBLE_SECONDS)
        finally:
            self._writer = None

    def write_last(self) -> None:
        """Writes in this very thread: for the end of a process, in which nothing else runs."""
        self._write()

    def _write(self) -> bool:
        rows = [self._waiting.popleft() for _ in range(len(self._waiting))]
        if not rows:
            return True
        try:
            self._insert(self._open(), rows)
            return True
        except (sqlite3.Error, OSError) as error:
            self._waiting.extendleft(reversed(rows))
            self._close()
            if time.monotonic() - self._complained > 60:
                self._complained = time.monotonic()
                logger.error("the ledger of usage cannot be written, rows wait: %s", error)
            return False

    def _insert(self, db: sqlite3.Connection, rows: list[UsageRow | TraceRow]) -> None:
        usage = [dataclasses.astuple(row) for row in rows if isinstance(row, UsageRow)]
        traces = [row for row in rows if isinstance(row, TraceRow)][-self.max_traces :]
        made = [(row.request_id, row.tenant, row.encode()) for row in traces]
        with db:
            db.execute("BEGIN IMMEDIATE")
            places = ", ".join("?" * len(dataclasses.fields(UsageRow)))
            db.executemany(f"INSERT INTO usage VALUES (NULL, {places})", usage)
            db.executemany("INSERT INTO traces VALUES (NULL, ?, ?, ?)", made)
            if made:
                db.execute(
                    "DELETE FROM traces WHERE number <= (SELECT max(number) FROM traces) - ?",
                    (self.max_traces,),
                )

    def _read(self, work: Callable[[sqlite3.Connection], Result]) -> Result | None:
        self._write()
        if not (self._folder / FILE).exists():
            return None
        try:
            return work(self._open())
        except (sqlite3.Error, OSError) as error:
            logger.error("the ledger of usage cannot be read: %s", error)
            self._close()
            return None

    def _open(self) -> sqlite3.Connection:
        if self._connection is None:
            path = self._folder / FILE
            self._connection = open_shared(path, SCHEMA, busy_seconds=_BUSY_SECONDS)
        return self._connection

    def _close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
