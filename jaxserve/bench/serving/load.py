"""Sends conversations to a server at their times and keeps a record of every request."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from jaxserve.bench.serving.answers import Record, ask, error_message
from jaxserve.bench.serving.conversations import Conversation, Turn
from jaxserve.bench.serving.http_stream import Exchange, HttpError, Server
from jaxserve.errors import EngineError, ResourceError

#: How long a server may take to say which models it has.
_MODELS_SECONDS = 30
NOT_SENT = "not sent, because an earlier turn of its conversation failed"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """How requests are sent. fields: of the body, for all requests. timeout: seconds per answer.

    max_concurrency: conversations at the same time, None for no bound.
    """

    server: Server
    model: str
    chat: bool
    fields: dict[str, Any]
    timeout: float
    max_concurrency: int | None = None

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.chat else "/v1/completions"


async def find_model(server: Server, wanted: str | None) -> str:
    """The model that is wanted, or the server's first one.

    Raises ResourceError where no server answers, EngineError where it does not say.
    """
    try:
        async with asyncio.timeout(_MODELS_SECONDS), Exchange(server, "/v1/models", None) as answer:
            body = await answer.whole()
    except (OSError, HttpError, TimeoutError) as error:
        where = f"{server.host}:{server.port}"
        raise ResourceError(
            f"no server answers at {where} ({error or type(error).__name__}); start one, or name "
            "another with --base-url"
        ) from None
    if wanted is not None:
        return wanted
    try:
        name: str = msgspec.json.decode(body)["data"][0]["id"]
    except (msgspec.DecodeError, KeyError, IndexError, TypeError):
        raise EngineError(
            f"the server does not say which models it has (HTTP {answer.head.status}: "
            f"{error_message(body)}); name one with --model"
        ) from None
    return name


async def warm_up(load: Load, conversations: Sequence[Conversation]) -> None:
    """Asks each first turn, one after the other. Raises EngineError when one fails."""
    for conversation in conversations:
        body = request_body(load, conversation, [], conversation.turns[0])
        record = await _ask(load, body, time.perf_counter())
        if record.error is not None:
            raise EngineError(f"the warm-up request failed: {record.error}")


async def run(
    load: Load,
    conversations: Sequence[Conversation],
    starts: Sequence[float],
    on_done: Callable[[Record], None],
) -> tuple[list[Record], float]:
    """Records in the order of the conversations and their turns, and the seconds of the whole run.

    starts: when each conversation begins.
    """
    began = time.perf_counter()
    places: contextlib.AbstractAsyncContextManager[object] = contextlib.nullcontext()
    if load.max_concurrency is not None:
        places = asyncio.Semaphore(load.max_concurrency)

    async def converse(conversation: Conversation, start: float) -> list[Record]:
        await asyncio.sleep(max(0.0, began + start - time.perf_counter()))
        async with places:
            return await _converse(load, conversation, began, on_done)

    tasks = [converse(each, start) for each, start in zip(conversations, starts, strict=True)]
    chains = await asyncio.gather(*tasks)
    return [record for chain in chains for record in chain], time.perf_counter() - began


async def _converse(
    load: Load, conversation: Conversation, began: float, on_done: Callable[[Record], None]
) -> list[Record]:
    records: list[Record] = []
    answers: list[str] = []
    for turn in conversation.turns:
        if records and records[-1].error is not None:
            record = Record(started=time.perf_counter() - began, error=NOT_SENT)
        else:
            body = request_body(load, conversation, answers, turn)
            record = await _ask(load, body, began)
        answers.append(record.text)
        records.append(record)
        on_done(record)
    return records


async def _ask(load: Load, body: dict[str, Any], began: float) -> Record:
    return await ask(load.server, load.path, body, began=began, timeout=load.timeout)


def request_body(
    load: Load, conversation: Conversation, answers: Sequence[str], turn: Turn
) -> dict[str, Any]:
    """The body that asks for a turn, `answers` being those to the turns before it."""
    body = {
        "model": load.model,
        "max_tokens": turn.output_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
        **load.fields,
    }
    before = conversation.turns[: len(answers)]
    if not load.chat:
        said = [part for pair in zip(before, answers, strict=True) for part in _texts(*pair)]
        return body | {"prompt": "\n".join([*said, str(turn.content)]) if said else turn.content}
    messages: list[dict[str, Any]] = []
    if conversation.system is not None:
        messages.append({"role": "system", "content": conversation.system})
    for earlier, answer in zip(before, answers, strict=True):
        messages += _messages(earlier)
        messages.append({"role": "assistant", "content": answer})
    return body | {"messages": [*messages, *_messages(turn)]}


def _texts(turn: Turn, answer: str) -> tuple[str, str]:
    return str(turn.content), answer


def _messages(turn: Turn) -> list[dict[str, Any]]:
    if isinstance(turn.content, str):
        return [{"role": "user", "content": turn.content}]
    return turn.content  # type: ignore[return-value]
