"""HTTP itself, against real gunicorn: statuses, headers, odd clients, many clients (35, 36, 48)."""

from __future__ import annotations

import asyncio
import concurrent.futures
import http.client
import json
import socket
import time
from typing import Any

import openai
import pytest
from running_server import RunningServer, wait_until

CHAT = "/v1/chat/completions"
BODY = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/nowhere", 404, "not_found"),
        ("GET", CHAT, 405, "method_not_allowed"),
        ("DELETE", "/v1/models", 405, "method_not_allowed"),
        ("GET", "/v1/models/other", 404, "model_not_found"),
        ("POST", "/v1//chat/completions", 404, "not_found"),
    ],
)
def test_statuses(server: RunningServer, method: str, path: str, status: int, code: str) -> None:
    answer = server.call(method, path)
    assert (answer.status, answer.json["error"]["code"]) == (status, code)
    assert "Allow" in answer.headers or status != 405


@pytest.mark.parametrize("kind", ["text/plain", "", "multipart/form-data", "application/xml"])
def test_content_type(server: RunningServer, kind: str) -> None:
    answer = server.call("POST", CHAT, BODY, {"Content-Type": kind})
    assert answer.status == 415
    assert "application/json" in answer.json["error"]["message"]
    good = {"Content-Type": "application/json; charset=utf-8"}
    assert server.call("POST", CHAT, BODY, good).status == 200


def test_models(server: RunningServer) -> None:
    card = server.call("GET", "/v1/models").json["data"][0]
    assert (card["id"], card["object"], card["max_model_len"]) == ("fake", "model", 600)
    assert server.call("GET", "/v1/models/fake").json == card


def test_health_ready_metrics_and_index(server: RunningServer) -> None:
    assert server.call("GET", "/health").status == 200
    assert server.call("GET", "/ready").json == {"status": "ready"}
    metrics = server.call("GET", "/metrics")
    assert metrics.headers["Content-Type"].startswith("text/plain; version=0.0.4")
    assert metrics.body.decode().count("# TYPE jaxserve:engine_up gauge") == 1
    assert "POST /v1/chat/completions" in server.call("GET", "/").json["routes"]


def test_request_id(server: RunningServer) -> None:
    for stream in (False, True):
        answer = server.call("POST", CHAT, {**BODY, "stream": stream}, {"X-Request-Id": "me-1.a"})
        assert answer.headers["X-Request-Id"] == "me-1.a"
    for bad in ("a b", "x" * 200, "<script>"):
        given = server.call("GET", "/nowhere", headers={"X-Request-Id": bad}).headers
        assert given["X-Request-Id"] not in ("", bad)


