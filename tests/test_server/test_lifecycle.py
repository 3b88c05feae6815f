"""Starting, restarting, draining and ending, with real processes (38, 48, bad input)."""

from __future__ import annotations

import contextlib
import os
import pathlib
import shutil
import signal
import socket
import threading
import time
from collections.abc import Callable

import pytest
from running_server import Answer, RunningServer, wait_until

from jaxserve.config import EngineConfig, ServerConfig

Start = Callable[..., RunningServer]
SLOW = {"messages": [{"role": "user", "content": "@pause:100@"}], "max_tokens": 20}


def alive(pid: int) -> bool:
    try:
        return ") Z" not in pathlib.Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False


def in_background(call: Callable[[], Answer]) -> tuple[threading.Thread, list[Answer]]:
    answers: list[Answer] = []
    thread = threading.Thread(target=lambda: answers.append(call()))
    thread.start()
    return thread, answers


def test_drain_has_a_deadline(start_server: Start) -> None:
    server = start_server(server=ServerConfig(port=0, drain_seconds=1.0)).wait_ready()
    body = {**SLOW, "max_tokens": 500}
    stream, streamed = in_background(
        lambda: server.call("POST", "/v1/chat/completions", {**body, "stream": True})
    )
    whole, answered = in_background(lambda: server.call("POST", "/v1/chat/completions", body))
    wait_until(lambda: server.gauge("vllm:num_requests_running") == 2)
    server.terminate()
    start = time.monotonic()
    assert server.wait() == 0
    assert time.monotonic() - start < 12
    stream.join()
    whole.join()
    last = streamed[0].body.decode().strip().split("\n\n")[-1]
    assert '"error"' in last
    assert "shutting down" in last
    assert answered[0].status == 503


def test_workers_die_with_the_parent(start_server: Start) -> None:
    server = start_server().wait_ready()
    children = server.children()
    assert len(children) == 2
    command = pathlib.Path(f"/proc/{server.engine_pid()}/cmdline").read_text().split("\0")
    folder = pathlib.Path(command[command.index("--address") + 1].removeprefix("ipc://")).parent
    assert folder.stat().st_mode & 0o777 == 0o700
    server.process.kill()
    server.wait()
    wait_until(lambda: not any(map(alive, children)), 5)
    shutil.rmtree(folder)  # nobody was left to do it


def test_port_in_use(start_server: Start) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        server = start_server(server=ServerConfig(port=port))
        assert server.wait(20) == 1
    lines = server.errors.read_text().splitlines()
    assert len(lines) == 1
    assert str(port) in lines[0]
    assert "--port" in lines[0]
    assert not server.log.exists(), "the engine was not even started"


@pytest.mark.parametrize(("engine_code", "code"), [("3", 1), ("4", 2)])
def test_user_error_of_the_engine_is_one_line(
    start_server: Start, engine_code: str, code: int
) -> None:
    server = start_server(fake_engine=["--exit-code", engine_code])
    assert server.wait(20) == code
    assert server.errors.read_text() == "fake engine: no such model 'nowhere'; try another\n"


def test_crash_loop_gives_up(start_server: Start) -> None:
    server = start_server(fake_engine=["--exit-code", "5"])
    assert server.wait(40) == 1
    last = server.errors.read_text().splitlines()[-1]
    assert "giving up" in last
    assert last.endswith("no such model 'nowhere'; try another")


def test_from_loading_to_drain(start_server: Start) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    server = start_server(server=ServerConfig(port=port), fake_engine=["--load-seconds", "8"])
    server.url = f"http://127.0.0.1:{port}"
    wait_until(lambda: _listens(server), 20)
    early = server.call("GET", "/ready")
    assert early.status == 503
    assert "load" in early.json["reason"] or "start" in early.json["reason"]
    refused = server.chat("hi", max_tokens=1)
    assert (refused.status, refused.json["error"]["code"]) == (503, "unavailable")
    server.wait_ready()
    assert server.call("GET", "/ready").status == 200
    children = server.children()
    stream, streamed = in_background(
        lambda: server.call("POST", "/v1/chat/completions", {**SLOW, "stream": True})
    )
    whole, answered = in_background(lambda: server.call("POST", "/v1/chat/completions", SLOW))
    wait_until(lambda: server.gauge("vllm:num_requests_running") == 2)
    server.terminate()
    time.sleep(0.3)
    with contextlib.suppress(OSError):
        assert server.chat("late", max_tokens=1).status == 503
    stream.join()
    whole.join()
    assert len(streamed[0].events) == 22
    assert answered[0].json["usage"]["completion_tokens"] == 20
    assert server.wait() == 0
    assert not any(map(alive, children))


def _listens(server: RunningServer) -> bool:
    try:
        return server.call("GET", "/health").status == 200
    except OSError:
        return False


