"""Batches and the answers to their lines, in the database.

A batch goes validating -> in_progress -> finalizing -> completed, or fails, expires, or is
cancelled. Each line's answer is a row of its own, so it is there once or not at all.
"""

from __future__ import annotations

import dataclasses
import enum
import sqlite3
import time
import uuid
from collections.abc import Sequence
from typing import Any

import msgspec

from jaxserve.errors import NotFoundError, RefusedError, RequestError
from server.storage import Storage

ENDED = ("completed", "failed", "expired", "cancelled")
WINDOWS = {"24h": 86400}
#: Batches of one tenant that are not done.
MAX_OPEN = 1000
KEPT_SECONDS = 30 * 86400
Json = dict[str, Any]


class Outcome(enum.IntEnum):
    """What became of a line; all but DONE go to the error file."""

    DONE = 0
    FAILED = 1
    NOT_BEGUN = 2


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LineAnswer:
    """The answer to line `number`; data: its line of the output or error file."""

    number: int
    outcome: Outcome
    data: bytes


class BatchStore:
    """All batches; those of one tenant are nothing to another."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage

    def create(self, fields: Json, *, model: str, tenant: str) -> Json:
        """A new batch. fields: what its object has beside the usual. Raises RefusedError."""
        now = int(time.time())
        expires = now + WINDOWS[fields["completion_window"]]
        batch = {
            "id": f"batch_{uuid.uuid4().hex}",
            "object": "batch",
            "model": model,
            "errors": None,
            "status": "validating",
            "output_file_id": None,
            "error_file_id": None,
            "created_at": now,
            "expires_at": expires,
            **{f"{step}_at": None for step in ("in_progress", "finalizing", "completed", "failed")},
            **{f"{step}_at": None for step in ("expired", "cancelling", "cancelled")},
            "request_counts": {"total": 0, "completed": 0, "failed": 0},
            **fields,
        }

        def work(connection: sqlite3.Connection) -> None:
            query = f"SELECT count(*) FROM batches WHERE tenant = ? AND status NOT IN {ENDED}"
            if connection.execute(query, (tenant,)).fetchone()[0] >= MAX_OPEN:
                raise RefusedError(
                    f"{MAX_OPEN} batches are not done yet", reason="too_many_batches"
                )
            row = (batch["id"], tenant, now, model, "validating", expires, _encode(batch))
            connection.execute("INSERT INTO batches VALUES (?, ?, ?, ?, ?, ?, ?)", row)

        self._storage.run(work)
        return shown(batch)

    def get(self, batch_id: str, tenant: str) -> Json:
        """A batch's object with counts of this moment. Raises NotFoundError."""
        return shown(self._find(batch_id, tenant))

    def all(self, tenant: str, *, descending: bool) -> list[Json]:
        """All batches of a tenant."""
        if not self._storage.exists:
            return []
        order = "DESC" if descending else "ASC"
        query = f"SELECT id FROM batches WHERE tenant = ? ORDER BY created {order}, id"

        def work(connection: sqlite3.Connection) -> list[Json]:
            ids = [row["id"] for row in connection.execute(query, (tenant,))]
            return [_load(connection, batch_id) for batch_id in ids]

        return [shown(batch) for batch in self._storage.run(work)]

    def cancel(self, batch_id: str, tenant: str) -> Json:
        """Begins to cancel it; the worker ends it. Raises NotFoundError and RequestError."""
        self._find(batch_id, tenant)

        def work(connection: sqlite3.Connection) -> Json:
            batch = _load(connection, batch_id)
            if batch["status"] in (*ENDED, "finalizing"):
                raise RequestError(
                    f"the batch is {batch['status']}; it cannot be cancelled", param="batch_id"
                )
            _move(connection, batch, "cancelling")
            return batch

        return shown(self._storage.run(work))

    def next(self, model: str) -> tuple[Json, str] | None:
        """The oldest batch for `model` that is not done, and its tenant."""
        query = (
            "SELECT id, tenant FROM batches WHERE model = ? AND status IN "
            "('validating', 'in_progress', 'finalizing', 'cancelling') ORDER BY created, id LIMIT 1"
        )

        def work(connection: sqlite3.Connection) -> tuple[Json, str] | None:
            row = connection.execute(query, (model,)).fetchone()
            return None if row is None else (_load(connection, row["id"]), row["tenant"])

        return self._storage.run(work)

    def move(self, batch_id: str, status: str, **fields: Any) -> Json:
        """Gives a batch a new status, unless it is being cancelled or has ended."""

        def work(connection: sqlite3.Connection) -> Json:
            batch = _load(connection, batch_id)
            stays = batch["status"] == "cancelling" and status == "in_progress"
            if batch["status"] not in ENDED:
                batch |= fields
                _move(connection, batch, batch["status"] if stays else status)
            return batch

        return self._storage.run(work)

    def status(self, batch_id: str) -> str:
        """What it is at."""
        query = "SELECT status FROM batches WHERE id = ?"
        return str(self._storage.run(lambda c: c.execute(query, (batch_id,)).fetchone())["status"])

    def done(self, batch_id: str) -> set[int]:
        """The numbers of the lines that have their answer."""
        query = "SELECT number FROM batch_lines WHERE batch = ?"
        rows = self._storage.run(lambda c: c.execute(query, (batch_id,)).fetchall())
        return {row["number"] for row in rows}

    def add(self, batch_id: str, answers: Sequence[LineAnswer]) -> str:
        """Keeps answers; one that is there already stays. Returns the batch's status."""
        rows = [(batch_id, answer.number, int(answer.outcome), answer.data) for answer in answers]

        def work(connection: sqlite3.Connection) -> str:
            connection.executemany("INSERT OR IGNORE INTO batch_lines VALUES (?, ?, ?, ?)", rows)
            return str(_load(connection, batch_id)["status"])

        return self._storage.run(work)

    def sweep(self) -> None:
        """Forgets batches that ended long ago."""
        query = f"DELETE FROM batches WHERE created < ? AND status IN {ENDED}"
        self._storage.run(lambda c: c.execute(query, (time.time() - KEPT_SECONDS,)))

    def _find(self, batch_id: str, tenant: str) -> Json:
        query = "SELECT 1 FROM batches WHERE id = ? AND tenant = ?"

        def work(connection: sqlite3.Connection) -> Json | None:
            known = connection.execute(query, (batch_id, tenant)).fetchone()
            return None if known is None else _load(connection, batch_id)

        found = self._storage.run(work) if self._storage.exists else None
        if found is None:
            raise NotFoundError(
                f"there is no batch {batch_id[:80]!r}", param="batch_id", code="batch_not_found"
            )
        return found


