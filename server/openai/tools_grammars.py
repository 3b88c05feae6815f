"""Grammars that hold calls of tools to their schemas (step 1): where calls must come, and where they may.

Written in llguidance's dialect of Lark. A special token is matched by its number only; no text
matches it.
"""

from __future__ import annotations

import json

from jaxserve.errors import RequestError
from jaxserve.request import Grammar
from jaxserve.structured.grammars import json_part, lark_grammar, quoted
from jaxserve.tokenizer.protocol import Tokenizer
from server.openai.tools import Json, ToolsAsked
from server.openai.tools_formats import ToolFormat

#: Calls in one answer that a grammar writes.
MAX_CALLS = 16


def forced_calls(asked: ToolsAsked, form: ToolFormat, tokenizer: Tokenizer) -> Grammar:
    """Answers that are calls as `asked` wants them, with arguments valid for the tool's schema.

    Raises RequestError naming a schema that cannot be enforced.
    """
    form = asked.format(form)
    tools = [
        (tool["function"]["name"], tool["function"]["parameters"])
        for tool in asked.tools
        if not asked.named or tool["function"]["name"] == asked.choice
    ]
    start = f"start: {_calls(form, form.lead, parallel=asked.parallel and not asked.named)}"
    return _grammar([start, *_rules(tools, form, form.call)], form, tokenizer)


def free_calls(
    asked: ToolsAsked, form: ToolFormat, tokenizer: Tokenizer, *, not_first: str = ""
) -> Grammar:
    """Answers of any text, in which whatever is read as a call is one, and a valid one.

    not_first: what text may not begin with, as whoever reads the answer would take it away.
    Arguments are valid for the schema of a strict tool, and any object for another. Raises
    RequestError where a schema cannot be enforced, or calls of this form cannot be.
    """
    if not form.call:
        raise RequestError(
            "tools: strict is not supported for this model where calls are optional; set "
            'tool_choice to "required" or leave strict out',
            param="tools",
            code="unsupported_parameter",
        )
    tools = [
        (
            tool["function"]["name"],
            tool["function"]["parameters"] if tool["function"]["name"] in asked.strict else {},
        )
        for tool in asked.tools
    ]
    if form.opening:
        lines, call = _after_an_opening(asked, form, tokenizer)
    else:
        lines, call = _instead_of_text(asked, form, not_first), form.call
    return _grammar([*lines, *_rules(tools, form, call)], form, tokenizer)


def _after_an_opening(
    asked: ToolsAsked, form: ToolFormat, tokenizer: Tokenizer
) -> tuple[list[str], str]:
    """The start of a grammar in which an opening begins calls, and what a call is in it.

    Text never spells the opening: a special token shows as the same text, and is read alike.
    """
    opening, has_lead = token_or_text(form.opening, tokenizer), bool(form.lead)
    rest = (form.lead or form.call).removeprefix(form.opening)
    call = form.call if has_lead else rest
    block = _calls(form, rest, parallel=asked.parallel) if has_lead else "call"
    most = MAX_CALLS if asked.parallel and not has_lead else 1
    without = f"/(?s:.*)/ & ~(/(?s:.*)/ {quoted(form.opening)} /(?s:.*)/)"
    before = f"before[lazy]: /(?s:.*)/ {opening}"
    if opening.startswith("<"):
        before = f"before: TEXT? {opening}"
    lines = [
        f"start: (before {block}){{0,{most}}} tail?",
        before,
        "tail: TEXT",
        f"TEXT: /(?s:.+)/ & {without}",
    ]
    return lines, call


def _instead_of_text(asked: ToolsAsked, form: ToolFormat, not_first: str) -> list[str]:
    """The start of a grammar in which an answer that begins with a brace is nothing but calls."""
    space = r"\s\x1c-\x1f"  # what Python strips
    excluded = "".join(
        f" & ~(/[{space}]*/ {quoted(text)} /(?s:.*)/)" for text in (form.prefix, not_first) if text
    )
    prefix = f"({form.prefix})? " if form.prefix else ""
    return [
        f"start: {prefix}{_calls(form, form.lead, parallel=asked.parallel)} | text?",
        "text: TEXT",
        f"TEXT: /[{space}]*[^{space}{{](?s:.*)/{excluded}",
    ]


def _calls(form: ToolFormat, lead: str, *, parallel: bool) -> str:
    more = f"({form.between} call){{0,{MAX_CALLS - 1}}}" if parallel else ""
    return f"{lead} call {more} {form.end}"


def _rules(tools: list[tuple[str, Json]], form: ToolFormat, call: str) -> list[str]:
    """`call` and what it is made of; tools: names and schemas of their arguments."""
    lines = ["call: " + " | ".join(f"call{number}" for number in range(len(tools)))]
    for number, (name, parameters) in enumerate(tools):
        schema = json_part(_arguments_schema(parameters), "tools")
        body = call.replace("{name}", name).replace("{arguments}", f"arguments{number}")
        lines += [f"call{number}: {body}", f"arguments{number}: %json {_json(schema)}"]
    return lines


def _grammar(lines: list[str], form: ToolFormat, tokenizer: Tokenizer) -> Grammar:
    """Markers that stand alone in the rules become special tokens, where they are that, or texts."""
    found = []
    for line in lines:
        if "%json" not in line:
            for marker in form.markers:
                line = _replace(line, marker, token_or_text(marker, tokenizer))
        found.append(line)
    return lark_grammar("\n".join(found), "tools")


def _replace(line: str, marker: str, by: str) -> str:
    """Replaces a marker that is not in quotes."""
    parts = line.split(quoted(marker))
    return quoted(marker).join(part.replace(marker, by) for part in parts)


def token_or_text(text: str, tokenizer: Tokenizer) -> str:
    """How Lark refers to a marker."""
    token = tokenizer.id_of(text)
    special = token is not None and token in tokenizer.special_ids
    return f"<[{token}]>" if special else quoted(text)


def _arguments_schema(parameters: Json) -> Json:
    """Arguments are an object, and without a word about it none that is not listed."""
    schema = {"type": "object", **parameters}
    if "additionalProperties" not in schema and "properties" in schema:
        schema["additionalProperties"] = False
    return schema


def _json(schema: Json) -> str:
    return json.dumps(schema, ensure_ascii=False)
