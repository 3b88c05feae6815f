"""GET /v1/usage: what one's own requests took; an admin sees everybody's."""

from __future__ import annotations

from typing import Any

import flask

from jaxserve.errors import NotFoundError, RequestError
from server.access.gate import check_admin, current_caller
from server.described import Description, described
from server.services import Services
from server.usage.summary import GROUPS, Question, read_day, read_groups, summarise

_DAY = {"type": "string", "format": "date"}
_PARAMETERS = {
    "group_by": {"type": "string", "default": ",".join(GROUPS)},
    "tenant": {"type": "string"},
    "since": _DAY,
    "until": _DAY,
}


def usage_blueprint(services: Services) -> flask.Blueprint:
    """The usage route."""
    blueprint = flask.Blueprint("usage", __name__)

    @blueprint.get("/v1/usage")
    @described(Description(query=_PARAMETERS))
    def usage() -> dict[str, Any]:
        """Sums over the ledger, by day, tenant and model."""
        question = _read(flask.request.args)
        if not services.meter.ledger.keeps_rows:
            raise NotFoundError("this server keeps no ledger of usage: --no-usage-ledger")
        found = services.meter.ledger.read(lambda db: summarise(db, question))
        return {"object": "list", "data": found or []}

    return blueprint


def _read(given: Any) -> Question:
    for name in given:
        if name not in _PARAMETERS:
            raise RequestError(
                f"{name[:40]!r} is no parameter here; there are {', '.join(sorted(_PARAMETERS))}",
                param=name[:40],
            )
    caller = current_caller()
    tenant = given.get("tenant")
    if tenant is not None and tenant != caller.name:
        check_admin("another tenant's usage")
    if tenant is None and not caller.tenant.admin:
        tenant = caller.name
    return Question(
        groups=read_groups(given.get("group_by", ",".join(GROUPS))),
        tenant=tenant,
        since=read_day(given.get("since"), "since"),
        until=read_day(given.get("until"), "until"),
    )
