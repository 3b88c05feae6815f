"""What no honest client sends, byte by byte to a real server: refused in words, and nobody is harmed."""

from __future__ import annotations

import concurrent.futures
import contextlib
import http.client
import itertools
import json
import pathlib
import re
import socket
import time
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import flask
import pytest
from app_alone import make_app
from running_server import RunningServer

from jaxserve.cli.main import main
from jaxserve.config import EngineConfig, ServerConfig

CHAT = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
UPLOAD = (
    b"POST /v1/files HTTP/1.1\r\nHost: x\r\nContent-Type: multipart/form-data; boundary=edge\r\n"
)
NOWHERE = b"POST /nowhere HTTP/1.1\r\nHost: x\r\n"
HEALTH = b"GET /health HTTP/1.1\r\nHost: x\r\n"
CLOSE = b"Connection: close\r\n"
CHUNKED = b"Transfer-Encoding: chunked\r\n"
BODY = json.dumps({"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}).encode()
FORM = (
    b'--edge\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    b'--edge\r\nContent-Disposition: form-data; name="file"; filename="a.jsonl"\r\n\r\n{}\r\n'
    b"--edge--\r\n"
)
#: What an attacker hides behind a request: it must never be answered as one.
HIDDEN = b"GET /metrics HTTP/1.1\r\nHost: x\r\nX-Request-Id: hidden\r\n\r\n"
#: Seconds that bodies may take here.
PATIENCE = 1.0


def make_impatient_app() -> flask.Flask:
    """What gunicorn loads: the application, with less time for bodies than people need."""
    from byte_front import make_app as make_byte_app

    import server.batches.file_routes
    import server.body

    server.body.BODY_SECONDS = PATIENCE
    server.batches.file_routes.UPLOAD_SECONDS = PATIENCE
    return make_byte_app()


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("hostile")
    server = RunningServer(
        folder,
        engine=EngineConfig(model="fake", max_model_len=600),
        server=ServerConfig(port=0, max_body_bytes=2**20, data_dir=str(folder / "data")),
        front_app="test_server.test_hostile_http:make_impatient_app()",
    )
    try:
        yield server.wait_ready()
    finally:
        server.stop()


@pytest.fixture
def server(running: RunningServer) -> Iterator[RunningServer]:
    """The server, which is as well after every test as it was before, and has nothing to report."""
    yield running
    assert running.call("GET", "/health").status == 200
    assert running.chat("@say:well@").json["choices"][0]["message"]["content"] == "well"
    assert running.errors.read_text() == ""


def talk(server: RunningServer, *pieces: bytes, end: bool = False) -> bytes:
    """Sends the pieces, a moment between them, and reads until the server closes.

    end: nothing more is to come, and the server is told.
    """
    answer = b""
    with socket.create_connection(server.address, timeout=15) as connection:
        with contextlib.suppress(ConnectionResetError, BrokenPipeError):  # closed meanwhile
            for number, piece in enumerate(pieces):
                time.sleep(0.05 if number else 0)
                connection.sendall(piece)
            if end:
                connection.shutdown(socket.SHUT_WR)
        with contextlib.suppress(ConnectionResetError):
            while piece := connection.recv(65536):
                answer += piece
    return answer


def statuses(answer: bytes) -> list[int]:
    return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d\d\d) ", answer)]


def check_refusal(answer: bytes, status: int) -> dict[str, Any]:
    """One answer, with the error object, which tells nothing about the server's inside."""
    assert statuses(answer) == [status], answer
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"content-type: application/json" in head.lower()
    for secret in (b"Traceback", b".py", b"site-packages", b"gunicorn.", b"root:"):
        assert secret not in body
    error: dict[str, Any] = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert len(error["message"]) < 400
    return error


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def length(data: bytes | int) -> bytes:
    return b"Content-Length: %d\r\n" % (data if isinstance(data, int) else len(data))


WHOLE = chunk(BODY) + b"0\r\n\r\n"
#: Headers that leave open where the body ends, and headers that are none.
UNCLEAR = {
    "length and chunks": length(BODY) + CHUNKED,
    "two lengths": length(5) + length(6),
    "one length twice": length(BODY) * 2,
    "list of lengths": b"Content-Length: 5, 5\r\n",
    "signed length": b"Content-Length: +5\r\n",
    "negative length": b"Content-Length: -5\r\n",
    "length in hex": b"Content-Length: 0x5\r\n",
    "length with underscore": b"Content-Length: 5_0\r\n",
    "length in superscript": b"Content-Length: \xb2\r\n",
    "length of 5000 digits": b"Content-Length: " + b"9" * 5000 + b"\r\n",
    "chunked twice": CHUNKED * 2,
    "chunked not last": b"Transfer-Encoding: chunked, gzip\r\n",
    "identity": b"Transfer-Encoding: identity\r\n",
    "space before the colon": b"Transfer-Encoding : chunked\r\n",
    "vertical tab": b"Transfer-Encoding: \x0bchunked\r\n",
    "folded header": b"X-Folded: a\r\n b\r\n" + length(BODY),
    "bare LF after a header": b"X-A: b\n" + length(BODY),
    "bare CR in a header": b"X-A: b\rX-C: d\r\n" + length(BODY),
    "NUL in a header": b"X-A: b\0\r\n" + length(BODY),
    "no colon": b"what is this\r\n" + length(BODY),
    "empty name": b": a\r\n" + length(BODY),
    "name that is not ASCII": b"X-\xff: a\r\n" + length(BODY),
    "two hosts": b"Host: other\r\n" + length(BODY),
    "two content types": b"Content-Type: text/plain\r\n" + length(BODY),
    "two schemes": b"X-Forwarded-Proto: https\r\nX-Forwarded-Ssl: off\r\n" + length(BODY),
}


@pytest.mark.parametrize("headers", UNCLEAR.values(), ids=UNCLEAR)
def test_a_body_of_unclear_length_is_refused_and_nothing_behind_it_is_read(
    server: RunningServer, headers: bytes
) -> None:
    check_refusal(talk(server, CHAT + headers + b"\r\n" + WHOLE + HIDDEN), 400)


def test_an_unknown_transfer_coding(server: RunningServer) -> None:
    """501 is what HTTP asks for (RFC 9112, section 6.1)."""
    answer = talk(server, CHAT + b"Transfer-Encoding: xchunked\r\n\r\n" + WHOLE + HIDDEN)
    assert "xchunked" in check_refusal(answer, 501)["message"]


BAD_CHUNKS = {
    "no number": b"zz\r\n",
    "negative": b"-5\r\nhello\r\n",
    "with 0x": b"0x5\r\nhello\r\n",
    "empty": b"\r\nhello\r\n",
    "too short": b"3\r\nhello\r\n0\r\n\r\n",
    "wrong end": b"5\r\nhelloXX0\r\n\r\n",
    "bare LF in an extension": b"5;a\rb\r\nhello\r\n0\r\n\r\n",
    "extension without a name": b"5;=\r\nhello\r\n0\r\n\r\n",
    "endless extension": b"5;a=" + b"b" * 9000,
    "length in a trailer": chunk(b"hello") + b"0\r\nContent-Length: 5\r\n\r\n",
    "key in a trailer": chunk(b"hello") + b"0\r\nAuthorization: Bearer x\r\n\r\n",
    "broken trailer": chunk(b"hello") + b"0\r\nwhat\r\n\r\n",
}


@pytest.mark.parametrize("route", [CHAT, UPLOAD, NOWHERE], ids=["chat", "upload", "nowhere"])
@pytest.mark.parametrize("chunks", BAD_CHUNKS.values(), ids=BAD_CHUNKS)
def test_a_broken_chunk_ends_the_connection(
    server: RunningServer, chunks: bytes, route: bytes
) -> None:
    """Whether the request hidden behind it comes at once or a moment later."""
    for pieces in ([chunks + HIDDEN], [chunks, HIDDEN]):
        answer = talk(server, route + CHUNKED + b"\r\n" + pieces[0], *pieces[1:])
        assert b"hidden" not in answer
        if route is NOWHERE:  # refused before its body is looked at
            assert statuses(answer) in ([404], [404, 400])
        else:
            assert check_refusal(answer, 400)["code"] == "invalid_body"


@pytest.mark.parametrize(
    "rest",
    [
        length(2**63 - 1) + b"\r\n" + BODY,
        length(10**24) + b"\r\n" + BODY,
        length(len(BODY) + 1) + b"\r\n" + BODY,
        CHUNKED + b"\r\n" + chunk(BODY),
        CHUNKED + b"\r\n" + b"f" * 17 + b"\r\n" + BODY,
        CHUNKED + b"\r\n" + b"f" * 5000 + b"\r\n" + BODY,
        CHUNKED + b"\r\n%x\n%s\n0\n\n" % (len(BODY), BODY),
    ],
    ids=["2**63", "10**24", "one less", "no last chunk", "17 digits", "5000 digits", "bare LF"],
)
def test_half_a_body_is_no_request(server: RunningServer, rest: bytes) -> None:
    """Also when the half is valid JSON."""
    submitted = len(server.engine_events("submit"))
    error = check_refusal(talk(server, CHAT + rest, end=True), 400)
    assert error["code"] == "invalid_body"
    assert len(server.engine_events("submit")) == submitted


@pytest.mark.parametrize("framing", [CHUNKED, length(500)], ids=["chunked", "length"])
def test_half_an_upload_is_the_clients_fault_and_not_the_disks(
    server: RunningServer, framing: bytes
) -> None:
    half = chunk(FORM[:120]) if framing is CHUNKED else FORM[:120]
    check_refusal(talk(server, UPLOAD + framing + b"\r\n" + half, end=True), 400)
    assert server.call("GET", "/v1/files").json["data"] == []


def test_chunks_may_have_extensions_and_trailers(server: RunningServer) -> None:
    chunks = b'%x;a=b;c="d;e"\r\n%s\r\n0;last\r\nX-Sum: 1\r\n\r\n' % (len(BODY), BODY)
    assert statuses(talk(server, CHAT + CLOSE + CHUNKED + b"\r\n" + chunks)) == [200]


@pytest.mark.parametrize("route", [CHAT, UPLOAD], ids=["chat", "upload"])
@pytest.mark.parametrize("coding", ["gzip", "br", "identity, gzip", "chunked"])
def test_compressed_bodies_are_never_unpacked(
    server: RunningServer, coding: str, route: bytes
) -> None:
    packer = zlib.compressobj(wbits=31)
    bomb = packer.compress(b"0" * 2**25) + packer.flush()
    assert len(bomb) < 2**16
    head = f"Content-Encoding: {coding}\r\n".encode() + length(bomb) + CLOSE
    error = check_refusal(talk(server, route + head + b"\r\n" + bomb), 415)
    assert coding in error["message"]
    head = b"Transfer-Encoding: gzip, chunked\r\n" + CLOSE
    whole = chunk(BODY if route is CHAT else FORM) + b"0\r\n\r\n"
    check_refusal(talk(server, route + head + b"\r\n" + whole), 415)


def test_expect(server: RunningServer) -> None:
    with socket.create_connection(server.address, timeout=15) as connection:
        connection.sendall(CHAT + CLOSE + b"Expect: 100-Continue\r\n" + length(BODY) + b"\r\n")
        assert connection.recv(65536) == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.sendall(BODY)
        assert connection.recv(65536).startswith(b"HTTP/1.1 200 ")
    check_refusal(talk(server, CHAT + b"Expect: tea\r\n" + length(BODY) + b"\r\n" + BODY), 417)


SLOW_STARTS = {
    "nothing": [b""],
    "request line": [b"GET /hea", b"l"],
    "one header": [HEALTH + b"X-A: ", b"a"],
    "many headers": [HEALTH, b"X-A: b\r\n"],
    "TLS": [b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b"\x07"],
    "a second request": [HEALTH + b"\r\n", b"G"],
    "a body that nobody reads": [HEALTH + length(9999) + b"\r\n", b"x"],
    "JSON": [CHAT + length(9999) + b"\r\n", b" "],
    "JSON in chunks": [CHAT + CHUNKED + b"\r\n", b"1\r\n \r\n"],
    "one chunk": [CHAT + CHUNKED + b"\r\n270f\r\n", b" "],
    "an upload": [UPLOAD + length(9999) + b"\r\n" + FORM[:90], b"-"],
    "an upload in one chunk": [UPLOAD + CHUNKED + b"\r\n270f\r\n" + FORM[:90], b"-"],
}


def drip(server: RunningServer, start: Sequence[bytes]) -> tuple[float, bytes]:
    """Sends the start and then drops of it; how long that was tolerated, and what was answered."""
    begin, answer = time.monotonic(), b""
    with socket.create_connection(server.address) as connection:
        connection.settimeout(0.2)
        try:
            connection.sendall(start[0])
            while time.monotonic() - begin < 20:
                try:
                    piece = connection.recv(65536)
                    if not piece:
                        break
                    answer += piece
                except TimeoutError:
                    connection.sendall(start[-1] if len(start) > 1 else b"")
        except (ConnectionResetError, BrokenPipeError):
            pass
    return time.monotonic() - begin, answer


def test_whoever_is_slow_is_let_go_and_holds_nobody_up(server: RunningServer) -> None:
    with concurrent.futures.ThreadPoolExecutor(2 * len(SLOW_STARTS)) as pool:
        calls = {name: pool.submit(drip, server, start) for name, start in SLOW_STARTS.items()}
        while not all(call.done() for call in calls.values()):
            begin = time.monotonic()
            assert server.chat("@say:still quick@").status == 200
            assert time.monotonic() - begin < 3
            time.sleep(0.3)
    for name, call in calls.items():
        seconds, answer = call.result()
        assert seconds < 12, name
        slow_body = any(SLOW_STARTS[name][0].startswith(route) for route in (CHAT, UPLOAD))
        answered = [408] if slow_body else [200] if HEALTH + b"\r\n" in SLOW_STARTS[name] else []
        if name == "a body that nobody reads":
            answered = [200]
        assert statuses(answer) == answered, name


@pytest.mark.parametrize("route", [CHAT, UPLOAD], ids=["chat", "upload"])
def test_what_comes_after_a_body_that_was_too_slow_is_no_request(
    server: RunningServer, route: bytes
) -> None:
    """The chunk was left in its middle: its rest might look like one."""
    with socket.create_connection(server.address, timeout=15) as connection:
        connection.sendall(route + CHUNKED + b"\r\n" + b"fff\r\n{")
        answer = connection.recv(65536)
        assert answer.startswith(b"HTTP/1.1 408 ")
        try:
            connection.sendall(HIDDEN)
            while piece := connection.recv(65536):
                answer += piece
        except (ConnectionResetError, BrokenPipeError):
            pass
    check_refusal(answer, 408)


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (HEALTH + b"".join(b"X-%d: a\r\n" % n for n in range(5000)) + b"\r\n", 431),
        (HEALTH + b"X-A: " + b"a" * 100_000 + b"\r\n\r\n", 431),
        (HEALTH + b"X-A: a\r\n" * 200_000, 431),
        (b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n", 414),
        (b"GET /" + b"a" * 1_000_000, 414),
        (b"A" * 5000 + b" /health HTTP/1.1\r\nHost: x\r\n\r\n", 414),
        (b"GET /health\r\n\r\n", 400),  # HTTP/0.9
        (b"GET /health HTTP/2.0\r\nHost: x\r\n\r\n", 400),
        (b"GET /health HTTP/11\r\nHost: x\r\n\r\n", 400),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0", 400),
        (b"GET /health HTTP/1.1\nHost: x\n\n", 400),
        (b"GET /hea\0lth HTTP/1.1\r\nHost: x\r\n\r\n", 400),
        (b"GET /\xff\xfe HTTP/1.1\r\nHost: x\r\n\r\n", 400),
        (b"GET  HTTP/1.1\r\nHost: x\r\n\r\n", 400),
        (b"GET health HTTP/1.1\r\nHost: x\r\n\r\n", 400),
        (b"GET /a b HTTP/1.1\r\nHost: x\r\n\r\n", 400),
        (b"GET http://[evil/health HTTP/1.1\r\nHost: x\r\n\r\n", 400),
        (b"get /health HTTP/1.1\r\nHost: x\r\n\r\n", 400),
        (b"HTTP/1.1 200 OK\r\n\r\n", 400),
        (b"PROXY TCP4 1.2.3.4 5.6.7.8 1 2\r\n" + HEALTH + b"\r\n", 400),
        (b"POST /v1/chat/completions HTTP/1.0\r\n" + CHUNKED + b"\r\n" + WHOLE, 400),
        (bytes(range(256)) * 10, 400),
        (b"\r\n" * 10, 400),
        (b"OPTIONS * HTTP/1.1\r\nHost: x\r\n" + CLOSE + b"\r\n", 404),
        (b"CONNECT evil.example:443 HTTP/1.1\r\nHost: x\r\n\r\n" + HIDDEN, 404),
        (b"BREW /health HTTP/1.1\r\nHost: x\r\n" + CLOSE + b"\r\n", 405),
    ],
    ids=lambda value: repr(value[:30]) if isinstance(value, bytes) else None,
)
def test_what_is_hardly_http(server: RunningServer, request_bytes: bytes, status: int) -> None:
    check_refusal(talk(server, request_bytes), status)