def shown(batch: Json) -> Json:
    """What the API shows of a batch."""
    return {name: value for name, value in batch.items() if name != "output_expires_after"}


def finish(connection: sqlite3.Connection, batch_id: str, status: str, fields: Json) -> None:
    """Ends a batch in the caller's transaction; its lines are in files by now."""
    batch = _load(connection, batch_id) | fields
    _move(connection, batch, status)
    connection.execute("DELETE FROM batch_lines WHERE batch = ?", (batch_id,))


def _load(connection: sqlite3.Connection, batch_id: str) -> Json:
    row = connection.execute("SELECT body FROM batches WHERE id = ?", (batch_id,)).fetchone()
    batch: Json = msgspec.json.decode(row["body"])
    if batch["status"] not in ENDED:
        query = "SELECT outcome > 0, count(*) FROM batch_lines WHERE batch = ? GROUP BY 1"
        counts = {bool(failed): count for failed, count in connection.execute(query, (batch_id,))}
        batch["request_counts"] |= {
            "completed": counts.get(False, 0),
            "failed": counts.get(True, 0),
        }
    return batch


def _move(connection: sqlite3.Connection, batch: Json, status: str) -> None:
    if batch["status"] != status:
        batch |= {"status": status, f"{status}_at": int(time.time())}
    values = (status, _encode(batch), batch["id"])
    connection.execute("UPDATE batches SET status = ?, body = ? WHERE id = ?", values)


def _encode(batch: Json) -> str:
    return msgspec.json.encode(batch).decode()
