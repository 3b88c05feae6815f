"""Sums over the ledger: by tenant, model and day. Knows neither HTTP nor gevent."""

from __future__ import annotations

import dataclasses
import datetime
import sqlite3
from collections.abc import Sequence
from typing import Any

from jaxserve.errors import RequestError

GROUPS = ("day", "tenant", "model")
SUMS = (
    "requests",
    "aborted",
    "prompt_tokens",
    "cached_tokens",
    "generated_tokens",
    "queue_seconds",
    "device_seconds",
    "price",
)
_SQL = "count(*) AS requests, coalesce(sum(finish_reason = 'abort'), 0) AS aborted, " + ", ".join(
    f"coalesce(sum({name}), 0) AS {name}" for name in SUMS[2:]
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """since, until: days, both included. tenant: None for all. groups: some of `GROUPS`."""

    groups: tuple[str, ...] = GROUPS
    tenant: str | None = None
    since: str | None = None
    until: str | None = None


def read_groups(text: str) -> tuple[str, ...]:
    """`tenant,day` as a tuple. Raises RequestError."""
    groups = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    if not set(groups) <= set(GROUPS):
        raise RequestError(
            f"group_by is {text[:100]!r}; it must be some of {', '.join(GROUPS)}", param="group_by"
        )
    return groups


def read_day(text: str | None, param: str) -> str | None:
    """A day as 2026-12-31. Raises RequestError."""
    if text is None:
        return None
    try:
        return datetime.date.fromisoformat(text).isoformat()
    except ValueError:
        raise RequestError(
            f"{param} is {text[:40]!r}; it must be a day, as in 2026-12-31", param=param
        ) from None


def summarise(db: sqlite3.Connection, question: Question) -> list[dict[str, Any]]:
    """One entry per group, in their order."""
    groups: Sequence[str] = question.groups
    assert set(groups) <= set(GROUPS)
    wheres, values = ["1"], []
    for sql, value in (
        ("tenant = ?", question.tenant),
        ("day >= ?", question.since),
        ("day <= ?", question.until),
    ):
        if value is not None:
            wheres.append(sql)
            values.append(value)
    columns = ", ".join([*groups, _SQL])
    grouping = f"GROUP BY {', '.join(groups)} ORDER BY {', '.join(groups)}" if groups else ""
    rows = db.execute(
        f"SELECT {columns} FROM usage WHERE {' AND '.join(wheres)} {grouping}", values
    )
    return [dict(zip((*groups, *SUMS), row, strict=True)) for row in rows]
