"""Anthropic's Messages API: what a body means, what comes back, whole and as events, and refusals."""

from __future__ import annotations

from typing import Any

import pytest
from anthropic.types.message_count_tokens_params import MessageCountTokensParams
from anthropic.types.message_create_params import MessageCreateParamsBase
from app_alone import events, make_app, post
from byte_tokenizer import BOS, END, TURN
from fake_client import FakeClient

from server.anthropic.schema import CountTokensBody, MessagesBody

PATH = "/v1/messages"
HI: dict[str, Any] = {"max_tokens": 40, "messages": [{"role": "user", "content": "@say:Hällo.@"}]}

CITING = {"role": "user", "content": [{"type": "text", "text": "a", "citations": [{}]}]}


@pytest.fixture(scope="module")
def client() -> FakeClient:
    return FakeClient()


@pytest.fixture(scope="module")
def web(client: FakeClient) -> Any:
    return make_app(client).test_client()


def test_a_whole_answer(web: Any, client: FakeClient) -> None:
    answer = post(web, PATH, {**HI, "system": "be brief", "top_k": 3, "temperature": 0.5})
    body = answer.get_json()
    assert answer.status_code == 200, body
    assert body["type"], body["role"] == ("message", "assistant")
    assert body["content"] == [{"type": "text", "text": "Hällo."}]
    assert (body["stop_reason"], body["stop_sequence"]) == ("end_turn", None)
    request = client.requests[-1]
    assert body["usage"]["input_tokens"] == len(request.prompt_ids)
    assert body["usage"]["output_tokens"] == len("Hällo.".encode()) + 1
    system = [TURN, *b"system\nbe brief", END]
    assert request.prompt_ids[: 1 + len(system)] == [BOS, *system]
    assert (request.sampling.top_k, request.sampling.temperature) == (3, 0.5)
    assert answer.headers["request-id"] == answer.headers["X-Request-Id"]
    count = post(web, f"{PATH}/count_tokens", {"messages": HI["messages"], "system": "be brief"})
    assert count.get_json() == {"input_tokens": len(request.prompt_ids)}


def test_events(web: Any) -> None:
    answer = post(web, PATH, {**HI, "stream": True, "stop_sequences": ["o."]})
    found = events(answer)
    assert [name for name, _ in found] == [data["type"] for _, data in found]
    names = [name for name, _ in found]
    assert names[:3] == ["message_start", "content_block_start", "ping"]
    assert names[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(names[3:-3]) == {"content_block_delta"}
    assert "".join(data["delta"]["text"] for _, data in found[3:-3]) == "Häll"
    assert all(data["delta"]["text"] for _, data in found[3:-3])
    assert found[0][1]["message"]["content"] == []
    last = found[-2][1]
    assert last["delta"] == {"stop_reason": "stop_sequence", "stop_sequence": "o."}
    assert last["usage"]["output_tokens"] == len("Hällo.".encode())
    assert "[DONE]" not in answer.text


def test_a_cut_answer_says_so(web: Any) -> None:
    assert post(web, PATH, {**HI, "max_tokens": 2}).get_json()["stop_reason"] == "max_tokens"


def test_more_tokens_than_there_is_room_for(web: Any) -> None:
    endless = {"max_tokens": 10**6, "messages": [{"role": "user", "content": "go on"}]}
    body = post(web, PATH, endless).get_json()
    assert body["stop_reason"] == "model_context_window_exceeded"
    assert body["usage"]["input_tokens"] + body["usage"]["output_tokens"] == 600
    found = events(post(web, PATH, {**endless, "stream": True}))
    assert found[-2][1]["delta"]["stop_reason"] == "model_context_window_exceeded"
    assert post(web, PATH, {**HI, "max_tokens": 10**6}).get_json()["stop_reason"] == "end_turn"


def test_turns(web: Any, client: FakeClient) -> None:
    """Blocks, neighbours of one role, thinking of earlier turns, and a begun answer."""
    text = [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}]
    thought = {"type": "thinking", "thinking": "hm", "signature": "x"}
    messages = [
        {"role": "user", "content": text},
        {"role": "user", "content": "b"},
        {"role": "assistant", "content": [thought, {"type": "text", "text": "It is"}]},
    ]
    assert post(web, PATH, {**HI, "messages": messages}).status_code == 200
    end = [*b"assistant\nIt is"]
    want = [BOS, TURN, *b"user\na\nb", END, TURN, *end]
    assert client.requests[-1].prompt_ids == want


