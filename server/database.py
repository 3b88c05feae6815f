"""Opens an SQLite file that several processes share, in whose thread the caller is.

Two processes that make the same file at the same moment would meet SQLite's "database is locked",
which its own waiting does not cover; so they come one after the other.
"""

from __future__ import annotations

import fcntl
import pathlib
import sqlite3


def open_shared(path: pathlib.Path, schema: str, *, busy_seconds: float) -> sqlite3.Connection:
    """A connection in WAL mode with the tables of `schema`. Raises sqlite3.Error, OSError.

    busy_seconds: how long a transaction waits for another process's.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with path.with_name(f"{path.name}.lock").open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        connection = sqlite3.connect(
            path, timeout=busy_seconds, isolation_level=None, check_same_thread=False
        )
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = NORMAL")
            connection.executescript(schema)
        except BaseException:
            connection.close()
            raise
    return connection
