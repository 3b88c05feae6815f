"""Embeddings and log-probabilities of prompts: shapes, formats, refusals."""

from __future__ import annotations

import base64
from typing import Any

import msgspec
import numpy as np
import pytest
from app_alone import events, make_app, post
from byte_tokenizer import BOS
from fake_client import FakeClient
from openai.types import CreateEmbeddingResponse
from openai.types.embedding_create_params import EmbeddingCreateParams

from server.openai.schema import EmbeddingsBody

PATH = "/v1/embeddings"


@pytest.fixture(scope="module")
def client() -> FakeClient:
    return FakeClient()


@pytest.fixture(scope="module")
def web(client: FakeClient) -> Any:
    return make_app(client).test_client()


def vectors(answer: Any) -> np.ndarray:
    data = answer.get_json()["data"]
    assert [entry["index"] for entry in data] == list(range(len(data)))
    return np.array([entry["embedding"] for entry in data], np.float32)


def expected(ids: list[int]) -> np.ndarray:
    return np.array([[(token + k) % 7 for token in ids] for k in range(8)], np.float32).mean(1)


def test_vectors_have_length_one(web: Any) -> None:
    answer = post(web, PATH, {"input": ["ab", "c"], "user": "me", "model": "fake"})
    body = answer.get_json()
    assert answer.status_code == 200, body
    CreateEmbeddingResponse.model_validate(body)
    assert body["usage"] == {"prompt_tokens": 5, "total_tokens": 5}
    for vector, text in zip(vectors(answer), (b"ab", b"c"), strict=True):
        want = expected([BOS, *text])
        assert vector == pytest.approx(want / np.linalg.norm(want), abs=1e-6)


def test_inputs_of_every_kind(web: Any, client: FakeClient) -> None:
    for given, prompts in (
        ("ab", [[BOS, *b"ab"]]),
        ([97.0, 98], [[97, 98]]),
        ([[97], [98, 99]], [[97], [98, 99]]),
    ):
        client.requests.clear()
        assert post(web, PATH, {"input": given}).status_code == 200
        assert [request.prompt_ids for request in client.requests] == prompts


def test_last_token_plain_and_shortened(web: Any) -> None:
    fields = {"input": [97, 98], "pooling": "last"}
    plain = vectors(post(web, PATH, {**fields, "normalize": False}))[0]
    assert plain == pytest.approx(expected([98]))
    short = vectors(post(web, PATH, {**fields, "dimensions": 3}))[0]
    want = expected([98])[:3]
    assert short == pytest.approx(want / np.linalg.norm(want), abs=1e-6)


def test_base64(web: Any) -> None:
    want = vectors(post(web, PATH, {"input": "ab"}))[0]
    body = post(web, PATH, {"input": "ab", "encoding_format": "base64"}).get_json()
    data = base64.b64decode(body["data"][0]["embedding"])
    assert np.frombuffer(data, "<f4") == pytest.approx(want)


def test_every_parameter_of_the_official_client_is_known() -> None:
    known = set(EmbeddingsBody.__struct_fields__)
    assert set(EmbeddingCreateParams.__annotations__) - known == set()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": ""}, None),
        ({"input": []}, "input"),
        ({"input": None}, "input"),
        ({"input": [1, "a"]}, "input"),
        ({"input": [260]}, "input"),
        ({"input": "\ud800"}, None),
        ({"input": "x" * 700}, "input"),
        ({"input": ["a"] * 2049}, "input"),
        ({"dimensions": 0}, "dimensions"),
        ({"dimensions": 9}, "dimensions"),
        ({"encoding_format": "int8"}, "encoding_format"),
        ({"pooling": "max"}, "pooling"),
        ({"truncate": 1}, "truncate"),
    ],
)
def test_refusals(web: Any, fields: dict[str, Any], param: str | None) -> None:
    answer = post(web, PATH, {"input": "hi", **fields})
    if fields == {"input": ""}:  # one token, the begin of a text
        assert answer.status_code == 200
        return
    error = answer.get_json()["error"]
    assert (answer.status_code, error["param"]) == (400, param), error