def test_other_forms_of_a_request_are_what_they_seem(server: RunningServer) -> None:
    line = b"GET http://evil.example/health HTTP/1.1\r\nHost: x\r\n"
    assert statuses(talk(server, line + CLOSE + b"\r\n")) == [200]
    # A header that moves the application to another path is obeyed from nobody.
    moved = b"SCRIPT_NAME: /nowhere\r\nPATH_INFO: /metrics\r\nX-Original-URL: /metrics\r\n"
    answer = talk(server, HEALTH + moved + CLOSE + b"\r\n")
    assert statuses(answer) == [200]
    assert answer.endswith(b'{"status":"ok"}\n')


def test_no_upgrade(server: RunningServer) -> None:
    """The connection stays what it is."""
    for status, upgrade in (
        (
            200,
            b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n",
        ),
        (
            400,
            b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
            b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n",
        ),
    ):
        answer = talk(server, HEALTH + upgrade + b"\r\n" + HEALTH + CLOSE + b"\r\n")
        assert statuses(answer) == [status, 200]
        assert status == 200 or b"websockets are not spoken" in answer


def test_pipelined_requests_are_answered_in_order(server: RunningServer) -> None:
    names = [f"pipe-{number}" for number in range(30)]
    requests = b""
    for name in names:
        head, body = (CHAT, BODY) if int(name[5:]) % 3 == 0 else (HEALTH, HIDDEN)
        requests += head + f"X-Request-Id: {name}\r\n".encode() + length(body) + b"\r\n" + body
    answer = talk(server, requests + HEALTH + CLOSE + b"\r\n")
    assert statuses(answer) == [200] * 31
    assert re.findall(rb"X-Request-Id: (pipe-\d+)", answer) == [name.encode() for name in names]
    assert b"hidden" not in answer


