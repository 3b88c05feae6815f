"""Answers of a given form: what a body asks for, as a `Grammar` (step 1).

OpenAI's `response_format`, vLLM's `structured_outputs`, and the `guided_*` fields that it had before.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from jaxserve.errors import RequestError
from jaxserve.request import Grammar, SamplingParams
from jaxserve.structured import grammars
from server.openai.schema import ChatBody, CompletionBody, GenerationBody

_OLD = "guided_"
#: Keys of structured_outputs that work, and the old fields' names without their prefix.
_KINDS = ("json", "json_object", "regex", "choice", "grammar")
#: Keys that ask for nothing when they have this value, and what to say otherwise.
_OTHER_KEYS = {
    "structural_tag": (None, "structural tags are not supported"),
    "whitespace_pattern": (None, "white space between the parts of JSON is bounded, one run each"),
    "disable_any_whitespace": (False, "white space cannot be switched off"),
    "disable_additional_properties": (False, 'write "additionalProperties": false in the schema'),
    "disable_fallback": (True, "there is one backend, and no fallback"),
    "_backend": (None, "there is one backend"),
    "_backend_was_auto": (False, "there is one backend"),
}


def read_grammar(body: GenerationBody) -> Grammar | None:
    """The form that the answer must have, None for any. Raises RequestError naming the field."""
    found = []
    if isinstance(body, ChatBody | CompletionBody) and body.response_format is not None:
        found.append(_response_format(body.response_format))
    if body.structured_outputs is not None:
        found.append(_structured_outputs(body.structured_outputs))
    for kind in ("json", "regex", "choice", "grammar"):
        value = getattr(body, _OLD + kind)
        if value is not None:
            found.append(_read(kind, value, _OLD + kind))
    given = [grammar for grammar in found if grammar is not None]
    if len(given) > 1:
        raise RequestError(
            f"{given[0].param} and {given[1].param} both say what the answer must look like; "
            "give one of them",
            param=given[1].param,
        )
    return given[0] if given else None


def check_company(grammar: Grammar, sampling: SamplingParams) -> None:
    """Raises RequestError for fields that contradict an answer of a given form."""
    for name, wanted in (
        ("ignore_eos", sampling.ignore_eos),
        ("min_tokens", sampling.min_tokens),
        ("allowed_token_ids", sampling.allowed_token_ids is not None),
    ):
        if wanted:
            raise RequestError(
                f"{name} cannot be combined with {grammar.param}, which says where an answer ends "
                "and of which tokens it is made",
                param=name,
                code="unsupported_parameter",
            )


def _response_format(value: Any) -> Grammar | None:
    param = "response_format"
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return grammars.object_grammar(param)
    if kind == "json_schema":
        return _json_schema(value.get("json_schema"), param)
    if kind is None:
        raise _wrong(param, "must be an object with a type")
    raise RequestError(
        f"{param}.type is {str(kind)[:40]!r}; this server has text, json_object and json_schema",
        param=param,
        code="unsupported_parameter",
    )


def _json_schema(value: Any, param: str) -> Grammar:
    if not isinstance(value, dict):
        raise _wrong(param, "must hold json_schema, an object with a name and a schema")
    unknown = value.keys() - {"name", "description", "schema", "strict"}
    if unknown:
        raise _wrong(param, f"json_schema has {min(unknown)[:64]!r}, which is unknown")
    if not isinstance(value.get("name"), str):
        raise _wrong(param, "json_schema must have a name")
    schema = value.get("schema")
    if schema is None:
        return grammars.object_grammar(param)
    return grammars.schema_grammar(schema, param)


def _structured_outputs(value: Any) -> Grammar | None:
    param = "structured_outputs"
    if not isinstance(value, dict):
        raise _wrong(param, "must be an object")
    for name, given in value.items():
        nothing, reason = _OTHER_KEYS.get(name, (None, f"known are {', '.join(_KINDS)}"))
        if name not in _KINDS and given is not None and given != nothing:
            raise RequestError(
                f"{param}.{name[:64]} is not supported by this server: {reason}",
                param=param,
                code="unsupported_parameter",
            )
    kinds = [kind for kind in _KINDS if value.get(kind) not in (None, False)]
    if len(kinds) != 1:
        raise _wrong(param, f"must hold exactly one of {', '.join(_KINDS)}")
    return _read(kinds[0], value[kinds[0]], param)


def _read(kind: str, value: Any, param: str) -> Grammar:
    if kind == "json":
        return grammars.schema_grammar(_parsed(value, param), param)
    if kind == "json_object":
        if value is not True:
            raise _wrong(param, "json_object must be true or false")
        return grammars.object_grammar(param)
    if kind == "choice":
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise _wrong(param, "choice must be a list of texts")
        return grammars.choice_grammar(value, param)
    if not isinstance(value, str) or not value:
        raise _wrong(param, f"{kind} must be a text")
    makers: dict[str, Callable[[str, str], Grammar]] = {
        "regex": grammars.regex_grammar,
        "grammar": grammars.text_grammar,
    }
    return makers[kind](value, param)


def _parsed(schema: Any, param: str) -> Any:
    """A schema may come as JSON text."""
    if not isinstance(schema, str):
        return schema
    try:
        return json.loads(schema)
    except (ValueError, RecursionError):
        raise _wrong(param, "its schema is no JSON") from None


def _wrong(param: str, what: str) -> RequestError:
    return RequestError(f"{param} {what}", param=param, code="invalid_type")