def test_tool_turns_reach_the_template(web: Any, client: FakeClient) -> None:
    use = {"type": "tool_use", "id": "t1", "name": "f", "input": {"x": 1}}
    result = {
        "type": "tool_result",
        "tool_use_id": "t1",
        "content": [{"type": "text", "text": "5"}],
    }
    messages = [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": [use]},
        {"role": "user", "content": [result, {"type": "text", "text": "and?"}]},
    ]
    assert post(web, PATH, {**HI, "messages": messages}).status_code == 200
    prompt = bytes(i for i in client.requests[-1].prompt_ids if i < 256)
    assert b"tool\n5user\nand?" in prompt


def test_every_parameter_of_the_official_client_is_known() -> None:
    create, count = (
        MessageCreateParamsBase.__annotations__,
        MessageCountTokensParams.__annotations__,
    )
    assert set(create) - set(MessagesBody.__struct_fields__) == set()
    assert set(count) - set(CountTokensBody.__struct_fields__) == set()


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": None}, "max_tokens"),
        ({"messages": [{"role": "user", "content": "x" * 700}]}, "tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "system", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages.0.content.0"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_use"}]}]}, "tool_use"),
        ({"messages": [{"role": "user"}]}, "messages.0.content"),
        ({"system": [{"type": "image"}]}, "system"),
        ({"system": 5}, "system"),
        ({"messages": [CITING]}, "citations"),
        ({"stop_sequences": [""]}, "stop"),
        ({"stop_sequences": "x"}, "stop_sequences"),
        ({"thinking": {"type": "enabled", "budget_tokens": 2000}}, "thinking"),
        ({"tools": [{"type": "web_search_20250305", "name": "w"}]}, "tools.0"),
        ({"tools": [{"name": "w"}]}, "tools.0"),
        ({"tool_choice": {"type": "x"}}, "tool_choice"),
        ({"output_config": {"effort": "high"}}, "output_config"),
        ({"mcp_servers": [{}]}, "mcp_servers"),
        ({"temperature": -1}, "temperature"),
        ({"top_k": -5}, "top_k"),
        ({"seed": 1}, "seed"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_refusals(web: Any, fields: dict[str, Any], words: str, stream: bool) -> None:
    answer = post(web, PATH, {**HI, "stream": stream, **fields})
    body = answer.get_json()
    assert (answer.status_code, body["type"]) == (400, "error")
    assert body["error"]["type"] == "invalid_request_error"
    assert words in body["error"]["message"]
    assert body["request_id"] == answer.headers["request-id"]


def test_other_errors_have_the_shape(web: Any) -> None:
    unknown = post(web, PATH, {**HI, "model": "other"})
    assert unknown.status_code == 404
    assert unknown.get_json()["error"]["type"] == "not_found_error"
    plain = web.post(PATH, data=b"{}", content_type="text/plain")
    assert (plain.status_code, plain.get_json()["type"]) == (415, "error")
    version = post(web, PATH, HI, **{"anthropic-version": "2020-01-01"})
    assert version.status_code == 400
    assert post(web, PATH, HI, **{"anthropic-version": "2026-10-21"}).status_code == 200
    assert "anthropic-version" in version.get_json()["error"]["message"]
    whole = post(web, PATH, {**HI, "messages": [{"role": "user", "content": "@fail@"}]})
    assert (whole.status_code, whole.get_json()["error"]["type"]) == (500, "api_error")
    fails = {**HI, "stream": True, "messages": [{"role": "user", "content": "@fail@"}]}
    name, data = events(post(web, PATH, fails))[-1]
    assert (name, data["error"]["type"]) == ("error", "api_error")
