"""A client that looks closely: raw frames, times of events, connections that one may leave."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import http.client
import itertools
import json
import re
import socket
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
ROUTES = (COMPLETIONS, CHAT)
PATIENCE = 600.0

Result = TypeVar("Result")


class FailedError(Exception):
    """The behaviour does not hold; says what was seen."""


class RefusedByNameError(Exception):
    """The server refuses by name what the behaviour is about."""


class UntriedError(Exception):
    """The behaviour could not be tried on this server; says why."""


def must(condition: object, seen: str) -> None:
    """Raises FailedError with what was seen."""
    if not condition:
        raise FailedError(seen)


@dataclasses.dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer. seconds: from sending to its last byte."""

    status: int
    headers: dict[str, str]
    body: bytes
    seconds: float

    @property
    def json(self) -> Any:
        try:
            return json.loads(self.body)
        except ValueError:
            raise FailedError(f"status {self.status} with {self.body[:60]!r} for JSON") from None

    @property
    def error(self) -> dict[str, Any]:
        """The error object. Raises FailedError if there is none of the known form."""
        found = self.json.get("error") if isinstance(self.json, dict) else None
        whole = isinstance(found, dict) and {"message", "type", "param", "code"} <= found.keys()
        must(whole, f"status {self.status} with no error object: {self.body[:80].decode()!r}")
        return found or {}

    def names(self, field: str) -> bool:
        """A 4xx that names the field, in `param` or in its words."""
        return 400 <= self.status < 500 and field in self.body.decode(errors="replace")

    @property
    def choices(self) -> list[dict[str, Any]]:
        """Of a 200. Raises FailedError for any other status."""
        must(self.status == 200, f"status {self.status}: {self.body[:120].decode()!r}")
        return sorted(self.json["choices"], key=lambda choice: choice["index"])

    @property
    def text(self) -> str:
        """Of the first choice."""
        return text_of(self.choices[0])

    @property
    def finish(self) -> str:
        """The first choice's finish_reason."""
        return str(self.choices[0]["finish_reason"])

    @property
    def usage(self) -> dict[str, Any]:
        must(self.status == 200, f"status {self.status}: {self.body[:120].decode()!r}")
        return dict(self.json["usage"])


def text_of(choice: dict[str, Any]) -> str:
    """Of a choice, whole or a piece, of either route."""
    if "text" in choice:
        return choice["text"] or ""
    return (choice.get("message") or choice.get("delta") or {}).get("content") or ""


