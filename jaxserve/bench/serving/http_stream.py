"""One HTTP request whose answer comes in pieces, over asyncio's streams (around step 9).

As little as a load generator needs: HTTP/1.1, a connection per request, bodies that are chunked, of
known length, or end with the connection.
"""

from __future__ import annotations

import asyncio
import dataclasses
import ssl
import urllib.parse
from collections.abc import AsyncIterator

from jaxserve.errors import UsageError

_MAX_HEAD = 65536
_READ = 65536


class HttpError(Exception):
    """The connection, or what came over it, is not what HTTP promises. `str` is one line."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """Where requests go. prefix: what comes before /v1."""

    host: str
    port: int
    prefix: str
    secure: bool
    api_key: str | None = None

    @classmethod
    def parse(cls, url: str, api_key: str | None = None) -> Server:
        """http://HOST:PORT, with or without /v1. Raises UsageError."""
        try:
            parts = urllib.parse.urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise UsageError(f"--base-url is {url!r}: {error}") from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UsageError(f"--base-url is {url!r}; it must be like http://127.0.0.1:8000")
        secure = parts.scheme == "https"
        return cls(
            host=parts.hostname,
            port=port or (443 if secure else 80),
            prefix=parts.path.rstrip("/").removesuffix("/v1"),
            secure=secure,
            api_key=api_key,
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """The beginning of an answer."""

    status: int
    fields: dict[str, str]


class Exchange:
    """One request and its answer: `async with Exchange(...) as exchange`.

    path: from /v1 on. body: None asks with GET. Raises OSError or HttpError.
    """

    def __init__(self, server: Server, path: str, body: bytes | None) -> None:
        self._server = server
        self._request = _request_bytes(server, path, body)
        self.head = Head(status=0, fields={})

    async def __aenter__(self) -> Exchange:
        server = self._server
        context = ssl.create_default_context() if server.secure else None
        self._reader, self._writer = await asyncio.open_connection(
            server.host, server.port, ssl=context, limit=_MAX_HEAD
        )
        try:
            self._writer.write(self._request)
            await self._writer.drain()
            self.head = await self._read_head()
        except BaseException:
            self._writer.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        self._writer.close()

    async def pieces(self) -> AsyncIterator[bytes]:
        """The body as it arrives."""
        try:
            if self.head.fields.get("transfer-encoding", "").lower() == "chunked":
                async for piece in self._chunks():
                    yield piece
            elif "content-length" in self.head.fields:
                yield await self._reader.readexactly(int(self.head.fields["content-length"]))
            else:
                while piece := await self._reader.read(_READ):
                    yield piece
        except asyncio.IncompleteReadError:
            raise HttpError("the connection ended in the middle of the answer") from None
        except ValueError as error:
            raise HttpError(f"the answer is not HTTP: {error}") from None

    async def whole(self) -> bytes:
        """The body, once it is complete."""
        return b"".join([piece async for piece in self.pieces()])

    async def _read_head(self) -> Head:
        try:
            raw = await self._reader.readuntil(b"\r\n\r\n")
            first, *lines = raw.decode("latin-1").split("\r\n")
            status = int(first.split(" ", 2)[1])
        except asyncio.IncompleteReadError:
            raise HttpError("the connection ended before an answer") from None
        except (asyncio.LimitOverrunError, ValueError, IndexError):
            raise HttpError("the answer is not HTTP") from None
        pairs = (line.partition(":") for line in lines if line)
        return Head(
            status=status, fields={name.strip().lower(): value.strip() for name, _, value in pairs}
        )

    async def _chunks(self) -> AsyncIterator[bytes]:
        reader = self._reader
        while size := int((await reader.readuntil(b"\n")).split(b";")[0], 16):
            piece = await reader.readexactly(size + 2)
            yield piece[:-2]


def _request_bytes(server: Server, path: str, body: bytes | None) -> bytes:
    lines = [
        f"{'GET' if body is None else 'POST'} {server.prefix}{path} HTTP/1.1",
        f"Host: {server.host}:{server.port}",
        "Connection: close",
        "Accept: text/event-stream, application/json",
    ]
    if server.api_key is not None:
        lines.append(f"Authorization: Bearer {server.api_key}")
    if body is not None:
        lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
    return "\r\n".join([*lines, "", ""]).encode() + (body or b"")