@pytest.mark.parametrize(
    "given",
    [
        b"a%0d%0aSet-Cookie: b=c",
        "\N{LATIN SMALL LETTER U WITH DIAERESIS}\u2028".encode(),
        b"\xff\xfe",
        b"a" * 8000,
        b"a\r\nX-Request-Id: b",
        b"a\tb",
        b"",
    ],
    ids=["percent", "unicode", "8 bit", "long", "twice", "tab", "empty"],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_hostile_request_id_is_not_sent_back(
    server: RunningServer, given: bytes, stream: bool
) -> None:
    body = json.dumps({**json.loads(BODY), "stream": stream}).encode()
    header = b"X-Request-Id: " + given + b"\r\n"
    answer = talk(server, CHAT + CLOSE + header + length(body) + b"\r\n" + body)
    head = answer.partition(b"\r\n\r\n")[0].lower()
    assert statuses(answer) == [200]
    (found,) = re.findall(rb"x-request-id: (.*)\r?", head)
    assert re.fullmatch(rb"[0-9a-f]{32}", found.strip())
    assert b"set-cookie" not in head


def test_a_request_id_with_line_ends_or_of_10_kb_is_refused(server: RunningServer) -> None:
    for given, status in ((b"a\rSet-Cookie: b=c", 400), (b"a" * 10_240, 431)):
        answer = talk(server, HEALTH + b"X-Request-Id: " + given + b"\r\n\r\n")
        check_refusal(answer, status)
        assert b"a" * 100 not in answer


IDS = {
    "parent": "..",
    "parents": "..%2f..%2f..%2fetc%2fpasswd",
    "hidden dots": "%2e%2e%2f%2e%2e%2fetc%2fpasswd",
    "backslashes": "..%5c..%5cserver%5capp",
    "absolute": "%2fetc%2fpasswd",
    "NUL": "%00",
    "NUL inside": "a%00.js",
    "line end": "a%0d%0aX-A:%20b",
    "no UTF-8": "%ff%fe",
    "surrogate": "%ed%a0%80",
    "half an escape": "%zz%2",
    "format": "%25s%25n{0}",
    "SQL": "'%20OR%20'1'='1",
    "long": "a" * 3900,
}


@pytest.mark.parametrize(
    "path",
    [
        "/v1/models/{}",
        "/v1/files/{}",
        "/v1/files/{}/content",
        "/v1/batches/{}",
        "/v1/batches/{}/cancel",
        "/v1/responses/{}",
        "/v1/responses/{}/input_items",
        "/v1/requests/{}/trace",
        "/static/{}",
        "/{}",
    ],
)
def test_no_name_reaches_what_it_should_not(server: RunningServer, path: str) -> None:
    for method, name in itertools.product(("GET", "DELETE", "POST"), IDS.values()):
        line = f"{method} {path.format(name)} HTTP/1.1\r\nHost: x\r\n".encode()
        answer = talk(server, line + CLOSE + b"Content-Length: 0\r\n\r\n")
        (status,) = statuses(answer)
        assert status in (404, 405), answer
        check_refusal(answer, status)
        assert b"\r\nx-a: b" not in answer.lower()


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("/v1/requests?limit=-1", "limit"),
        ("/v1/requests/x/trace?formt=chrome", "formt"),
        ("/v1/files?limit=%00", "limit"),
        ("/v1/files?after=%ed%a0%80", "after"),
        ("/v1/batches?limit=1e3", "limit"),
        ("/v1/batches?after=" + "z" * 3900, "after"),
        ("/v1/usage?since=%00", "since"),
        ("/v1/usage?group_by=" + "z" * 3900, "group_by"),
        ("/v1/usage?" + "z" * 3900 + "=1", "z" * 40),
    ],
    ids=lambda value: value[:24],
)
def test_hostile_queries(server: RunningServer, query: str, param: str) -> None:
    answer = talk(server, f"GET {query} HTTP/1.1\r\nHost: x\r\n".encode() + CLOSE + b"\r\n")
    assert check_refusal(answer, 400)["param"] == param


