"""Exceptions become OpenAI's error object, here and nowhere else."""

from __future__ import annotations

import logging
import math

import flask
import msgspec
from werkzeug.exceptions import HTTPException

from jaxserve.client import HungUpError
from jaxserve.errors import (
    EngineError,
    LimitError,
    NotFoundError,
    RefusedError,
    RequestError,
    StorageError,
)

logger = logging.getLogger("jaxserve.server")

RETRY_AFTER_SECONDS = 1
#: nginx's status for a client that closed its connection; nobody reads it.
CLIENT_LEFT = 499
#: In place of werkzeug's sentences, which speak of pages and servers.
_HTTP_MESSAGES = {
    400: "this is no request of HTTP/1.1 that is understood here; websockets are not spoken",
    404: "there is no such path here; GET / lists the routes",
    405: "this path does not take that method; GET / lists the routes",
}


def error_body(error: Exception) -> dict[str, dict[str, str | None]]:
    """`{"error": {message, type, param, code}}`; never shows what the server is made of."""
    message, kind, param, code = str(error), "invalid_request_error", None, None
    if isinstance(error, NotFoundError):
        param, code = error.param, error.code or "not_found"
    elif isinstance(error, RequestError):
        param, code = error.param, error.code or "invalid_value"
    elif isinstance(error, RefusedError):
        kind = "server_error" if isinstance(error, StorageError) else "rate_limit_error"
        kind = "insufficient_quota" if error.status == 402 else kind
        code = error.reason
    elif isinstance(error, EngineError):
        kind, code = "server_error", "engine_error" if error.status == 500 else "unavailable"
    elif isinstance(error, HTTPException):
        own = error.description != type(error).description
        theirs = error.description or error.name
        message = theirs if own else _HTTP_MESSAGES.get(error.code or 500, theirs)
        code = error.name.lower().replace(" ", "_")
    else:
        message, kind, code = "internal error; the server's log says more", "server_error", None
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def error_status(error: Exception) -> int:
    """The HTTP status that goes with `error_body`."""
    if isinstance(error, HTTPException):
        return error.code or 500
    if isinstance(error, (RequestError, RefusedError, EngineError)):
        return error.status
    return CLIENT_LEFT if isinstance(error, HungUpError) else 500


def error_response(error: Exception) -> flask.Response:
    """The whole answer for `error`; unexpected ones go to the log with their traceback."""
    status = error_status(error)
    if isinstance(error, HungUpError):
        return flask.Response(status=status)
    if status == 500:
        logger.error("a request failed", exc_info=error)
    response = flask.Response(
        msgspec.json.encode(error_body(error)), status, mimetype="application/json"
    )
    if status in (402, 429, 503):
        seconds = error.retry_after if isinstance(error, LimitError) else RETRY_AFTER_SECONDS
        response.headers["Retry-After"] = str(max(1, math.ceil(seconds)))
    if isinstance(error, LimitError):
        response.headers.update(error.headers)
    if status == 401:
        response.headers["WWW-Authenticate"] = _challenge()
    valid_methods = getattr(error, "valid_methods", None)
    if valid_methods:
        response.headers["Allow"] = ", ".join(sorted(valid_methods))
    return response


def _challenge() -> str:
    """How to send a key. A browser that opens the page is asked to ask for it: the password is the key."""
    opens = flask.request.path == "/" and "text/html" in flask.request.headers.get("Accept", "")
    return 'Basic realm="API key as password", charset="UTF-8"' if opens else "Bearer"


def install(app: flask.Flask) -> None:
    """Makes every exception of every route go through `error_response`."""
    app.register_error_handler(Exception, error_response)
