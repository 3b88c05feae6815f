"""GET /v1/models and /v1/models/{id}."""

from __future__ import annotations

from typing import Any

import flask

from server.services import Services


def models_blueprint(services: Services) -> flask.Blueprint:
    """The models routes."""
    blueprint = flask.Blueprint("models", __name__)

    def card() -> dict[str, Any]:
        infos = [engine.info for engine in services.engines if engine.info is not None]
        return {
            "id": services.served_name(),
            "object": "model",
            "created": services.started,
            "owned_by": "jaxserve",
            "max_model_len": infos[0].max_model_len if infos else None,
        }

    @blueprint.get("/v1/models")
    def models() -> dict[str, Any]:
        """The models that this server has."""
        return {"object": "list", "data": [card()]}

    @blueprint.get("/v1/models/<path:model>")
    def model(model: str) -> dict[str, Any]:
        """One model."""
        services.check_model(model)
        return card()

    return blueprint
