"""HTTP itself: statuses, headers, old and odd clients."""

from __future__ import annotations

import http.client
import json
import socket
import time

from behaviour_groups.client import CHAT, COMPLETIONS, ROUTES, Server, must, still_answers
from behaviour_groups.limits import INSIDES
from behaviour_groups.listed import Behaviour

PROMPT = "The capital of France is"
JSON = {"Content-Type": "application/json"}


def health(server: Server) -> str:
    """/health answers 200 fast."""
    answers = [server.call("GET", "/health") for _ in range(20)]
    must(all(answer.status == 200 for answer in answers), f"status {answers[0].status}")
    slowest = max(answer.seconds for answer in answers)
    must(slowest < 0.5, f"{slowest:.2f} s")
    return f"within {1000 * slowest:.0f} ms"


def stream_headers(server: Server) -> str:
    """Event streams say Cache-Control: no-cache and X-Accel-Buffering: no."""
    for route in ROUTES:
        stream = server.stream(route, PROMPT, max_tokens=2).whole()
        kind = stream.headers.get("content-type", "")
        must(kind.startswith("text/event-stream"), f"{route}: content type {kind!r}")
        must("no-cache" in stream.headers.get("cache-control", ""), f"{route}: no Cache-Control")
        buffering = stream.headers.get("x-accel-buffering")
        must(buffering == "no", f"{route}: X-Accel-Buffering is {buffering!r}")
    return "both"


def request_id(server: Server) -> str:
    """The client's X-Request-Id comes back, of whole answers, streams and errors."""
    head = {"X-Request-Id": "ask-17"}
    bodies = [server.body(COMPLETIONS, PROMPT, max_tokens=2, stream=on) for on in (False, True)]
    for body in [*bodies, {"model": server.model}]:
        answer = server.call("POST", COMPLETIONS, body, head)
        found = answer.headers.get("x-request-id")
        must(found == "ask-17", f"{found!r} with status {answer.status}")
    return "three kinds of answers"


def content_type(server: Server) -> str:
    """A body that is not called JSON: 400 or 415."""
    body = json.dumps(server.body(COMPLETIONS, PROMPT, max_tokens=2)).encode()
    for kind in ("text/plain", "application/x-www-form-urlencoded", ""):
        answer = server.call("POST", COMPLETIONS, body, {"Content-Type": kind})
        must(answer.status in (400, 415), f"{kind!r}: {answer.status}")
        must(answer.error["message"], f"{kind!r}: no message")
    return "three kinds"


def statuses(server: Server) -> str:
    """Wrong method: 405; unknown path: 404; both with the JSON error object."""
    for method, path, wanted in (
        ("GET", CHAT, 405),
        ("DELETE", COMPLETIONS, 405),
        ("POST", "/v1/models", 405),
        ("GET", "/v1/nothing", 404),
        ("POST", "/nothing", 404),
    ):
        answer = server.call(method, path, {} if method == "POST" else None)
        must(answer.status == wanted, f"{method} {path}: {answer.status}")
        must(answer.error["message"], f"{method} {path}: no message")
    return "405 and 404"


def _head(server: Server, version: str, more: str) -> str:
    key = f"Authorization: Bearer {server.key}\r\n" if server.key else ""
    start = f"POST {COMPLETIONS} HTTP/{version}\r\nHost: x\r\nContent-Type: application/json\r\n"
    return f"{start}{key}{more}\r\n"


def old_http(server: Server) -> str:
    """HTTP/1.0 clients get whole answers and streams, ended by the close of the connection."""
    for stream in (False, True):
        body = json.dumps(server.body(COMPLETIONS, PROMPT, max_tokens=3, stream=stream))
        head = _head(server, "1.0", f"Content-Length: {len(body)}\r\n")
        start = time.monotonic()
        found = server.raw((head + body).encode(), timeout=20)
        must(b" 200 " in found[:20], f"{found[:60]!r}")
        must(b"transfer-encoding: chunked" not in found.lower(), "chunked to HTTP/1.0")
        must(not stream or b"data: [DONE]\n\n" in found, "no [DONE]")
        must(time.monotonic() - start < 15, "the connection stays open")
    return "whole and streamed"