def test_no_method_is_overridden(server: RunningServer) -> None:
    sent = talk(server, UPLOAD + CLOSE + length(FORM) + b"\r\n" + FORM)
    path = "/v1/files/" + json.loads(sent.partition(b"\r\n\r\n")[2])["id"]
    for name in ("X-HTTP-Method-Override", "X-HTTP-Method", "X-Method-Override"):
        assert server.call("GET", path, headers={name: "DELETE"}).status == 200
    assert server.call("POST", path, b"_method=DELETE").status == 405
    assert server.call("GET", path).status == 200
    assert server.call("DELETE", path).status == 200


def test_answers_without_a_body_leave_the_connection_in_order(server: RunningServer) -> None:
    """HEAD, OPTIONS and TRACE on every path, all in one connection."""
    paths = server.call("GET", "/openapi.json").json["paths"]
    connection = http.client.HTTPConnection(*server.address, timeout=20)
    connection.connect()
    own = connection.sock.getsockname()
    for path, methods in paths.items():
        for method in ("HEAD", "OPTIONS", "TRACE"):
            connection.request(
                method, re.sub(r"\{\w+\}", "x", path), headers={"X-Secret": "echo-me"}
            )
            response = connection.getresponse()
            body = response.read()
            assert b"echo-me" not in body
            if method == "HEAD":
                assert response.status in ((200, 404) if "get" in methods else (404, 405)), path
            else:
                assert response.status == (200 if method == "OPTIONS" else 405), path
                assert "OPTIONS" in (response.getheader("Allow") or "")
            assert connection.sock.getsockname() == own
    connection.close()
    for path in paths:
        line = f"CONNECT {re.sub(r'{.*?}', 'x', path)} HTTP/1.1\r\nHost: x\r\n\r\n".encode()
        assert statuses(talk(server, line + HIDDEN)) in ([400], [404], [405])


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (BODY.decode().encode("utf-16"), "application/json; charset=utf-16"),
        (BODY.decode().encode("utf-16-le"), "application/json"),
        (BODY.replace(b"hi", b"\\ud800"), "application/json"),
        (BODY.replace(b"hi", b"\\ud800\\u0041"), "application/json"),
        (BODY.replace(b"hi", b"\xed\xa0\x80"), "application/json"),
        (BODY.replace(b"hi", b"\xc0\xaf"), "application/json"),
        (BODY.replace(b"hi", b"a\nb"), "application/json"),
        (b"\0" * 1000, "application/json"),
        (BODY + BODY, "application/json"),
        (b"", "application/json"),
    ],
)
def test_bodies_that_are_no_text(server: RunningServer, body: bytes, kind: str) -> None:
    head = CHAT.replace(b"application/json", kind.encode()) + CLOSE + length(body)
    check_refusal(talk(server, head + b"\r\n" + body), 400)


