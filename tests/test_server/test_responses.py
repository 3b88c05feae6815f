"""OpenAI's Responses API: what a body means, what comes back, what is kept, and refusals."""

from __future__ import annotations

import pathlib
import sqlite3
from typing import Any

import pytest
from app_alone import events, make_app, post
from byte_tokenizer import BOS, END, TURN
from fake_client import FakeClient
from openai.types.responses import Response
from openai.types.responses.response_create_params import ResponseCreateParamsBase

from server.responses import store
from server.responses.schema import ResponsesBody

PATH = "/v1/responses"
HI: dict[str, Any] = {"input": "@say:Hällo.@"}


@pytest.fixture(scope="module")
def client() -> FakeClient:
    return FakeClient()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return tmp_path_factory.mktemp("data")


@pytest.fixture(scope="module")
def web(client: FakeClient, folder: pathlib.Path) -> Any:
    return make_app(client, folder=folder).test_client()


def text_of(body: Any) -> str:
    return str(body["output"][0]["content"][0]["text"])


def test_a_whole_answer(web: Any, client: FakeClient) -> None:
    fields = {"instructions": "be brief", "temperature": 0.5, "metadata": {"a": "b"}}
    answer = post(web, PATH, {**HI, **fields, "max_output_tokens": 50})
    body = answer.get_json()
    assert answer.status_code == 200, body
    assert Response.model_validate(body).output_text == "Hällo."
    assert (body["status"], body["error"], body["metadata"]) == ("completed", None, {"a": "b"})
    request = client.requests[-1]
    system = [TURN, *b"system\nbe brief", END]
    assert request.prompt_ids[: 1 + len(system)] == [BOS, *system]
    assert (request.sampling.temperature, request.sampling.max_tokens) == (0.5, 50)
    made = len("Hällo.".encode()) + 1
    usage = body["usage"]
    assert (usage["input_tokens"], usage["output_tokens"]) == (len(request.prompt_ids), made)
    assert usage["total_tokens"] == len(request.prompt_ids) + made
    count = post(web, f"{PATH}/input_tokens", {**HI, "instructions": "be brief"}).get_json()
    assert count["input_tokens"] == len(request.prompt_ids)


@pytest.mark.parametrize(("most", "status"), [(None, "completed"), (3, "incomplete")])
def test_events(web: Any, most: int | None, status: str) -> None:
    body = {**HI, "stream": True, "include": ["message.output_text.logprobs"]}
    if most is not None:
        body["max_output_tokens"] = most
    answer = post(web, PATH, body)
    found = events(answer)
    assert [name for name, _ in found] == [data["type"] for _, data in found]
    assert [data["sequence_number"] for _, data in found] == list(range(len(found)))
    names = [name for name, _ in found]
    start = ["created", "in_progress", "output_item.added", "content_part.added"]
    end = ["output_text.done", "content_part.done", "output_item.done", status]
    assert names[:4] == [f"response.{name}" for name in start]
    assert names[-4:] == [f"response.{name}" for name in end]
    deltas = [data for _, data in found[4:-4]]
    assert {data["type"] for data in deltas} == {"response.output_text.delta"}
    assert all(data["delta"] and data["logprobs"] for data in deltas)
    whole = found[-1][1]["response"]
    assert "".join(data["delta"] for data in deltas) == text_of(whole) == found[-4][1]["text"]
    assert whole["id"] == found[0][1]["response"]["id"]
    assert web.get(f"{PATH}/{whole['id']}").get_json() == whole
    details = {"reason": "max_output_tokens"} if most else None
    assert whole["incomplete_details"] == details
    assert "[DONE]" not in answer.text


def test_an_answer_that_builds_on_earlier_ones(web: Any, client: FakeClient) -> None:
    first = post(web, PATH, {**HI, "instructions": "not carried over"}).get_json()
    again = {"input": [{"role": "user", "content": [{"type": "input_text", "text": "and?"}]}]}
    second = post(web, PATH, {**again, "previous_response_id": first["id"]}).get_json()
    assert second["previous_response_id"] == first["id"]
    post(web, PATH, {"input": "so?", "previous_response_id": second["id"]})
    prompt = bytes(i for i in client.requests[-1].prompt_ids if i < 256).decode()
    assert prompt.startswith("user\n@say:Hällo.@assistant\nHällo.user\nand?assistant\n")
    assert prompt.endswith("user\nso?assistant\n")
    items = web.get(f"{PATH}/{second['id']}/input_items").get_json()
    assert [item["content"] for item in items["data"]] == [again["input"][0]["content"]]
    assert web.delete(f"{PATH}/{first['id']}").get_json()["deleted"] is True
    for answer in (
        web.get(f"{PATH}/{first['id']}"),
        web.delete(f"{PATH}/{first['id']}"),
        post(web, PATH, {"input": "x", "previous_response_id": second["id"]}),
        post(web, PATH, {"input": "x", "previous_response_id": "resp_none"}),
    ):
        assert answer.status_code == 404
        assert "stored response" in answer.get_json()["error"]["message"]


