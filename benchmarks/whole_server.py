"""The real server with all its processes, before the small checkpoint or the tests' stand-in for an
engine; what its processes hold of memory and have used of the processors, and its metrics.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import pathlib
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator

from server_rates import ROOT

from jaxserve.config import EngineConfig, ServerConfig

FAKE = "fake"
START_SECONDS = 600.0


class WholeServer:
    """A running server. process: the parent of all others."""

    def __init__(self, process: int, address: tuple[str, int]) -> None:
        self.process = process
        self.address = address

    def processes(self) -> list[int]:
        """The parent and everything below it."""
        found = [self.process]
        for pid in found:
            with contextlib.suppress(OSError):
                for task in pathlib.Path(f"/proc/{pid}/task").iterdir():
                    found += [int(child) for child in (task / "children").read_text().split()]
        return found

    def memory_bytes(self) -> dict[int, int]:
        """By process; what they share is divided among them, so that the sum is right."""
        found = {}
        for pid in self.processes():
            with contextlib.suppress(OSError):
                for line in pathlib.Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
                    if line.startswith("Pss:"):
                        found[pid] = int(line.split()[1]) * 1024
        return found

    def cpu_seconds(self) -> float:
        """Used by all processes that live."""
        ticks = 0
        for pid in self.processes():
            with contextlib.suppress(OSError):
                fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                ticks += int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK")

    def metric(self, name: str) -> float | None:
        """The sum over all labels; None for one that this engine does not have."""
        connection = http.client.HTTPConnection(*self.address, timeout=60)
        try:
            connection.request("GET", "/metrics")
            lines = connection.getresponse().read().decode().splitlines()
        finally:
            connection.close()
        found = [line.split()[-1] for line in lines if line.startswith((f"{name}{{", f"{name} "))]
        return sum(map(float, found)) if found else None


@contextlib.contextmanager
def whole_server(model: str, *, slots: int, measured: bool = True) -> Iterator[WholeServer]:
    """The server while the block runs. measured: whether it keeps its ledger and traces."""
    with tempfile.TemporaryDirectory() as folder:
        start = _fake if model == FAKE else _real
        with start(model, pathlib.Path(folder), slots, measured) as server:
            yield server


@contextlib.contextmanager
def _fake(model: str, folder: pathlib.Path, slots: int, measured: bool) -> Iterator[WholeServer]:
    sys.path.insert(0, str(ROOT / "tests"))
    from running_server import RunningServer

    config = ServerConfig(port=0, usage_ledger=measured, trace_requests=1000 if measured else 0)
    engine = EngineConfig(model=model, max_num_seqs=slots)
    running = RunningServer(folder, engine=engine, server=config)
    try:
        yield WholeServer(running.process.pid, running.wait_ready().address)
    finally:
        running.stop()


@contextlib.contextmanager
def _real(model: str, folder: pathlib.Path, slots: int, measured: bool) -> Iterator[WholeServer]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = free.getsockname()
    command = [sys.executable, "-m", "jaxserve.cli.main", "serve", "--model", model]
    command += ["--port", str(address[1]), "--max-num-seqs", str(slots), "--log-level", "warning"]
    command += ["--max-model-len", "512", "--data-dir", str(folder / "data")]
    command += [] if measured else ["--no-usage-ledger", "--trace-requests", "0"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
    try:
        _wait_ready(process, address)
        yield WholeServer(process.pid, address)
    finally:
        process.terminate()
        process.wait(60)


def _wait_ready(process: subprocess.Popen[bytes], address: tuple[str, int]) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        connection = http.client.HTTPConnection(*address, timeout=30)
        try:
            connection.request("GET", "/ready")
            if connection.getresponse().status == 200:
                return
        except OSError:
            pass
        finally:
            connection.close()
        time.sleep(0.5)
    raise SystemExit("error: the server does not start")
