"""Structured output in requests: what is taken reaches the engine, what cannot be enforced is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from app_alone import make_app, post
from fake_client import FakeClient

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES = {"messages": [{"role": "user", "content": "hi"}]}
PROMPT = {"prompt": "hi"}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


def ask(path: str, **fields: Any) -> tuple[Any, FakeClient]:
    client = FakeClient()
    body = {**(MESSAGES if path == CHAT else PROMPT), **fields}
    return post(make_app(client).test_client(), path, body), client


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"response_format": {"type": "json_object"}}, "json_schema"),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": SCHEMA, "strict": True},
                }
            },
            "integer",
        ),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, "integer"),
        ({"structured_outputs": {"regex": "a+", "disable_any_whitespace": False}}, "a+"),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes"),
        ({"structured_outputs": {"grammar": 'root ::= "x"+'}}, "start"),
        ({"guided_choice": ["yes", "no"]}, "yes"),
        ({"guided_json": SCHEMA}, "integer"),
    ],
)
def test_a_grammar_reaches_the_engine(path: str, fields: dict[str, Any], word: str) -> None:
    answer, client = ask(path, **fields)
    assert answer.status_code == 200, answer.text
    grammar = client.requests[0].grammar
    assert grammar is not None
    assert word in grammar.text
    assert grammar.param in fields


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(
    ("fields", "param", "word"),
    [
        ({"response_format": {"type": "xml"}}, "response_format", "xml"),
        ({"response_format": "json"}, "response_format", "type"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
            "response_format",
            "name",
        ),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": {"type": "strin"}},
                }
            },
            "response_format",
            "strin",
        ),
        ({"structured_outputs": {}}, "structured_outputs", "exactly one"),
        ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs", "exactly one"),
        ({"structured_outputs": {"regex": "a("}}, "structured_outputs", "unclosed"),
        ({"structured_outputs": {"choice": [1]}}, "structured_outputs", "texts"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs", "structural_tag"),
        ({"structured_outputs": {"jason": {}}}, "structured_outputs", "jason"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs", "no JSON"),
        ({"guided_regex": "(a)\\1"}, "guided_regex", "backreferences"),
        ({"guided_grammar": "nonsense"}, "guided_grammar", "Lark"),
        ({"guided_decoding_backend": "xgrammar"}, "guided_decoding_backend", "one backend"),
        ({"guided_choice": ["a"], "guided_regex": "a"}, "guided_choice", "both"),
        ({"guided_choice": ["a"], "ignore_eos": True}, "ignore_eos", "combined"),
        ({"guided_choice": ["a"], "min_tokens": 2}, "min_tokens", "combined"),
        ({"guided_choice": ["a"], "allowed_token_ids": [97]}, "allowed_token_ids", "combined"),
    ],
)
def test_what_cannot_be_enforced_is_refused_before_any_token(
    path: str, fields: dict[str, Any], param: str, word: str
) -> None:
    answer, client = ask(path, stream=True, **fields)
    error = answer.get_json()["error"]
    assert (answer.status_code, error["param"]) == (400, param), error
    assert word in error["message"]
    assert client.requests == []


def test_plain_text_asks_for_nothing() -> None:
    answer, client = ask(CHAT, response_format={"type": "text"})
    assert answer.status_code == 200
    assert client.requests[0].grammar is None


@pytest.mark.parametrize(
    ("fields", "template"),
    [
        ({**MESSAGES, "guided_regex": "("}, "x"),
        ({"messages": [{"role": "user", "content": "x" * 9000}]}, "{{ raise_exception('no') }}"),
    ],
    ids=["grammar", "long prompt"],
)
def test_a_refusal_from_a_thread_leaves_no_traceback_in_the_log(
    fields: dict[str, Any], template: str, capfd: pytest.CaptureFixture[str]
) -> None:
    answer = post(make_app(template=template).test_client(), CHAT, fields)
    assert answer.status_code == 400, answer.text
    assert "Traceback" not in capfd.readouterr().err
