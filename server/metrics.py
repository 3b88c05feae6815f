"""GET /metrics: the engine's own metrics in Prometheus' text format, and whether it is there."""

from __future__ import annotations

import os

import flask

from jaxserve.errors import EngineGoneError
from server.access.gate import current_caller
from server.described import TEXT, Description, described
from server.services import Services

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_UP = "jaxserve:engine_up"
_LOST = "jaxserve:usage_rows_lost"


def _without_others(text: str) -> str:
    """Who is no admin sees of what is told by tenant only the own."""
    caller = current_caller()
    if caller.tenant.admin:
        return text
    own = f'tenant="{caller.name}"'
    lines = text.splitlines(keepends=True)
    return "".join(line for line in lines if 'tenant="' not in line or own in line)


def metrics_blueprint(services: Services) -> flask.Blueprint:
    """The metrics route; valid also while the engine is gone."""
    blueprint = flask.Blueprint("metrics", __name__)

    @blueprint.get("/metrics")
    @described(Description(answers=(TEXT,)))
    def metrics() -> flask.Response:
        text, up = "", 1
        try:
            text = services.engines[0].metrics()
        except EngineGoneError:
            up = 0
        lost = services.meter.ledger.num_lost
        text += f"# HELP {_LOST} Rows of usage that could not be written\n# TYPE {_LOST} counter\n"
        text += f'{_LOST}_total{{worker="{os.getpid()}"}} {lost}\n'
        text += f"# HELP {_UP} Whether the engine answers\n# TYPE {_UP} gauge\n{_UP} {up}\n"
        return flask.Response(_without_others(text), content_type=CONTENT_TYPE)

    return blueprint
