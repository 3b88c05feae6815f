"""GET / for browsers, and the page's files. Everybody else gets the list of routes at /."""

from __future__ import annotations

import pathlib
from typing import Any

import flask

from server.services import Services

STATIC = pathlib.Path(__file__).parent / "static"
#: The page loads nothing from anywhere else, and nobody else may frame it.
POLICY = (
    "default-src 'self'; img-src 'self' data:; frame-ancestors 'none'; base-uri 'none'; "
    "form-action 'self'"
)


def web_blueprint(services: Services) -> flask.Blueprint:
    """The page at / and its files."""
    blueprint = flask.Blueprint("web", __name__)

    @blueprint.get("/")
    def index() -> flask.Response:
        accepted = flask.request.accept_mimetypes
        if accepted.best_match(["application/json", "text/html"]) != "text/html":
            answer = flask.jsonify(_describe(services))
        else:
            answer = _file("index.html")
        answer.vary.add("Accept")
        return answer

    @blueprint.get("/static/<name>")
    def static(name: str) -> flask.Response:
        return _file(name)

    return blueprint


def _describe(services: Services) -> dict[str, Any]:
    """What / tells programs: the model and every route."""
    routes = {
        f"{method} {rule.rule}"
        for rule in flask.current_app.url_map.iter_rules()
        for method in (rule.methods or set()) - {"HEAD", "OPTIONS"}
    }
    return {
        "name": "jaxserve",
        "model": services.served_name(),
        "routes": sorted(routes, key=lambda route: route.split()[::-1]),
    }


def _file(name: str) -> flask.Response:
    answer = flask.send_from_directory(STATIC, name, max_age=0, etag=True)
    answer.headers["Content-Security-Policy"] = POLICY
    answer.headers["X-Content-Type-Options"] = "nosniff"
    answer.headers["Referrer-Policy"] = "no-referrer"
    return answer
