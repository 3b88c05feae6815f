"""The files that a batch leaves behind, made when its last line is answered.

Each is written beside, brought to disk and renamed before the database speaks of it; after a
crash in between the same names are written again.
"""

from __future__ import annotations

import os
import sqlite3
import time
from typing import Any

from server.batches.batches import Outcome, finish
from server.batches.files import KEPT_SECONDS, FileStore, insert_file
from server.storage import Storage

Json = dict[str, Any]


class ResultFiles:
    """Makes output and error files."""

    def __init__(self, storage: Storage, files: FileStore) -> None:
        self._storage = storage
        self._files = files

    def finish(self, batch: Json, tenant: str) -> None:
        """Writes the files of a batch whose lines are done, and ends it. Raises StorageError."""
        cancelled = batch["status"] == "cancelling"
        kept = batch["output_expires_after"] or KEPT_SECONDS

        def work(connection: sqlite3.Connection) -> None:
            fields: Json = {}
            counts = dict(batch["request_counts"])
            expired = False
            for failed, word in ((0, "output"), (1, "error")):
                file_id = f"file-{word}-{batch['id']}"
                count, size, late = self._write(connection, batch["id"], failed, file_id)
                counts["failed" if failed else "completed"] = count
                expired |= late
                if count:
                    row = {
                        "id": file_id,
                        "tenant": tenant,
                        "created": int(time.time()),
                        "expires": int(time.time()) + kept,
                        "name": f"{batch['id']}_{word}.jsonl",
                        "purpose": "batch_output",
                        "size": size,
                    }
                    insert_file(connection, row)
                    fields[f"{word}_file_id"] = file_id
            fields["request_counts"] = counts
            ended = "cancelled" if cancelled else "expired" if expired else "completed"
            finish(connection, batch["id"], ended, fields)

        self._storage.run(work)

    def _write(
        self, connection: sqlite3.Connection, batch_id: str, failed: int, file_id: str
    ) -> tuple[int, int, bool]:
        """Lines and bytes of one file, and whether a line in it came too late to be begun."""
        query = (
            "SELECT answer, outcome FROM batch_lines WHERE batch = ? AND (outcome > 0) = ? "
            "ORDER BY number"
        )
        path = self._files.path(file_id)
        part = path.with_name(f"{file_id}.part")
        count, late = 0, False
        with part.open("wb") as file:
            for row in connection.execute(query, (batch_id, failed)):
                file.write(row["answer"])
                late |= row["outcome"] == Outcome.NOT_BEGUN
                count += 1
            file.flush()
            os.fsync(file.fileno())
            size = file.tell()
        if count:
            part.replace(path)
        else:
            part.unlink()
        return count, size, late
