"""Checks a chat's messages as OpenAI's API documents them (step 1).

Extra keys inside a message stay: clients send whole answers back, and templates may use them.
"""

from __future__ import annotations

from typing import Any

from jaxserve.errors import RequestError

#: Roles of the API -> roles that models' templates know.
_ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}


def read_messages(raw: list[Any]) -> list[dict[str, Any]]:
    """Messages with a known role, whose content is a text or a list of text parts.

    Raises RequestError.
    """
    if not raw:
        raise RequestError("messages must hold at least one message", param="messages")
    return [_message(message, f"messages[{number}]") for number, message in enumerate(raw)]


def _message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise _wrong(where, "must be an object with a role and a content")
    role = message.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise _wrong(f"{where}.role", f"is {_show(role)}; it must be one of {', '.join(_ROLES)}")
    content = message.get("content")
    if content is None and role == "assistant":
        content = ""
    if not isinstance(content, str):
        content = _text_parts(content, f"{where}.content")
    calls = message.get("tool_calls")
    if calls is not None:
        _check_tool_calls(calls, f"{where}.tool_calls")
    return {**message, "role": _ROLES[role], "content": content}


def _text_parts(parts: Any, where: str) -> list[dict[str, str]]:
    """A refusal that a client sends back is text like any other."""
    if not isinstance(parts, list):
        raise _wrong(where, "must be a string or a list of text parts")
    texts: list[dict[str, str]] = []
    for number, part in enumerate(parts):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in ("text", "refusal"):
            raise _wrong(
                f"{where}[{number}]",
                f"has the type {_show(kind)}; only text parts are supported by this model",
            )
        text = part.get(kind)
        if not isinstance(text, str):
            raise _wrong(f"{where}[{number}].{kind}", "must be a string")
        texts.append({"type": "text", "text": text})
    return texts


def _check_tool_calls(calls: Any, where: str) -> None:
    if not isinstance(calls, list):
        raise _wrong(where, "must be a list")
    for number, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise _wrong(f"{where}[{number}]", "must hold a function with a name")
        if not isinstance(function.get("arguments"), str):
            raise _wrong(f"{where}[{number}].function.arguments", "must be a string")


def _wrong(where: str, what: str) -> RequestError:
    return RequestError(f"{where} {what}", param="messages", code="invalid_messages")


def _show(value: Any) -> str:
    return "missing" if value is None else repr(value)[:40]
