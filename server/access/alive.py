"""Which workers are alive: each holds a lock on a file of its own, which the kernel frees.

Holds whatever the clock says and however a worker ends.
"""

from __future__ import annotations

import fcntl
import pathlib
import uuid
from typing import IO


class WorkerName:
    """This worker's name among those that share `folder`."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.name = uuid.uuid4().hex
        self._folder = folder
        self._lock: IO[bytes] | None = None

    def hold(self) -> None:
        """From now on it counts as alive. May be called again."""
        if self._lock is None:
            self._lock = self._file(self.name).open("ab")
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def give_up(self) -> None:
        """The name counts as that of a dead worker now; there is a new one."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None
            self._file(self.name).unlink(missing_ok=True)
        self.name = uuid.uuid4().hex

    def is_alive(self, name: str) -> bool:
        """Whether a worker of that name is there. Of a dead one nothing stays."""
        if name == self.name:
            return True
        path = self._file(name)
        try:
            with path.open("ab") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        path.unlink(missing_ok=True)
        return False

    def _file(self, name: str) -> pathlib.Path:
        return self._folder / f"limits-{name}.lock"
