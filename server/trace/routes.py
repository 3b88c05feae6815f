"""GET /v1/requests and /v1/requests/{id}/trace: what the last requests went through."""

from __future__ import annotations

import sqlite3
from typing import Any

import flask
import msgspec

from jaxserve.errors import NotFoundError, RequestError
from server.access.gate import current_caller
from server.described import Description, described
from server.paging import check_query
from server.services import Services
from server.trace.chrome import chrome_trace

FORMATS = ("json", "chrome")
#: Traces in the list.
MAX_LISTED = 100
_SQL = "SELECT data FROM traces WHERE {where} ORDER BY number DESC LIMIT {limit}"


def trace_blueprint(services: Services) -> flask.Blueprint:
    """Both routes."""
    blueprint = flask.Blueprint("trace", __name__)

    @blueprint.get("/v1/requests")
    def list_requests() -> dict[str, Any]:
        """The last requests, newest first: what a trace says of them, without its steps."""
        check_query()
        data = []
        for trace in _find(services, "1", (), MAX_LISTED):
            data.append({k: v for k, v in trace.items() if k not in ("steps", "answers")})
        return {"object": "list", "data": data}

    @blueprint.get("/v1/requests/<path:request_id>/trace")
    @described(Description(query={"format": {"type": "string", "enum": FORMATS}}))
    def request_trace(request_id: str) -> flask.Response:
        """A request's trace: as JSON, or as Chrome's trace events (`format=chrome`)."""
        check_query("format")
        wanted = flask.request.args.get("format", "json")
        if wanted not in FORMATS:
            raise RequestError(
                f"format is {wanted[:40]!r}; it must be one of {', '.join(FORMATS)}", param="format"
            )
        found = _find(services, "request_id = ?", (request_id,), 1)
        if not found:
            raise NotFoundError(
                f"there is no trace of a request {request_id[:200]!r}; "
                f"the last {services.meter.ledger.max_traces} are kept (--trace-requests)",
                param="id",
            )
        trace = chrome_trace(found[0]) if wanted == "chrome" else found[0]
        return flask.Response(msgspec.json.encode(trace), mimetype="application/json")

    return blueprint


def _find(
    services: Services, where: str, values: tuple[str, ...], limit: int
) -> list[dict[str, Any]]:
    """One's own traces, an admin's is everybody's; newest first."""
    caller = current_caller()
    if not caller.tenant.admin:
        where, values = f"{where} AND tenant = ?", (*values, caller.name)

    def read(db: sqlite3.Connection) -> list[bytes]:
        return [row[0] for row in db.execute(_SQL.format(where=where, limit=limit), values)]

    return [msgspec.json.decode(data) for data in services.meter.ledger.read(read) or []]
