"""Bodies that no honest client sends get a 400 that says what is wrong, on every route with a body."""

from __future__ import annotations

import json
from typing import Any

import openai.types.chat.completion_create_params as chat_params
import openai.types.completion_create_params as completion_params
import pytest
from app_alone import make_app, post
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from server.anthropic.schema import MessagesBody
from server.batches.batch_routes import BatchBody
from server.openai.schema import ChatBody, CompletionBody, EmbeddingsBody
from server.responses.schema import ResponsesBody

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


STRUCTS: dict[str, Any] = {
    "/v1/messages": MessagesBody,
    "/v1/messages/count_tokens": MessagesBody,
    "/v1/responses": ResponsesBody,
    "/v1/responses/input_tokens": ResponsesBody,
    "/v1/embeddings": EmbeddingsBody,
    "/v1/batches": BatchBody,
    CHAT: ChatBody,
}
WORDS = st.sampled_from(
    [
        "user",
        "assistant",
        "text",
        "tool_use",
        "tool_result",
        "function_call",
        "message",
        "input_text",
        "function",
        "type",
        "role",
        "content",
        "name",
        "id",
        "call_id",
        "arguments",
        "output",
        "auto",
        "json_schema",
        "format",
        "schema",
        "strict",
        "tools",
        "mean",
        "float",
        "base64",
        "24h",
    ]
)
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(max_size=4)
    | WORDS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(WORDS, inner, max_size=5),
    max_leaves=10,
)
TURNS = st.lists(
    st.fixed_dictionaries(
        {}, optional={"role": WORDS, "content": JSON, "type": WORDS, "tool_calls": JSON}
    ),
    max_size=3,
)
START: dict[str, Any] = {
    "messages": [{"role": "user", "content": "x"}],
    "max_tokens": 2,
    "input": "x",
    "input_file_id": "file-x",
    "endpoint": CHAT,
    "completion_window": "24h",
    "store": False,
}


@settings(max_examples=250, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data(), st.sampled_from(sorted(STRUCTS)))
def test_any_body_is_answered_without_a_5xx_and_a_refusal_names_the_field(
    web: Any, data: Any, path: str
) -> None:
    known = STRUCTS[path].__struct_fields__
    body = {name: value for name, value in START.items() if name in known}
    fields = st.dictionaries(st.sampled_from(sorted(set(known) - {"store"})), JSON, max_size=3)
    body |= data.draw(fields)
    turns = data.draw(st.none() | TURNS)
    if turns is not None:
        body |= {name: turns for name in ("messages", "input") if name in known}
    text = json.dumps(body)
    answer = post(web, path, text.encode())
    assert answer.status_code < 500, answer.text
    if answer.status_code >= 400:
        error = answer.get_json()["error"]
        if "not valid JSON" in error["message"]:
            assert "NaN" in text or "Infinity" in text
        elif path.startswith("/v1/messages"):  # Anthropic's error object has no `param`
            assert any(field in error["message"] for field in known), error
        else:
            assert str(error["param"]).startswith(tuple(known)), error