def test_silent_and_dead_engines(start_server: Start) -> None:
    server = start_server().wait_ready()
    _kill_gunicorn(server)
    assert server.chat("hi", max_tokens=1).status == 200
    os.kill(server.engine_pid(), signal.SIGSTOP)
    try:
        wait_until(lambda: server.call("GET", "/ready").status == 503, 10)
        assert "jaxserve:engine_up 0" in server.call("GET", "/metrics").body.decode()
        assert server.call("GET", "/health").status == 200
        assert server.chat("hi").status == 503
    finally:
        os.kill(server.engine_pid(), signal.SIGCONT)
    wait_until(lambda: server.call("GET", "/ready").status == 200, 10)

    body = {**SLOW, "max_tokens": 500}
    stream, streamed = in_background(
        lambda: server.call("POST", "/v1/chat/completions", {**body, "stream": True})
    )
    whole, answered = in_background(lambda: server.call("POST", "/v1/chat/completions", body))
    wait_until(lambda: server.gauge("vllm:num_requests_running") == 2)
    os.kill(server.engine_pid(), signal.SIGKILL)
    stream.join(5)
    whole.join(5)
    frames = streamed[0].body.decode().strip().split("\n\n")
    assert '"error"' in frames[-1]
    assert "[DONE]" not in streamed[0].body.decode()
    assert answered[0].status == 503
    wait_until(lambda: server.call("GET", "/ready").status == 200, 20)
    assert server.chat("hi", max_tokens=3).json["usage"]["completion_tokens"] == 3
    assert "signal SIGKILL; starting it again" in server.errors.read_text()
    assert server.gauge("jaxserve:engine_up") == 1


def test_an_engine_that_stands_still_is_replaced(start_server: Start) -> None:
    server = start_server().wait_ready()
    body = {**SLOW, "max_tokens": 500, "stream": True}
    stream, streamed = in_background(lambda: server.call("POST", "/v1/chat/completions", body))
    wait_until(lambda: server.gauge("vllm:num_requests_running") == 1)
    stuck = server.engine_pid()
    os.kill(stuck, signal.SIGSTOP)
    stopped = time.monotonic()
    stream.join(10)
    assert time.monotonic() - stopped < 7
    assert '"error"' in streamed[0].body.decode()
    assert server.call("GET", "/ready").status == 503
    wait_until(lambda: not alive(stuck), 20)
    wait_until(lambda: server.call("GET", "/ready").status == 200, 20)
    assert server.chat("hi", max_tokens=3).json["usage"]["completion_tokens"] == 3
    assert "the engine is stuck" in server.errors.read_text()


def _kill_gunicorn(server: RunningServer) -> None:
    """Clients that come meanwhile wait: the parent holds the port."""
    (master,) = (pid for pid in server.children() if pid != server.engine_pid())
    os.kill(master, signal.SIGKILL)
    wait_until(lambda: not alive(master))


def test_queue(start_server: Start) -> None:
    """A full queue is a real 429, for streams too; who leaves the queue makes room."""
    engine = EngineConfig(model="fake", max_num_seqs=1, max_queue_len=1)
    server = start_server(engine=engine).wait_ready()
    body = {**SLOW, "max_tokens": 500}
    first = server.send_only("/v1/chat/completions", {**body, "stream": True})
    wait_until(lambda: server.gauge("vllm:num_requests_running") == 1)
    second = server.send_only("/v1/chat/completions", body)
    wait_until(lambda: server.gauge("vllm:num_requests_waiting") == 1)
    for stream in (False, True):
        answer = server.call("POST", "/v1/chat/completions", {**SLOW, "stream": stream})
        assert answer.status == 429
        assert answer.json["error"]["code"] == "queue_full"
        assert "Retry-After" in answer.headers
    second.close()
    assert wait_until(lambda: server.gauge("vllm:num_requests_waiting") == 0) < 1.0
    assert server.gauge("vllm:num_requests_running") == 1
    first.close()


def test_two_workers_and_a_second_signal(start_server: Start) -> None:
    server = start_server(server=ServerConfig(port=0, workers=2)).wait_ready()
    answers = [in_background(lambda: server.chat("hi", max_tokens=4)) for _ in range(8)]
    for thread, _ in answers:
        thread.join()
    assert [found[0].status for _, found in answers] == [200] * 8
    children = server.children()
    connection = server.send_only("/v1/chat/completions", {**SLOW, "max_tokens": 500})
    wait_until(lambda: server.gauge("vllm:num_requests_running") == 1)
    server.terminate()
    time.sleep(0.5)
    server.terminate()
    assert server.wait(3) == 1
    assert not any(map(alive, children))
    connection.close()


def test_model_that_the_front_end_cannot_read_is_one_line(start_server: Start) -> None:
    engine = EngineConfig(model="nowhere/at/all.gguf")
    server = start_server(engine=engine, front_app="server.worker:make_app()")
    assert server.wait(20) == 1
    assert server.errors.read_text() == "error: nowhere/at/all.gguf does not exist\n"
