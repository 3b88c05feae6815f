"""A client that leaves, or stops reading, holds nothing up (31, 32, slow readers)."""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable
from typing import Any

import pytest
from running_server import RunningServer, wait_until

from jaxserve.config import EngineConfig

SLOW = {"messages": [{"role": "user", "content": "@pause:50@"}], "max_tokens": 400}
COMPLETION = {"prompt": ["@pause:50@", "@pause:50@ too"], "max_tokens": 400, "n": 2}


def close(connection: socket.socket) -> None:
    connection.close()


def reset(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def running(server: RunningServer) -> float:
    return server.gauge("vllm:num_requests_running") + server.gauge("vllm:num_requests_waiting")


@pytest.mark.parametrize("leave", [close, reset])
@pytest.mark.parametrize(
    ("path", "body", "count"),
    [
        ("/v1/chat/completions", {**SLOW, "stream": True}, 1),
        ("/v1/chat/completions", SLOW, 1),
        ("/v1/chat/completions", {**SLOW, "n": 3, "stream": True}, 3),
        ("/v1/completions", COMPLETION, 4),
    ],
)
def test_leaving_aborts(
    server: RunningServer, path: str, body: Any, count: int, leave: Callable[[Any], None]
) -> None:
    name = 'vllm:request_success_total{model_name="fake",finished_reason="abort"}'
    aborted = server.gauge(name)
    connection = server.send_only(path, body)
    wait_until(lambda: running(server) == count)
    leave(connection)
    assert wait_until(lambda: running(server) == 0) < 1.0
    assert server.gauge(name) == aborted + count


def test_keep_alive_after_a_stream(server: RunningServer) -> None:
    """A pipelined request is neither a departure nor lost."""
    body = {"messages": [{"role": "user", "content": "@pause:20@"}], "max_tokens": 20}
    connection = server.send_only("/v1/chat/completions", {**body, "stream": True})
    connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    data = b""
    while piece := connection.recv(65536):
        data += piece
    assert data.count(b"HTTP/1.1 200 OK") == 2
    assert b"data: [DONE]" in data
    connection.close()


def test_a_reader_that_stalls_is_dropped(start_server: Callable[..., RunningServer]) -> None:
    long = 1_000_000
    engine = EngineConfig(model="fake", max_model_len=2 * long, num_pages=long)
    server = start_server(engine=engine, fake_engine=["--step-ms", "1"]).wait_ready()
    body = {"prompt": "x", "max_tokens": long, "stream": True}
    connection = server.send_only("/v1/completions", body, receive_buffer=4096)
    wait_until(lambda: running(server) == 1)
    wait_until(lambda: running(server) == 0, 20)
    assert len(server.engine_events("abort")) == 1
    assert server.errors.read_text() == ""
    connection.close()
