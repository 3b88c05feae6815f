"""Messages and responses against real processes: clients that leave, refusals, many at once."""

from __future__ import annotations

import concurrent.futures
import json
from typing import Any

import pytest
from running_server import Answer, RunningServer, wait_until

MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"


def body(path: str, text: str, **fields: Any) -> dict[str, Any]:
    turn = [{"role": "user", "content": text}]
    if path == MESSAGES:
        return {"messages": turn, "max_tokens": 400, **fields}
    return {"input": turn, "max_output_tokens": 400, "store": False, **fields}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [MESSAGES, RESPONSES])
def test_a_client_that_leaves_stops_the_engine(
    server: RunningServer, path: str, stream: bool
) -> None:  # 31
    aborts = len(server.engine_events("abort"))
    connection = server.send_only(path, body(path, "go on @pause:20@", stream=stream))
    wait_until(lambda: server.gauge("vllm:num_requests_running") == 1)
    connection.close()
    wait_until(lambda: len(server.engine_events("abort")) == aborts + 1, 2.0)
    assert server.gauge("vllm:num_requests_running") == 0


@pytest.mark.parametrize("path", [MESSAGES, RESPONSES])
def test_the_start_of_a_stream(server: RunningServer, path: str) -> None:
    answer = server.call("POST", path, body(path, "@say:hi@", stream=True))
    assert answer.headers["Content-Type"].startswith("text/event-stream")
    assert answer.headers["Cache-Control"] == "no-cache"
    assert answer.headers["X-Accel-Buffering"] == "no"
    assert b"\r" not in answer.body
    assert answer.body.endswith(b"\n\n")
    for frame in answer.body.decode().removesuffix("\n\n").split("\n\n"):
        name, data = frame.split("\n")
        assert name == f"event: {json.loads(data.removeprefix('data: '))['type']}"
    refused = server.call("POST", path, body(path, "x", stream=True, temperature=-1))
    assert (refused.status, b"temperature" in refused.body) == (400, True)
    assert "X-Request-Id" in refused.headers


def test_many_at_once_do_not_mix(server: RunningServer) -> None:  # 16, 48
    def ask(number: int) -> tuple[int, Answer]:
        path = (MESSAGES, RESPONSES)[number % 2]
        fields = {"stream": number % 3 == 0}
        return number, server.call("POST", path, body(path, f"@say:answer {number}.@", **fields))

    with concurrent.futures.ThreadPoolExecutor(32) as pool:
        for number, answer in pool.map(ask, range(96)):
            want = f"answer {number}."
            if number % 3:
                found = answer.json["content" if number % 2 == 0 else "output"][0]
                text = found["text"] if number % 2 == 0 else found["content"][0]["text"]
            else:
                frames = answer.body.decode().split("\n\n")[:-1]
                events = [json.loads(frame.split("data: ", 1)[1]) for frame in frames]
                deltas = [event["delta"] for event in events if "delta" in event["type"]]
                texts = [
                    each.get("text", "") if isinstance(each, dict) else each for each in deltas
                ]
                text = "".join(texts)
            assert text == want
