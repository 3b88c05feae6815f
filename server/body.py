"""Reading a request's body: its type, coding, size and pace are checked before it is parsed."""

from __future__ import annotations

from typing import TypeVar

import flask
import gevent
from gunicorn.http.body import Body as GunicornBody
from gunicorn.http.errors import ParseException
from werkzeug.exceptions import (
    RequestEntityTooLarge,
    RequestTimeout,
    UnsupportedMediaType,
)

from jaxserve.errors import RequestError
from server.marks import mark
from server.openai.decode import decode_body
from server.openai.schema import Body

AnyBody = TypeVar("AnyBody", bound=Body)

#: Seconds that a client may take to send its body.
BODY_SECONDS = 60.0
#: What is still taken off a client's hands before a refusal, so that it gets to read the refusal.
_MAX_DISCARDED = 64 * 2**20
_CHUNK = 65536


def read_json(kind: type[AnyBody], max_bytes: int) -> AnyBody:
    """The current request's body as a `kind`.

    Raises werkzeug's 413, 415 and 408 errors, and RequestError.
    """
    request = flask.request
    mimetype = request.mimetype
    if mimetype != "application/json" and not mimetype.endswith("+json"):
        raise UnsupportedMediaType(
            f"the content type is {mimetype[:100] or 'missing'!r}; send application/json"
        )
    check_coding()
    data = _read(max_bytes)
    mark("body_read")
    return decode_body(data, kind)


def check_coding() -> None:
    """Raises werkzeug's 415 error for a compressed body: none is ever unpacked here."""
    headers = flask.request.headers
    for name, plain in (("Content-Encoding", "identity"), ("Transfer-Encoding", "chunked")):
        coding = headers.get(name, plain)
        if coding.lower() != plain:
            raise UnsupportedMediaType(
                f"the {name.replace('-', ' ').lower()} is {coding[:40]!r}; send the body as it is"
            )


def read_piece(size: int) -> bytes:
    """At most `size` more bytes of the current request's body. Raises RequestError."""
    try:
        return flask.request.stream.read(size)
    except (OSError, ParseException):
        raise RequestError("the body could not be read", code="invalid_body") from None
    except gevent.Timeout:
        # A chunk was left in its middle, so what comes next on this connection is no request.
        # gunicorn closes it for every Exception, which this is not.
        body = flask.request.environ["wsgi.input"]
        if isinstance(body, GunicornBody):
            body.failed = True
        raise


def _read(max_bytes: int) -> bytes:
    timeout = gevent.Timeout(BODY_SECONDS)
    timeout.start()
    try:
        chunks, size = [], 0
        while chunk := read_piece(_CHUNK):
            size += len(chunk)
            if size <= max_bytes:
                chunks.append(chunk)
            else:
                chunks.clear()
            if size > _MAX_DISCARDED:
                break
    except gevent.Timeout as expired:
        if expired is not timeout:
            raise
        raise RequestTimeout(f"the body did not arrive within {BODY_SECONDS:g} s") from None
    finally:
        timeout.close()
    if size > max_bytes:
        raise RequestEntityTooLarge(f"the body is larger than {max_bytes} bytes")
    announced = flask.request.content_length
    if announced is not None and size < announced:
        raise RequestError(f"the body ended after {size} of {announced} bytes", code="invalid_body")
    return b"".join(chunks)
