"""Structured output and tools."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from behaviour_groups.client import (
    CHAT,
    Answer,
    RefusedByNameError,
    Server,
    must,
    still_answers,
    together,
)
from behaviour_groups.listed import Behaviour

PROMPT = "Write one JSON value about a small town."
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 12},
                "unit": {"enum": ["celsius", "fahrenheit"]},
            },
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    },
}
NAMED = {"type": "function", "function": {"name": "get_weather"}}


def _format(schema: Any) -> dict[str, Any]:
    form = {"type": "json_schema", "json_schema": {"name": "it", "schema": schema}}
    return {"response_format": form}


def invalid_forms(server: Server) -> str:
    """Invalid schemas, regexes and grammars: 400, and the server is fine after."""
    cases: list[dict[str, Any]] = [
        _format({"type": "nonsense"}),
        _format({"type": "string", "pattern": "("}),
        _format({"type": "object", "properties": 5}),
        _format({"$ref": "#/nowhere"}),
        _format(5),
        {"structured_outputs": {"regex": "(unclosed"}},
        {"structured_outputs": {"grammar": "this is no grammar ::= ((("}},
        {"structured_outputs": {"choice": []}},
        {"structured_outputs": {"json": "{"}},
    ]
    bad = []
    for case in cases:
        for stream in (False, True):
            answer = server.chat(PROMPT, max_tokens=8, stream=stream, **case)
            if answer.status != 400:
                how = "streamed" if stream else "whole"
                bad.append(f"{json.dumps(case).rstrip('}')[-26:]} {how} {answer.status}")
    still_answers(server)
    must(not bad, f"{len(bad)} of {2 * len(cases)}: {'; '.join(bad[:3])}")
    return f"{len(cases)} forms, 400 each, whole and streamed"


def _object(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties)}


def _text(**rules: Any) -> dict[str, Any]:
    return _object(a={"type": "string", **rules})


def _unique(items: list[Any]) -> bool:
    return len({json.dumps(item, sort_keys=True) for item in items}) == len(items)


#: A keyword, a schema, and what holds for a value that is valid.
KEYWORDS: tuple[tuple[str, dict[str, Any], Callable[[Any], object]], ...] = (
    ("enum", _object(a={"enum": ["x", 7]}), lambda v: v["a"] in ("x", 7)),
    ("const", _object(a={"const": "yes"}), lambda v: v["a"] == "yes"),
    ("minimum", _object(a={"type": "integer", "minimum": 500, "maximum": 700}),
     lambda v: 500 <= v["a"] <= 700),
    ("multipleOf", _object(a={"type": "integer", "multipleOf": 7, "minimum": 1, "maximum": 99}),
     lambda v: v["a"] % 7 == 0),
    ("exclusiveMaximum", _object(a={"type": "integer", "minimum": 3, "exclusiveMaximum": 5}),
     lambda v: 3 <= v["a"] < 5),
    ("pattern", _text(pattern="^[A-C]{2}-[0-9]{3}$"),
     lambda v: re.fullmatch("[A-C]{2}-[0-9]{3}", v["a"])),
    ("minLength", _text(minLength=15, maxLength=20), lambda v: 15 <= len(v["a"]) <= 20),
    ("format date", _text(format="date"), lambda v: re.fullmatch(r"\d{4}-\d\d-\d\d", v["a"])),
    ("minItems", _object(a={"type": "array", "items": {"type": "integer", "maximum": 9},
                            "minItems": 3, "maxItems": 4}), lambda v: 3 <= len(v["a"]) <= 4),
    ("uniqueItems", _object(a={"type": "array", "items": {"enum": [1, 2]}, "uniqueItems": True,
                               "minItems": 2, "maxItems": 2}), lambda v: _unique(v["a"])),
    ("contains", _object(a={"type": "array", "items": {"enum": [1, 2]}, "contains": {"const": 2},
                            "minItems": 1, "maxItems": 2}), lambda v: 2 in v["a"]),
    ("prefixItems", _object(a={"type": "array", "prefixItems": [{"const": 1}, {"const": "b"}],
                               "items": False, "minItems": 2}), lambda v: v["a"] == [1, "b"]),
    ("additionalProperties", {**_text(maxLength=9), "additionalProperties": False},
     lambda v: v.keys() == {"a"}),
    ("patternProperties", {"type": "object", "patternProperties": {"^k[0-9]$": {"enum": [1, 2]}},
                           "additionalProperties": False, "minProperties": 1, "maxProperties": 2},
     lambda v: 1 <= len(v) <= 2 and all(re.fullmatch("k[0-9]", k) for k in v)),
    ("propertyNames", {"type": "object", "propertyNames": {"pattern": "^[a-c]$"},
                       "additionalProperties": {"enum": [1]}, "minProperties": 1},
     lambda v: v and all(re.fullmatch("[a-c]", k) for k in v)),
    ("anyOf", _object(a={"anyOf": [{"const": "p"}, {"const": 4}]}), lambda v: v["a"] in ("p", 4)),
    ("oneOf", _object(a={"oneOf": [{"type": "integer", "minimum": 1, "maximum": 6},
                                   {"type": "integer", "minimum": 4, "maximum": 9}]}),
     lambda v: (1 <= v["a"] <= 6) != (4 <= v["a"] <= 9)),
    ("not", _object(a={"enum": ["x", "y"], "not": {"const": "x"}}), lambda v: v["a"] == "y"),
    ("allOf", _object(a={"allOf": [{"type": "integer", "minimum": 5},
                                   {"type": "integer", "maximum": 6}]}),
     lambda v: 5 <= v["a"] <= 6),
    ("dependentRequired", {"type": "object", "properties": {"a": {"const": 1}, "b": {"const": 2}},
                           "required": ["a"], "dependentRequired": {"a": ["b"]},
                           "additionalProperties": False}, lambda v: v == {"a": 1, "b": 2}),
    ("if/then", {**_object(a={"enum": [1, 2]}), "if": {"properties": {"a": {"const": 1}}},
                 "then": {"required": ["b"]}}, lambda v: v["a"] != 1 or "b" in v),
    ("$ref", {**_object(a={"$ref": "#/$defs/d"}), "$defs": {"d": {"enum": [8, 9]}}},
     lambda v: v["a"] in (8, 9)),
)  # fmt: skip


def keywords(server: Server) -> str:
    """Each keyword is enforced or refused; JSON that is not complete only with finish length."""
    refused, broken, unfinished, enforced = [], [], [], 0
    for name, schema, right in KEYWORDS:
        jobs = [
            lambda s=schema, i=i: server.chat(
                PROMPT, temperature=1, seed=i, max_tokens=80, **_format(s)
            )
            for i in range(6)
        ]
        answers = together(jobs)
        if {answer.status for answer in answers} == {400}:
            refused.append(name)
        elif not all(_fits(answer, right) for answer in answers):
            broken.append(name)
        elif all(answer.finish == "length" for answer in answers):
            unfinished.append(name)
        else:
            enforced += 1
    note = f"; refused: {', '.join(refused)}" if refused else ""
    note += f"; never whole: {', '.join(unfinished)}" if unfinished else ""
    must(not broken, f"not enforced: {', '.join(broken)} (of {len(KEYWORDS)}){note}")
    return f"{enforced} of {len(KEYWORDS)} enforced{note}"


def _fits(answer: Answer, right: Callable[[Any], object]) -> bool:
    if answer.status != 200:
        return False
    try:
        return bool(right(json.loads(answer.text)))
    except ValueError:
        return answer.finish == "length"
    except (KeyError, TypeError, AttributeError):
        return False


def regexes_and_choices(server: Server) -> str:
    """A regex, a choice and json_object hold at temperature 1."""
    for seed in range(4):
        fields = {"temperature": 1, "seed": seed, "max_tokens": 60}
        regex = server.complete("Code:", structured_outputs={"regex": "[A-F]{3}[0-9]{4}"}, **fields)
        if regex.names("structured_outputs"):
            raise RefusedByNameError("structured_outputs")
        must(re.fullmatch("[A-F]{3}[0-9]{4}", regex.text), f"regex: {regex.text!r}")
        must(regex.finish == "stop", f"regex: finish_reason {regex.finish}")
        choice = server.complete("A:", structured_outputs={"choice": ["tea", "milk"]}, **fields)
        must(choice.text in ("tea", "milk"), f"choice: {choice.text!r}")
        some = server.chat(PROMPT, response_format={"type": "json_object"}, **fields)
        whole = some.finish == "length" or isinstance(json.loads(some.text), dict)
        must(whole, f"json_object: {some.text[:40]!r}")
    return "4 seeds each"


def cut_tool_calls(server: Server) -> str:
    """A call that max_tokens cuts says length, whole and streamed."""
    fields: dict[str, Any] = {"tools": [TOOL], "tool_choice": NAMED}
    for length in (1, 3, 6):
        whole = server.chat("Weather in Oslo?", max_tokens=length, **fields)
        if whole.names("tool"):
            raise RefusedByNameError(whole.error["message"][:80])
        must(whole.finish == "length", f"{length} tokens, whole: {whole.finish}")
        stream = server.stream(CHAT, "Weather in Oslo?", max_tokens=length, **fields).whole()
        must(stream.finishes() == ["length"], f"{length} tokens, streamed: {stream.finishes()}")
    return "3 lengths, whole and streamed"


def forced_tool_calls(server: Server) -> str:
    """A named or required call has valid arguments; streamed fragments join to the same JSON."""
    for choice in (NAMED, "required"):
        for seed in range(3):
            fields: dict[str, Any] = {"tools": [TOOL], "tool_choice": choice, "max_tokens": 120}
            fields |= {"temperature": 1, "seed": seed}
            name = choice if choice == "required" else "named"
            answer = server.chat("Weather in Oslo?", **fields)
            if answer.names("tool"):
                raise RefusedByNameError(answer.error["message"][:80])
            calls = answer.choices[0]["message"].get("tool_calls") or []
            if answer.finish == "length":
                continue
            must(calls, f"{name}: no call, content {str(answer.text)[:40]!r}")
            for call in calls:
                _check_call(call["function"]["name"], call["function"]["arguments"], name)
            stream = server.stream(CHAT, "Weather in Oslo?", **fields).whole()
            joined = _joined(stream.pieces)
            wanted = [(c["function"]["name"], c["function"]["arguments"]) for c in calls]
            same = [(n, json.loads(a)) for n, a in joined] == [
                (n, json.loads(a)) for n, a in wanted
            ]
            must(same, f"{name}: streamed {str(joined)[:60]}, whole {str(wanted)[:60]}")
    return "named and required, 3 seeds each, whole and streamed"


def _check_call(name: str, arguments: str, choice: str) -> None:
    try:
        value = json.loads(arguments)
    except ValueError:
        value = None
    right = (
        name == "get_weather"
        and isinstance(value, dict)
        and value.keys() == {"city", "unit"}
        and isinstance(value["city"], str)
        and len(value["city"]) <= 12
        and value["unit"] in ("celsius", "fahrenheit")
    )
    must(right, f"{choice}: {name} with {arguments[:60]!r}")


def _joined(pieces: list[tuple[int, dict[str, Any]]]) -> list[tuple[str, str]]:
    calls: dict[int, list[str]] = {}
    for _, piece in pieces:
        for part in piece["delta"].get("tool_calls") or []:
            call = calls.setdefault(part["index"], ["", ""])
            function = part.get("function") or {}
            call[0] += function.get("name") or ""
            call[1] += function.get("arguments") or ""
    return [(name, arguments) for _, (name, arguments) in sorted(calls.items())]


CHECKS = (
    Behaviour("39", "invalid schemas and regexes: 400, fine after", invalid_forms),
    Behaviour("40", "each keyword of a schema is enforced or refused", keywords),
    Behaviour("40", "regex, choice and json_object hold", regexes_and_choices),
    Behaviour("42", "a cut tool call says length", cut_tool_calls),
    Behaviour("42", "forced calls are valid, fragments join to them", forced_tool_calls),
)
