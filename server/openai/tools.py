"""Tools in a chat's body: what is offered, what must be called, and how the answer will be read (step 1)."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from jaxserve.errors import RequestError
from server.openai.schema import ChatBody
from server.openai.tools_formats import LLAMA3, ToolFormat

MAX_TOOLS = 128
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
Json = dict[str, Any]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ToolsAsked:
    """tools: as the template gets them. choice: auto, required, or the name of the one to call.

    strict: names of those whose arguments must be valid for their schema wherever they are called.
    """

    tools: list[Json]
    choice: str
    parallel: bool
    named: bool = False
    strict: frozenset[str] = frozenset()

    @property
    def names(self) -> frozenset[str]:
        """Of all tools."""
        return frozenset(tool["function"]["name"] for tool in self.tools)

    @property
    def forced(self) -> bool:
        """Whether the answer must be a call."""
        return self.named or self.choice == "required"

    def format(self, model: ToolFormat) -> ToolFormat:
        """How calls are written: in the model's way, or, where no grammar has that, in Llama's."""
        return LLAMA3 if self.forced and not model.call else model


def read_tools(body: ChatBody) -> ToolsAsked | None:
    """What a body offers; None for no tools, or none that may be called. Raises RequestError."""
    tools = [] if body.tools is None else body.tools
    if not isinstance(tools, list):
        raise _wrong("tools", "must be a list")
    if len(tools) > MAX_TOOLS:
        raise _wrong("tools", f"holds {len(tools)} tools; at most {MAX_TOOLS} are taken")
    checked = [_tool(tool, f"tools[{number}]") for number, tool in enumerate(tools)]
    names = [tool["function"]["name"] for tool in checked]
    for name in names:
        if names.count(name) > 1:
            raise _wrong("tools", f"holds the function {name!r} more than once")
    choice, named = _choice(body.tool_choice, names)
    if choice == "none" or not checked:
        return None
    return ToolsAsked(
        tools=checked,
        choice=choice,
        parallel=body.parallel_tool_calls is not False,
        named=named,
        strict=frozenset(
            name for name, tool in zip(names, tools, strict=True) if tool["function"].get("strict")
        ),
    )


def _tool(tool: Any, where: str) -> Json:
    kind = tool.get("type") if isinstance(tool, dict) else None
    if kind != "function":
        raise RequestError(
            f"{where} has the type {repr(kind)[:40]}; only function is supported",
            param="tools",
            code="unsupported_parameter",
        )
    function = tool.get("function")
    if not isinstance(function, dict):
        raise _wrong("tools", f"{where}.function must be an object")
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise _wrong("tools", f"{where}.function.name must have 1 to 64 letters, digits, _, . or -")
    if not isinstance(function.get("description", ""), str | None):
        raise _wrong("tools", f"{where}.function.description must be a string")
    if not isinstance(function.get("parameters"), dict | None):
        raise _wrong("tools", f"{where}.function.parameters must be an object")
    if not isinstance(function.get("strict"), bool | None):
        raise _wrong("tools", f"{where}.function.strict must be true or false")
    shown = {key: value for key, value in function.items() if key != "strict"}
    shown.setdefault("description", "")
    if shown.get("parameters") is None:
        shown["parameters"] = {"type": "object", "properties": {}}
    return {"type": "function", "function": shown}


def _choice(choice: Any, names: list[str]) -> tuple[str, bool]:
    """(auto, none, required or a name; whether it is a name)."""
    if choice is None:
        return "auto", False
    if choice in ("auto", "none"):
        return choice, False
    if not names:
        raise _wrong("tool_choice", "asks for a call, but there are no tools")
    if choice == "required":
        return choice, False
    function = choice.get("function") if isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or choice.get("type") != "function":
        raise RequestError(
            "tool_choice must be auto, none, required, or name a function",
            param="tool_choice",
            code="unsupported_parameter",
        )
    if name not in names:
        raise _wrong("tool_choice", f"names {name[:64]!r}, which is none of the tools")
    return name, True


def _wrong(param: str, what: str) -> RequestError:
    return RequestError(f"{param}: {what}", param=param, code="invalid_tools")
