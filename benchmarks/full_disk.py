"""A disk that is full while the server writes its ledger, and a batch its answers: a real one.

A small file system in memory (which takes the rights to mount one) holds the server's data folder.
While it is full, uploads are refused by name, the batch waits, everything else goes on; once there
is room the batch ends with all its lines, and the ledger has a row for every request.
"""

from __future__ import annotations

import contextlib
import json
import pathlib
import subprocess
import time
from collections.abc import Iterator
from typing import Any

from running_server import RunningServer, wait_until

_SIZE = "6m"
_LINES = 40
_FORM = "a-boundary"
_FILLER = "filler"


@contextlib.contextmanager
def small_disk(folder: pathlib.Path) -> Iterator[bool]:
    """A file system of a few MiB at `folder` while the block runs; False if that may not be."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={_SIZE}", "tmpfs", str(folder)]
    mounted = subprocess.run(command, capture_output=True, check=False).returncode == 0
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", str(folder)], check=True)


def fill(server: RunningServer, folder: pathlib.Path) -> str:
    """Begins a batch and takes all the room there is. Returns the batch's id."""
    batch = _begin(server)
    wait_until(lambda: _batch(server, batch)["status"] == "in_progress")
    with (folder / _FILLER).open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))
    answer = _upload(server, b"x" * 10_000)
    assert (answer.status, answer.json["error"]["code"]) == (507, "storage_full"), answer.body
    return batch


def free(server: RunningServer, folder: pathlib.Path, batch: str) -> str:
    """Makes room again, and says what became of what waited for it."""
    time.sleep(1.0)
    before = _batch(server, batch)["status"]
    assert before == "in_progress", f"the batch is {before} on a full disk"
    assert server.complete("hello", max_tokens=3).status == 200
    (folder / _FILLER).unlink()
    start = time.monotonic()
    wait_until(lambda: _batch(server, batch)["status"] == "completed", 30)
    seconds = time.monotonic() - start
    counts = _batch(server, batch)["request_counts"]
    assert counts == {"total": _LINES, "completed": _LINES, "failed": 0}, counts
    lost = server.gauge("jaxserve:usage_rows_lost_total")
    said = "the disk is full" in server.errors.read_text()
    assert said, "the log says nothing of a full disk"
    return f"batch whole {seconds:.1f} s after there was room, {lost:.0f} rows of usage lost"


def _begin(server: RunningServer) -> str:
    lines = []
    for number in range(_LINES):
        body = {"prompt": f"@pause:50@ {number}", "max_tokens": 20, "ignore_eos": True}
        line = {"custom_id": str(number), "method": "POST", "url": "/v1/completions", "body": body}
        lines.append(json.dumps(line))
    file = _upload(server, "\n".join(lines).encode()).json["id"]
    body = {"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"}
    return str(server.call("POST", "/v1/batches", body).json["id"])


def _upload(server: RunningServer, data: bytes) -> Any:
    part = f"--{_FORM}\r\nContent-Disposition: form-data; name="
    form = f'{part}"purpose"\r\n\r\nbatch\r\n{part}"file"; filename="in.jsonl"\r\n\r\n'.encode()
    form += data + f"\r\n--{_FORM}--\r\n".encode()
    kind = {"Content-Type": f"multipart/form-data; boundary={_FORM}"}
    return server.call("POST", "/v1/files", form, kind)


def _batch(server: RunningServer, batch: str) -> Any:
    return server.call("GET", f"/v1/batches/{batch}").json
