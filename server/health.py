"""GET /health (this process answers), /ready (a request would be answered), and / (what is here)."""

from __future__ import annotations

from typing import Any

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

    @blueprint.get("/")
    def index() -> dict[str, Any]:
        rules = flask.current_app.url_map.iter_rules()
        routes = {
            f"{method} {rule.rule}"
            for rule in rules
            for method in (rule.methods or set()) - {"HEAD", "OPTIONS"}
        }
        return {
            "name": "jaxserve",
            "model": services.served_name(),
            "routes": sorted(routes, key=lambda route: route.split()[::-1]),
        }

    return blueprint
