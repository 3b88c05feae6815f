"""The process that compiles: `python -m jaxserve.plan.child`, a PlanRequest on standard input.

Started by `launch`, which has set what jax and the compilers read when they are loaded. Messages
go to standard output, one JSON line each; whatever libraries print there goes to standard error.
"""

from __future__ import annotations

import os
import sys
import threading
from typing import IO

import msgspec

from jaxserve.config import cache_folder
from jaxserve.errors import USER_ERRORS, UsageError
from jaxserve.plan.make import make_plan
from jaxserve.plan.messages import Failed, Message, Planned, PlanRequest, Progress
from pallas_kernels.errors import KernelError

#: What a plan can fail for that is said in one line.
REASONS: tuple[type[Exception], ...] = (*USER_ERRORS, KernelError)


class Reporter:
    """Writes messages; several threads may."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._lock = threading.Lock()

    def send(self, message: Message) -> None:
        """One line."""
        with self._lock:
            self._file.write(msgspec.json.encode(message) + b"\n")
            self._file.flush()

    def say(self, text: str) -> None:
        """What is being done."""
        self.send(Progress(text))


def main() -> int:
    """Makes one plan. 0 also when it failed for a reason that it could name."""
    reporter = Reporter(os.fdopen(os.dup(1), "wb"))
    os.dup2(2, 1)
    request = msgspec.json.decode(sys.stdin.buffer.read(), type=PlanRequest)
    try:
        reporter.send(Planned(make_plan(request, cache_folder(), reporter.say)))
    except UsageError as error:
        reporter.send(Failed(str(error), is_usage=True))
    except REASONS as error:
        reporter.send(Failed(str(error), is_usage=False))
    return 0


if __name__ == "__main__":
    sys.exit(main())
