"""/openapi.json is valid, complete, and says what the routes check."""

from __future__ import annotations

import pathlib
import re
from typing import Any

import pytest
from app_alone import make_app, post
from openapi_spec_validator import OpenAPIV31SpecValidator

APP = make_app()
DOCUMENT: Any = APP.test_client().get("/openapi.json").get_json()
WITH_BODY = {
    path: operations["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"]
    for path, operations in DOCUMENT["paths"].items()
    if "application/json" in operations.get("post", {}).get("requestBody", {}).get("content", {})
}


def schema(path: str) -> Any:
    return DOCUMENT["components"]["schemas"][WITH_BODY[path].rpartition("/")[2]]


def test_it_is_valid() -> None:
    OpenAPIV31SpecValidator(DOCUMENT).validate()


def test_every_route_is_there() -> None:
    for rule in APP.url_map.iter_rules():
        path = re.sub(r"<(?:[^:<>]+:)?([^<>]+)>", r"{\1}", rule.rule)
        methods = {method.lower() for method in rule.methods or ()} - {"head", "options"}
        assert methods <= DOCUMENT["paths"][path].keys(), path
    summaries = [op["summary"] for ops in DOCUMENT["paths"].values() for op in ops.values()]
    assert all(summaries)
    ids = [op["operationId"] for ops in DOCUMENT["paths"].values() for op in ops.values()]
    assert len(set(ids)) == len(ids)


@pytest.mark.parametrize("path", sorted(WITH_BODY))
def test_a_described_field_is_known_and_no_other(path: str) -> None:
    """Each with a value that none takes: the complaint is about the value, not about the name."""
    web = APP.test_client()
    url = path.replace("{", "").replace("}", "")
    for field in schema(path)["properties"]:
        error = post(web, url, {field: [{"no": "such value"}]}).get_json()
        assert "unknown" not in str(error.get("error", {}).get("message")), (field, error)
    answer = post(web, url, {"no_such_field": 1})
    assert answer.status_code == 400
    assert "no_such_field" in answer.text
    assert schema(path)["additionalProperties"] is False


def test_what_is_refused_is_described_as_such() -> None:
    chat = schema("/v1/chat/completions")["properties"]
    assert chat["store"]["enum"] == [None, False]
    assert schema("/v1/messages")["properties"]["speed"]["enum"] == [None, "standard"]
    assert schema("/v1/responses")["properties"]["background"]["enum"] == [None, False]


@pytest.mark.parametrize("path", sorted(DOCUMENT["paths"]))
def test_other_methods_are_405_with_json(path: str) -> None:
    web = APP.test_client()
    url = path.replace("{", "").replace("}", "")
    offered = {method.upper() for method in DOCUMENT["paths"][path]}
    if url == "/v1/responses/input_tokens":  # may also be a response's id
        offered |= {"GET", "DELETE"}
    for method in {"PUT", "PATCH", "DELETE", "POST", "GET", "TRACE"} - offered:
        answer = web.open(url, method=method)
        assert (answer.status_code, answer.get_json()["error"]["code"]) == (
            405,
            "method_not_allowed",
        ), (method, url)
        assert set(answer.headers["Allow"].replace(" ", "").split(",")) >= offered
    options = web.open(url, method="OPTIONS")
    assert options.status_code == 200
    assert "OPTIONS" in options.headers["Allow"]
    if "GET" in offered and url.startswith("/v1/models"):
        head = web.open("/v1/models", method="HEAD")
        assert (head.status_code, head.data) == (200, b"")


def test_every_route_has_its_words() -> None:
    text = (pathlib.Path(__file__).parents[2] / "docs" / "api.md").read_text()
    pages = {"/", "/static/{name}"}
    missing = [path for path in DOCUMENT["paths"] if path not in pages and path not in text]
    assert not missing