@dataclasses.dataclass(slots=True)
class Stream:
    """What came of a stream; times in seconds of time.monotonic()."""

    sent: float
    status: int = 0
    headers: dict[str, str] = dataclasses.field(default_factory=dict)
    raw: bytes = b""
    times: list[float] = dataclasses.field(default_factory=list)
    chunks: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    done: bool = False

    @property
    def pieces(self) -> list[tuple[int, dict[str, Any]]]:
        """Every choice of every chunk, with its index."""
        return [(choice["index"], choice) for chunk in self.chunks for choice in chunk["choices"]]

    def text(self, index: int = 0) -> str:
        return "".join(text_of(piece) for i, piece in self.pieces if i == index)

    def finishes(self, index: int = 0) -> list[str]:
        """All finish reasons that are not null."""
        return [p["finish_reason"] for i, p in self.pieces if i == index and p["finish_reason"]]

    @property
    def usages(self) -> list[dict[str, Any]]:
        return [chunk["usage"] for chunk in self.chunks if chunk.get("usage")]

    @property
    def content_times(self) -> list[float]:
        """When pieces with text came."""
        pairs = zip(self.times, self.chunks, strict=True)
        return [at for at, chunk in pairs if any(map(text_of, chunk["choices"]))]

    @property
    def gaps(self) -> list[float]:
        """Seconds between pieces with text."""
        times = self.content_times
        return [b - a for a, b in itertools.pairwise(times)]

    def whole(self) -> Stream:
        """Itself. Raises FailedError for a refusal or a stream without its end."""
        must(self.status == 200, f"status {self.status}: {self.raw[:120].decode()!r}")
        must(self.done, f"no [DONE] after {len(self.chunks)} chunks: {self.raw[-120:].decode()!r}")
        return self


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """A running server. context: tokens of prompt and answer together."""

    name: str
    url: str
    model: str
    key: str | None = None
    context: int = 0

    @property
    def address(self) -> tuple[str, int]:
        parts = urllib.parse.urlsplit(self.url)
        return parts.hostname or "127.0.0.1", parts.port or 80

    def connect(self, timeout: float = PATIENCE) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(*self.address, timeout=timeout)

    def head(self, more: dict[str, str] | None = None) -> dict[str, str]:
        key = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        return {**key, **(more or {})}

    def call(
        self,
        method: str,
        path: str,
        body: Any = None,
        headers: dict[str, str] | None = None,
        timeout: float = PATIENCE,
    ) -> Answer:
        """body: bytes as they are, anything else as JSON."""
        data = body if isinstance(body, bytes | type(None)) else json.dumps(body).encode()
        kind = {"Content-Type": "application/json"} if data is not None else {}
        connection = self.connect(timeout)
        start = time.monotonic()
        try:
            connection.request(method, path, data, {**kind, **self.head(headers)})
            response = connection.getresponse()
            content = response.read()
        except (OSError, http.client.HTTPException) as error:
            raise FailedError(f"{method} {path}: {type(error).__name__} {error}") from error
        finally:
            connection.close()
        names = {name.lower(): value for name, value in response.getheaders()}
        return Answer(response.status, names, content, time.monotonic() - start)

    def body(self, route: str, prompt: Any, **fields: Any) -> dict[str, Any]:
        """prompt: a text, token ids (for completions), or messages (for chat)."""
        fields = {"model": self.model, "temperature": 0, **fields}
        if route == COMPLETIONS:
            return {"prompt": prompt, **fields}
        chat = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        return {"messages": chat, **fields}

    def ask(self, route: str, prompt: Any, **fields: Any) -> Answer:
        """A whole answer."""
        return self.call("POST", route, self.body(route, prompt, **fields))

    def complete(self, prompt: Any, **fields: Any) -> Answer:
        return self.ask(COMPLETIONS, prompt, **fields)

    def chat(self, prompt: Any, **fields: Any) -> Answer:
        return self.ask(CHAT, prompt, **fields)

    def stream(
        self,
        route: str,
        prompt: Any,
        on_chunk: Callable[[dict[str, Any]], None] | None = None,
        **fields: Any,
    ) -> Stream:
        """Reads a stream to its end."""
        data = json.dumps(self.body(route, prompt, stream=True, **fields))
        connection = self.connect()
        found = Stream(time.monotonic())
        try:
            connection.request("POST", route, data, self.head({"Content-Type": "application/json"}))
            response = connection.getresponse()
            found.status = response.status
            found.headers = {name.lower(): value for name, value in response.getheaders()}
            for line in response if response.status == 200 else ():
                found.raw += line
                if line.strip() == b"data: [DONE]":
                    found.done = True
                elif line.startswith(b"data:"):
                    chunk = json.loads(line[5:])
                    if "error" in chunk:
                        continue  # it has no choices, and no [DONE] that makes it whole
                    found.times.append(time.monotonic())
                    found.chunks.append(chunk)
                    if on_chunk is not None:
                        on_chunk(chunk)
            if response.status != 200:
                found.raw = response.read()
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise FailedError(f"the stream broke: {type(error).__name__} {error}") from error
        finally:
            connection.close()
        return found

    def open(self, route: str, prompt: Any, **fields: Any) -> socket.socket:
        """Sends a request and leaves its answer unread; the caller closes it."""
        data = json.dumps(self.body(route, prompt, **fields)).encode()
        head = {"Host": "server", "Content-Type": "application/json", **self.head()}
        lines = "".join(f"{name}: {value}\r\n" for name, value in head.items())
        start = f"POST {route} HTTP/1.1\r\n{lines}Content-Length: {len(data)}\r\n\r\n"
        connection = socket.create_connection(self.address, timeout=PATIENCE)
        connection.sendall(start.encode() + data)
        return connection

    def raw(self, data: bytes, timeout: float = 60.0) -> bytes:
        """Sends bytes as they are and reads until the server closes or nothing comes for a while."""
        found = b""
        with socket.create_connection(self.address, timeout=timeout) as connection:
            connection.sendall(data)
            with contextlib.suppress(TimeoutError, ConnectionResetError):
                while part := connection.recv(65536):
                    found += part
        return found

    def tokens(self, text: str) -> list[int]:
        """Token ids of a text, without any that mark its beginning."""
        body = {"model": self.model, "prompt": text, "add_special_tokens": False}
        return list(self.call("POST", "/tokenize", body).json["tokens"])

    def metrics(self) -> str:
        answer = self.call("GET", "/metrics")
        if answer.status != 200:
            raise UntriedError(f"/metrics answers {answer.status}")
        return answer.body.decode()

    def metric(self, name: str, text: str | None = None, **labels: str) -> float:
        """The sum over all series with these labels. Raises UntriedError if there is none."""
        wanted = [f'{label}="{value}"' for label, value in labels.items()]
        values = [
            float(line.rsplit(" ", 1)[1])
            for line in (self.metrics() if text is None else text).splitlines()
            if re.match(rf"{re.escape(name)}[{{ ]", line) and all(each in line for each in wanted)
        ]
        if not values:
            raise UntriedError(f"no metric {name}")
        return sum(values)

    def rests(self, seconds: float = 60.0) -> float:
        """Waits until nothing runs and waits; returns how long that took. Raises FailedError."""
        start = time.monotonic()
        names = ("vllm:num_requests_running", "vllm:num_requests_waiting")
        while True:
            text = self.metrics()
            if not any(self.metric(name, text) for name in names):
                return time.monotonic() - start
            must(time.monotonic() - start < seconds, f"requests still run after {seconds:g} s")
            time.sleep(0.05)


