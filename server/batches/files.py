"""Files that clients hand in and batches leave behind: a row in the database, bytes in a folder.

A file is there once its row is: its bytes are complete on disk by then.
"""

from __future__ import annotations

import os
import pathlib
import sqlite3
import time
import uuid
from typing import IO, Any

from jaxserve.errors import NotFoundError, RequestError, StorageError
from server.storage import Storage, named_errors

#: Seconds for which a file is kept that was uploaded or made without saying for how long.
KEPT_SECONDS = 30 * 86400
_LEFT_SECONDS = 86400
_BUSY = ("validating", "in_progress", "finalizing", "cancelling")
Json = dict[str, Any]


def new_file_id() -> str:
    """A name for a file that does not exist yet."""
    return f"file-{uuid.uuid4().hex}"


class FileStore:
    """max_bytes: of all files together."""

    def __init__(self, storage: Storage, max_bytes: int) -> None:
        self._storage = storage
        self._max_bytes = max_bytes

    def path(self, file_id: str) -> pathlib.Path:
        """Where a file's bytes are."""
        return self._storage.files / file_id

    def begin(self, file_id: str) -> IO[bytes]:
        """A file to write to; nothing is kept of it until `keep`. Raises StorageError."""
        self._storage.run(lambda connection: None)  # makes the folder
        with named_errors():
            return self._part(file_id).open("w+b")

    def keep(self, row: Json) -> Json:
        """Makes a file that was written entirely one that is kept, and returns its object.

        row: id, tenant, expires, name, purpose. Raises StorageError.
        """
        part = self._part(row["id"])
        size = self._storage.run_beside(lambda: _bring_to_disk(part))

        def work(connection: sqlite3.Connection) -> Json:
            used = connection.execute("SELECT coalesce(sum(size), 0) FROM files").fetchone()[0]
            if used + size > self._max_bytes:
                raise StorageError(
                    f"{used} bytes are kept of {self._max_bytes} (--max-data-bytes); delete files",
                    full=True,
                )
            full_row = {**row, "created": int(time.time()), "size": size}
            insert_file(connection, full_row)
            part.replace(self.path(row["id"]))
            return file_object(full_row)

        try:
            return self._storage.run(work)
        except BaseException:
            self.discard(row["id"])
            raise

    def discard(self, file_id: str) -> None:
        """Forgets a file that was begun."""
        self._part(file_id).unlink(missing_ok=True)

    def get(self, file_id: str, tenant: str) -> Json:
        """A file's object. Raises NotFoundError."""
        row = None
        if self._storage.exists:
            query = "SELECT * FROM files WHERE id = ? AND tenant = ? AND expires > ?"
            row = self._storage.run(
                lambda c: c.execute(query, (file_id, tenant, time.time())).fetchone()
            )
        if row is None:
            raise NotFoundError(
                f"there is no file {file_id[:80]!r}", param="file_id", code="file_not_found"
            )
        return file_object(dict(row))

    def all(self, tenant: str, purpose: str | None, *, descending: bool) -> list[Json]:
        """All files of a tenant, of one purpose if given."""
        if not self._storage.exists:
            return []
        query = (
            "SELECT * FROM files WHERE tenant = ? AND expires > ? AND coalesce(purpose = ?, 1) "
            f"ORDER BY created {'DESC' if descending else 'ASC'}, id"
        )
        rows = self._storage.run(
            lambda c: c.execute(query, (tenant, time.time(), purpose)).fetchall()
        )
        return [file_object(dict(row)) for row in rows]

    def delete(self, file_id: str, tenant: str) -> None:
        """Forgets a file. Raises NotFoundError, and RequestError while a batch needs it."""
        self.get(file_id, tenant)

        def work(connection: sqlite3.Connection) -> None:
            query = "SELECT id FROM batches WHERE status IN (?, ?, ?, ?) AND body LIKE ?"
            busy = connection.execute(query, (*_BUSY, f'%"{file_id}"%')).fetchone()
            if busy is not None:
                raise RequestError(
                    f"the file {file_id} is read by {busy['id']}, which is not done; cancel it first",
                    param="file_id",
                    code="file_in_use",
                )
            connection.execute("DELETE FROM files WHERE id = ?", (file_id,))
            self.path(file_id).unlink(missing_ok=True)

        self._storage.run(work)

    def sweep(self) -> None:
        """Removes what has expired, unless a batch still needs it."""

        def work(connection: sqlite3.Connection) -> None:
            query = (
                "SELECT id FROM files WHERE expires <= ? AND NOT EXISTS (SELECT 1 FROM batches "
                "WHERE status IN (?, ?, ?, ?) AND body LIKE '%\"' || files.id || '\"%')"
            )
            for row in connection.execute(query, (time.time(), *_BUSY)).fetchall():
                connection.execute("DELETE FROM files WHERE id = ?", (row["id"],))
                self.path(row["id"]).unlink(missing_ok=True)

            self._remove_leftovers(connection)

        self._storage.run(work)

    def _remove_leftovers(self, connection: sqlite3.Connection) -> None:
        """What uploads left behind whose server died: bytes that no row speaks of."""
        before = time.time() - _LEFT_SECONDS
        query = "SELECT 1 FROM files WHERE id = ?"
        for path in list(self._storage.files.iterdir()):
            if path.stat().st_mtime < before:
                known = connection.execute(query, (path.name,)).fetchone()
                if known is None:
                    path.unlink(missing_ok=True)

    def _part(self, file_id: str) -> pathlib.Path:
        return self._storage.files / f"{file_id}.part"


def _bring_to_disk(path: pathlib.Path) -> int:
    """The file's size, once all of it is on the disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        return path.stat().st_size


def insert_file(connection: sqlite3.Connection, row: Json) -> None:
    """Adds a file's row, or replaces it."""
    names = ("id", "tenant", "created", "expires", "name", "purpose", "size")
    values = [row[name] for name in names]
    connection.execute("INSERT OR REPLACE INTO files VALUES (?, ?, ?, ?, ?, ?, ?)", values)


def file_object(row: Json) -> Json:
    """What the API shows of a file."""
    return {
        "id": row["id"],
        "object": "file",
        "bytes": row["size"],
        "created_at": row["created"],
        "expires_at": row["expires"],
        "filename": row["name"],
        "purpose": row["purpose"],
        "status": "processed",
        "status_details": None,
    }
