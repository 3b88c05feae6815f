"""An OpenAI-like server of scripted streams in a thread, for tests of the load generator.

A prompt that holds a key of SCRIPTS gets that script; any other gets three texts at once.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any

#: Texts with the seconds to wait before each; then what comes at the end.
SCRIPTS: dict[str, list[tuple[float, str]]] = {
    "@slow@": [(0.2, "a"), (0.1, "b"), (0.1, "c"), (0.1, "d")],
    "@steady@": [(0.05, "x"), (0.05, "y")],
}


class ScriptedServer:
    """`with ScriptedServer() as server`: `url`, the bodies it got, and how many were open at most."""

    def __init__(self, *, usage: bool = True) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.most_open = 0
        self._open = 0
        self._usage = usage
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=[self._serve()])

    def __enter__(self) -> ScriptedServer:
        self._thread.start()
        assert self._ready.wait(10)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join(10)
        self._loop.close()

    async def _serve(self) -> None:
        self._end = asyncio.Event()
        server = await asyncio.start_server(self._answer, "127.0.0.1", 0, backlog=512)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        self._ready.set()
        await self._end.wait()
        server.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        if head.startswith("GET"):
            await self._send_whole(writer, 200, {"data": [{"id": "scripted"}]})
            return
        (length,) = (
            int(line.split(":")[1])
            for line in head.split("\r\n")
            if "content-length" in line.lower()
        )
        body = json.loads(await reader.readexactly(length))
        self.bodies.append(body)
        self._open += 1
        self.most_open = max(self.most_open, self._open)
        try:
            await self._stream(writer, body, chat="/chat/" in head.split("\r\n")[0])
        finally:
            self._open -= 1
            writer.close()

    async def _stream(
        self, writer: asyncio.StreamWriter, body: dict[str, Any], *, chat: bool
    ) -> None:
        asked = json.dumps(body["messages"][-1] if chat else body["prompt"])
        if "@refuse@" in asked:
            await self._send_whole(writer, 429, {"error": {"message": "too busy"}})
            return
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        script = next((s for key, s in SCRIPTS.items() if key in asked), [(0.0, t) for t in "abc"])
        for event, pause in self._events(script, asked, chat=chat):
            await asyncio.sleep(pause)
            if event is None:
                return
            data = b"data: " + event + b"\n\n"
            writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
            await writer.drain()
        writer.write(b"0\r\n\r\n")

    def _events(
        self, script: Sequence[tuple[float, str]], asked: str, *, chat: bool
    ) -> Iterator[tuple[bytes | None, float]]:
        """Events with the pause before each; None cuts the connection."""

        def choice(text: str, finish: str | None = None) -> bytes:
            inner = {"delta": {"content": text}} if chat else {"text": text}
            return json.dumps({"choices": [{**inner, "finish_reason": finish}]}).encode()

        if chat:
            yield json.dumps({"choices": [{"delta": {"role": "assistant"}}]}).encode(), 0.0
        for pause, text in script:
            yield choice(text), pause
            if "@cut@" in asked:
                yield None, 0.0
            if "@broken@" in asked:
                yield b'{"error": {"message": "the engine is on fire"}}', 0.0
        yield choice("", "length"), 0.0
        if self._usage:
            usage = {"prompt_tokens": 7, "completion_tokens": len(script) + 1}
            yield json.dumps({"choices": [], "usage": usage}).encode(), 0.0
        yield b"[DONE]", 0.0

    async def _send_whole(self, writer: asyncio.StreamWriter, status: int, value: Any) -> None:
        data = json.dumps(value).encode()
        head = f"HTTP/1.1 {status} X\r\nContent-Length: {len(data)}\r\n\r\n"
        writer.write(head.encode() + data)
        await writer.drain()
        writer.close()
