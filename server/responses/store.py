"""Responses that were stored: a later request may build on them, or ask for them again.

Bounded: the oldest go when there are too many, or when all together are too large.
"""

from __future__ import annotations

import sqlite3
import time
from typing import Any

import msgspec

from jaxserve.errors import NotFoundError
from server.storage import Storage

MAX_RESPONSES = 10_000
#: A conversation that is longer is started anew by its client.
MAX_TURNS = 1000
_MAX_SHARE = 10  # of --max-data-bytes: one part in ten

Json = dict[str, Any]
_CHAIN = """
WITH RECURSIVE chain (id, previous, items, body, depth) AS (
    SELECT id, previous, items, body, 0 FROM responses WHERE id = ? AND tenant = ?
    UNION ALL
    SELECT r.id, r.previous, r.items, r.body, depth + 1 FROM responses r JOIN chain
    ON r.id = chain.previous WHERE depth < ?
)
SELECT * FROM chain ORDER BY depth DESC
"""


class ResponseStore:
    """max_bytes: of all that the server may keep; responses get a part of it."""

    def __init__(self, storage: Storage, max_bytes: int) -> None:
        self._storage = storage
        self._max_bytes = max_bytes // _MAX_SHARE

    def save(self, body: Json, items: list[Any], tenant: str) -> None:
        """Keeps a finished response and the items that it answered. Raises StorageError."""
        kept, made = msgspec.json.encode(items).decode(), msgspec.json.encode(body).decode()
        row = (body["id"], tenant, time.time(), body["previous_response_id"], kept, made)

        def work(connection: sqlite3.Connection) -> None:
            size = len(kept) + len(made)
            connection.execute("INSERT INTO responses VALUES (?, ?, ?, ?, ?, ?, ?)", (*row, size))
            self._forget_oldest(connection)

        self._storage.run(work)

    def load(self, response_id: str, tenant: str) -> Json:
        """A response as it was answered. Raises NotFoundError."""
        return dict(msgspec.json.decode(self._row(response_id, tenant, "response_id")["body"]))

    def items(self, response_id: str, tenant: str) -> list[Any]:
        """The items that it answered, not those of the responses before it."""
        return list(msgspec.json.decode(self._row(response_id, tenant, "response_id")["items"]))

    def conversation(self, response_id: str, tenant: str) -> list[Any]:
        """All items up to and with the output of a response. Raises NotFoundError."""
        if not self._storage.exists:
            raise _unknown(response_id, "previous_response_id")
        rows = self._storage.run(
            lambda c: c.execute(_CHAIN, (response_id, tenant, MAX_TURNS)).fetchall()
        )
        if not rows:
            raise _unknown(response_id, "previous_response_id")
        if rows[0]["previous"] is not None:
            raise _unknown(rows[0]["previous"], "previous_response_id")
        found: list[Any] = []
        for row in rows:
            found += msgspec.json.decode(row["items"])
            found += msgspec.json.decode(row["body"])["output"]
        return found

    def delete(self, response_id: str, tenant: str) -> None:
        """Forgets a response. Raises NotFoundError."""
        self._row(response_id, tenant, "response_id")
        self._storage.run(lambda c: c.execute("DELETE FROM responses WHERE id = ?", (response_id,)))

    def _row(self, response_id: str, tenant: str, param: str) -> sqlite3.Row:
        if not self._storage.exists:
            raise _unknown(response_id, param)
        query = "SELECT * FROM responses WHERE id = ? AND tenant = ?"
        row: sqlite3.Row | None = self._storage.run(
            lambda c: c.execute(query, (response_id, tenant)).fetchone()
        )
        if row is None:
            raise _unknown(response_id, param)
        return row

    def _forget_oldest(self, connection: sqlite3.Connection) -> None:
        count, size = connection.execute("SELECT count(*), sum(size) FROM responses").fetchone()
        while count > 1 and (count > MAX_RESPONSES or size > self._max_bytes):
            oldest = connection.execute(
                "SELECT id, size FROM responses ORDER BY created LIMIT 1"
            ).fetchone()
            connection.execute("DELETE FROM responses WHERE id = ?", (oldest["id"],))
            count, size = count - 1, size - oldest["size"]


def _unknown(response_id: str, param: str) -> NotFoundError:
    return NotFoundError(
        f"there is no stored response {response_id[:80]!r}; responses are kept until they are too "
        "old or too many, and not at all with store: false",
        param=param,
        code="previous_response_not_found" if param != "response_id" else "not_found",
    )
