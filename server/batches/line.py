"""One line of a batch: it goes through the application like a request that came over HTTP.

So every route that a batch may name reads, limits and answers it by its own rules.
"""

from __future__ import annotations

import io
from typing import Any

import flask
import msgspec

from jaxserve.errors import RequestError
from jaxserve.offline.batch_input import InputLine, parse_line
from jaxserve.offline.batch_output import answer_id
from server.batches.batches import LineAnswer, Outcome
from server.tenant import BACKGROUND_KEY, TENANT_KEY

ENDPOINTS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/embeddings",
    "/v1/responses",
)
Json = dict[str, Any]


def answer_line(app: flask.Flask, line: InputLine, tenant: str) -> tuple[int, LineAnswer]:
    """The HTTP status of a line's answer, and the answer."""
    assert line.data is not None, "the file was checked"
    request = parse_line(line.data)
    try:
        _refuse_stream(request.body)
        status, request_id, data = _dispatch(app, request.url, request.body, tenant)
        body = msgspec.Raw(data)
    except RequestError as error:
        fields = {"message": str(error), "type": "invalid_request_error", "param": error.param}
        request_id, status = "", error.status
        body = msgspec.Raw(msgspec.json.encode({"error": {**fields, "code": error.code}}))
    entry = {
        "id": answer_id(line),
        "custom_id": request.custom_id,
        "response": {"status_code": status, "request_id": request_id, "body": body},
        "error": None,
    }
    made = msgspec.json.encode(entry) + b"\n"
    return status, LineAnswer(
        number=line.number, outcome=Outcome.DONE if status == 200 else Outcome.FAILED, data=made
    )


def failed_line(
    line: InputLine, code: str, message: str, outcome: Outcome = Outcome.FAILED
) -> LineAnswer:
    """What the error file says of a line that has no response."""
    assert line.data is not None, "the file was checked"
    entry = {
        "id": answer_id(line),
        "custom_id": parse_line(line.data).custom_id,
        "response": None,
        "error": {"code": code, "message": message},
    }
    return LineAnswer(number=line.number, outcome=outcome, data=msgspec.json.encode(entry) + b"\n")


def _refuse_stream(body: bytes) -> None:
    try:
        fields = msgspec.json.decode(body)
    except msgspec.MsgspecError:
        return  # the route says what is wrong
    if isinstance(fields, dict) and fields.get("stream"):
        raise RequestError("stream is not possible in a batch; leave it out", param="stream")


def _dispatch(app: flask.Flask, url: str, body: bytes, tenant: str) -> tuple[int, str, bytes]:
    environ = {
        "REQUEST_METHOD": "POST",
        "SCRIPT_NAME": "",
        "PATH_INFO": url,
        "QUERY_STRING": "",
        "CONTENT_TYPE": "application/json",
        "CONTENT_LENGTH": str(len(body)),
        "SERVER_NAME": "batch",
        "SERVER_PORT": "0",
        "SERVER_PROTOCOL": "HTTP/1.1",
        "wsgi.version": (1, 0),
        "wsgi.url_scheme": "http",
        "wsgi.input": io.BytesIO(body),
        "wsgi.errors": io.StringIO(),
        "wsgi.multithread": True,
        "wsgi.multiprocess": True,
        "wsgi.run_once": False,
        TENANT_KEY: tenant,
        BACKGROUND_KEY: True,
    }
    with app.request_context(environ):
        response = app.full_dispatch_request()
        try:
            data = response.get_data()
            return response.status_code, response.headers.get("X-Request-Id", ""), data
        finally:
            response.close()
