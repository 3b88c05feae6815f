"""What a worker knows of the key file, read again when it changes (looked at once a second at most).

A file that is broken or gone meanwhile changes nothing: the last good one stays, for workers that
start then, too, and the log says so once.
"""

from __future__ import annotations

import hmac
import logging
import os
import pathlib
import tempfile
import time

import msgspec

from jaxserve.errors import UsageError
from server.access.keyfile import KeyFile, Tenant, hash_key, read_key_file

logger = logging.getLogger("jaxserve.server")

#: Seconds between two looks at the file.
LOOK_SECONDS = 1.0
_Version = tuple[int, int, int] | None


class KeyRing:
    """The tenants of one key file.

    private_folder: where the last good file is kept for other workers of this server. Raises
    UsageError if the file is not good, nor ever was.
    """

    def __init__(self, path: pathlib.Path, private_folder: pathlib.Path | None = None) -> None:
        self._path = path
        self._last_good = None if private_folder is None else private_folder / "keys.json"
        self._version = _version(path)
        self._next_look = time.monotonic() + LOOK_SECONDS
        self._tenants: dict[str, Tenant] = {}
        self._digests: list[tuple[str, str]] = []
        try:
            self._use(read_key_file(path))
        except UsageError as error:
            if self._last_good is None or not self._last_good.exists():
                raise
            self._use(read_key_file(self._last_good))
            self._complain(error)

    def find(self, key: str) -> str | None:
        """The name of the tenant that has this key, after the same time whichever it is."""
        self._look()
        given = hash_key(key)
        found = None
        for name, digest in self._digests:
            if hmac.compare_digest(digest, given):
                found = name
        return found

    def tenant(self, name: str) -> Tenant | None:
        """A tenant by name."""
        self._look()
        return self._tenants.get(name)

    def _use(self, file: KeyFile) -> None:
        self._tenants = file.tenants
        self._digests = [
            (name, key.sha256) for name, tenant in file.tenants.items() for key in tenant.keys
        ]
        if self._last_good is not None:
            with tempfile.NamedTemporaryFile(dir=self._last_good.parent, delete=False) as copy:
                copy.write(msgspec.json.encode(file))
            os.replace(copy.name, self._last_good)

    def _look(self) -> None:
        now = time.monotonic()
        if now < self._next_look:
            return
        self._next_look = now + LOOK_SECONDS
        version = _version(self._path)
        if version == self._version:
            return
        self._version = version
        try:
            self._use(read_key_file(self._path))
        except UsageError as error:
            self._complain(error)

    def _complain(self, error: UsageError) -> None:
        logger.error("%s; the keys that were read before stay as they are", error)


def _version(path: pathlib.Path) -> _Version:
    try:
        state = os.stat(path)
    except OSError:
        return None
    return state.st_mtime_ns, state.st_size, state.st_ino
