"""Looks a batch's file over before any of it is answered: a bad file fails as a whole."""

from __future__ import annotations

import pathlib
from typing import Any

from jaxserve.errors import RequestError
from jaxserve.offline.batch_input import open_input, parse_line, read_lines

MAX_LINES = 50_000
_MAX_ERRORS = 100
Json = dict[str, Any]


def check_file(path: pathlib.Path, endpoint: str, max_line: int) -> tuple[int, list[Json]]:
    """The number of requests in a file, and what is wrong with it (nothing, mostly).

    max_line: bytes of one line. Raises ResourceError if the file cannot be read.
    """
    seen: set[str] = set()
    errors: list[Json] = []
    total = 0
    with open_input(path) as file:
        for line in read_lines(file, max_line):
            total += 1
            try:
                if line.data is None:
                    raise RequestError(f"the line is longer than {max_line} bytes", code="too_long")
                _check_line(line.data, endpoint, seen)
            except RequestError as error:
                errors.append(error_entry(error, line.number))
            if total > MAX_LINES:
                many = RequestError(f"more than {MAX_LINES} requests", code="too_many_requests")
                errors.append(error_entry(many, None))
            if len(errors) >= _MAX_ERRORS or total > MAX_LINES:
                break
    if total == 0:
        errors.append(error_entry(RequestError("the file is empty", code="empty_file"), None))
    return total, errors


def error_entry(error: RequestError, line: int | None) -> Json:
    """One entry of a batch's errors."""
    code = error.code or "invalid_request"
    return {"code": code, "message": str(error), "param": error.param, "line": line}


def _check_line(data: bytes, endpoint: str, seen: set[str]) -> None:
    request = parse_line(data)
    if request.url != endpoint:
        raise RequestError(
            f"url is {request.url[:64]!r}; the batch's endpoint is {endpoint}", param="url"
        )
    if request.custom_id in seen:
        raise RequestError(
            f"the custom_id {request.custom_id[:64]!r} comes twice",
            param="custom_id",
            code="duplicate_custom_id",
        )
    seen.add(request.custom_id)
