"""Starts `jaxserve serve` with the fake engine as real processes, for tests."""

from __future__ import annotations

import dataclasses
import http.client
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time
from typing import Any

import msgspec
from byte_front import Setup

from jaxserve.config import EngineConfig, ServerConfig

TESTS = pathlib.Path(__file__).parent
START_SECONDS = 60.0


@dataclasses.dataclass
class Answer:
    """What came back for one request."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def events(self) -> list[Any]:
        """The JSON objects of an event stream, without the closing [DONE]."""
        frames = self.body.decode().split("\n\n")
        assert frames.pop() == "", "a stream ends with an empty line"
        assert all(frame.startswith("data: ") for frame in frames), frames
        assert frames.pop() == "data: [DONE]", "a stream ends with [DONE]"
        return [json.loads(frame.removeprefix("data: ")) for frame in frames]


class RunningServer:
    """One parent process with its children; `url` is known once it is ready."""

    def __init__(
        self,
        folder: pathlib.Path,
        *,
        engine: EngineConfig | None = None,
        server: ServerConfig | None = None,
        fake_engine: list[str] | None = None,
        front_app: str = "byte_front:make_app()",
    ) -> None:
        self.log = folder / "engine.jsonl"
        self.errors = folder / "errors.txt"
        setup = Setup(
            engine=engine or EngineConfig(model="fake"),
            server=server or ServerConfig(port=0),
            fake_engine=["--log", str(self.log), *(fake_engine or [])],
            front_app=front_app,
        )
        path = os.pathsep.join([str(TESTS.parent), str(TESTS)])
        with self.errors.open("wb") as errors:
            self.process = subprocess.Popen(
                [sys.executable, str(TESTS / "byte_front.py"), msgspec.json.encode(setup).decode()],
                env={**os.environ, "PYTHONPATH": path, "JAXSERVE_STATE": str(folder / "state")},
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        self.url = ""

    def wait_ready(self) -> RunningServer:
        assert self.process.stdout is not None
        line = self.process.stdout.readline().strip()
        assert line.startswith("ready: http://"), (line, self.errors.read_text())
        self.url = line.removeprefix("ready: ")
        return self

    @property
    def address(self) -> tuple[str, int]:
        host, port = self.url.removeprefix("http://").split(":")
        return host, int(port)

    def call(
        self,
        method: str,
        path: str,
        body: Any = None,
        headers: dict[str, str] | None = None,
        timeout: float = 30,
    ) -> Answer:
        data = body if isinstance(body, bytes | type(None)) else json.dumps(body).encode()
        connection = http.client.HTTPConnection(*self.address, timeout=timeout)
        try:
            head = {"Content-Type": "application/json"} if data is not None else {}
            connection.request(method, path, data, {**head, **(headers or {})})
            response = connection.getresponse()
            return Answer(response.status, dict(response.getheaders()), response.read())
        finally:
            connection.close()

    def chat(self, text: str, **fields: Any) -> Answer:
        body = {"messages": [{"role": "user", "content": text}], **fields}
        return self.call("POST", "/v1/chat/completions", body)

    def complete(self, prompt: Any, **fields: Any) -> Answer:
        return self.call("POST", "/v1/completions", {"prompt": prompt, **fields})

    def send_only(
        self, path: str, body: Any, *, receive_buffer: int | None = None
    ) -> socket.socket:
        """Sends a request and returns its connection without reading the answer."""
        data = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        connection = socket.socket()
        if receive_buffer is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        connection.settimeout(30)
        connection.connect(self.address)
        connection.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        return connection

    def engine_events(self, kind: str) -> list[dict[str, Any]]:
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        return [event for event in map(json.loads, lines) if event["event"] == kind]

    def gauge(self, name: str) -> float:
        text = self.call("GET", "/metrics").body.decode()
        values = [line.split()[-1] for line in text.splitlines() if line.startswith(name)]
        return sum(map(float, values))

    def children(self) -> list[int]:
        """Process ids of the engine and of gunicorn."""
        tasks = pathlib.Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        return [int(pid) for pid in tasks.read_text().split()]

    def engine_pid(self) -> int:
        for pid in self.children():
            if b"fake_engine" in pathlib.Path(f"/proc/{pid}/cmdline").read_bytes():
                return pid
        raise AssertionError("no engine process")

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    def wait(self, seconds: float = 30) -> int:
        return self.process.wait(seconds)

    def stop(self) -> None:
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGKILL):
            if self.process.poll() is not None:
                break
            self.process.send_signal(number)
            try:
                self.process.wait(8)
            except subprocess.TimeoutExpired:
                continue
        if self.process.stdout is not None:
            self.process.stdout.close()


def wait_until(condition: Any, seconds: float = 5.0) -> float:
    """Waits until `condition()` is true and returns how long that took."""
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < seconds, f"not within {seconds} s"
        time.sleep(0.02)
    return time.monotonic() - start
