"""GET /metrics: the engine's own metrics in Prometheus' text format, and whether it is there."""

from __future__ import annotations

import os

import flask

from jaxserve.errors import EngineGoneError
from server.described import TEXT, Description, described
from server.services import Services

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_UP = "jaxserve:engine_up"
_LOST = "jaxserve:usage_rows_lost"


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
        return flask.Response(text, content_type=CONTENT_TYPE)

    return blueprint
