"""Keys, limits and usage with real processes: two workers, one of which is killed."""

from __future__ import annotations

import json
import os
import pathlib
import signal
import socket
import sqlite3
import subprocess
from typing import Any

import pytest
from running_server import RunningServer, wait_until

from jaxserve.cli.main import main
from jaxserve.config import ServerConfig

LONG = {"prompt": "@pause:20@", "max_tokens": 3000, "stream": True, "ignore_eos": True}


def test_limits_hold_over_two_workers_and_a_killed_one_frees_what_it_had_open(
    start_server: Any, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = {}
    path = str(tmp_path / "keys.json")
    for name, flags in (
        ("alice", ["--concurrent-requests", "3"]),
        ("bob", ["--requests-per-minute", "5"]),
        ("root", ["--admin"]),
    ):
        assert main(["keys", "add", path, name, *flags]) == 0
        keys[name] = capsys.readouterr().out.strip()
    config = ServerConfig(
        port=0, workers=2, data_dir=str(tmp_path / "data"), api_keys=path, drain_seconds=2
    )
    server: RunningServer = start_server(server=config)
    server.wait_ready()

    def ask(who: str, **fields: Any) -> Any:
        body = {"prompt": "abc", "max_tokens": 2, **fields}
        return server.call("POST", "/v1/completions", body, {"x-api-key": keys[who]})

    assert server.call("GET", "/metrics").status == 401
    statuses = [ask("bob").status for _ in range(10)]
    assert statuses == [200] * 5 + [429] * 5
    root = {"x-api-key": keys["root"]}
    path = "/v1/usage?tenant=bob&group_by="
    wait_until(lambda: server.call("GET", path, headers=root).json["data"][0]["requests"] == 5)
    head = {"Authorization": f"Bearer {keys['alice']}"}
    streams = [_open(server, LONG, head) for _ in range(3)]
    assert [stream.readline()[9:12] for stream in streams] == [b"200"] * 3
    refused = ask("alice")
    assert (refused.status, refused.json["error"]["code"]) == (429, "too_many_concurrent_requests")
    assert ask("root").status == 200
    workers = _workers(server)
    assert len(workers) == 2
    for pid in workers:
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: _answers(ask), 20)
    again = [_open(server, LONG, head) for _ in range(2)]
    assert [stream.readline()[9:12] for stream in again] == [b"200", b"200"]
    server.terminate()
    assert server.wait() == 0
    with sqlite3.connect(tmp_path / "data" / "usage.sqlite") as db:
        rows = db.execute(
            "SELECT tenant, finish_reason, count(*) FROM usage WHERE tenant != 'root' "
            "GROUP BY 1, 2 ORDER BY 1, 2"
        ).fetchall()
    assert ("bob", "length", 5) in rows
    assert ("alice", "abort", 5) in rows, "what a kill or the shutdown cut off is in the ledger"


def _open(server: RunningServer, body: Any, headers: dict[str, str]) -> Any:
    """The raw answer to a request, as it comes."""
    data = json.dumps(body).encode()
    lines = [f"{name}: {value}" for name, value in headers.items()]
    head = "\r\n".join(
        ["POST /v1/completions HTTP/1.1", "Host: x", "Content-Type: application/json", *lines]
    )
    plain = socket.create_connection(server.address, timeout=30)
    plain.sendall(f"{head}\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)
    return plain.makefile("rb")


def _answers(ask: Any) -> bool:
    try:
        return bool(ask("alice").status == 200)
    except OSError:
        return False


def _workers(server: RunningServer) -> list[int]:
    engine = server.engine_pid()
    (master,) = (pid for pid in server.children() if pid != engine)
    found = subprocess.run(["pgrep", "-P", str(master)], capture_output=True, text=True, check=True)
    return [int(pid) for pid in found.stdout.split()]
