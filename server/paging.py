"""Lists that come a page at a time, as OpenAI's API has them: limit, order, after."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import flask

from jaxserve.errors import RequestError

MAX_LIMIT = 10_000
DEFAULT_LIMIT = 20
_ORDERS = ("asc", "desc")
PAGE_QUERY: dict[str, dict[str, Any]] = {
    "limit": {"type": "integer", "minimum": 1, "maximum": MAX_LIMIT},
    "order": {"enum": list(_ORDERS)},
    "after": {"type": "string"},
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """Which part of a list was asked for: at most `limit` after the one called `after`."""

    limit: int
    after: str | None
    descending: bool


def read_page(*also: str, default_limit: int = DEFAULT_LIMIT) -> Page:
    """The page that the query asks for. also: other parameters of the route.

    Raises RequestError naming what is wrong or unknown.
    """
    check_query(*PAGE_QUERY, *also)
    arguments = flask.request.args
    text = arguments.get("limit", str(default_limit))
    limit = small_whole(text)
    if not 1 <= limit <= MAX_LIMIT:
        raise RequestError(f"limit is {text[:20]!r}; it must be 1 to {MAX_LIMIT}", param="limit")
    order = arguments.get("order", "desc")
    if order not in _ORDERS:
        raise RequestError(f"order is {order[:20]!r}; it must be asc or desc", param="order")
    after = arguments.get("after") or None
    return Page(limit=limit, after=after, descending=order == "desc")


def check_query(*known: str) -> None:
    """Raises RequestError for a parameter of the query that is none of `known`."""
    for name in flask.request.args:
        if name not in known:
            raise RequestError(
                f"unknown query parameter {name[:64]!r}", param=name[:64], code="unknown_parameter"
            )


def small_whole(text: str) -> int:
    """The number that `text` is; 0 for what is none of at most nine digits."""
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 9 else 0


def list_body(items: Sequence[dict[str, Any]], page: Page) -> dict[str, Any]:
    """The answer, from all items in the order asked for. Raises RequestError if `after` is none."""
    start = 0
    if page.after is not None:
        ids = [item["id"] for item in items]
        if page.after not in ids:
            raise RequestError(f"there is nothing called {page.after[:80]!r} here", param="after")
        start = ids.index(page.after) + 1
    shown = items[start : start + page.limit]
    return {
        "object": "list",
        "data": shown,
        "first_id": shown[0]["id"] if shown else None,
        "last_id": shown[-1]["id"] if shown else None,
        "has_more": start + page.limit < len(items),
    }