def together(jobs: Iterable[Callable[[], Result]]) -> list[Result]:
    """Runs all jobs at once; results in the jobs' order."""
    jobs = list(jobs)
    with concurrent.futures.ThreadPoolExecutor(len(jobs)) as pool:
        return [future.result() for future in [pool.submit(job) for job in jobs]]


@contextlib.contextmanager
def company(server: Server, prompts: Sequence[Any], **fields: Any) -> Any:
    """Streams of other requests, all of which have had a token when the block begins."""
    begun = [threading.Event() for _ in prompts]
    with concurrent.futures.ThreadPoolExecutor(len(prompts)) as pool:
        jobs = [
            pool.submit(server.stream, COMPLETIONS, prompt, lambda _, e=event: e.set(), **fields)
            for prompt, event in zip(prompts, begun, strict=True)
        ]
        for event, job in zip(begun, jobs, strict=True):
            while not event.wait(0.05) and not job.done():
                pass
        yield jobs
        for job in jobs:
            job.result().whole()


def still_answers(server: Server) -> None:
    """Raises FailedError if a plain request is not answered."""
    answer = server.complete("The capital of France is", max_tokens=3)
    must(answer.status == 200, f"afterwards a plain request gets {answer.status}")


def must_equal(wanted: str, found: str, where: str) -> None:
    """Raises FailedError that says from where on the texts differ."""
    letters = enumerate(zip(wanted, found, strict=False))
    at = next((i for i, (a, b) in letters if a != b), min(len(wanted), len(found)))
    must(wanted == found, f"{where}: another text from character {at} of {len(wanted)} on")


def refused_or_200(answer: Answer, field: str) -> Answer:
    """Raises RefusedByNameError for a 4xx that names the field, FailedError for any other that is not a 200."""
    if answer.names(field):
        raise RefusedByNameError(f"{answer.status}: {answer.error['message'][:80]}")
    must(answer.status == 200, f"{field}: status {answer.status}")
    return answer
