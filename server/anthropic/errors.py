"""Anthropic's error object: the same status and words, in another shape (step 9)."""

from __future__ import annotations

from typing import Any

from server.errors import error_body, error_status

_TYPES = {
    401: "authentication_error",
    402: "billing_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def anthropic_error(error: Exception, request_id: str) -> dict[str, Any]:
    """`{"type": "error", "error": {type, message}, "request_id"}`."""
    status = error_status(error)
    kind = _TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    return {
        "type": "error",
        "error": {"type": kind, "message": error_body(error)["error"]["message"]},
        "request_id": request_id,
    }