def test_items_of_other_kinds(web: Any, client: FakeClient) -> None:
    items = [
        {"role": "developer", "content": "d"},
        {"type": "message", "role": "user", "content": "u"},
        {"type": "reasoning", "summary": []},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}", "id": "x"},
        {"type": "function_call_output", "call_id": "c", "output": "5"},
    ]
    assert post(web, PATH, {"input": items, "store": False}).status_code == 200
    prompt = bytes(i for i in client.requests[-1].prompt_ids if i < 256)
    assert prompt.startswith(b"system\nduser\nuassistant\ntool\n5")


def test_what_is_not_stored(web: Any) -> None:
    body = post(web, PATH, {**HI, "store": False}).get_json()
    assert body["store"] is False
    assert web.get(f"{PATH}/{body['id']}").status_code == 404


def test_the_oldest_go_first(web: Any, folder: pathlib.Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(store, "MAX_RESPONSES", 3)
    ids = [post(web, PATH, HI).get_json()["id"] for _ in range(5)]
    found = [web.get(f"{PATH}/{response}").status_code for response in ids]
    assert found == [404, 404, 200, 200, 200]


def test_another_process_finds_it(web: Any, folder: pathlib.Path) -> None:
    first = post(web, PATH, HI).get_json()
    other = make_app(folder=folder).test_client()
    assert text_of(other.get(f"{PATH}/{first['id']}").get_json()) == "Hällo."


def test_a_full_disk_has_a_name(tmp_path: pathlib.Path) -> None:
    web = make_app(folder=tmp_path).test_client()
    kept = post(web, PATH, HI).get_json()
    with sqlite3.connect(tmp_path / "jaxserve.sqlite") as connection:
        connection.execute(
            "CREATE TRIGGER full BEFORE INSERT ON responses BEGIN "
            "SELECT RAISE(ABORT, 'database or disk is full'); END"
        )
    answer = post(web, PATH, HI)
    assert (answer.status_code, answer.get_json()["error"]["code"]) == (507, "storage_full")
    name, data = events(post(web, PATH, {**HI, "stream": True}))[-2]
    assert (name, data["code"]) == ("error", "storage_full")
    assert web.get(f"{PATH}/{kept['id']}").status_code == 200
    assert post(web, PATH, {**HI, "store": False}).status_code == 200


def test_a_failing_stream(web: Any) -> None:
    found = events(post(web, PATH, {"input": "@fail@", "stream": True}))
    assert [name for name, _ in found[-2:]] == ["error", "response.failed"]
    assert found[-1][1]["response"]["error"]["code"] == "server_error"


def test_every_parameter_of_the_official_client_is_known() -> None:
    known = set(ResponsesBody.__struct_fields__)
    assert set(ResponseCreateParamsBase.__annotations__) - known == set()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"input": [5]}, "input"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input"),
        ({"input": [{"type": "web_search_call"}]}, "input"),
        ({"input": "x" * 700}, "input"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 10**6}, "max_output_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"include": ["file_search_call.results"]}, "include"),
        ({"background": True}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"reasoning": {"effort": "high"}}, "reasoning"),
        ({"truncation": "auto"}, "truncation"),
        ({"text": {"verbosity": "high"}}, "text"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options"),
        ({"messages": []}, "messages"),
        ({"n": 2}, "n"),
    ],
)
def test_refusals(web: Any, fields: dict[str, Any], param: str) -> None:
    answer = post(web, PATH, {**HI, **fields})
    error = answer.get_json()["error"]
    assert (answer.status_code, error["param"]) == (400, param), error
    assert param in error["message"] or error["code"] == "context_length_exceeded"


@pytest.mark.parametrize("query", ["limit=0", "limit=x", "order=up", "after=none", "page=2"])
def test_bad_pages(web: Any, query: str) -> None:
    kept = post(web, PATH, HI).get_json()["id"]
    answer = web.get(f"{PATH}/{kept}/input_items?{query}")
    assert (answer.status_code, answer.get_json()["error"]["param"]) == (400, query.split("=")[0])
