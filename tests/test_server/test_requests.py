"""What bodies mean, which are refused and how; the application alone, without processes."""

from __future__ import annotations

import json
import re
from typing import Any

import flask.testing
import pytest
from byte_front import TEMPLATE
from byte_tokenizer import BOS, END, EOS, TURN, ByteTokenizer
from fake_client import FakeClient
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxserve.config import EngineConfig, ServerConfig
from jaxserve.context.chat_template import ChatTemplate
from jaxserve.request import SamplingParams
from server.app import create_app
from server.openai.schema import ChatBody, CompletionBody

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
USER = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}


@pytest.fixture(scope="module")
def client() -> FakeClient:
    return FakeClient()


@pytest.fixture(scope="module")
def web(client: FakeClient) -> flask.testing.FlaskClient:
    template = ChatTemplate(TEMPLATE, special={})
    server = ServerConfig(max_body_bytes=200_000, max_prompt_bytes=100_000)
    app = create_app(client, ByteTokenizer(), template, EngineConfig(model="fake"), server)  # type: ignore[arg-type]
    return app.test_client()


def post(web: flask.testing.FlaskClient, path: str, body: Any) -> Any:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return web.post(path, data=data, content_type="application/json")


def sampling(web: Any, client: FakeClient, path: str, **fields: Any) -> SamplingParams:
    start = USER if path == CHAT else {"prompt": "hi", "max_tokens": 4}
    answer = post(web, path, {**start, **fields})
    assert answer.status_code == 200, answer.text
    return client.requests[-1].sampling


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_every_supported_field_arrives(web: Any, client: FakeClient, path: str) -> None:  # 26
    fields: dict[str, Any] = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7.0,
        "min_p": 0.1,
        "repetition_penalty": 1.2,
        "presence_penalty": -0.5,
        "frequency_penalty": 0.25,
        "logit_bias": {"65": 3, "66": -100},
        "allowed_token_ids": [65, 66],
        "stop": "x",
        "include_stop_str_in_output": True,
        "stop_token_ids": [10],
        "ignore_eos": True,
        "skip_special_tokens": False,
        "seed": 12.0,
        "max_tokens": 5.0,
    }
    got = sampling(web, client, path, **fields)
    want = {**fields, "logit_bias": {65: 3.0, 66: -100.0}, "stop": ["x"]}
    assert {name: getattr(got, name) for name in want} == want


def test_min_tokens(web: Any, client: FakeClient) -> None:
    assert sampling(web, client, CHAT, min_tokens=2).min_tokens == 2
    body = {"prompt": "@say:abXabXab@", "max_tokens": 40}
    for least, text in ((0, "ab"), (2, "ab"), (3, "abXab"), (4, "abXab"), (6, "abXabXab")):
        for stream in (False, True):
            fields = {**body, "stop": "X", "min_tokens": least, "stream": stream}
            assert joined(post(web, COMPLETIONS, fields), stream) == text


def test_top_k_beyond_any_vocabulary(web: Any, client: FakeClient) -> None:
    assert sampling(web, client, CHAT, top_k=2**70).top_k == 0
    assert sampling(web, client, CHAT, top_k=-1).top_k == 0


def test_bad_words_with_and_without_space(web: Any, client: FakeClient) -> None:
    words = sampling(web, client, CHAT, bad_words=["ab"]).bad_words
    assert words == [[97, 98], [32, 97, 98]]


def test_logprobs_fields(web: Any, client: FakeClient) -> None:
    assert sampling(web, client, CHAT, logprobs=True).logprobs == 0
    assert sampling(web, client, CHAT, logprobs=True, top_logprobs=20).logprobs == 20
    assert sampling(web, client, COMPLETIONS, logprobs=3).logprobs == 3
    assert sampling(web, client, CHAT).logprobs is None


def test_priority_and_salt(web: Any, client: FakeClient) -> None:
    sampling(web, client, CHAT, priority=-3, cache_salt="tenant")
    request = client.requests[-1]
    assert (request.priority, request.cache_salt) == (-3, "tenant")


def test_lengths(web: Any, client: FakeClient) -> None:  # 21
    body = {"messages": USER["messages"]}
    answer = post(web, CHAT, body).get_json()
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["total_tokens"] == 600
    assert post(web, COMPLETIONS, {"prompt": "hi"}).get_json()["usage"]["completion_tokens"] == 16
    room = 600 - answer["usage"]["prompt_tokens"]
    fits = post(web, CHAT, {**body, "max_completion_tokens": room}).get_json()
    assert fits["usage"]["completion_tokens"] == room
    for name in ("max_tokens", "max_completion_tokens"):
        for value in (room + 1, 10**30):
            error = post(web, CHAT, {**body, name: value}).get_json()["error"]
            assert (error["param"], error["code"]) == (name, "context_length_exceeded")
            assert "600" in error["message"]


