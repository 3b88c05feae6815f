"""What users of other servers saw go wrong, where no other test here says it (19, 23, 25, 48)."""

from __future__ import annotations

import concurrent.futures
from typing import Any

import pytest
from app_alone import make_app, post
from fake_client import FakeClient
from running_server import RunningServer, wait_until

COMPLETIONS = "/v1/completions"


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e400"])
@pytest.mark.parametrize("field", ["logit_bias", "repetition_penalty", "min_p", "temperature"])
def test_what_is_no_number_is_refused(field: str, value: str) -> None:  # 23, 25
    client = FakeClient()
    web = make_app(client).test_client()
    given = f'{{"5": {value}}}' if field == "logit_bias" else value
    answer = post(web, COMPLETIONS, f'{{"prompt": "hi", "{field}": {given}}}'.encode())
    assert answer.status_code == 400, answer.text
    assert client.requests == []
    assert post(web, COMPLETIONS, {"prompt": "hi", "max_tokens": 2}).status_code == 200


@pytest.mark.parametrize("value", [100, 1e6, 1e30])
def test_a_large_repetition_penalty_is_taken(value: float) -> None:  # 25
    client = FakeClient()
    body = {"prompt": "hi", "max_tokens": 2, "repetition_penalty": value}
    assert post(make_app(client).test_client(), COMPLETIONS, body).status_code == 200
    assert client.requests[0].sampling.repetition_penalty == value


def test_requests_behind_a_prompt_that_is_too_long_finish(server: RunningServer) -> None:  # 19
    def ask(number: int) -> Any:
        prompt = "x" * 5000 if number % 3 == 0 else f"number {number}"
        return server.complete(prompt, max_tokens=4, ignore_eos=True)

    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(ask, range(12)))
    for number, answer in enumerate(answers):
        if number % 3 == 0:
            assert (answer.status, answer.json["error"]["param"]) == (400, "prompt")
            assert "600" in answer.json["error"]["message"], "the context is named"
        else:
            assert answer.json["usage"]["completion_tokens"] == 4


def test_no_stream_of_a_crowd_is_lost(server: RunningServer) -> None:  # 48
    def ask(number: int) -> None:
        answer = server.complete(
            f"number {number}",
            max_tokens=9,
            ignore_eos=True,
            stream=True,
            stream_options={"include_usage": True},
        )
        assert answer.status == 200
        assert answer.events[-1]["usage"]["completion_tokens"] == 9

    for count in (64, 64, 64, 64, 64, 256):
        with concurrent.futures.ThreadPoolExecutor(count) as pool:
            list(pool.map(ask, range(count)))
    wait_until(lambda: server.gauge("vllm:num_requests_running") == 0)
