"""The lines of a batch file, one at a time, however long the file or a line is (step 1).

A line is `{"custom_id": ..., "method": "POST", "url": ..., "body": {...}}`, as in OpenAI's batch
API. Empty lines are no requests. Knows nothing of what a body means.
"""

from __future__ import annotations

import dataclasses
import hashlib
import pathlib
import stat
from collections.abc import Iterator
from typing import BinaryIO

import msgspec

from jaxserve.errors import RequestError, ResourceError

_FIELDS = frozenset({"custom_id", "method", "url", "body"})
_DIGEST_BYTES = 8


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class InputLine:
    """One line. number: counted from 1, empty lines too. data: None if it is too long to be read.

    digest: of the line's bytes without its end, 64 bits.
    """

    number: int
    data: bytes | None
    digest: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LineRequest:
    """What a line asks for; the body is still text."""

    custom_id: str
    url: str
    body: bytes


def open_input(path: pathlib.Path) -> BinaryIO:
    """Opens a batch file. Raises ResourceError if it cannot be read twice."""
    try:
        file = path.open("rb")
    except OSError as error:
        raise ResourceError(f"cannot read {path}: {error.strerror}") from None
    if not stat.S_ISREG(path.stat().st_mode):
        file.close()
        raise ResourceError(f"{path} is no file; it must be one, since it is read twice")
    return file


def read_lines(file: BinaryIO, max_bytes: int) -> Iterator[InputLine]:
    """All lines that are not empty, from the file's begin; a line takes at most `max_bytes`."""
    file.seek(0)
    number = 0
    while data := file.readline(max_bytes + 2):
        number += 1
        text = data.rstrip(b"\r\n")
        digest = hashlib.blake2b(text, digest_size=_DIGEST_BYTES)
        whole = data.endswith(b"\n") or len(data) < max_bytes + 2
        while not whole:
            rest = file.readline(max_bytes)
            digest.update(rest.rstrip(b"\r\n"))
            whole = rest.endswith(b"\n") or not rest
        if text.strip() or len(data) >= max_bytes + 2:
            yield InputLine(
                number=number,
                data=text if len(text) <= max_bytes else None,
                digest=int.from_bytes(digest.digest(), "big"),
            )


def parse_line(data: bytes) -> LineRequest:
    """The request of a line. Raises RequestError naming what is wrong with it."""
    fields = _decode_fields(data)
    unknown = sorted(fields.keys() - _FIELDS)
    if unknown:
        raise RequestError(
            f"unknown field {unknown[0][:64]!r}; a line has {', '.join(sorted(_FIELDS))}",
            param=unknown[0][:64],
            code="unknown_parameter",
        )
    custom_id, method, url = (_text(fields, name) for name in ("custom_id", "method", "url"))
    if method != "POST":
        raise RequestError(f"method is {method[:64]!r}; it must be POST", param="method")
    body = fields.get("body")
    if body is None:
        raise _missing("body")
    return LineRequest(custom_id=custom_id, url=url, body=bytes(body))


def find_custom_id(data: bytes) -> str | None:
    """The custom_id of a line that may be wrong in every other way; None if there is none."""
    try:
        return _text(_decode_fields(data), "custom_id")
    except RequestError:
        return None


def _decode_fields(data: bytes) -> dict[str, msgspec.Raw]:
    try:
        return msgspec.json.decode(data, type=dict[str, msgspec.Raw])
    except msgspec.ValidationError:
        raise RequestError("the line is not a JSON object", code="invalid_json") from None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise RequestError(f"the line is not valid JSON: {error}", code="invalid_json") from None
    except RecursionError:
        raise RequestError("the line is nested too deeply", code="invalid_json") from None


def _text(fields: dict[str, msgspec.Raw], name: str) -> str:
    raw = fields.get(name)
    if raw is None:
        raise _missing(name)
    try:
        return msgspec.json.decode(raw, type=str)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        raise RequestError(f"{name} must be a string", param=name, code="invalid_type") from None


def _missing(name: str) -> RequestError:
    return RequestError(f"the line has no {name}", param=name, code="missing_parameter")