def test_prompt_too_long(web: Any) -> None:  # 19
    for body, path, param in (
        ({"prompt": "x" * 700}, COMPLETIONS, "prompt"),
        ({"prompt": "x" * 150_000}, COMPLETIONS, "prompt"),
        ({"messages": [{"role": "user", "content": "x" * 700}]}, CHAT, "messages"),
    ):
        answer = post(web, path, body)
        error = answer.get_json()["error"]
        assert (answer.status_code, error["param"]) == (400, param)
        assert error["code"] == "context_length_exceeded"
    assert post(web, COMPLETIONS, {"prompt": "x" * 250_000}).status_code == 413


def test_truncated_prompt(web: Any, client: FakeClient) -> None:
    body = {"prompt": "x" * 700 + "end", "truncate_prompt_tokens": 4, "max_tokens": 2}
    assert post(web, COMPLETIONS, body).status_code == 200
    assert client.requests[-1].prompt_ids == [*b"xend"]


def test_chat_prompt(web: Any, client: FakeClient) -> None:
    messages = [
        {"role": "developer", "content": "be <end> brief"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
    ]
    assert post(web, CHAT, {"messages": messages, "max_tokens": 1}).status_code == 200
    turns = [TURN, *b"system\nbe <end> brief", END, TURN, *b"user\na\nb", END, TURN]
    assert client.requests[-1].prompt_ids == [BOS, *turns, *b"assistant\n"]


def test_messages_sent_back(web: Any) -> None:
    """Clients send the whole answer back, with fields that requests do not document."""
    answer = post(web, CHAT, {**USER, "n": 2}).get_json()["choices"]
    history = [*USER["messages"], answer[0]["message"], {"role": "user", "content": "go on"}]
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    history += [
        {"role": "assistant", "content": None, "tool_calls": [call], "annotations": []},
        {"role": "tool", "tool_call_id": "1", "content": "5"},
    ]
    assert post(web, CHAT, {"messages": history, "max_tokens": 1}).status_code == 200


def test_continue_final_message(web: Any, client: FakeClient) -> None:
    messages = [*USER["messages"], {"role": "assistant", "content": "It is"}]
    body = {"messages": messages, "continue_final_message": True, "max_tokens": 1}
    assert post(web, CHAT, body).status_code == 200
    assert client.requests[-1].prompt_ids[-5:] == [*b"It is"]


@pytest.mark.parametrize(
    "fields",
    [
        {"user": "me", "metadata": {"a": "b"}, "store": False, "service_tier": "auto"},
        {"tools": [], "tool_choice": "none", "parallel_tool_calls": True, "modalities": ["text"]},
        {"response_format": {"type": "text"}, "stream_options": None, "stop": None},
        {"safety_identifier": "x", "prompt_cache_key": "y", "n": 1.0, "functions": None},
    ],
)
def test_harmless_fields(web: Any, fields: dict[str, Any]) -> None:
    assert post(web, CHAT, {**USER, **fields}).status_code == 200


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"temprature": 1}, "temprature"),
    ({"temperature": -1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.1}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 1.5}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"repetition_penalty": 0}, "repetition_penalty"),  # 25
    ({"repetition_penalty": -1}, "repetition_penalty"),
    ({"presence_penalty": 2.5}, "presence_penalty"),
    ({"frequency_penalty": -2.5}, "frequency_penalty"),
    ({"n": 0}, "n"),
    ({"n": 17}, "n"),
    ({"n": True}, "n"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"min_tokens": 9}, "min_tokens"),
    ({"seed": 2**63}, "seed"),
    ({"stop": ["a"] * 17}, "stop"),
    ({"stop": ["a" * 2000]}, "stop"),
    ({"stop": 5}, "stop"),
    ({"stop": [1]}, "stop"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x"),
    ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options"),
    ({"logit_bias": {"260": 1}}, "logit_bias"),  # 23
    ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"logit_bias": {"a": 1}}, "logit_bias"),
    ({"logit_bias": {"²": 1}}, "logit_bias"),
    ({"logit_bias": {"1": 101}}, "logit_bias"),
    ({"logit_bias": {"1": "x"}}, "logit_bias"),
    ({"logit_bias": [1]}, "logit_bias"),
    ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ({"allowed_token_ids": []}, "allowed_token_ids"),
    ({"allowed_token_ids": [9999]}, "allowed_token_ids"),
    ({"bad_words": [""]}, "bad_words"),
    ({"bad_words": ["longer than eight tokens"]}, "bad_words"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ({"priority": 2**70}, "priority"),
    ({"model": "other"}, "model"),
]
REFUSED_CHAT: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": [1]}, "messages"),
    ({"messages": [{"role": "alien", "content": "x"}]}, "messages"),
    ({"messages": [{"role": "user"}]}, "messages"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
    ({"messages": [{"role": "assistant", "tool_calls": 5}]}, "messages"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"logprobs": 2}, "logprobs"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"response_format": {"type": "xml"}}, "response_format"),
    ({"modalities": ["text", "audio"]}, "modalities"),
    ({"audio": {"voice": "x"}}, "audio"),
    ({"store": True}, "store"),
    ({"store": 0}, "store"),
    ({"service_tier": "priority"}, "service_tier"),
    ({"reasoning_effort": "high"}, "reasoning_effort"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    ({"add_generation_prompt": True, "continue_final_message": True}, "continue_final_message"),
    ({"echo": True}, "echo"),
]
REFUSED_COMPLETION: list[tuple[dict[str, Any], str]] = [
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": ["a", 1]}, "prompt"),
    ({"prompt": [1, True]}, "prompt"),
    ({"prompt": [260]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [1.5]}, "prompt"),
    ({"prompt": {"a": 1}}, "prompt"),
    ({"prompt": ["a"] * 300}, "prompt"),
    ({"prompt": ["a"] * 200, "n": 2}, "n"),
    ({"logprobs": 21}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"echo": True, "stream": True, "max_tokens": 0}, "max_tokens"),
    ({"best_of": 3}, "best_of"),
    ({"suffix": "x"}, "suffix"),
    ({"messages": []}, "messages"),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        *((CHAT, *case) for case in REFUSED + REFUSED_CHAT),
        *((COMPLETIONS, *case) for case in REFUSED + REFUSED_COMPLETION),
    ],
)
def test_refusals_name_the_field(
    web: Any, path: str, fields: dict[str, Any], param: str, stream: bool
) -> None:  # 35
    body = {**USER} if path == CHAT else {"prompt": "hi", "max_tokens": 4}
    if stream and "stream" not in fields and "stream_options" not in fields:
        body["stream"] = True
    answer = post(web, path, {**body, **fields})
    error = answer.get_json()["error"]
    assert answer.status_code == (404 if "model" in fields else 400)
    assert error["param"] == param, error
    assert re.split(r"[._]", param)[-1].removesuffix("s") in error["message"], error
    assert set(error) == {"message", "type", "param", "code"}
    assert "\n" not in error["message"]


