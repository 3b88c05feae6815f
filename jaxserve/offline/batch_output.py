"""The answers of a batch file, which are also the record of what is done (step 9).

Each answer is appended with one write, so that a killed run leaves whole lines and at most one
torn one at the end. Its "id" holds the number and the digest of the line that it answers, since
custom_ids may repeat. The same command run again cuts the torn line off and does the rest.
"""

from __future__ import annotations

import fcntl
import os
import pathlib
import re
import stat
from collections.abc import Iterable
from typing import Any, Self

import msgspec

from jaxserve.errors import ResourceError
from jaxserve.offline.batch_input import InputLine

_HEAD = b'{"id":"batch_req_'
_DONE = re.compile(re.escape(_HEAD) + rb'(\d{1,18})_([0-9a-f]{16})",.*\}\n', re.S)
_SUM = 2**64


def answer_id(line: InputLine) -> str:
    """The "id" of a line's answer."""
    return f"batch_req_{line.number}_{line.digest:016x}"


class DoneLines:
    """Which lines are done: a bit for each line of the input."""

    def __init__(self) -> None:
        self.count = 0
        self.last = 0
        self.digest_sum = 0
        self._bits = bytearray()

    def add(self, number: int, digest: int) -> None:
        """Notes a line that was not done before."""
        assert number not in self, number
        at, bit = divmod(number, 8)
        if at >= len(self._bits):
            self._bits.extend(bytes(at + 1 - len(self._bits)))
        self._bits[at] |= 1 << bit
        self.count += 1
        self.last = max(self.last, number)
        self.digest_sum = (self.digest_sum + digest) % _SUM

    def __contains__(self, number: int) -> bool:
        at, bit = divmod(number, 8)
        return at < len(self._bits) and bool(self._bits[at] & 1 << bit)


class BatchOutput:
    """The open answer file; one process has it at a time.

    done: the lines whose answers it held when it was opened.
    """

    def __init__(self, path: pathlib.Path, *, max_number: int) -> None:
        """Opens or makes the file. max_number: no line of the input has a larger one.

        Raises ResourceError if it cannot be written, another run writes it, or it is none of ours.
        """
        self._path = path
        self._max_number = max_number
        self.done = DoneLines()
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise ResourceError(f"cannot write {path}: {error.strerror}") from None
        try:
            self._lock()
            self._scan()
        except BaseException:
            os.close(self._fd)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        os.close(self._fd)

    def check_input(self, lines: Iterable[InputLine]) -> int:
        """The number of `lines`, all of the input's. Raises ResourceError unless the answers that
        were found in the file are theirs.
        """
        total, found, digests = 0, 0, 0
        for line in lines:
            total += 1
            if line.number in self.done:
                found += 1
                digests += line.digest
        if found != self.done.count or digests % _SUM != self.done.digest_sum:
            raise ResourceError(
                f"{self._path} holds answers to other lines than the input's; give another file "
                "for the answers, or move this one away"
            )
        return total

    def write(
        self,
        line: InputLine,
        *,
        custom_id: str | None,
        response: dict[str, Any] | None,
        error: dict[str, Any] | None,
    ) -> None:
        """Appends one answer. Raises ResourceError if there is no room for it."""
        entry = {
            "id": answer_id(line),
            "custom_id": custom_id,
            "response": response,
            "error": error,
        }
        data = memoryview(msgspec.json.encode(entry) + b"\n")
        try:
            while data:
                data = data[os.write(self._fd, data) :]
        except OSError as failure:
            raise ResourceError(
                f"cannot write {self._path}: {failure.strerror}; the same command goes on from here"
            ) from None

    def _lock(self) -> None:
        if not stat.S_ISREG(os.fstat(self._fd).st_mode):
            raise ResourceError(f"{self._path} is no file; it must be one, to be read after a stop")
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the kernel frees it if we die
        except OSError:
            raise ResourceError(f"another run is writing {self._path}") from None

    def _scan(self) -> None:
        """Finds out what is done, and cuts off a line that was not finished."""
        whole = 0
        with open(self._fd, "rb", closefd=False) as file:
            for text in file:
                if not text.endswith(b"\n"):
                    if not (text.startswith(_HEAD) or _HEAD.startswith(text)):
                        raise self._foreign(self.done.count + 1)
                    os.ftruncate(self._fd, whole)
                    return
                match = _DONE.fullmatch(text)
                number = int(match[1]) if match else 0
                if match is None or not 1 <= number <= self._max_number or number in self.done:
                    raise self._foreign(self.done.count + 1)
                self.done.add(number, int(match[2], 16))
                whole += len(text)

    def _foreign(self, number: int) -> ResourceError:
        return ResourceError(
            f"line {number} of {self._path} is no answer to a line of this input; give another "
            "file for the answers, or move this one away"
        )
