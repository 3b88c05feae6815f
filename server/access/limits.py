"""What each tenant has used of its limits, in one SQLite file that all workers share.

Rates are levels that sink with time: a request is taken if its estimate still fits under the limit,
and the level is corrected once it is known what it took. What is open is a row with its worker's
name; a worker holds a lock on a file of that name, which the kernel frees when it dies, so that
nothing it had open counts for ever. Days are UTC's. Where the file cannot be written (a full disk)
each worker counts for itself until it can.
"""

from __future__ import annotations

import dataclasses
import logging
import pathlib
import sqlite3
import time
import uuid
from collections.abc import Callable
from typing import TypeVar

from gevent.threadpool import ThreadPool

from jaxserve.errors import LimitError
from server.access.alive import WorkerName
from server.access.keyfile import LIMITS, Tenant
from server.access.levels import Level, rate_headers, sunk
from server.database import open_shared

logger = logging.getLogger("jaxserve.server")

_SCHEMA = """
CREATE TABLE IF NOT EXISTS levels (
    tenant TEXT PRIMARY KEY, requests REAL NOT NULL, tokens REAL NOT NULL, at REAL NOT NULL
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS days (
    tenant TEXT NOT NULL, day TEXT NOT NULL, tokens REAL NOT NULL, cost REAL NOT NULL,
    PRIMARY KEY (tenant, day)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS open (
    id TEXT PRIMARY KEY, tenant TEXT NOT NULL, worker TEXT NOT NULL, running INTEGER NOT NULL,
    tokens REAL NOT NULL, cost REAL NOT NULL
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS open_by_tenant ON open (tenant);
"""
_BUSY_SECONDS = 5.0
#: How long a worker counts for itself before it tries the file again.
_ALONE_SECONDS = 30.0

Result = TypeVar("Result")


@dataclasses.dataclass(frozen=True, slots=True)
class Admission:
    """A request that was taken, and what it was reckoned to cost. headers: for its answer."""

    id: str
    tenant: str
    tokens: float
    headers: dict[str, str]