def test_special_prompts(web: Any, client: FakeClient) -> None:
    for prompt, want in (
        ("hi", [[BOS, *b"hi"]]),
        ("<turn>hi", [[BOS, TURN, *b"hi"]]),
        (["a", "b"], [[BOS, *b"a"], [BOS, *b"b"]]),
        ([72.0, 73], [[72, 73]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
    ):
        client.requests.clear()
        answer = post(web, COMPLETIONS, {"prompt": prompt, "max_tokens": 1})
        assert answer.status_code == 200, answer.text
        assert [request.prompt_ids for request in client.requests] == want
    post(web, COMPLETIONS, {"prompt": "a", "add_special_tokens": False, "max_tokens": 1})
    assert client.requests[-1].prompt_ids == [*b"a"]


def test_indices_of_many_prompts(web: Any) -> None:
    body = {"prompt": ["@say:one@", "@say:two@"], "n": 2, "max_tokens": 9}
    choices = post(web, COMPLETIONS, body).get_json()["choices"]
    assert [(choice["index"], choice["text"]) for choice in choices] == [
        (0, "one"),
        (1, "one"),
        (2, "two"),
        (3, "two"),
    ]


@pytest.mark.parametrize("stream", [False, True])
def test_echo(web: Any, stream: bool) -> None:
    for prompt in ("@say:äb@", [*b"@say:xy@"]):
        body = {"prompt": prompt, "echo": True, "stream": stream}
        answer = post(web, COMPLETIONS, body)
        text = "@say:äb@äb" if isinstance(prompt, str) else "@say:xy@xy"
        assert joined(answer, stream) == text


def joined(answer: Any, stream: bool) -> str:
    if not stream:
        return str(answer.get_json()["choices"][0]["text"])
    frames = [frame[6:] for frame in answer.text.split("\n\n")[:-2]]
    return "".join(json.loads(frame)["choices"][0]["text"] for frame in frames)


def test_completion_logprobs(web: Any) -> None:
    body = {"prompt": "@say:a🙂b@", "logprobs": 2, "max_tokens": 9}
    logprobs = post(web, COMPLETIONS, body).get_json()["choices"][0]["logprobs"]
    assert logprobs["tokens"][:3] == ["a", "bytes:\\xf0", "bytes:\\x9f"]
    assert logprobs["text_offset"] == [0, 1, 1, 1, 1, 2, 3]
    assert logprobs["token_logprobs"] == [-0.25] * 7
    assert logprobs["top_logprobs"][0] == {"a": -0.25, "b": -1.25}


@pytest.mark.parametrize("stream", [False, True])
def test_chat_logprobs_and_token_ids(web: Any, stream: bool) -> None:
    body = {
        "messages": [{"role": "user", "content": "@say:a🙂b@"}],
        "logprobs": True,
        "top_logprobs": 1,
        "return_token_ids": True,
        "stream": stream,
    }
    answer = post(web, CHAT, body)
    if stream:
        frames = [json.loads(frame[6:]) for frame in answer.text.split("\n\n")[:-2]]
    else:
        frames = [answer.get_json()]
    choices = [frame["choices"][0] for frame in frames]
    entries = [
        entry for choice in choices for entry in (choice["logprobs"] or {}).get("content", [])
    ]
    assert [entry["bytes"] for entry in entries[:-1]] == [[byte] for byte in "a🙂b".encode()]
    assert entries[0]["top_logprobs"] == [{"token": "a", "logprob": -0.25, "bytes": [97]}]
    token_ids = [token for choice in choices for token in choice.get("token_ids", [])]
    assert token_ids == [*"a🙂b".encode(), EOS]
    assert frames[0]["prompt_token_ids"][0] == BOS


def test_tokenize(web: Any) -> None:
    answer = post(web, "/tokenize", {"prompt": "<turn>é", "return_token_strs": True}).get_json()
    assert answer["tokens"] == [BOS, TURN, 0xC3, 0xA9]
    assert answer["count"] == 4
    assert answer["max_model_len"] == 600
    assert answer["token_strs"][1] == "<turn>"
    chat = post(web, "/tokenize", {"messages": USER["messages"]}).get_json()
    assert chat["tokens"][:2] == [BOS, TURN]
    back = post(web, "/detokenize", {"tokens": chat["tokens"]}).get_json()
    assert back["prompt"] == "<bos><turn>user\nhi<end><turn>assistant\n"


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": []}, "prompt"),
        ("/tokenize", {"prompt": "a", "add_generation_prompt": True}, "add_generation_prompt"),
        ("/tokenize", {"text": "a"}, "text"),
        ("/detokenize", {"tokens": [999]}, "tokens"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
        ("/detokenize", {}, "tokens"),
    ],
)
def test_tokenize_refusals(web: Any, path: str, body: Any, param: str) -> None:
    answer = post(web, path, body)
    assert (answer.status_code, answer.get_json()["error"]["param"]) == (400, param)


BAD_BODIES = [
    b"",
    b"{",
    b"null",
    b"[]",
    b'"text"',
    b"{}",
    b"\xff\xfe",
    b'{"messages": NaN}',
    b'{"temperature": 1e999, "messages": []}',
    b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
    b'{"messages": ' + b"[" * 50_000 + b"]" * 50_000 + b"}",
    b'{"a":' * 20_000 + b"1" + b"}" * 20_000,
]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, "/tokenize", "/detokenize"])
@pytest.mark.parametrize("body", BAD_BODIES, ids=lambda body: repr(body[:24]))
def test_bad_bodies(web: Any, path: str, body: bytes) -> None:
    answer = post(web, path, body)
    assert answer.status_code == 400
    assert answer.get_json()["error"]["message"]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner),
    max_leaves=8,
)
FIELDS = sorted({*ChatBody.__struct_fields__, *CompletionBody.__struct_fields__} - {"model"})
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "tool"]) | JSON, "content": JSON},
    optional={"tool_calls": JSON, "name": JSON},
)


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=4),
    st.lists(MESSAGE, max_size=3) | st.just(USER["messages"]),
    st.sampled_from([CHAT, COMPLETIONS, "/tokenize"]),
)
def test_any_body_is_answered_without_a_5xx(
    web: Any, fields: dict[str, Any], messages: Any, path: str
) -> None:
    prompt = {"prompt": "x"} if path == COMPLETIONS else {"messages": messages}
    body = json.dumps({**prompt, **fields}).encode()
    answer = post(web, path, body)
    assert answer.status_code < 500, answer.text
    if answer.status_code >= 400:
        assert answer.get_json()["error"]["message"]


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.binary(max_size=200), st.sampled_from([CHAT, COMPLETIONS, "/tokenize", "/detokenize"]))
def test_any_bytes_are_answered_with_400(web: Any, body: bytes, path: str) -> None:
    assert post(web, path, body).status_code == 400
