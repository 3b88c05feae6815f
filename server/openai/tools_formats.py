"""How models write calls of tools into their answers: one `ToolFormat` per convention (step 9).

Found by what a model's chat template says. A format knows where a call begins, how its name and its
arguments stand in the text, and what a grammar for it looks like.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from jaxserve.context.chat_template import ChatTemplate
from jaxserve.errors import UsageError
from server.openai.tools_values import parse_braces

#: Longest text between an opening and arguments.
MAX_HEADER = 2048
_MARKER = re.compile(r"\[[A-Z]+\]")
_NAME = r"[A-Za-z0-9_.-]{1,64}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """One convention.

    opening: text that begins a call or a list of calls; "" where an answer that begins with `start`
    is one. closing: text that ends a call, "" if there is none; then calls may stand side by side after
    one opening, with `separator` between them and `list_end` after the last.
    header: what stands between opening and arguments; group 1 is the function's name.
    in_object: the arguments stand in an object with the name, whose brace comes after them.
    quote: None where arguments are JSON; else the text around strings in Gemma's notation.
    python: the whole answer is a Python list of calls, `[f(x=1), g()]`.
    prefix: text that may stand before the first call and means nothing.
    call: how a grammar writes one call, with {name} and {arguments} in Lark; "" where `required` and
    named tools are enforced in Llama's way instead, whatever the model prefers. lead, between, end:
    Lark before the first call, between two, and after the last. id_length: of calls' ids.
    """

    name: str
    opening: str
    closing: str
    header: re.Pattern[str]
    call: str
    in_object: bool = True
    start: str = "{"
    python: bool = False
    separator: str = ""
    list_end: str = ""
    prefix: str = ""
    lead: str = ""
    between: str = '"\\n"'
    end: str = ""
    quote: str | None = None
    id_length: int = 24

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that may be special tokens."""
        own = (self.opening, self.closing, self.quote, self.prefix, *_MARKER.findall(self.call))
        return tuple(dict.fromkeys(text for text in own if text))

    def arguments(self, text: str) -> dict[str, Any] | None:
        """Gemma's notation of arguments as an object; None if it is not."""
        assert self.quote is not None
        return parse_braces(text, self.quote)


def _object(arguments: str) -> str:
    """The beginning of `{"name": ..., "arguments": {`, up to the brace of the arguments."""
    return rf'\s*\{{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*"({_NAME})"\s*,\s*"(?:{arguments})"\s*:\s*(?=\{{)'


HERMES = ToolFormat(
    name="hermes",
    opening="<tool_call>",
    closing="</tool_call>",
    header=re.compile(_object("arguments")),
    call='<tool_call> "\\n{\\"name\\": \\"{name}\\", \\"arguments\\": " {arguments} "}\\n" </tool_call>',
)
LLAMA3 = ToolFormat(
    name="llama3_json",
    opening="",
    closing="",
    header=re.compile(_object("parameters|arguments")),
    separator=";",
    prefix="<|python_tag|>",
    call='"{\\"name\\": \\"{name}\\", \\"parameters\\": " {arguments} "}"',
    between='"; "',
)
MISTRAL = ToolFormat(
    name="mistral",
    opening="[TOOL_CALLS]",
    closing="",
    header=re.compile(r"\s*\[?" + _object("arguments")),
    separator=",",
    list_end="]",
    call='"{\\"name\\": \\"{name}\\", \\"arguments\\": " {arguments} "}"',
    lead='[TOOL_CALLS] "["',
    between='", "',
    end='"]"',
    id_length=9,
)
MISTRAL_ARGS = ToolFormat(
    name="mistral_args",
    opening="[TOOL_CALLS]",
    closing="",
    header=re.compile(rf"\s*({_NAME})(?:\[CALL_ID\]\w+)?\[ARGS\]\s*(?=\{{)"),
    in_object=False,
    call='[TOOL_CALLS] "{name}" [ARGS] {arguments}',
    between="",
    id_length=9,
)
GEMMA = ToolFormat(
    name="gemma",
    opening="<|tool_call>",
    closing="<tool_call|>",
    header=re.compile(rf"\s*call:({_NAME})(?=\{{)"),
    in_object=False,
    call="",
    quote='<|"|>',
)
FUNCTION_GEMMA = dataclasses.replace(
    GEMMA,
    name="functiongemma",
    opening="<start_function_call>",
    closing="<end_function_call>",
    quote="<escape>",
)
PYTHONIC = ToolFormat(
    name="pythonic",
    opening="",
    closing="",
    header=re.compile(""),
    call="",
    in_object=False,
    start="[",
    python=True,
    prefix="<|python_start|>",
)
FORMATS = {
    each.name: each
    for each in (HERMES, LLAMA3, PYTHONIC, MISTRAL, MISTRAL_ARGS, GEMMA, FUNCTION_GEMMA)
}

#: What a chat template contains -> the convention; the first that fits.
_SIGNS = (
    (("<|tool_call>", "call:"), GEMMA),
    (("<start_function_call>",), FUNCTION_GEMMA),
    (("[TOOL_CALLS]", "[ARGS]"), MISTRAL_ARGS),
    (("[TOOL_CALLS]",), MISTRAL),
    (("<tool_call>", "name", "arguments"), HERMES),
    (("<|header_start|>",), PYTHONIC),
    (("<|start_header_id|>",), LLAMA3),
    (("<|python_tag|>",), LLAMA3),
)


def find_format(template: ChatTemplate | None, wanted: str) -> ToolFormat | None:
    """The convention of a model; wanted: the name that an operator gave, or auto, or none.

    Raises UsageError for an unknown name.
    """
    if wanted == "none" or template is None:
        return None
    if wanted != "auto":
        if wanted not in FORMATS:
            raise UsageError(
                f"--tool-parser is {wanted!r}; it must be auto, none or one of {', '.join(FORMATS)}"
            )
        return FORMATS[wanted]
    if not template.takes_tools or "<function=" in template.source:
        return None
    for texts, found in _SIGNS:
        if all(text in template.source for text in texts):
            return found
    return None