def test_keep_alive_after_errors_and_streams(server: RunningServer) -> None:
    connection = http.client.HTTPConnection(*server.address, timeout=20)
    for body, status in (
        (BODY, 200),
        ({"bad": 1}, 400),
        ({**BODY, "stream": True}, 200),
        ({**BODY, "model": "x"}, 404),
        (BODY, 200),
    ):
        connection.request("POST", CHAT, json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        local = connection.sock.getsockname() if connection.sock else None
        assert (response.status, bool(response.read())) == (status, True)
        assert local is not None
        assert connection.sock is not None
        assert connection.sock.getsockname() == local
    connection.close()


def raw(server: RunningServer, data: bytes) -> bytes:
    with socket.create_connection(server.address, timeout=20) as connection:
        connection.sendall(data)
        answer = b""
        while piece := connection.recv(65536):
            answer += piece
    return answer


@pytest.mark.parametrize("stream", [False, True])
def test_http_1_0(server: RunningServer, stream: bool) -> None:
    body = json.dumps({**BODY, "stream": stream}).encode()
    head = f"POST {CHAT} HTTP/1.0\r\nContent-Type: application/json\r\n"
    answer = raw(server, f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    head_bytes, _, rest = answer.partition(b"\r\n\r\n")
    assert b" 200 OK" in head_bytes
    assert b"chunked" not in head_bytes.lower()
    assert rest.endswith(b"data: [DONE]\n\n") if stream else json.loads(rest)["choices"]


def chunked(body: bytes, size: int = 7) -> bytes:
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    pieces = [body[at : at + size] for at in range(0, len(body), size)]
    data = b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces)
    end = b"0\r\n\r\n"
    return f"{head}Connection: close\r\nTransfer-Encoding: chunked\r\n\r\n".encode() + data + end


def test_chunked_bodies(server: RunningServer) -> None:
    good = json.dumps(BODY).encode()
    assert b" 200 OK" in raw(server, chunked(good))
    assert b" 400 BAD REQUEST" in raw(server, chunked(b"{"))
    broken = chunked(good).replace(b"\r\n7\r\n", b"\r\nzz\r\n", 1)
    assert b" 400 " in raw(server, broken).split(b"\r\n")[0]
    assert b" 413 " in raw(server, chunked(b"x" * 2**21, 2**16)).split(b"\r\n")[0]


def test_too_large_is_told(server: RunningServer) -> None:
    """The client gets to read the refusal although it was still sending."""
    answer = server.call("POST", CHAT, b'{"messages": "' + b"x" * (12 * 2**20) + b'"}')
    assert answer.status == 413
    assert "1048576" in answer.json["error"]["message"]


def test_half_sent_bodies_hold_nobody_up(server: RunningServer) -> None:
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    half = f'{head}Content-Length: 1000\r\n\r\n{{"messages"'.encode()
    connections = [socket.create_connection(server.address) for _ in range(50)]
    for connection in connections:
        connection.sendall(half)
    start = time.monotonic()
    assert server.call("POST", CHAT, BODY).status == 200
    assert time.monotonic() - start < 3
    for connection in connections:
        connection.close()


def test_health_while_a_huge_prompt_arrives(server: RunningServer) -> None:  # 36
    huge = json.dumps({"prompt": "hello wörld " * 40_000}).encode()
    assert len(huge) < 2**20
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        calls = [
            pool.submit(server.call, "POST", "/v1/completions", body)
            for body in (huge, huge, b"x" * (12 * 2**20))
        ]
        slowest = 0.0
        while not all(call.done() for call in calls):
            start = time.monotonic()
            assert server.call("GET", "/health").status == 200
            slowest = max(slowest, time.monotonic() - start)
    assert slowest < 1.0
    assert [call.result().status for call in calls] == [400, 400, 413]


def test_many_streams_at_once(server: RunningServer) -> None:  # 16, 48
    async def one(client: openai.AsyncOpenAI, number: int) -> tuple[str, int]:
        stream = await client.chat.completions.create(
            model="fake",
            messages=[{"role": "user", "content": f"number {number} @say:{number} 안녕 {number}@"}],
            stream=True,
            stream_options={"include_usage": True},
        )
        text, made = "", 0
        async for chunk in stream:
            text += "".join(choice.delta.content or "" for choice in chunk.choices)
            made = chunk.usage.completion_tokens if chunk.usage else made
        return text, made

    async def everybody() -> list[tuple[str, int]]:
        async with openai.AsyncOpenAI(
            base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60
        ) as client:
            return await asyncio.gather(*(one(client, number) for number in range(200)))

    for number, (text, made) in enumerate(asyncio.run(everybody())):
        want = f"{number} 안녕 {number}"
        assert (text, made) == (want, len(want.encode()) + 1)
    wait_until(lambda: server.gauge("vllm:num_requests_running") == 0)


@pytest.fixture(scope="module")
def client(server: RunningServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


MESSAGES: list[Any] = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": [{"type": "text", "text": "@say:Good day!@"}]},
]


def test_openai_client(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="fake", messages=MESSAGES)
    assert answer.choices[0].message.content == "Good day!"
    assert answer.choices[0].finish_reason == "stop"
    again = [*MESSAGES, answer.choices[0].message, MESSAGES[1]]
    assert client.chat.completions.create(model="fake", messages=again, max_tokens=1).usage
    again[2] = answer.choices[0].message.model_dump()
    assert client.chat.completions.create(model="fake", messages=again, max_tokens=1).usage
    assert [model.id for model in client.models.list()] == ["fake"]
    assert client.models.retrieve("fake").id == "fake"


def test_openai_client_streaming(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(model="fake", messages=MESSAGES) as stream:
        text = "".join(event.delta for event in stream if event.type == "content.delta")
        final = stream.get_final_completion()
    assert text == final.choices[0].message.content == "Good day!"
    pieces = client.completions.create(model="fake", prompt="@say:Hi.@", stream=True, logprobs=1)
    choices = [piece.choices[0] for piece in pieces]
    assert "".join(choice.text for choice in choices) == "Hi."
    tokens = [token for choice in choices if choice.logprobs for token in choice.logprobs.tokens]
    assert tokens == ["H", "i", ".", "<eos>"]


def test_openai_client_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        client.chat.completions.create(model="other", messages=MESSAGES)
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as wrong:
        client.chat.completions.create(model="fake", messages=MESSAGES, temperature=-1, stream=True)
    assert wrong.value.param == "temperature"
    failing: list[Any] = [{"role": "user", "content": "@fail@@pause:20@"}]
    stream = client.chat.completions.create(model="fake", messages=failing, stream=True)
    with pytest.raises(openai.APIError, match="told to fail"):
        list(stream)
