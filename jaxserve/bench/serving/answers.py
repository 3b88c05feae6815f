"""One answer, read and timed as vLLM's benchmark does (around step 9).

A chunk counts where it carries text; chunks with a role, an end or usage only are no tokens.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import AsyncIterator
from typing import Any

import msgspec

from jaxserve.bench.serving.http_stream import Exchange, HttpError, Server

_DATA = b"data:"
_DONE = b"[DONE]"


@dataclasses.dataclass(slots=True, kw_only=True)
class Record:
    """One request. Times in seconds; `started` since the beginning of the run.

    ttft: from the request to its first text; None without any. gaps: between chunks of text.
    latency: to the last chunk. counted: token counts are the server's own, not chunks.
    """

    started: float
    ttft: float | None = None
    gaps: list[float] = dataclasses.field(default_factory=list)
    latency: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    counted: bool = False
    text: str = ""
    error: str | None = None

    @property
    def tpot(self) -> float | None:
        """Mean seconds per token after the first; None for answers of one token."""
        if self.ttft is None or self.output_tokens < 2:
            return None
        return (self.latency - self.ttft) / (self.output_tokens - 1)


async def ask(
    server: Server, path: str, body: dict[str, Any], *, began: float, timeout: float
) -> Record:
    """Asks and reads the whole answer; what goes wrong is in `error`.

    began: `time.perf_counter()` at the beginning of the run. timeout: seconds for the whole answer.
    """
    start = time.perf_counter()
    record = Record(started=start - began)
    reading = _Reading(record, start)
    try:
        async with (
            asyncio.timeout(timeout),
            Exchange(server, path, msgspec.json.encode(body)) as exchange,
        ):
            if exchange.head.status != 200:
                message = error_message(await exchange.whole())
                record.error = f"HTTP {exchange.head.status}: {message}"
                return record
            async for data in _events(exchange.pieces()):
                reading.take(data)
        if record.error is None and not reading.finished:
            record.error = "the stream ended before the answer did"
        elif record.error is None and record.ttft is None:
            record.error = "an answer without any text"
    except TimeoutError:
        record.error = f"no whole answer within {timeout:g} seconds"
    except (OSError, HttpError) as error:
        record.error = f"{type(error).__name__}: {error}"
    except (msgspec.MsgspecError, KeyError, IndexError, TypeError, AttributeError) as error:
        record.error = f"an event of the stream is not what OpenAI's API promises: {error!r}"
    return record


class _Reading:
    """Takes the events of one stream."""

    def __init__(self, record: Record, start: float) -> None:
        self._record = record
        self._start = start
        self._last = start
        self._texts = 0
        self.finished = False

    def take(self, data: bytes) -> None:
        now = time.perf_counter()
        if data == _DONE:
            self.finished = True
            return
        event = msgspec.json.decode(data)
        record = self._record
        if "error" in event:
            record.error = f"error in the stream: {error_message(data)}"
            return
        if usage := event.get("usage"):
            record.prompt_tokens = usage["prompt_tokens"]
            record.output_tokens = usage["completion_tokens"]
            record.counted = True
        for choice in event.get("choices", ()):
            delta = choice.get("delta") or {}
            text = choice.get("text") or delta.get("content") or delta.get("reasoning_content")
            if choice.get("finish_reason"):
                self.finished = True
            if text:
                self._take_text(text, now)
            record.latency = now - self._start

    def _take_text(self, text: str, now: float) -> None:
        record = self._record
        if record.ttft is None:
            record.ttft = now - self._start
        else:
            record.gaps.append(now - self._last)
        self._last = now
        record.text += text
        self._texts += 1
        if not record.counted:
            record.output_tokens = self._texts


async def _events(pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The data of each event; every event is one line of data."""
    rest = b""
    async for piece in pieces:
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if line.startswith(_DATA):
                yield line[len(_DATA) :].strip()


def error_message(body: bytes) -> str:
    """What an error's body says, in one line."""
    try:
        value = msgspec.json.decode(body)
        error = value.get("error", value)
        text = error if isinstance(error, str) else error.get("message") or str(error)
    except (msgspec.DecodeError, AttributeError):
        text = body.decode("utf-8", "replace")
    return " ".join(str(text).split())[:300]
