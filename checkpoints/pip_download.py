"""Fetches wheels with the user's own pip, so that mirrors, proxies and certificates just work.

Used by `checkpoints.pull`. Knows no registry: pip's configuration says where wheels come from.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from checkpoints.errors import DownloadFailedError

POLL_SECONDS = 0.1


def download_wheels(
    requirements: Sequence[str], folder: Path, report_bytes: Callable[[int], None]
) -> None:
    """Puts one wheel per requirement ("name==version") into `folder`, without dependencies.

    report_bytes is called again and again with the number of bytes that have arrived.
    Raises DownloadFailedError with pip's own last words. pip ends with us, also on Ctrl-C.
    """
    unpacking = folder / "unpacking"  # pip downloads into TMPDIR before it moves wheels
    unpacking.mkdir()
    log = folder / "pip.log"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += ["--disable-pip-version-check", "--no-input", "--no-cache-dir"]
    command += ["--progress-bar", "off", "--dest", str(folder), *requirements]
    with open(log, "wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "TMPDIR": str(unpacking)},
        )
        try:
            while True:
                try:
                    code = process.wait(timeout=POLL_SECONDS)
                    break
                except subprocess.TimeoutExpired:
                    report_bytes(folder_bytes(folder))
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
    if code != 0:
        words = _last_words(log.read_text(encoding="utf-8", errors="replace"))
        raise DownloadFailedError(f"pip download {' '.join(requirements)} failed: {words}")
    report_bytes(folder_bytes(folder))


def folder_bytes(folder: Path) -> int:
    """Size of all files below a folder; files may vanish meanwhile."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.stat(os.path.join(parent, name)).st_size
            except FileNotFoundError:
                continue
    return total


def _last_words(log: str) -> str:
    """The line that tells most: pip's first ERROR, else a missing pip, else the last line."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    if any("No module named pip" in line for line in lines):
        return "this Python has no pip (python -m ensurepip adds it)"
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    if errors and "Retrying (" in log:
        return f"the package index could not be reached ({errors[0][:300]})"
    if errors:
        return errors[0][:300]
    return (lines[-1] if lines else "it said nothing")[:300]