class LimitBook:
    """Admits requests within their tenant's limits. folder: shared by all workers."""

    def __init__(self, folder: pathlib.Path) -> None:
        self._folder = folder
        self._thread = ThreadPool(1)
        self._worker = WorkerName(folder)
        self._connection: sqlite3.Connection | None = None
        self._alone_until = 0.0

    def admit(self, name: str, tenant: Tenant, tokens: float, cost: float) -> Admission | None:
        """Takes a request of about so many tokens; None for a tenant without limits.

        Raises LimitError, whose `headers` say what is left.
        """
        if _unlimited(tenant):
            return None
        found: Admission | LimitError = self._thread.apply(
            self._run, (lambda db: self._admit(db, name, tenant, tokens, cost),)
        )
        if isinstance(found, LimitError):
            raise found
        return found

    def release(self, admission: Admission) -> None:
        """A request no longer runs, though what it took is not known yet."""

        def work(db: sqlite3.Connection) -> None:
            db.execute("UPDATE open SET running = 0 WHERE id = ?", (admission.id,))

        self._thread.apply(self._run, (work,))

    def settle(self, admission: Admission, tokens: float, cost: float) -> None:
        """What a request took in the end."""
        self._thread.apply(self._run, (lambda db: _settle(db, admission, tokens, cost),))

    def close(self) -> None:
        """Gives up the lock: what is still open no longer counts."""
        self._thread.apply(self._close)

    def _admit(
        self, db: sqlite3.Connection, name: str, tenant: Tenant, tokens: float, cost: float
    ) -> Admission | LimitError:
        requests, minute = _levels(db, name, tenant)
        wait = max(requests.seconds_until(1), minute.seconds_until(tokens))
        problem: LimitError | None = None
        if wait > 0:
            by_tokens = requests.seconds_until(1) < wait
            which, limit = ("tokens", minute) if by_tokens else ("requests", requests)
            problem = LimitError(
                f"{limit.limit:g} {which} per minute are allowed; try again in {wait:.1f} s",
                reason="rate_limit_exceeded",
                retry_after=wait,
            )
        problem = problem or self._over_budget(db, name, tenant, tokens, cost)
        problem = problem or self._too_many(db, name, tenant)
        if problem is not None:
            problem.headers = rate_headers(requests, minute)
            return problem
        requests.used += 1
        taken = tokens if minute.limit is None else min(tokens, minute.limit)
        minute.used += taken
        db.execute(
            "INSERT OR REPLACE INTO levels VALUES (?, ?, ?, ?)",
            (name, requests.used, minute.used, time.monotonic()),
        )
        admission = Admission(uuid.uuid4().hex, name, taken, rate_headers(requests, minute))
        row = (admission.id, name, self._worker.name, taken, cost)
        db.execute("INSERT INTO open VALUES (?, ?, ?, 1, ?, ?)", row)
        return admission

    def _over_budget(
        self, db: sqlite3.Connection, name: str, tenant: Tenant, tokens: float, cost: float
    ) -> LimitError | None:
        if tenant.daily_tokens is None and tenant.daily_cost is None:
            return None
        for attempt in range(2):
            used = db.execute(
                "SELECT coalesce(sum(tokens), 0), coalesce(sum(cost), 0) FROM (SELECT tokens, cost "
                "FROM days WHERE tenant = ?1 AND day = ?2 UNION ALL SELECT tokens, cost FROM open "
                "WHERE tenant = ?1)",
                (name, _today()),
            ).fetchone()
            for what, limit, have, more in (
                ("tokens", tenant.daily_tokens, used[0], tokens),
                ("cost", tenant.daily_cost, used[1], cost),
            ):
                if limit is not None and (have + more > limit or have >= limit):
                    if attempt == 0 and self._reap(db, name):
                        break
                    return LimitError(
                        f"the day's budget of {limit:g} ({what}) is used up: {have:g} so far, and "
                        f"this request may take {more:g}; a new day begins at midnight UTC",
                        reason="insufficient_quota",
                        retry_after=86400 - time.time() % 86400,
                        status=402,
                    )
            else:
                return None
        return None

    def _too_many(self, db: sqlite3.Connection, name: str, tenant: Tenant) -> LimitError | None:
        limit = tenant.concurrent_requests
        if limit is None:
            return None
        query = "SELECT count(*) FROM open WHERE tenant = ? AND running"
        count = db.execute(query, (name,)).fetchone()[0]
        if count >= limit and self._reap(db, name):
            count = db.execute(query, (name,)).fetchone()[0]
        if count < limit:
            return None
        return LimitError(
            f"{count} of your requests are at work, and {limit} may be; wait for one to end",
            reason="too_many_concurrent_requests",
            retry_after=1.0,
        )

    def _reap(self, db: sqlite3.Connection, name: str) -> bool:
        """Forgets what dead workers had open: nobody knows what it took. Whether there was any."""
        found = False
        rows = db.execute("SELECT DISTINCT worker FROM open WHERE tenant = ?", (name,)).fetchall()
        for (worker,) in rows:
            if not self._worker.is_alive(worker):
                db.execute("DELETE FROM open WHERE worker = ?", (worker,))
                found = True
        return found

    def _run(self, work: Callable[[sqlite3.Connection], Result]) -> Result:
        try:
            return _transact(self._open(), work)
        except (sqlite3.Error, OSError) as error:
            logger.error("limits are counted by each worker alone for a while: %s", error)
            self._close()
            self._alone_until = time.monotonic() + _ALONE_SECONDS
            return _transact(self._open(), work)

    def _open(self) -> sqlite3.Connection:
        alone = time.monotonic() < self._alone_until
        if self._alone_until and not alone:
            self._close()
            self._alone_until = 0.0
        if self._connection is None and alone:
            self._connection = sqlite3.connect(
                ":memory:", isolation_level=None, check_same_thread=False
            )
            self._connection.executescript(_SCHEMA)
        elif self._connection is None:
            path = self._folder / "limits.sqlite"
            self._connection = open_shared(path, _SCHEMA, busy_seconds=_BUSY_SECONDS)
            self._worker.hold()
        return self._connection

    def _close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        self._worker.give_up()


def _unlimited(tenant: Tenant) -> bool:
    return all(getattr(tenant, limit) is None for limit in LIMITS)


def _transact(db: sqlite3.Connection, work: Callable[[sqlite3.Connection], Result]) -> Result:
    with db:
        db.execute("BEGIN IMMEDIATE")
        return work(db)


def _levels(db: sqlite3.Connection, name: str, tenant: Tenant) -> tuple[Level, Level]:
    """Requests and tokens of the last minute, as far as they have not sunk since."""
    found = db.execute("SELECT requests, tokens, at FROM levels WHERE tenant = ?", (name,))
    requests, tokens, at = found.fetchone() or (0.0, 0.0, 0.0)
    passed = time.monotonic() - at
    if passed < 0:  # this clock begins anew with the machine: the level is of another life
        requests = tokens = 0.0
    return (
        sunk(requests, tenant.requests_per_minute, passed),
        sunk(tokens, tenant.tokens_per_minute, passed),
    )


def _settle(db: sqlite3.Connection, admission: Admission, tokens: float, cost: float) -> None:
    name = admission.tenant
    db.execute("DELETE FROM open WHERE id = ?", (admission.id,))
    db.execute(
        "UPDATE levels SET tokens = tokens + ? WHERE tenant = ?", (tokens - admission.tokens, name)
    )
    db.execute(
        "INSERT INTO days VALUES (?, ?, ?, ?) ON CONFLICT DO UPDATE SET "
        "tokens = tokens + excluded.tokens, cost = cost + excluded.cost",
        (name, _today(), tokens, cost),
    )


def _today() -> str:
    return time.strftime("%Y-%m-%d", time.gmtime())