def ways_to(path: str) -> set[str]:
    """The path itself, and what other servers take for the same."""
    tail = path.lstrip("/")
    return {
        path,
        f"{path}/",
        f"/{path}",
        f"/.{path}",
        f"/health/..{path}",
        f"/health/%2e%2e{path}",
        f"/health%2f..{path}",
        f"/health;{path}",
        f"/health%00{path}",
        f"/health%20{path}",
        f"{path};x",
        f"{path}%20",
        f"{path}?/health",
        f"/{tail.upper()}",
        f"/%{ord(tail[0]):02x}{tail[1:]}" if tail else "/?health",
        f"http://evil.example{path}",
    }


def test_no_way_to_any_route_without_a_key(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = tmp_path / "keys.json"
    assert main(["keys", "add", str(keys), "alice"]) == 0
    capsys.readouterr()
    app = make_app(api_keys=str(keys))
    web = app.test_client()
    tried = 0
    moved = {"X-Original-URL": "/health", "X-Rewrite-URL": "/health", "Script-Name": "/health"}
    for rule in app.url_map.iter_rules():
        path = re.sub(r"<[^>]*>", "x", rule.rule)
        for way in ways_to(path):
            for method in {*(rule.methods or ()), "POST", "TRACE", "BREW"}:
                answer = web.open(way, method=method, headers=moved)
                is_open = answer.request.path in ("/health", "/ready")
                assert (answer.status_code == 401) is not is_open, (method, way)
                tried += 1
    assert tried > 1000