def test_a_server_that_was_not_started_for_it_says_so() -> None:
    client = FakeClient()
    assert client.info is not None
    client.info = msgspec.structs.replace(client.info, embeddings="off", prompt_logprobs=False)
    web = make_app(client).test_client()
    answer = post(web, PATH, {"input": "a"})
    assert (answer.status_code, "--embeddings" in answer.text) == (400, True)
    for path, body in (
        ("/v1/completions", {"prompt": "a", "prompt_logprobs": 1}),
        ("/v1/completions", {"prompt": "a", "echo": True, "logprobs": 1}),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "a"}], "prompt_logprobs": 0},
        ),
    ):
        answer = post(web, path, body)
        name = "echo" if "echo" in body else "prompt_logprobs"
        assert answer.get_json()["error"]["param"] == name
        assert answer.status_code == 400


def test_prompt_logprobs(web: Any) -> None:
    body = {"prompt": ["ab", "c"], "prompt_logprobs": 2, "max_tokens": 1, "n": 2}
    choices = post(web, "/v1/completions", body).get_json()["choices"]
    assert [len(choice["prompt_logprobs"]) for choice in choices] == [3, 3, 2, 2]
    first, second, third = choices[0]["prompt_logprobs"]
    assert first is None
    assert set(second) == {"97", "98"}
    assert second["97"] == {"logprob": -1.0, "rank": 1, "decoded_token": "a"}
    assert third["98"] == {"logprob": -2.0, "rank": 2, "decoded_token": "b"}
    last = choices[2]["prompt_logprobs"][1]["99"]
    assert last == {"logprob": -0.5, "rank": None, "decoded_token": "c"}
    chat = {"messages": [{"role": "user", "content": "x"}], "prompt_logprobs": 0, "max_tokens": 1}
    answer = post(web, "/v1/chat/completions", chat).get_json()
    assert len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]


@pytest.mark.parametrize("stream", [False, True])
def test_echo_with_logprobs(web: Any, stream: bool) -> None:
    body = {"prompt": "@say:äb@", "echo": True, "logprobs": 1, "stream": stream}
    answer = post(web, "/v1/completions", body)
    assert answer.status_code == 200, answer.text
    if stream:
        frames = [data for _, data in events(answer) if data != "[DONE]"]
        choices = [frame["choices"][0] for frame in frames]
    else:
        choices = answer.get_json()["choices"]
    assert "".join(choice["text"] for choice in choices) == "@say:äb@äb"
    found = [choice["logprobs"] for choice in choices if choice["logprobs"]]
    joined = {name: [value for each in found for value in each[name]] for name in found[0]}
    prompt = len("@say:äb@".encode()) + 1
    assert joined["tokens"][:3] == ["<bos>", "@", "s"]
    assert joined["token_logprobs"][0] is joined["top_logprobs"][0] is None
    assert joined["token_logprobs"][1:prompt] == [-0.5] * (prompt - 1)
    assert joined["token_logprobs"][prompt:] == [-0.25] * 4
    assert joined["text_offset"][:4] == [0, 0, 1, 2]
    assert joined["text_offset"][prompt] == len("@say:äb@")


def test_echo_without_an_answer(web: Any, client: FakeClient) -> None:
    body = {"prompt": ["ab", "c"], "echo": True, "logprobs": 0, "max_tokens": 0}
    answer = post(web, "/v1/completions", body).get_json()
    assert [choice["text"] for choice in answer["choices"]] == ["ab", "c"]
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["length"] * 2
    assert answer["choices"][0]["logprobs"]["token_logprobs"] == [None, -0.5, -0.5]
    assert answer["usage"]["completion_tokens"] == 0
    assert all(request.score for request in client.requests[-2:])
    del body["logprobs"]
    assert post(web, "/v1/completions", body).get_json()["choices"][1]["text"] == "c"
    assert post(web, "/v1/completions", {**body, "echo": False}).status_code == 400
