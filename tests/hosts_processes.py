"""Engines over several hosts as real processes of this machine, one CPU device each, for tests."""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence

import psutil

TESTS = pathlib.Path(__file__).parent
#: Generous: the machine may be busy with other things.
START_SECONDS = 150.0
END_SECONDS = 60.0


class HostProcess:
    """One process; standard output and standard error together are in `log`."""

    def __init__(self, command: Sequence[str], log: pathlib.Path, **environment: str) -> None:
        self.log = log
        inherited = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
        path = os.pathsep.join([str(TESTS.parent), str(TESTS)])
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, *command],
                env={**inherited, "JAX_PLATFORMS": "cpu", "PYTHONPATH": path, **environment},
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )

    @property
    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def wait(self, seconds: float = END_SECONDS) -> int:
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {seconds} s: {self.text}") from None

    def wait_text(self, words: str, seconds: float = START_SECONDS) -> str:
        """Waits until a line of the log holds `words` and returns it."""
        deadline = time.monotonic() + seconds
        while True:
            ended = self.process.poll() is not None
            for line in self.text.splitlines():
                if words in line:
                    return line
            assert not ended, f"ended without {words!r}: {self.text}"
            assert time.monotonic() < deadline, f"no {words!r} after {seconds} s: {self.text}"
            time.sleep(0.05)

    def kill(self, number: int = signal.SIGKILL) -> None:
        self.process.send_signal(number)

    def stop(self) -> None:
        """Ends it and whatever it started."""
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(self.process.pid).children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.kill()
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
        self.process.wait(10)


@contextlib.contextmanager
def two_hosts(
    folder: pathlib.Path, command: Sequence[str], **environment: str
) -> Iterator[tuple[HostProcess, HostProcess]]:
    """The same command as process 0 and 1, told through the environment."""
    shared = {
        "JAXSERVE_NUM_PROCESSES": "2",
        "JAXSERVE_COORDINATOR_ADDRESS": f"127.0.0.1:{free_ports()}",
        **environment,
    }
    hosts: list[HostProcess] = []
    try:
        for number in (0, 1):
            hosts.append(
                HostProcess(
                    command,
                    folder / f"process-{number}.txt",
                    JAXSERVE_PROCESS_ID=str(number),
                    **shared,
                )
            )
        yield hosts[0], hosts[1]
    finally:
        for host in hosts:
            host.stop()


def free_ports() -> int:
    """The first of two neighbouring ports that nobody listens on."""
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            port: int = first.getsockname()[1]
            with contextlib.suppress(OSError, OverflowError):
                second.bind(("127.0.0.1", port + 1))
                return port
