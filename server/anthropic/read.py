"""From Anthropic's messages to a chat's (step 1): the same prompt, whichever API asked for it."""

from __future__ import annotations

from typing import Any

import msgspec

from jaxserve.errors import RequestError
from server.anthropic.schema import PROMPT_REFUSALS, REFUSALS, MessagesBody, PromptBody
from server.openai.fields import refuse_fields
from server.openai.schema import ChatBody

_ROLES = ("user", "assistant")
#: What models thought in earlier turns is no part of the next prompt, as in Anthropic's API.
_THINKING = ("thinking", "redacted_thinking")
Json = dict[str, Any]


def to_chat(body: PromptBody) -> ChatBody:
    """The chat that `body` asks for. Raises RequestError naming the field.

    A last message of the assistant's is continued, not answered.
    """
    refuse_fields(body, REFUSALS if isinstance(body, MessagesBody) else PROMPT_REFUSALS)
    messages = _system(body.system) + _merge(
        [
            part
            for number, message in enumerate(body.messages)
            for part in _message(message, f"messages.{number}")
        ]
    )
    if not body.messages:
        raise RequestError("messages must hold at least one message", param="messages")
    chat = ChatBody(
        messages=messages,
        continue_final_message=messages[-1]["role"] == "assistant",
        tools=[_tool(tool, f"tools.{number}") for number, tool in enumerate(body.tools or [])],
        tool_choice=_tool_choice(body.tool_choice),
        response_format=_response_format(body.output_config),
        parallel_tool_calls=not (body.tool_choice or {}).get("disable_parallel_tool_use", False),
    )
    if isinstance(body, MessagesBody):
        if body.max_tokens < 1:
            raise RequestError(
                f"max_tokens is {body.max_tokens}; it must be at least 1", param="max_tokens"
            )
        chat.max_tokens = body.max_tokens
        chat.stop = body.stop_sequences
        chat.temperature, chat.top_k, chat.top_p = body.temperature, body.top_k, body.top_p
    return chat


def _system(system: str | list[Any] | None) -> list[Json]:
    if not system:
        return []
    content = system if isinstance(system, str) else _texts(system, "system")
    return [{"role": "system", "content": content}]


def _message(message: Any, where: str) -> list[Json]:
    """One message, or several where tool results stand beside text."""
    if not isinstance(message, dict):
        raise _wrong(where, "must be an object with a role and a content")
    role, content = message.get("role"), message.get("content")
    if role not in _ROLES:
        raise _wrong(f"{where}.role", f"is {_show(role)}; it must be user or assistant")
    if isinstance(content, str):
        content = [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise _wrong(f"{where}.content", "must be a string or a list of content blocks")
    texts: list[Json] = []
    calls: list[Json] = []
    results: list[Json] = []
    for number, block in enumerate(content):
        at = f"{where}.content.{number}"
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "text":
            texts += _texts([block], at)
            if role == "user" and block.get("citations"):
                raise _wrong(f"{at}.citations", "are possible in answers only")
        elif kind == "tool_use" and role == "assistant":
            calls.append(_call(block, at))
        elif kind == "tool_result" and role == "user":
            results.append(_result(block, at))
        elif not (kind in _THINKING and role == "assistant"):
            raise _wrong(at, f"has the type {_show(kind)}, which is not supported for {role}")
    if role == "assistant":
        return [{"role": role, "content": texts, **({"tool_calls": calls} if calls else {})}]
    return results + ([{"role": role, "content": texts}] if texts or not results else [])


def _texts(blocks: list[Any], where: str) -> list[Json]:
    texts = []
    for block in blocks:
        if not isinstance(block, dict) or block.get("type") != "text":
            kind = block.get("type") if isinstance(block, dict) else None
            raise _wrong(where, f"holds the type {_show(kind)}; only text blocks are supported")
        if not isinstance(block.get("text"), str):
            raise _wrong(f"{where}.text", "must be a string")
        texts.append({"type": "text", "text": block["text"]})
    return texts


def _call(block: Json, where: str) -> Json:
    if not (isinstance(block.get("id"), str) and isinstance(block.get("name"), str)):
        raise _wrong(where, "must have an id and a name")
    if not isinstance(block.get("input"), dict):
        raise _wrong(f"{where}.input", "must be an object")
    arguments = msgspec.json.encode(block["input"]).decode()
    function = {"name": block["name"], "arguments": arguments}
    return {"id": block["id"], "type": "function", "function": function}


def _result(block: Json, where: str) -> Json:
    if not isinstance(block.get("tool_use_id"), str):
        raise _wrong(f"{where}.tool_use_id", "must be a string")
    content = block.get("content") or ""
    if not isinstance(content, str | list):
        raise _wrong(f"{where}.content", "must be a string or a list of text blocks")
    texts = content if isinstance(content, str) else _texts(content, f"{where}.content")
    return {"role": "tool", "tool_call_id": block["tool_use_id"], "content": texts}


def _merge(messages: list[Json]) -> list[Json]:
    """Neighbours of one role become one turn, as in Anthropic's API; templates want turns."""
    merged: list[Json] = []
    for message in messages:
        last = merged[-1] if merged else {}
        if last.get("role") == message["role"] and message["role"] != "tool":
            calls = [*last.get("tool_calls", []), *message.get("tool_calls", [])]
            merged[-1] = {
                **last,
                "content": last["content"] + message["content"],
                **({"tool_calls": calls} if calls else {}),
            }
        else:
            merged.append(message)
    return merged


def _response_format(config: Json | None) -> Any:
    """The form of the answer, as chat has it; effort cannot be chosen."""
    given = {name: value for name, value in (config or {}).items() if value is not None}
    for name in given:
        if name != "format":
            raise RequestError(
                f"output_config.{name[:64]} is not supported by this server; leave it out",
                param="output_config",
                code="unsupported_parameter",
            )
    form = given.get("format")
    if form is None:
        return None
    kind = form.get("type") if isinstance(form, dict) else None
    if kind != "json_schema" or not isinstance(form.get("schema"), dict):
        raise RequestError(
            "output_config.format must have the type json_schema and a schema",
            param="output_config",
        )
    return {"type": "json_schema", "json_schema": {"name": "output", "schema": form["schema"]}}


def _tool(tool: Any, where: str) -> Json:
    if not isinstance(tool, dict) or tool.get("type", "custom") != "custom":
        raise RequestError(f"{where} is no tool that a client runs", param="tools")
    if not isinstance(tool.get("name"), str) or not isinstance(tool.get("input_schema"), dict):
        raise RequestError(f"{where} must have a name and an input_schema", param="tools")
    function = {"name": tool["name"], "parameters": tool["input_schema"]}
    if isinstance(tool.get("description"), str):
        function["description"] = tool["description"]
    if tool.get("strict") is not None:
        function["strict"] = tool["strict"]
    return {"type": "function", "function": function}


def _tool_choice(choice: Json | None) -> Any:
    if choice is None:
        return None
    kind = choice.get("type")
    if kind == "tool" and isinstance(choice.get("name"), str):
        return {"type": "function", "function": {"name": choice["name"]}}
    names = {"auto": "auto", "none": "none", "any": "required"}
    if not isinstance(kind, str) or kind not in names:
        raise RequestError(
            "tool_choice must have the type auto, any, none, or tool with a name",
            param="tool_choice",
        )
    return names[kind]


def _wrong(where: str, what: str) -> RequestError:
    return RequestError(f"{where} {what}", param=where.split(".")[0], code="invalid_messages")


def _show(value: Any) -> str:
    return "missing" if value is None else repr(value)[:40]
