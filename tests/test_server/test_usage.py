"""The ledger and limits over HTTP: what is counted, who sees what, and what a full disk does."""

from __future__ import annotations

import contextlib
import csv
import io
import pathlib
import resource
import sqlite3
from collections.abc import Iterator
from typing import Any

import pytest
from app_alone import make_app, post
from fake_client import FakeClient

from jaxserve.cli.main import main
from server.usage import ledger
from server.usage.ledger import Ledger, UsageRow
from server.usage.meter import EXTENSION

CHAT = {"messages": [{"role": "user", "content": "a long question"}], "max_tokens": 4}
PRICES = {
    "price_per_device_hour": 36.0,
    "price_per_million_prompt_tokens": 2.0,
    "price_per_million_generated_tokens": 10.0,
}


@pytest.fixture
def keys(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    """Keys by tenant; the file is keys.json."""
    path = str(tmp_path / "keys.json")
    found = {}
    for name, flags in (
        ("alice", ["--requests-per-minute", "3", "--tokens-per-minute", "1000"]),
        ("bob", ["--daily-tokens", "200"]),
        ("carol", ["--concurrent-requests", "1"]),
        ("root", ["--admin"]),
    ):
        assert main(["keys", "add", path, name, *flags]) == 0
        found[name] = capsys.readouterr().out.strip()
    return found


def app_of(tmp_path: pathlib.Path, **settings: Any) -> Any:
    return make_app(
        folder=tmp_path / "data", api_keys=str(tmp_path / "keys.json"), **PRICES, **settings
    )


def test_every_request_is_counted_and_priced_and_one_sees_ones_own(
    tmp_path: pathlib.Path, keys: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    web = app_of(tmp_path).test_client()

    def ask(who: str, path: str, body: dict[str, Any]) -> Any:
        answer = post(web, path, body, **{"x-api-key": keys[who]})
        assert answer.status_code == 200, answer.text
        return answer.json

    def usage(who: str, query: str = "") -> Any:
        return web.get(f"/v1/usage{query}", headers={"x-api-key": keys[who]})

    prompt = ask("alice", "/v1/chat/completions", {**CHAT, "n": 2})["usage"]["prompt_tokens"]
    post(
        web, "/v1/chat/completions", {**CHAT, "stream": True}, **{"x-api-key": keys["alice"]}
    ).close()
    ask("bob", "/v1/completions", {"prompt": ["abc", "defg"], "max_tokens": 3})
    ask("bob", "/v1/messages", {**CHAT, "model": "fake"})
    (own,) = usage("alice").json["data"]
    assert (own["tenant"], own["model"], own["requests"]) == ("alice", "fake", 2)
    assert (own["prompt_tokens"], own["generated_tokens"]) == (2 * prompt, 12)
    assert own["queue_seconds"] == pytest.approx(3 * 0.25)
    seconds = (3 * prompt + 12) / 1000  # the fake engine's: each answer computes the prompt
    assert own["device_seconds"] == pytest.approx(seconds)
    price = 2 * prompt * 2e-6 + 12 * 10e-6 + seconds / 100
    assert own["price"] == pytest.approx(price)
    assert {row["tenant"] for row in usage("root").json["data"]} == {"alice", "bob"}
    assert usage("root", "?tenant=bob&group_by=model").json["data"][0]["requests"] == 2
    assert usage("alice", "?tenant=bob").status_code == 403
    assert usage("alice", "?tenant=alice&until=2000-01-01").json["data"] == []
    for bad in ("?group_by=key", "?since=yesterday", "?tenants=bob"):
        assert usage("root", bad).status_code == 400
    capsys.readouterr()
    assert main(["usage", "--data-dir", str(tmp_path / "data"), "--csv", "--by", "tenant"]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [row["tenant"] for row in rows] == ["alice", "bob"]
    assert float(rows[0]["price"]) == pytest.approx(price)
    assert main(["usage", "--data-dir", str(tmp_path / "data"), "--tenant", "bob"]) == 0
    head, line = capsys.readouterr().out.splitlines()
    assert head.split()[:3] == ["day", "tenant", "model"]
    assert line.split()[1:4] == ["bob", "fake", "2"]
    assert main(["usage", "--data-dir", str(tmp_path / "none")]) == 1
    assert main(["usage", "--by", "hour"]) == 2


def test_limits_over_http(tmp_path: pathlib.Path, keys: dict[str, str]) -> None:
    app = app_of(tmp_path)
    web = app.test_client()

    def ask(who: str, path: str = "/v1/chat/completions", **fields: Any) -> Any:
        return post(web, path, {**CHAT, **fields}, **{"x-api-key": keys[who]})

    first = ask("alice")
    assert first.headers["x-ratelimit-limit-requests"] == "3"
    assert first.headers["x-ratelimit-remaining-requests"] == "2"
    assert int(first.headers["x-ratelimit-remaining-tokens"]) < 1000
    streamed = ask("alice", stream=True)
    assert streamed.headers["x-ratelimit-remaining-requests"] == "1"
    streamed.close()
    assert ask("alice", max_tokens=0).status_code == 400, "what is wrong costs no request"
    ask("alice")
    for stream in (False, True):
        refused = ask("alice", stream=stream)
        assert refused.status_code == 429
        assert 1 <= int(refused.headers["Retry-After"]) <= 20
        assert refused.headers["x-ratelimit-remaining-requests"] == "0"
        assert refused.json["error"]["code"] == "rate_limit_exceeded"
    anthropic = ask("alice", "/v1/messages", model="fake")
    assert anthropic.status_code == 429
    assert anthropic.json["error"]["type"] == "rate_limit_error"
    for _ in range(5):
        assert "x-ratelimit-limit-requests" not in ask("root").headers
    for _ in range(6):  # each is settled before its answer is complete
        assert ask("carol").status_code == 200
    while (answer := ask("bob", max_tokens=40)).status_code == 200:
        pass
    assert answer.status_code == 402
    assert answer.json["error"]["type"] == "insufficient_quota"
    assert int(answer.headers["Retry-After"]) <= 86400
    assert ask("carol", priority=-5).json["error"]["param"] == "priority"
    assert ask("root", priority=-5).status_code == 200


def test_tenants_learn_nothing_of_one_another(
    tmp_path: pathlib.Path, keys: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither what another has asked, from the prefix cache, nor how much, from the metrics."""
    client = FakeClient()
    text = "".join(f'x_total{{model_name="m",tenant="{name}"}} 1\n' for name in keys)
    monkeypatch.setattr(client, "metrics", lambda: text + "y_total 2\n")
    path = str(tmp_path / "keys.json")
    web = make_app(client, folder=tmp_path / "data", api_keys=path).test_client()
    for name in ("alice", "bob"):
        post(web, "/v1/completions", {"prompt": "x"}, **{"x-api-key": keys[name]})
        body = {"prompt": "x", "cache_salt": "s"}
        answer = post(web, "/v1/completions", body, **{"x-api-key": keys[name]})
        assert answer.status_code in (200, 402)
    assert len({request.cache_salt for request in client.requests}) == len(client.requests)
    assert {request.tenant for request in client.requests} == {"alice", "bob"}
    seen = {
        name: web.get("/metrics", headers={"x-api-key": key}).text.count("tenant=")
        for name, key in keys.items()
    }
    assert seen == {"alice": 1, "bob": 1, "carol": 1, "root": 4}
    assert "y_total 2" in web.get("/metrics", headers={"x-api-key": keys["bob"]}).text


def row(number: int) -> UsageRow:
    return UsageRow(
        ended=0.0,
        day="2026-12-01",
        request_id=str(number),
        tenant="",
        model="m",
        route="r",
        answers=1,
        prompt_tokens=1,
        cached_tokens=0,
        generated_tokens=1,
        queue_seconds=0.0,
        device_seconds=0.0,
        finish_reason="stop",
        price=0.0,
    )


def test_a_full_disk_hangs_nobody_and_rows_wait_for_room(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ledger, "MAX_WAITING", 10)
    book = Ledger(tmp_path, rows=True, traces=0)
    insert = book._insert

    def full(*arguments: Any) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr(book, "_insert", full)
    for number in range(13):
        book.add(row(number))
        book.flush()
    assert book.num_lost == 3
    assert [record.levelname for record in caplog.records] == ["ERROR"], "said once a minute"
    monkeypatch.setattr(book, "_insert", insert)
    kept = book.read(lambda db: [row[0] for row in db.execute("SELECT request_id FROM usage")])
    assert kept == [str(number) for number in range(3, 13)]


@contextlib.contextmanager
def no_room(most: int) -> Iterator[None]:
    """No file of this process may grow beyond so many bytes: writes fail, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_requests_are_answered_while_the_ledger_cannot_be_written(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """SQLite itself fails here; nothing is replaced."""
    monkeypatch.setattr(ledger, "MAX_WAITING", 8)
    app = make_app(folder=tmp_path / "data")
    web, book = app.test_client(), app.extensions[EXTENSION].ledger
    assert post(web, "/v1/chat/completions", CHAT).status_code == 200
    book.flush()
    with no_room(512):
        for _ in range(6):  # each leaves a row of usage and a trace
            assert post(web, "/v1/chat/completions", CHAT).status_code == 200
            book.flush()
        said = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
        lost = [
            line for line in web.get("/metrics").text.splitlines() if "rows_lost_total{" in line
        ]
    assert len(said) == 1
    assert "cannot be written" in said[0]
    assert [line.split()[-1] for line in lost] == ["4"]
    (usage,) = web.get("/v1/usage").json["data"]
    assert usage["requests"] == 1 + 6 - 2


def test_without_a_ledger_nothing_is_written(tmp_path: pathlib.Path) -> None:
    app = make_app(folder=tmp_path / "data", usage_ledger=False, trace_requests=0)
    web = app.test_client()
    assert post(web, "/v1/chat/completions", CHAT).status_code == 200
    app.extensions[EXTENSION].ledger.flush()
    assert web.get("/v1/usage").status_code == 404
    assert not (tmp_path / "data").exists()
