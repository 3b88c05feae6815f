"""Bodies that no honest client sends get a 400 that says what is wrong, on every route with a body."""

from __future__ import annotations

from typing import Any

import openai.types.chat.completion_create_params as chat_params
import openai.types.completion_create_params as completion_params
import pytest
from app_alone import make_app, post

from server.openai.schema import ChatBody, CompletionBody

CHAT = "/v1/chat/completions"
DEEP = b'{"messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"


@pytest.fixture(scope="module")
def web() -> Any:
    return make_app().test_client()


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        (b'{"seed": 1, "seed": 2, "messages": []}', "seed", "twice"),
        (b'{"messages": [{"role": "user", "role": "x"}]}', "role", "twice"),
        (b'{"messages": [], "logit_bias": {"1": 1, "1": 2}}', "1", "twice"),
        (b'{"seed": ' + b"9" * 6000 + b', "messages": []}', "seed", "out of range"),
        (b'{"temperature": -1e999, "messages": []}', "temperature", "out of range"),
        (b'{"temperature": NaN, "messages": []}', None, "valid JSON"),
        (b'{"temperature": Infinity, "messages": []}', None, "valid JSON"),
        (b'{"user": "\xff", "messages": []}', None, "UTF-8"),
        (b'{"messages": [' + b"{}," * 30_000 + b"{}]}", None, "objects"),
        (DEEP, None, "deeply"),
        (b"\xef\xbb\xbf{}", None, "valid JSON"),
        (b"[]", None, "object"),
    ],
    ids=lambda value: repr(value[:24]) if isinstance(value, bytes) else None,
)
def test_what_is_wrong_is_said(web: Any, body: bytes, param: str | None, words: str) -> None:
    for path in (CHAT, "/v1/completions", "/tokenize"):
        answer = post(web, path, body)
        error = answer.get_json()["error"]
        assert (answer.status_code, error["param"]) == (400, param), error
        assert words in error["message"]
        assert len(error["message"]) < 300


def test_every_parameter_of_the_official_client_is_known() -> None:
    """None of them may end as "unknown parameter": each works, is harmless, or has its reason."""
    chat = chat_params.CompletionCreateParamsBase.__annotations__
    completion = completion_params.CompletionCreateParamsBase.__annotations__
    assert set(chat) - set(ChatBody.__struct_fields__) == set()
    assert set(completion) - set(CompletionBody.__struct_fields__) == set()


@pytest.mark.parametrize("name", ["moderation", "prompt_cache_options", "web_search_options"])
def test_parameters_without_effect_are_refused(web: Any, name: str) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], name: {"x": 1}}
    answer = post(web, CHAT, body)
    error = answer.get_json()["error"]
    assert (answer.status_code, error["param"]) == (400, name)
    assert error["code"] == "unsupported_parameter"


def test_a_compressed_body_is_refused_by_name(web: Any) -> None:
    answer = post(web, CHAT, b"\x1f\x8b", **{"Content-Encoding": "gzip"})
    assert (answer.status_code, "gzip" in answer.get_json()["error"]["message"]) == (415, True)
