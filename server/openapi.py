"""GET /openapi.json: every route of the application, from its rules, its notes and its structs.

A body's schema is made from the struct that decodes it and from the table that refuses fields, so
what is said here is what is checked there. OpenAPI 3.1.
"""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Callable
from typing import Any

import flask
import msgspec

from server.described import EVENTS, JSON, Description, description_of
from server.openai.schema import Body

Json = dict[str, Any]
_METHODS = ("GET", "POST", "PUT", "DELETE", "PATCH")
_PARAMETER = re.compile(r"<(?:[^:<>]+:)?([^<>]+)>")
_REF = "#/components/schemas/{name}"
_ERROR: Json = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


def openapi_blueprint() -> flask.Blueprint:
    """The route."""
    blueprint = flask.Blueprint("openapi", __name__)
    made: list[Json] = []

    @blueprint.get("/openapi.json")
    def openapi() -> Json:
        """This description."""
        if not made:
            made.append(describe(flask.current_app))
        return made[0]

    return blueprint


def describe(app: flask.Flask) -> Json:
    """The whole document."""
    paths: dict[str, Json] = {}
    bodies: set[type[Body]] = set()
    refusals: dict[type[Body], Description] = {}
    for rule in sorted(app.url_map.iter_rules(), key=lambda rule: rule.rule):
        view = app.view_functions[rule.endpoint]
        note = description_of(view)
        if note.body is not None:
            bodies.add(note.body)
            refusals[note.body] = note
        path = _PARAMETER.sub(r"{\1}", rule.rule)
        for method in _METHODS:
            if method in (rule.methods or ()):
                operation = _operation(rule.endpoint, view, note, sorted(rule.arguments))
                paths.setdefault(path, {})[method.lower()] = operation
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "jaxserve",
            "version": _version(),
            "description": "OpenAI's and Anthropic's APIs, with vLLM's additions.",
        },
        "paths": paths,
        "components": {
            "schemas": {"Error": _ERROR, **_schemas(bodies, refusals)},
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
        "security": [{}, {"bearer": []}, {"key": []}],
    }


def _version() -> str:
    """Of the installed package; the front end does not import it as a whole."""
    try:
        return importlib.metadata.version("jaxserve")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def _operation(
    name: str, view: Callable[..., Any], note: Description, arguments: list[str]
) -> Json:
    """One method of one path."""
    summary = (view.__doc__ or name).strip().split("\n")[0]
    places = [
        {"name": argument, "in": "path", "required": True, "schema": {"type": "string"}}
        for argument in arguments
    ]
    places += [
        {"name": parameter, "in": "query", "required": False, "schema": schema}
        for parameter, schema in note.query.items()
    ]
    error = {"content": {JSON: {"schema": {"$ref": _REF.format(name="Error")}}}}
    operation: Json = {
        "operationId": name.replace(".", "_"),
        "summary": summary,
        "parameters": places,
        "responses": {
            "200": {"description": "The answer.", "content": _contents(note.answers)},
            "default": {"description": "What is wrong, in words.", **error},
        },
    }
    if note.body is not None:
        schema = {"$ref": _REF.format(name=note.body.__name__)}
        operation["requestBody"] = {"required": True, "content": {JSON: {"schema": schema}}}
    if note.form is not None:
        content = {"multipart/form-data": {"schema": note.form}}
        operation["requestBody"] = {"required": True, "content": content}
    return operation


def _contents(kinds: tuple[str, ...]) -> Json:
    schemas: dict[str, Json] = {JSON: {"type": "object"}, EVENTS: {}}
    return {kind: {"schema": schemas.get(kind, {"type": "string"})} for kind in kinds}


def _schemas(bodies: set[type[Body]], notes: dict[type[Body], Description]) -> dict[str, Json]:
    ordered = sorted(bodies, key=lambda body: body.__name__)
    _, schemas = msgspec.json.schema_components(ordered, ref_template=_REF)
    for body in ordered:
        schema = schemas[body.__name__]
        schema["additionalProperties"] = False
        for field, (empty, reason) in notes[body].refusals.items():
            schema["properties"][field] = {
                "enum": [None, *empty],
                "description": f"Asks for nothing only: {reason}.",
            }
    return schemas
