"""Faults under load, one after the other, and what became of the requests.

    python benchmarks/faults.py [--streams 32] [--only engine_killed ...]

Every fault meets a fresh server (the real parent, front end and client line, before the tests'
stand-in for the engine) that streams many answers. A stream survives if it ends whole; it is told
if it ends with an error event, or with a refusal; anything else is lost: cut off without a word,
or hanging. The server has recovered when a new request is answered in full.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import dataclasses
import json
import os
import pathlib
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "tests"))
from full_disk import fill, free, small_disk
from running_server import RunningServer

from jaxserve.config import EngineConfig, ServerConfig

#: The answer of a load stream: 60 tokens, 50 ms apart.
BODY = {
    "prompt": "@pause:50@ load",
    "max_tokens": 60,
    "ignore_eos": True,
    "temperature": 0,
    "stream": True,
}
MOST_SECONDS = 60.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a stream ended: "whole", "told" or "lost: why"; seconds since the fault."""

    kind: str
    seconds: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """name; what happens; whether streams may be ended by it; whether the server then ends, too.

    fills: whether it is the disk that the server keeps things on that gets full.
    """

    name: str
    strike: Callable[[RunningServer], None] = lambda server: None
    fills: bool = False
    spares: bool = False
    ends: bool = False
    workers: int = 1


def stream(server: RunningServer, body: dict[str, object]) -> tuple[str, float]:
    """Runs one stream to its end, and says how and when it ended."""
    data = json.dumps(body).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: jaxserve\r\nContent-Type: application/json\r\n"
        f"Connection: close\r\nContent-Length: {len(data)}\r\n\r\n"
    )
    received = b""
    try:
        with socket.create_connection(server.address, timeout=MOST_SECONDS) as connection:
            connection.sendall(head.encode() + data)
            while part := connection.recv(65536):
                received += part
    except TimeoutError:
        return "lost: it hangs", time.monotonic()
    except OSError as error:
        if not received:
            return f"lost: {error}", time.monotonic()
    if b"data: [DONE]" in received:
        return "whole", time.monotonic()
    told = b'"error"' in received
    return ("told" if told else f"lost after {len(received)} bytes"), time.monotonic()


def kill_engine(server: RunningServer) -> None:
    os.kill(server.engine_pid(), signal.SIGKILL)


def stop_engine(server: RunningServer) -> None:
    os.kill(server.engine_pid(), signal.SIGSTOP)


def kill_worker(server: RunningServer) -> None:
    """One of gunicorn's workers."""
    (master,) = (pid for pid in server.children() if pid != server.engine_pid())
    workers = pathlib.Path(f"/proc/{master}/task/{master}/children").read_text().split()
    os.kill(int(workers[0]), signal.SIGKILL)


def terminate(server: RunningServer) -> None:
    server.terminate()


def terminate_twice(server: RunningServer) -> None:
    server.terminate()
    time.sleep(0.3)
    server.terminate()


def leave(server: RunningServer) -> None:
    """200 clients ask for long answers and leave at once."""
    for _ in range(200):
        server.send_only("/v1/completions", {**BODY, "max_tokens": 500}).close()


def read_slowly(server: RunningServer) -> None:
    """A client asks for a long fast answer and never reads it."""
    body = {"prompt": "x", "max_tokens": 4000, "ignore_eos": True, "stream": True}
    SLOW_READERS.append(server.send_only("/v1/completions", body, receive_buffer=2048))


def fail_one(server: RunningServer) -> None:
    """A request that fails inside the engine."""
    kind, _ = stream(server, {**BODY, "prompt": "@fail@"})
    assert kind == "told", kind


SLOW_READERS: list[socket.socket] = []
FAULTS = (
    Fault(name="engine killed", strike=kill_engine),
    Fault(name="engine stuck", strike=stop_engine),
    Fault(name="worker killed (of 2)", strike=kill_worker, workers=2),
    Fault(name="200 clients leave at once", strike=leave, spares=True),
    Fault(name="a client that never reads", strike=read_slowly, spares=True),
    Fault(name="a request that fails", strike=fail_one, spares=True),
    Fault(name="disk full, for ledger and batch", fills=True, spares=True),
    Fault(name="SIGTERM", strike=terminate, spares=True, ends=True),
    Fault(name="SIGTERM twice", strike=terminate_twice, ends=True),
)


def recovery_seconds(server: RunningServer) -> float:
    """Until a new request is answered in full."""
    start = time.monotonic()
    while time.monotonic() - start < MOST_SECONDS:
        try:
            if server.complete("hello", max_tokens=3).status == 200:
                return time.monotonic() - start
        except OSError:
            pass
        time.sleep(0.1)
    return float("inf")


def run_fault(fault: Fault, num_streams: int) -> tuple[str, bool]:
    """One line of the table, and whether all went as it should."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        data = pathlib.Path(folder) / "data"
        if fault.fills and not stack.enter_context(small_disk(data)):
            return f"| {fault.name} | not run: no right to mount a file system |", True
        server = RunningServer(
            pathlib.Path(folder),
            engine=EngineConfig(model="fake", max_num_seqs=256),
            server=ServerConfig(
                port=0, workers=fault.workers, drain_seconds=20, data_dir=str(data)
            ),
        )
        try:
            server.wait_ready()
            with concurrent.futures.ThreadPoolExecutor(num_streams) as pool:
                jobs = [pool.submit(stream, server, BODY) for _ in range(num_streams)]
                while server.gauge("vllm:num_requests_running") < num_streams:
                    time.sleep(0.05)
                struck = time.monotonic()
                batch = fill(server, data) if fault.fills else ""
                fault.strike(server)
                ended = [job.result() for job in jobs]
            whole = sum(kind == "whole" for kind, _ in ended)
            told = sum(kind == "told" for kind, _ in ended)
            lost = [kind for kind, _ in ended if kind.startswith("lost")]
            latest = max((at - struck for kind, at in ended if kind != "whole"), default=0.0)
            if fault.ends:
                code = server.wait(30)
                after, good = f"exit code {code}", True
            else:
                seconds = recovery_seconds(server)
                after, good = f"answers after {seconds:.1f} s", seconds < MOST_SECONDS
                if fault.fills:
                    after += f"; {free(server, data, batch)}"
        finally:
            server.stop()
    # A killed worker takes its own connections with it; nobody is left to say a word on them.
    silent = fault.strike in (kill_worker, terminate_twice)
    good = good and (not lost or silent) and (not fault.spares or whole == num_streams)
    line = (
        f"| {fault.name} | {whole} | {told} | {len(lost)} | "
        f"{f'{latest:.1f} s' if told or lost else '-'} | {after} | {'yes' if good else 'NO'} |"
    )
    for kind in sorted(set(lost)):
        line += f"\n  {kind}"
    return line, good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--only", nargs="*", default=[], help="words of the faults to run")
    options = parser.parse_args()
    print("| fault | whole | told | lost | last word after | the server | as it should be |")
    print("|---|---|---|---|---|---|---|")
    failed = 0
    for fault in FAULTS:
        if options.only and not any(word in fault.name for word in options.only):
            continue
        line, good = run_fault(fault, options.streams)
        print(line, flush=True)
        failed += not good
    return min(1, failed)


if __name__ == "__main__":
    sys.exit(main())