def chunked(server: Server) -> str:
    """Request bodies in chunks work."""
    body = json.dumps(server.body(COMPLETIONS, PROMPT, max_tokens=3)).encode()
    connection = server.connect()
    parts = (body[i : i + 7] for i in range(0, len(body), 7))
    connection.request("POST", COMPLETIONS, parts, server.head(JSON), encode_chunked=True)
    response = connection.getresponse()
    must(response.status == 200, f"status {response.status}")
    connection.close()
    return f"{len(body)} bytes, 7 at a time"


def keep_alive(server: Server) -> str:
    """One connection goes on after errors and streams."""
    connection = server.connect(60)
    bodies = [
        (b"{", 400),
        (json.dumps(server.body(COMPLETIONS, PROMPT, max_tokens=3, stream=True)).encode(), 200),
        (json.dumps(server.body(COMPLETIONS, PROMPT, n=-1)).encode(), 400),
        (json.dumps(server.body(COMPLETIONS, PROMPT, max_tokens=3)).encode(), 200),
    ]
    own = None
    try:
        for body, status in bodies:
            connection.request("POST", COMPLETIONS, body, server.head(JSON))
            own = own or connection.sock.getsockname()
            response = connection.getresponse()
            response.read()
            must(response.status // 100 == status // 100, f"status {response.status}")
            must(connection.sock and connection.sock.getsockname() == own, "connection closed")
    except (OSError, http.client.HTTPException) as error:
        must(False, f"{type(error).__name__} {error}")
    finally:
        connection.close()
    return "four requests on one connection"


def slow_clients(server: Server) -> str:
    """Half-sent bodies and readers that never read hold nobody up."""
    idle = []
    for _ in range(40):
        connection = socket.create_connection(server.address)
        connection.sendall((_head(server, "1.1", "Content-Length: 5000\r\n") + "{").encode())
        idle.append(connection)
    for _ in range(8):
        idle.append(server.open(COMPLETIONS, PROMPT, max_tokens=400, ignore_eos=True, stream=True))
    slowest = max(server.complete(PROMPT, max_tokens=2).seconds for _ in range(5))
    for connection in idle:
        connection.close()
    must(slowest < 3, f"another request takes {slowest:.1f} s")
    server.rests()
    return f"40 half bodies, 8 who do not read; others within {slowest:.2f} s"


def errors_show_nothing(server: Server) -> str:
    """No error body shows stack traces or paths."""
    tried = 0
    for path in (CHAT, COMPLETIONS, "/tokenize", "/detokenize", "/v1/responses", "/v1/embeddings"):
        for body in (b"{", b"{}", b"[]", b'{"model": 1}', b'{"prompt": [["x"]], "tokens": ["a"]}'):
            text = server.call("POST", path, body).body.decode(errors="replace")
            tried += 1
            inside = next((word for word in INSIDES if word in text), None)
            must(inside is None, f"{path} with {body!r} shows {inside!r}")
    still_answers(server)
    return f"{tried} errors"


CHECKS = (
    Behaviour("http", "/health is fast", health),
    Behaviour("http", "headers of event streams", stream_headers),
    Behaviour("http", "X-Request-Id comes back", request_id),
    Behaviour("http", "a body not called JSON: 400 or 415", content_type),
    Behaviour("http", "405 and 404 with the error object", statuses),
    Behaviour("http", "HTTP/1.0", old_http),
    Behaviour("http", "chunked request bodies", chunked),
    Behaviour("http", "keep-alive after errors and streams", keep_alive),
    Behaviour("http", "slow and half-sent clients hold nobody up", slow_clients),
    Behaviour("http", "errors show nothing of the inside", errors_show_nothing),
)
