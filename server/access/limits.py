"""What each tenant has used of its limits, in one SQLite file that all workers share.

Rates are levels that sink with time: a request is taken if its estimate still fits under the limit,
and the level is corrected once it is known what it took. What is open is a row with its worker's
name; a worker holds a lock on a file of that name, which the kernel frees when it dies, so that
nothing it had open counts for ever. Days are UTC's. Where the file cannot be written (a full disk)
each worker counts for itself until it can.
"""

from __future__ import annotations

import dataclasses
import fcntl
import logging
import pathlib
import sqlite3
import time
import uuid
from collections.abc import Callable
from typing import IO, TypeVar

from gevent.threadpool import ThreadPool

from jaxserve.errors import LimitError
from server.access.keyfile import LIMITS, Tenant
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
_MINUTE = 60.0
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


@dataclasses.dataclass(slots=True)
class _Level:
    """How much of a minute's allowance is used now."""

    used: float
    limit: float | None

    def seconds_until(self, more: float) -> float:
        """How long until `more` fits; what is larger than the limit must wait for all of it."""
        if self.limit is None:
            return 0.0
        excess = self.used + min(more, self.limit) - self.limit
        return excess * _MINUTE / self.limit if excess > 1e-9 else 0.0


class LimitBook:
    """Admits requests within their tenant's limits. folder: shared by all workers."""

    def __init__(self, folder: pathlib.Path) -> None:
        self._folder = folder
        self._thread = ThreadPool(1)
        self._worker = uuid.uuid4().hex
        self._connection: sqlite3.Connection | None = None
        self._alone_until = 0.0
        self._lock: IO[bytes] | None = None

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
        self._lock_file(self._worker).unlink(missing_ok=True)

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
            problem.headers = _headers(requests, minute)
            return problem
        requests.used += 1
        taken = tokens if minute.limit is None else min(tokens, minute.limit)
        minute.used += taken
        db.execute(
            "INSERT OR REPLACE INTO levels VALUES (?, ?, ?, ?)",
            (name, requests.used, minute.used, time.monotonic()),
        )
        admission = Admission(uuid.uuid4().hex, name, taken, _headers(requests, minute))
        row = (admission.id, name, self._worker, taken, cost)
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
            if worker != self._worker and not _is_held(self._lock_file(worker)):
                db.execute("DELETE FROM open WHERE worker = ?", (worker,))
                self._lock_file(worker).unlink(missing_ok=True)
                found = True
        return found

    def _run(self, work: Callable[[sqlite3.Connection], Result]) -> Result:
        try:
            return _transact(self._open(), work)
        except (sqlite3.Error, OSError) as error:
            logger.error("limits are counted by each worker alone for a while: %s", error)
            self._close()
            self._worker = uuid.uuid4().hex  # what is open under the old name counts no more
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
            self._hold_lock()
        return self._connection

    def _hold_lock(self) -> None:
        if self._lock is None:
            self._lock = self._lock_file(self._worker).open("ab")
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def _lock_file(self, worker: str) -> pathlib.Path:
        return self._folder / f"limits-{worker}.lock"

    def _close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        if self._lock is not None:
            self._lock.close()
            self._lock = None


def _unlimited(tenant: Tenant) -> bool:
    return all(getattr(tenant, limit) is None for limit in LIMITS)


def _transact(db: sqlite3.Connection, work: Callable[[sqlite3.Connection], Result]) -> Result:
    with db:
        db.execute("BEGIN IMMEDIATE")
        return work(db)


def _levels(db: sqlite3.Connection, name: str, tenant: Tenant) -> tuple[_Level, _Level]:
    """Requests and tokens of the last minute, as far as they have not sunk since."""
    found = db.execute("SELECT requests, tokens, at FROM levels WHERE tenant = ?", (name,))
    requests, tokens, at = found.fetchone() or (0.0, 0.0, 0.0)
    passed = max(0.0, time.monotonic() - at)
    levels = []
    for used, limit in (
        (requests, tenant.requests_per_minute),
        (tokens, tenant.tokens_per_minute),
    ):
        sunk = used if limit is None else used - passed * limit / _MINUTE
        levels.append(_Level(max(0.0, sunk), limit))
    return levels[0], levels[1]


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


def _headers(requests: _Level, tokens: _Level) -> dict[str, str]:
    """OpenAI's names; only for limits that there are."""
    headers = {}
    for what, level in (("requests", requests), ("tokens", tokens)):
        if level.limit is not None:
            left = max(0.0, level.limit - level.used)
            headers[f"x-ratelimit-limit-{what}"] = str(int(level.limit))
            headers[f"x-ratelimit-remaining-{what}"] = str(int(left))
            seconds = max(0.0, level.used) * _MINUTE / level.limit
            headers[f"x-ratelimit-reset-{what}"] = f"{seconds:.3f}s"
    return headers


def _is_held(lock: pathlib.Path) -> bool:
    """Whether a living worker holds this file."""
    try:
        with lock.open("ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return False
    except BlockingIOError:
        return True


def _today() -> str:
    return time.strftime("%Y-%m-%d", time.gmtime())
