"""What the server keeps between requests and restarts: one SQLite file, and files beside it.

All front-end workers share the folder. It is made when something is first kept, so a server that
nobody asks to keep anything writes nothing. A full disk is an error with a name, never a loss of
what was kept before: SQLite's write-ahead log takes a transaction whole or not at all.
"""

from __future__ import annotations

import contextlib
import errno
import os
import pathlib
import sqlite3
from collections.abc import Callable, Iterator
from typing import TypeVar

from gevent.threadpool import ThreadPool

from jaxserve.errors import StorageError

#: Seconds that one process waits for another's transaction.
_BUSY_SECONDS = 20.0
_SCHEMA = """
CREATE TABLE IF NOT EXISTS responses (
    id TEXT PRIMARY KEY, tenant TEXT NOT NULL, created REAL NOT NULL, previous TEXT,
    items TEXT NOT NULL, body TEXT NOT NULL, size INTEGER NOT NULL
);
CREATE INDEX IF NOT EXISTS responses_by_age ON responses (created);
CREATE TABLE IF NOT EXISTS files (
    id TEXT PRIMARY KEY, tenant TEXT NOT NULL, created INTEGER NOT NULL, expires INTEGER,
    name TEXT NOT NULL, purpose TEXT NOT NULL, size INTEGER NOT NULL
);
CREATE INDEX IF NOT EXISTS files_by_age ON files (tenant, created, id);
CREATE TABLE IF NOT EXISTS batches (
    id TEXT PRIMARY KEY, tenant TEXT NOT NULL, created INTEGER NOT NULL, model TEXT NOT NULL,
    status TEXT NOT NULL, expires INTEGER NOT NULL, body TEXT NOT NULL
);
CREATE INDEX IF NOT EXISTS batches_by_status ON batches (model, status, created);
CREATE TABLE IF NOT EXISTS batch_lines (
    batch TEXT NOT NULL, number INTEGER NOT NULL, outcome INTEGER NOT NULL, answer BLOB NOT NULL,
    PRIMARY KEY (batch, number)
) WITHOUT ROWID;
"""

Result = TypeVar("Result")


class Storage:
    """The folder and its database. Calls wait in a thread of their own, not in gevent's loop."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder = folder
        self.files = folder / "files"
        self._thread = ThreadPool(1)
        self._connection: sqlite3.Connection | None = None

    @property
    def exists(self) -> bool:
        """Whether anything was ever kept here."""
        return self._database.exists()

    def run(self, work: Callable[[sqlite3.Connection], Result]) -> Result:
        """What `work` returns; all that it changes is kept, or nothing. Raises StorageError."""
        result: Result = self._thread.apply(self._run, (work,))
        return result

    def run_beside(self, work: Callable[[], Result]) -> Result:
        """Work on files that takes a while, outside gevent's loop. Raises StorageError."""

        def guarded() -> Result:
            with named_errors():
                return work()

        result: Result = self._thread.apply(guarded)
        return result

    def close(self) -> None:
        """Closes the database; a later call opens it again."""
        self._thread.apply(self._close)

    @property
    def _database(self) -> pathlib.Path:
        return self.folder / "jaxserve.sqlite"

    def _run(self, work: Callable[[sqlite3.Connection], Result]) -> Result:
        with named_errors():
            if self._connection is None:
                self._connection = self._open()
            with self._connection:  # commits, or rolls back
                self._connection.execute("BEGIN IMMEDIATE")
                return work(self._connection)

    def _open(self) -> sqlite3.Connection:
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.files.mkdir(mode=0o700, exist_ok=True)
        os.close(os.open(self._database, os.O_RDWR | os.O_CREAT, 0o600))  # prompts are in it
        connection = sqlite3.connect(
            self._database,
            timeout=_BUSY_SECONDS,
            isolation_level=None,
            check_same_thread=False,
        )
        connection.row_factory = sqlite3.Row
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        connection.executescript(_SCHEMA)
        return connection

    def _close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


@contextlib.contextmanager
def named_errors() -> Iterator[None]:
    """Turns what disks and SQLite say into StorageError; the server's log has the rest."""
    try:
        yield
    except sqlite3.DatabaseError as error:
        full = "full" in str(error)
        text = "the disk is full" if full else f"the data folder cannot be used: {error}"
        raise StorageError(f"{text}; nothing was kept", full=full) from error
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        words = error.strerror or "unknown error"
        text = "the disk is full" if full else f"the data folder cannot be used: {words}"
        raise StorageError(f"{text}; nothing was kept", full=full) from error
