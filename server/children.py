"""Child processes of `launch`: started in their own group, restarted with back-off, never left.

Knows nothing of what the children do.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import IO

#: A child that lived this long was no part of a crash loop.
STABLE_SECONDS = 60.0
MAX_FAILURES = 3
#: Exit code of a child whose trouble a restart cannot cure; it has said what it is.
USER_ERROR_EXIT = 3
#: The same for settings that cannot work: the whole command then ends with 2.
USAGE_ERROR_EXIT = 4
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


def die_with_parent(number: signal.Signals) -> None:
    """Linux sends this process `number` when its parent dies; elsewhere this does nothing."""
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, int(number))


def _between_fork_and_exec() -> Callable[[], None]:
    parent = os.getpid()

    def setup() -> None:
        os.setpgid(0, 0)  # Ctrl-C reaches the parent only, which ends its children in order
        die_with_parent(signal.SIGKILL)
        if os.getppid() != parent:  # it died before the line above
            os._exit(1)

    return setup


class Child:
    """One child process and its replacements.

    capture: pass the child's standard error on through `forward`, remembering its last line.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        pass_fds: Sequence[int] = (),
        capture: bool = False,
    ) -> None:
        self.name = name
        self.last_line = ""
        self.failures = 0
        self._command = list(command)
        self._environment = {**os.environ, **(environment or {})}
        self._pass_fds = tuple(pass_fds)
        self._capture = capture
        self._process: subprocess.Popen[bytes] | None = None
        self._started = 0.0
        self._start_at = 0.0

    def start(self) -> None:
        """Starts it now."""
        self._process = subprocess.Popen(
            self._command,
            env=self._environment,
            pass_fds=self._pass_fds,
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE if self._capture else None,
            preexec_fn=_between_fork_and_exec(),
        )
        if self._process.stderr is not None:
            os.set_blocking(self._process.stderr.fileno(), False)
        self._started = time.monotonic()

    @property
    def exit_code(self) -> int | None:
        """Of the process that ended; None while it runs or waits to be started again."""
        return None if self._process is None else self._process.poll()

    @property
    def crash_loop(self) -> bool:
        """Whether it ended too often, too soon, to be tried again."""
        return self.failures > MAX_FAILURES

    def ended(self) -> None:
        """To be called once it has ended: counts, and decides when the next attempt is due."""
        self.forward()
        now = time.monotonic()
        self.failures = 1 if now - self._started > STABLE_SECONDS else self.failures + 1
        self._start_at = now + 0.25 * 2**self.failures
        self._release()

    def start_if_due(self) -> bool:
        """Starts it again if it ended and its pause is over."""
        if self._process is not None or time.monotonic() < self._start_at:
            return False
        self.start()
        return True

    @property
    def stderr(self) -> IO[bytes] | None:
        """The captured standard error of the running process."""
        return None if self._process is None else self._process.stderr

    def forward(self) -> None:
        """Passes on what the child wrote to its standard error since the last call."""
        while self.stderr is not None:
            data = self.stderr.read(65536)
            if not data:
                return
            sys.stderr.buffer.write(data)
            sys.stderr.buffer.flush()
            lines = data.decode("utf-8", "replace").strip().splitlines()
            self.last_line = lines[-1].strip() if lines else self.last_line

    def terminate(self) -> None:
        """Asks it to end (SIGTERM)."""
        if self._process is not None:
            self._process.terminate()

    def wait(self, seconds: float) -> bool:
        """Waits for its end at most so long; passes on its standard error meanwhile."""
        deadline = time.monotonic() + seconds
        while self._process is not None and self._process.poll() is None:
            if time.monotonic() > deadline:
                return False
            self.forward()
            time.sleep(0.02)
        self.forward()
        return True

    def strike(self) -> None:
        """Ends it and its own children at once, stopped or not; its end is then seen as any other."""
        if self._process is not None and self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)

    def kill(self) -> None:
        """Ends it and its own children at once."""
        if self._process is not None and self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._release()

    def _release(self) -> None:
        if self._process is not None and self._process.stderr is not None:
            self._process.stderr.close()
        self._process = None
