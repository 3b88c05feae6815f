"""GET /health (this process answers) and /ready (a request would be answered)."""

from __future__ import annotations

import flask

from server.services import Services


def health_blueprint(services: Services) -> flask.Blueprint:
    """The routes that need neither a model nor a body."""
    blueprint = flask.Blueprint("health", __name__)

    @blueprint.get("/health")
    def health() -> dict[str, str]:
        return {"status": "ok"}

    @blueprint.get("/ready")
    def ready() -> tuple[dict[str, str], int]:
        reason = services.not_ready_reason()
        if reason is not None:
            return {"status": "not ready", "reason": reason}, 503
        return {"status": "ready"}, 200

    return blueprint
