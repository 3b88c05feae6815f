"""Limits of tenants by hand: levels that sink, budgets, what runs, dead workers, a full disk."""

from __future__ import annotations

import pathlib
import sqlite3
import time

import pytest

from jaxserve.errors import LimitError
from server.access import limits
from server.access.keyfile import Tenant
from server.access.limits import Admission, LimitBook


class Clock:
    def __init__(self) -> None:
        self.now, self.wall = 1000.0, 86400.0 * 20000

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return self.wall

    def gmtime(self) -> time.struct_time:
        return time.gmtime(self.wall)

    def strftime(self, form: str, moment: time.struct_time) -> str:
        return time.strftime(form, moment)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(limits, "time", clock)
    return clock


def admit(book: LimitBook, tenant: Tenant, tokens: float = 10, cost: float = 0.0) -> Admission:
    admission = book.admit("alice", tenant, tokens, cost)
    assert admission is not None
    return admission


def refused(book: LimitBook, tenant: Tenant, tokens: float = 10, cost: float = 0.0) -> LimitError:
    with pytest.raises(LimitError) as caught:
        book.admit("alice", tenant, tokens, cost)
    return caught.value


def test_requests_and_tokens_of_a_minute_over_two_workers(
    clock: Clock, tmp_path: pathlib.Path
) -> None:
    one, two = LimitBook(tmp_path), LimitBook(tmp_path)
    tenant = Tenant(requests_per_minute=3, tokens_per_minute=100)
    admit(one, tenant)
    admit(two, tenant)
    third = admit(one, tenant)
    assert third.headers["x-ratelimit-remaining-requests"] == "0"
    assert third.headers["x-ratelimit-remaining-tokens"] == "70"
    assert third.headers["x-ratelimit-reset-requests"] == "60.000s"
    error = refused(two, tenant)
    assert (error.status, error.reason) == (429, "rate_limit_exceeded")
    assert error.retry_after == pytest.approx(20)
    assert error.headers["x-ratelimit-limit-requests"] == "3"
    assert one.admit("bob", tenant, 10, 0.0) is not None, "another tenant's limits are its own"
    clock.now += 20
    admit(two, tenant)
    clock.now += 600
    one.settle(admit(one, tenant, tokens=50), tokens=250, cost=0)  # it took far more
    error = refused(two, tenant, tokens=100)
    assert "tokens per minute" in str(error)
    assert error.retry_after == pytest.approx(150)
    clock.now += 151
    big = admit(two, tenant, tokens=10**6)  # more than a minute's: has all of it, and waits for it
    two.settle(big, tokens=0, cost=0)
    assert admit(one, tenant, tokens=100).tokens == 100, "an estimate is given back"


def test_a_days_budgets_end_with_the_day(clock: Clock, tmp_path: pathlib.Path) -> None:
    book = LimitBook(tmp_path)
    tenant = Tenant(daily_tokens=100, daily_cost=2.0)
    first = admit(book, tenant, tokens=60, cost=1.5)
    error = refused(book, tenant, tokens=60)
    assert (error.status, error.reason) == (402, "insufficient_quota")
    assert error.retry_after == 86400
    book.settle(first, tokens=20, cost=2.5)
    assert "cost" in str(refused(book, tenant))
    assert LimitBook(tmp_path).admit("alice", Tenant(daily_tokens=31), 10, 0) is not None
    clock.wall += 86400
    admit(book, tenant)


def test_a_clock_that_jumps_neither_frees_nor_locks_anybody(
    clock: Clock, tmp_path: pathlib.Path
) -> None:
    """The wall clock does not enter rates; a day's budget is the day's that the clock shows."""
    book = LimitBook(tmp_path)
    tenant = Tenant(requests_per_minute=2, daily_tokens=100)
    today = clock.wall
    book.settle(admit(book, tenant), 30, 0)
    book.settle(admit(book, tenant), 30, 0)
    for jump in (-3600.0, 3600.0, -86400.0, 86400.0 * 400):
        clock.wall = today + jump
        error = refused(book, tenant)
        assert (error.status, error.retry_after) == (429, pytest.approx(30.0))
    clock.now += 60
    clock.wall = today - 86400.0
    book.settle(admit(book, tenant, tokens=100), 40, 0)
    clock.wall = today
    assert refused(book, tenant, tokens=41).status == 402, "what the day took is not forgotten"
    admit(book, tenant, tokens=40)


def test_rates_begin_anew_with_the_machine(clock: Clock, tmp_path: pathlib.Path) -> None:
    """The monotonic clock that levels are written with may start at 0 under a kept file."""
    clock.now = 1e6
    tenant = Tenant(requests_per_minute=1, tokens_per_minute=10)
    book = LimitBook(tmp_path)
    book.settle(admit(book, tenant), 10, 0)
    assert refused(book, tenant).status == 429
    clock.now = 20.0
    admit(book, tenant)
    assert refused(book, tenant).retry_after == pytest.approx(60.0)


def test_what_runs_at_once_also_of_a_worker_that_died(clock: Clock, tmp_path: pathlib.Path) -> None:
    one, two = LimitBook(tmp_path), LimitBook(tmp_path)
    tenant = Tenant(concurrent_requests=2)
    first = admit(one, tenant)
    admit(two, tenant)
    assert refused(one, tenant).reason == "too_many_concurrent_requests"
    one.release(first)
    second = admit(one, tenant)
    assert refused(one, tenant)
    two.close()  # as the kernel does for a process that was killed
    admit(one, tenant)
    one.settle(second, 5, 0)
    admit(one, tenant)
    assert refused(one, tenant)


def test_a_disk_that_is_full_leaves_each_worker_with_its_own_counts(
    clock: Clock, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    book = LimitBook(tmp_path)
    tenant = Tenant(requests_per_minute=2)
    admission = admit(book, tenant)
    work = limits._transact

    def full(db: sqlite3.Connection, todo: object) -> object:
        if db.execute("PRAGMA database_list").fetchone()[2]:
            raise sqlite3.OperationalError("database or disk is full")
        return work(db, todo)  # type: ignore[arg-type]

    monkeypatch.setattr(limits, "_transact", full)
    admit(book, tenant)
    admit(book, tenant)
    assert refused(book, tenant).status == 429
    book.settle(admission, 5, 0)
    monkeypatch.setattr(limits, "_transact", work)
    clock.now += 31
    assert admit(book, tenant).headers["x-ratelimit-remaining-requests"] == "1"


def test_a_tenant_without_limits_writes_nothing(tmp_path: pathlib.Path) -> None:
    assert LimitBook(tmp_path / "none").admit("alice", Tenant(weight=2.0), 10, 0) is None
    assert not (tmp_path / "none").exists()
