"""How a process of an engine over several hosts ends when not all is well.

Neither jax nor Python may have the last word then: at exit jax waits for the other processes and
aborts when they do not come, and a device that sits in a collective may never be done.
"""

from __future__ import annotations

import atexit
import os
import sys

import jax

#: The way out of every such end.
AGAIN = "start the command again on all hosts"
_INTERRUPTED = 130


def end_process(reason: str, code: int = 1) -> None:
    """Ends this process now, whatever its threads wait for."""
    print(f"error: {reason}" if code else reason, file=sys.stderr, flush=True)
    os._exit(code)


def end_without_jax(code: int) -> None:
    """When this process exits, it does so with this code and without jax's part of it.

    The last call counts. Changes nothing where jax was not started over several processes, or
    parted in order.
    """

    def leave() -> None:
        if jax.distributed.is_initialized():
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    atexit.register(leave)  # the last one registered is the first to run


def exit_code(error: BaseException) -> int:
    """What the command line exits with after this error."""
    if isinstance(error, KeyboardInterrupt):
        return _INTERRUPTED
    code: int = getattr(error, "exit_code", 1)
    return code
