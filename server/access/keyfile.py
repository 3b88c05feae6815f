"""The file of API keys: tenants with their limits, and hashes of their keys. Never a key itself.

One JSON object, made to be read and edited by people as well as by `jaxserve keys`. A key is 32
random bytes, so a plain SHA-256 of it cannot be guessed backwards. Replaced as a whole, so a reader
sees the old file or the new one.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import pathlib
import re
import secrets
import tempfile
from collections.abc import Iterator

import msgspec

from jaxserve.errors import ResourceError, UsageError

PREFIX = "jsk_"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
_HASH = re.compile(r"[0-9a-f]{64}")


class Key(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One key. id: what it is called in lists, which opens nothing. sha256: of the whole key."""

    id: str
    sha256: str
    created: str = ""


class Tenant(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """Somebody who has keys. A limit that is None does not exist.

    admin: may see everybody's usage and traces. weight: share of the engine beside other tenants
    while there is a queue. Tokens are those of prompts and answers together; days are UTC's;
    daily_cost is in the currency of the server's prices.
    """

    keys: list[Key] = []
    admin: bool = False
    weight: float = 1.0
    requests_per_minute: float | None = None
    tokens_per_minute: float | None = None
    concurrent_requests: int | None = None
    daily_tokens: int | None = None
    daily_cost: float | None = None


#: The numbers of a tenant that a file may set, and that `jaxserve keys add` has flags for.
LIMITS = (
    "requests_per_minute",
    "tokens_per_minute",
    "concurrent_requests",
    "daily_tokens",
    "daily_cost",
)


class KeyFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All tenants by name."""

    tenants: dict[str, Tenant] = {}


def read_key_file(path: pathlib.Path) -> KeyFile:
    """The checked file. Raises UsageError."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UsageError(
            f"the key file {str(path)!r} cannot be read: {error.strerror}; "
            f"make one with `jaxserve keys add {path} TENANT`"
        ) from None
    return parse_key_file(data, str(path))


def parse_key_file(data: bytes, name: str) -> KeyFile:
    """What a key file says. Raises UsageError naming what is wrong, and never a hash."""
    try:
        file = msgspec.json.decode(data, type=KeyFile)
    except msgspec.MsgspecError as error:
        raise UsageError(f"the key file {name!r} is broken: {error}") from None
    seen: set[str] = set()
    for tenant_name, tenant in file.tenants.items():
        for problem in _problems(tenant_name, tenant, seen):
            raise UsageError(f"the key file {name!r} is broken: {problem}")
    return file


def _problems(name: str, tenant: Tenant, seen: set[str]) -> Iterator[str]:
    if not _NAME.fullmatch(name):
        yield f"the tenant name {name[:80]!r} must be 1 to 64 letters, digits, or . _ @ -"
    if not 0 < tenant.weight <= 1000:
        yield f"weight of {name!r} is {tenant.weight}; it must be above 0 and at most 1000"
    for limit in LIMITS:
        value = getattr(tenant, limit)
        if value is not None and not 0 < value < 1e18:
            yield f"{limit} of {name!r} is {value}; it must be above 0 (leave it out for no limit)"
    for key in tenant.keys:
        if not _HASH.fullmatch(key.sha256):
            yield f"sha256 of the key {key.id!r} must be 64 hexadecimal digits, in lower case"
        if key.id in seen or key.sha256 in seen:
            yield f"the key {key.id!r} is there twice"
        seen |= {key.id, key.sha256}


def hash_key(key: str) -> str:
    """What a file holds of a key."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()


def make_key(created: str) -> tuple[str, Key]:
    """A new secret key, and what a file holds of it. created: a date, for people."""
    secret = PREFIX + secrets.token_urlsafe(32)
    return secret, Key(id=secrets.token_hex(4), sha256=hash_key(secret), created=created)


@contextlib.contextmanager
def changing(path: pathlib.Path) -> Iterator[KeyFileEdit]:
    """The file to be changed, which is written at the end; an empty one if there is none yet.

    Two that change it at once come one after the other. Raises UsageError, ResourceError.
    """
    try:
        with open(f"{path}.lock", "ab") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            edit = KeyFileEdit(read_key_file(path) if path.exists() else KeyFile())
            yield edit
            _replace(path, edit.file)
    except OSError as error:
        raise ResourceError(f"{str(path)!r} cannot be written: {error.strerror}") from None


class KeyFileEdit:
    """A key file on its way to be written again."""

    def __init__(self, file: KeyFile) -> None:
        self.file = file

    def put(self, name: str, tenant: Tenant) -> None:
        """Adds or replaces a tenant."""
        self.file = KeyFile(tenants={**self.file.tenants, name: tenant})


def _replace(path: pathlib.Path, file: KeyFile) -> None:
    data = msgspec.json.format(msgspec.json.encode(file), indent=2) + b"\n"
    parse_key_file(data, str(path))
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)  # mode 0600
    try:
        with os.fdopen(handle, "wb") as temporary:
            temporary.write(data)
            temporary.flush()
            os.fsync(temporary.fileno())
        if path.exists():
            os.chmod(name, path.stat().st_mode & 0o777)
        os.replace(name, path)
    except BaseException:
        pathlib.Path(name).unlink(missing_ok=True)
        raise
