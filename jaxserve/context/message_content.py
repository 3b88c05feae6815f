"""Messages of OpenAI's API in the shape that a template can take (step 1)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from jaxserve.errors import RequestError

Message = dict[str, Any]


def prepare_messages(
    messages: Sequence[Mapping[str, Any]], *, takes_parts: bool, takes_text: bool
) -> list[Message]:
    """Checked copies of `messages`. Doing it twice changes nothing more.

    takes_parts: the template goes through lists of content parts itself; otherwise text parts
        are joined with newlines. takes_text: it takes plain text; otherwise a text becomes a list
        of one part. Arguments of tool calls, which the API sends as JSON text, become objects.
    Raises RequestError (param "messages") for what is not a message or not text.
    """
    if not messages:
        raise RequestError("messages is empty; send at least one", param="messages")
    prepared = []
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise _wrong(index, "is not an object with a role")
        ready = dict(message)
        content = ready.get("content")
        if isinstance(content, list | tuple):
            texts = [_text_of(index, part) for part in content]
            if not takes_parts:
                ready["content"] = "\n".join(texts)
        elif isinstance(content, str):
            if not takes_text:
                ready["content"] = [{"type": "text", "text": content}]
        elif content is not None:
            raise _wrong(index, f"has content of type {type(content).__name__}, not text")
        if ready.get("tool_calls"):
            ready["tool_calls"] = [_prepare_call(index, call) for call in ready["tool_calls"]]
        prepared.append(ready)
    return prepared


def _text_of(index: int, part: Any) -> str:
    if not isinstance(part, Mapping):
        raise _wrong(index, "has a content part that is not an object")
    if part.get("type") != "text":
        raise _wrong(index, f"has a content part of type {part.get('type')!r}; only text is taken")
    if not isinstance(part.get("text"), str):
        raise _wrong(index, "has a content part of type text without a text")
    return str(part["text"])


def _prepare_call(index: int, call: Any) -> dict[str, Any]:
    if not isinstance(call, Mapping):
        raise _wrong(index, "has a tool call that is not an object")
    function = call.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return dict(call)
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except ValueError:
        raise _wrong(index, "has a tool call whose arguments are not JSON") from None
    return {**call, "function": {**function, "arguments": arguments}}


def _wrong(index: int, what: str) -> RequestError:
    return RequestError(f"messages[{index}] {what}", param="messages")
