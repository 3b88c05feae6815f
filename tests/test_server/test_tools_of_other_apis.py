"""Calls of tools and thoughts as Anthropic's Messages API and OpenAI's Responses API write them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from app_alone import events, make_app, post
from byte_front import TEMPLATE
from fake_client import FakeClient

CALLS = (
    'Let me see.\n<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": [2, "x"]}}\n</tool_call>\n'
    '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
)
ADD: dict[str, Any] = {"a": 1, "b": [2, "x"]}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "array"}}}
THOUGHT = "<think>\nWhat is it?\n</think>\n\nIt is 5."
MESSAGES: dict[str, Any] = {
    "max_tokens": 300,
    "tools": [
        {"name": "add", "description": "adds", "input_schema": SCHEMA},
        {"name": "now", "input_schema": {"type": "object"}},
    ],
}
RESPONSES: dict[str, Any] = {
    "store": False,
    "tools": [
        {"type": "function", "name": "add", "parameters": SCHEMA, "strict": False},
        {"type": "function", "name": "now", "parameters": None},
    ],
}


@pytest.fixture(scope="module")
def client() -> FakeClient:
    return FakeClient(max_model_len=3000)


@pytest.fixture(scope="module")
def web(client: FakeClient) -> Any:
    template = "{% if tools %}{{ tools | tojson }}{% endif %}" + TEMPLATE
    app = make_app(client, template=template, tool_parser="hermes", reasoning_parser="deepseek")
    return app.test_client()


def say(text: str) -> str:
    return f"@say:{text}@"


def messages(text: str, **fields: Any) -> dict[str, Any]:
    return {**MESSAGES, "messages": [{"role": "user", "content": say(text)}], **fields}


def test_messages_use_tools(web: Any, client: FakeClient) -> None:
    body = post(web, "/v1/messages", messages(CALLS)).get_json()
    text, add, now = body["content"]
    assert text == {"type": "text", "text": "Let me see."} or text["text"].strip() == "Let me see."
    assert (add["type"], add["name"], add["input"]) == ("tool_use", "add", ADD)
    assert (now["name"], now["input"]) == ("now", {})
    assert body["stop_reason"] == "tool_use"
    prompt = bytes(i for i in client.requests[-1].prompt_ids if i < 256)
    assert b'"name": "add"' in prompt
    found = events(post(web, "/v1/messages", messages(CALLS, stream=True)))
    starts = [data["content_block"] for name, data in found if name == "content_block_start"]
    assert [block["type"] for block in starts] == ["text", "tool_use", "tool_use"]
    indices = [data["index"] for name, data in found if name.startswith("content_block")]
    assert indices == sorted(indices)
    parts = [data for name, data in found if name == "content_block_delta"]
    joined = "".join(part["delta"].get("partial_json", "") for part in parts if part["index"] == 1)
    assert json.loads(joined) == ADD
    assert found[-2][1]["delta"]["stop_reason"] == "tool_use"
    stops = [data["index"] for name, data in found if name == "content_block_stop"]
    assert stops == [0, 1, 2]


def test_messages_that_are_cut_inside_a_call(web: Any) -> None:  # 42
    body = post(web, "/v1/messages", messages(CALLS, max_tokens=75)).get_json()
    assert body["stop_reason"] == "max_tokens"


def test_messages_think(web: Any) -> None:
    plain = {"max_tokens": 300, "messages": [{"role": "user", "content": say(THOUGHT)}]}
    body = post(web, "/v1/messages", plain).get_json()
    assert [block["type"] for block in body["content"]] == ["thinking", "text"]
    assert body["content"][0]["thinking"] == "What is it?"
    assert body["content"][1]["text"] == "It is 5."
    found = events(post(web, "/v1/messages", {**plain, "stream": True}))
    deltas = [data["delta"] for name, data in found if name == "content_block_delta"]
    assert "".join(delta.get("thinking", "") for delta in deltas) == "What is it?"
    assert "".join(delta.get("text", "") for delta in deltas) == "It is 5."


def test_a_tool_must_be_used(web: Any, client: FakeClient) -> None:
    for choice in ({"type": "any"}, {"type": "tool", "name": "add"}):
        fields = messages("x", tool_choice=choice)
        assert post(web, "/v1/messages", fields).status_code == 200
        assert client.requests[-1].grammar is not None
    wrong = messages("x", tool_choice={"type": "tool", "name": "other"})
    assert post(web, "/v1/messages", wrong).status_code == 400


def test_responses_call_functions(web: Any) -> None:
    body = post(web, "/v1/responses", {**RESPONSES, "input": say(CALLS)}).get_json()
    message, add, now = body["output"]
    assert message["content"][0]["text"].strip() == "Let me see."
    assert (add["type"], add["name"], add["status"]) == ("function_call", "add", "completed")
    assert json.loads(add["arguments"]) == ADD
    assert now["name"] == "now"
    found = events(post(web, "/v1/responses", {**RESPONSES, "input": say(CALLS), "stream": True}))
    assert [data["sequence_number"] for _, data in found] == list(range(len(found)))
    deltas = [
        data["delta"]
        for name, data in found
        if name == "response.function_call_arguments.delta" and data["output_index"] == 1
    ]
    assert json.loads("".join(deltas)) == ADD
    done = [data["item"] for name, data in found if name == "response.output_item.done"]
    assert [item["type"] for item in done] == ["message", "function_call", "function_call"]
    assert found[-1][1]["response"]["output"] == done
    again = [
        {"role": "user", "content": "go"},
        *done,
        {"type": "function_call_output", "call_id": done[1]["call_id"], "output": "3"},
    ]
    assert post(web, "/v1/responses", {**RESPONSES, "input": again}).status_code == 200


def test_responses_think(web: Any) -> None:
    body = post(web, "/v1/responses", {"store": False, "input": say(THOUGHT)}).get_json()
    thought, message = body["output"]
    assert (thought["type"], thought["content"][0]["text"]) == ("reasoning", "What is it?")
    assert message["content"][0]["text"] == "It is 5."
    counted = THOUGHT.index("</think>") + len("</think>")
    assert body["usage"]["output_tokens_details"] == {"reasoning_tokens": counted}
    stream = {"store": False, "input": say(THOUGHT), "stream": True}
    last = events(post(web, "/v1/responses", stream))[-1][1]["response"]
    assert last["usage"] == body["usage"]


def test_the_form_of_a_response(web: Any, client: FakeClient) -> None:
    form = {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True}
    fields = {"store": False, "input": say("{}"), "text": {"format": form}}
    assert post(web, "/v1/responses", fields).status_code == 200
    assert client.requests[-1].grammar is not None
    bad = {**fields, "text": {"format": {**form, "schema": {"type": "nothing"}}}}
    answer = post(web, "/v1/responses", bad)
    assert (answer.status_code, answer.get_json()["error"]["param"]) == (400, "text")


def test_the_form_of_a_message(web: Any, client: FakeClient) -> None:
    form = {"type": "json_schema", "schema": {"type": "object"}}
    fields = messages("{}", output_config={"format": form}, tools=[])
    assert post(web, "/v1/messages", fields).status_code == 200
    assert client.requests[-1].grammar is not None
    for wrong in (
        {"format": {"type": "text"}},
        {"format": {**form, "schema": {"type": "nothing"}}},
        {"effort": "high"},
    ):
        answer = post(web, "/v1/messages", {**fields, "output_config": wrong})
        assert answer.status_code == 400
