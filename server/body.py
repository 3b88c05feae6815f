"""Reading a request's body: its type, its size and its pace are checked before it is parsed."""

from __future__ import annotations

from typing import TypeVar

import flask
import gevent
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
    encoding = request.headers.get("Content-Encoding", "identity")
    if encoding.lower() != "identity":
        raise UnsupportedMediaType(
            f"the content encoding is {encoding[:40]!r}; send the body as it is"
        )
    data = _read(max_bytes)
    mark("body_read")
    return decode_body(data, kind)


def _read(max_bytes: int) -> bytes:
    timeout = gevent.Timeout(BODY_SECONDS)
    timeout.start()
    try:
        chunks, size = [], 0
        while chunk := flask.request.stream.read(_CHUNK):
            size += len(chunk)
            if size <= max_bytes:
                chunks.append(chunk)
            else:
                chunks.clear()
            if size > _MAX_DISCARDED:
                break
    except (OSError, ParseException):
        raise RequestError("the body could not be read", code="invalid_body") from None
    except gevent.Timeout as expired:
        if expired is not timeout:
            raise
        raise RequestTimeout(f"the body did not arrive within {BODY_SECONDS:g} s") from None
    finally:
        timeout.close()
    if size > max_bytes:
        raise RequestEntityTooLarge(f"the body is larger than {max_bytes} bytes")
    return b"".join(chunks)
