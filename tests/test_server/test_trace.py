"""A request's trace: every step of the walk in order, whose it is, and Chrome's format."""

from __future__ import annotations

import pathlib
import sqlite3
from typing import Any

import pytest
from app_alone import make_app, post
from running_server import RunningServer, wait_until

from jaxserve.cli.main import main
from jaxserve.config import EngineConfig, ServerConfig
from server.trace.chrome import chrome_trace

CHAT = {"messages": [{"role": "user", "content": "a question of some length"}], "max_tokens": 4}
WALK = ["received", "body_read", "context_assembled", "tokenised", "admitted", "submitted"]


def trace_of(web: Any, request_id: str, **headers: str) -> Any:
    return web.get(f"/v1/requests/{request_id}/trace", headers=headers)


@pytest.mark.parametrize("stream", [False, True])
def test_every_step_of_the_walk_is_there(tmp_path: pathlib.Path, stream: bool) -> None:
    web = make_app(folder=tmp_path, price_per_device_hour=36.0).test_client()
    answer = post(web, "/v1/chat/completions", {**CHAT, "n": 2, "stream": stream})
    size = len(answer.data)
    answer.close()
    trace = trace_of(web, answer.headers["X-Request-Id"]).json
    names = [step["name"] for step in trace["steps"]]
    wanted = [*WALK, "accepted", "detokenised", *(["written"] if stream else []), "finished"]
    assert names == wanted
    times = [step["at"] for step in trace["steps"] if step["name"] != "written"]
    assert times == sorted(times)
    assert trace["seconds"] == times[-1]
    steps = {step["name"]: step for step in trace["steps"]}
    assert steps["submitted"]["answers"] == 2
    assert steps["finished"]["bytes"] == size
    assert trace["finish_reason"] == "length"
    assert trace["cost"] == pytest.approx(trace["device_seconds"] / 100)
    first, second = trace["answers"]
    assert first["prompt_tokens"] == second["prompt_tokens"] > 0
    (chunk,) = first["prefill"]
    assert chunk["tokens"] + chunk["padding_tokens"] == chunk["bucket"]
    (decode,) = first["decode"]
    assert (decode["steps"], decode["tokens"], decode["batch"]) == (4, 4, 1.0)
    assert first["pages"] == -(-(first["prompt_tokens"] + 4) // 16)
    total = sum(each["device_seconds"] for each in trace["answers"])
    assert trace["device_seconds"] == pytest.approx(total)
    listed = web.get("/v1/requests").json["data"]
    assert [each["id"] for each in listed] == [trace["id"]]


def test_chrome_format_is_what_viewers_open(tmp_path: pathlib.Path) -> None:
    web = make_app(folder=tmp_path).test_client()
    request_id = post(web, "/v1/completions", {"prompt": "x" * 40}).headers["X-Request-Id"]
    chrome = web.get(f"/v1/requests/{request_id}/trace?format=chrome").json
    assert chrome == chrome_trace(trace_of(web, request_id).json)
    for event in chrome["traceEvents"]:
        assert event["ph"] in ("X", "i", "M")
        assert {"name", "pid", "tid"} <= event.keys()
        if event["ph"] == "X":
            assert event["dur"] >= 0
            assert event["ts"] >= 0
    names = [event["name"] for event in chrome["traceEvents"]]
    assert {"tokenised", "queued", "prefill", "first token", "POST /v1/completions"} <= set(names)
    assert web.get(f"/v1/requests/{request_id}/trace?format=svg").status_code == 400


def check_rules(events: list[Any]) -> None:
    """Chrome's trace event format: fields, order, and spans of a thread that hold or follow."""
    threads: dict[tuple[int, int], list[Any]] = {}
    for event in events:
        assert {"name", "ph", "ts", "pid", "tid", "args"} <= event.keys()
        assert all(type(event[name]) is int for name in ("ts", "pid", "tid"))
        assert event["name"]
        threads.setdefault((event["pid"], event["tid"]), []).append(event)
    for pid, tid in threads:
        mine = threads[pid, tid]
        names = [event for event in mine if event["ph"] == "M"]
        assert names == mine[: len(names)]
        assert "thread_name" in [event["name"] for event in names], (pid, tid)
        assert all(event["args"]["name"] for event in names)
        times = [event["ts"] for event in mine]
        assert times == sorted(times)
        open_until: list[int] = []
        for event in mine[len(names) :]:
            assert event["ph"] == "X" or (event["ph"], event["s"]) == ("i", "t")
            if event["ph"] == "X":
                while open_until and open_until[-1] <= event["ts"]:
                    open_until.pop()
                end = event["ts"] + event["dur"]
                assert event["dur"] >= 0
                assert not open_until or end <= open_until[-1], (event, open_until)
                open_until.append(end)
    processes = {event["pid"] for event in events if event["name"] == "process_name"}
    assert processes == {pid for pid, _ in threads}


@pytest.mark.parametrize("stream", [False, True])
def test_chrome_format_keeps_its_rules(tmp_path: pathlib.Path, stream: bool) -> None:
    web = make_app(folder=tmp_path).test_client()
    answer = post(web, "/v1/chat/completions", {**CHAT, "n": 3, "stream": stream})
    answer.close()
    request_id = answer.headers["X-Request-Id"]
    events = web.get(f"/v1/requests/{request_id}/trace?format=chrome").json["traceEvents"]
    check_rules(events)
    assert {event["tid"] for event in events if event["pid"] == 2} == {0, 1, 2}


def test_only_the_last_ones_are_kept_and_none_if_so_wished(tmp_path: pathlib.Path) -> None:
    web = make_app(folder=tmp_path / "a", trace_requests=3).test_client()
    ids = []
    for _ in range(6):
        ids.append(post(web, "/v1/completions", {"prompt": "x"}).headers["X-Request-Id"])
        web.get("/v1/usage")  # writes what waits
    found = [trace_of(web, request_id).status_code for request_id in ids]
    assert found == [404, 404, 404, 200, 200, 200]
    off = make_app(folder=tmp_path / "b", trace_requests=0).test_client()
    request_id = post(off, "/v1/completions", {"prompt": "x"}).headers["X-Request-Id"]
    assert trace_of(off, request_id).status_code == 404


def test_a_trace_is_its_tenants_and_the_admins(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(tmp_path / "keys.json")
    keys = {}
    for name in ("alice", "bob", "root"):
        admin = ["--admin"] if name == "root" else []
        assert main(["keys", "add", path, name, *admin]) == 0
        keys[name] = capsys.readouterr().out.strip()
    web = make_app(folder=tmp_path / "data", api_keys=path).test_client()
    head = {"x-api-key": keys["alice"], "x-request-id": "mine/1"}
    assert post(web, "/v1/completions", {"prompt": "x"}, **head).headers["X-Request-Id"] == "mine/1"
    statuses = {
        name: trace_of(web, "mine/1", **{"x-api-key": key}).status_code
        for name, key in keys.items()
    }
    assert statuses == {"alice": 200, "bob": 404, "root": 200}
    listed = web.get("/v1/requests", headers={"x-api-key": keys["bob"]}).json["data"]
    assert listed == []


def test_two_workers_share_traces_and_usage_and_what_is_left_open_counts(
    start_server: Any, tmp_path: pathlib.Path
) -> None:
    """Whichever worker answers; clients that leave, and a SIGTERM right after an answer."""
    config = ServerConfig(port=0, workers=2, data_dir=str(tmp_path / "data"))
    server: RunningServer = start_server(server=config, engine=EngineConfig(model="fake"))
    server.wait_ready()
    ids = [server.complete("abc", max_tokens=3).headers["X-Request-Id"] for _ in range(6)]
    for _ in range(3):
        body = {"prompt": "@pause:50@", "max_tokens": 1000, "stream": True}
        connection = server.send_only("/v1/completions", body)
        connection.recv(4000)
        connection.close()

    def usage(query: str = "") -> Any:
        data = server.call("GET", f"/v1/usage{query}").json["data"]
        return data[0] if data else {"requests": 0}

    wait_until(lambda: usage()["requests"] == 9)
    assert usage()["aborted"] == 3
    assert usage()["generated_tokens"] >= 6 * 3 + 3
    for request_id in ids:
        for _ in range(3):
            assert server.call("GET", f"/v1/requests/{request_id}/trace").status == 200
    server.complete("abc", max_tokens=3)
    server.terminate()
    assert server.wait() == 0
    with sqlite3.connect(tmp_path / "data" / "usage.sqlite") as db:
        assert db.execute("SELECT count(*) FROM usage").fetchone() == (10,)
