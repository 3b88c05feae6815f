"""From the items of OpenAI's Responses API to a chat's messages (step 1)."""

from __future__ import annotations

from typing import Any

from jaxserve.errors import RequestError
from server.openai.fields import refuse_fields
from server.openai.schema import ChatBody
from server.responses.schema import PROMPT_REFUSALS, REFUSALS, PromptBody, ResponsesBody

Json = dict[str, Any]
LOGPROBS = "message.output_text.logprobs"
#: What a response may be asked to hold besides; the second one's items never occur here.
_INCLUDE = (LOGPROBS, "reasoning.encrypted_content")
_ROLES = ("user", "assistant", "system", "developer")
_TEXT_PARTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}


def input_items(body: PromptBody) -> list[Any]:
    """The body's own items; a text is one message of the user's. Raises RequestError."""
    if body.input is None:
        if body.previous_response_id is None:
            raise RequestError("input must be given", param="input", code="missing_parameter")
        return []
    if isinstance(body.input, str):
        return [{"type": "message", "role": "user", "content": body.input}]
    return body.input


def to_chat(body: PromptBody, earlier: list[Any]) -> ChatBody:
    """The chat that `body` asks for; earlier: the items of the responses before it.

    Raises RequestError naming the field.
    """
    refuse_fields(body, REFUSALS if isinstance(body, ResponsesBody) else PROMPT_REFUSALS)
    messages = to_messages([*earlier, *input_items(body)])
    if body.instructions:
        messages.insert(0, {"role": "system", "content": body.instructions})
    chat = ChatBody(
        messages=messages,
        response_format=_text_format(body.text),
        tools=[_tool(tool, number) for number, tool in enumerate(body.tools or [])],
        tool_choice=_tool_choice(body.tool_choice),
        parallel_tool_calls=body.parallel_tool_calls,
    )
    if isinstance(body, ResponsesBody):
        _read_sampling(body, chat)
    return chat


def _read_sampling(body: ResponsesBody, chat: ChatBody) -> None:
    if body.max_output_tokens is not None and body.max_output_tokens < 1:
        raise RequestError(
            f"max_output_tokens is {body.max_output_tokens}; it must be at least 1",
            param="max_output_tokens",
        )
    chat.max_completion_tokens = body.max_output_tokens
    chat.temperature, chat.top_p = body.temperature, body.top_p
    chat.stream, chat.stream_options = body.stream, body.stream_options
    if body.stream_options is not None and body.stream_options.include_usage is not None:
        raise RequestError(
            "stream_options.include_usage is not a field of this route: the last event always "
            "holds the usage",
            param="stream_options",
        )
    for name in body.include or []:
        if name not in _INCLUDE:
            raise RequestError(
                f"include holds {name[:64]!r}; this server has {', '.join(_INCLUDE)}",
                param="include",
                code="unsupported_parameter",
            )
    chat.logprobs = LOGPROBS in (body.include or []) or body.top_logprobs is not None
    chat.top_logprobs = body.top_logprobs


def to_messages(items: list[Any]) -> list[Json]:
    """Messages of a chat. Raises RequestError naming the item."""
    messages: list[Json] = []
    for number, item in enumerate(items):
        where = f"input[{number}]"
        if not isinstance(item, dict):
            raise _wrong(where, "must be an object")
        kind = item.get("type", "message")
        if kind == "message":
            messages.append(_message(item, where))
        elif kind == "function_call":
            _add_call(messages, item, where)
        elif kind == "function_call_output":
            messages.append(_call_output(item, where))
        elif kind != "reasoning":  # what a model thought before is no part of the next prompt
            raise _wrong(f"{where}.type", f"is {_show(kind)}, which this server does not have")
    if not messages:
        raise RequestError("input must hold at least one message", param="input")
    return messages


def _message(item: Json, where: str) -> Json:
    role, content = item.get("role"), item.get("content")
    if role not in _ROLES:
        raise _wrong(f"{where}.role", f"is {_show(role)}; it must be one of {', '.join(_ROLES)}")
    if not isinstance(content, str):
        content = _texts(content, f"{where}.content")
    return {"role": role, "content": content}


def _texts(parts: Any, where: str) -> list[Json]:
    if not isinstance(parts, list):
        raise _wrong(where, "must be a string or a list of text parts")
    texts = []
    for number, part in enumerate(parts):
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(kind, str) or kind not in _TEXT_PARTS:
            raise _wrong(
                f"{where}[{number}]", f"has the type {_show(kind)}; only text is supported"
            )
        text = part.get(_TEXT_PARTS[kind])
        if not isinstance(text, str):
            raise _wrong(f"{where}[{number}].{_TEXT_PARTS[kind]}", "must be a string")
        texts.append({"type": "text", "text": text})
    return texts


def _add_call(messages: list[Json], item: Json, where: str) -> None:
    """Calls that follow one another, or a text of the assistant's, are one turn."""
    for name in ("call_id", "name", "arguments"):
        if not isinstance(item.get(name), str):
            raise _wrong(f"{where}.{name}", "must be a string")
    function = {"name": item["name"], "arguments": item["arguments"]}
    call = {"id": item["call_id"], "type": "function", "function": function}
    if messages and messages[-1]["role"] == "assistant":
        messages[-1].setdefault("tool_calls", []).append(call)
    else:
        messages.append({"role": "assistant", "content": "", "tool_calls": [call]})


def _call_output(item: Json, where: str) -> Json:
    if not isinstance(item.get("call_id"), str):
        raise _wrong(f"{where}.call_id", "must be a string")
    output = item.get("output")
    content = output if isinstance(output, str) else _texts(output, f"{where}.output")
    return {"role": "tool", "tool_call_id": item["call_id"], "content": content}


def _text_format(text: Json | None) -> Any:
    """What chat calls response_format."""
    if text is None:
        return None
    unknown = sorted(text.keys() - {"format", "verbosity"})
    if unknown or text.get("verbosity") not in (None, "medium"):
        name = unknown[0][:64] if unknown else "verbosity"
        raise RequestError(
            f"text.{name} is not supported by this server; leave it out",
            param="text",
            code="unsupported_parameter",
        )
    given = text.get("format")
    if isinstance(given, dict) and given.get("type") == "json_schema":
        inner = {name: value for name, value in given.items() if name != "type"}
        return {"type": "json_schema", "json_schema": inner}
    return given


def _tool(tool: Any, number: int) -> Json:
    if not isinstance(tool, dict) or tool.get("type") != "function":
        kind = tool.get("type") if isinstance(tool, dict) else None
        raise RequestError(
            f"tools[{number}] has the type {_show(kind)}; only function is supported",
            param="tools",
            code="unsupported_parameter",
        )
    return {"type": "function", "function": {k: v for k, v in tool.items() if k != "type"}}


def _tool_choice(choice: Any) -> Any:
    if isinstance(choice, dict) and choice.get("type") == "function":
        return {"type": "function", "function": {"name": choice.get("name")}}
    return choice


def _wrong(where: str, what: str) -> RequestError:
    return RequestError(f"{where} {what}", param="input", code="invalid_input")


def _show(value: Any) -> str:
    return "missing" if value is None else repr(value)[:40]
