"""Step 9 for Anthropic's Messages API: the answer to one request, as one object or as events."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator
from typing import Any

from jaxserve.request import FinishReason, RequestOutput
from server import sse
from server.answers import AnswerReader

Json = dict[str, Any]


class MessageAnswer:
    """Writes the answer to one request, which `reader` reads."""

    def __init__(self, model: str, reader: AnswerReader) -> None:
        self._model = model
        self._reader = reader
        self._id = f"msg_{uuid.uuid4().hex}"

    def whole(self, answer: RequestOutput) -> Json:
        """The message object, from the complete answer."""
        return {
            **self._message([{"type": "text", "text": answer.text}]),
            **_stop(answer),
            "usage": {**self._usage_in(), "output_tokens": self._reader.num_tokens},
        }

    def events(self, pieces: Iterable[tuple[int, RequestOutput]]) -> Iterator[bytes]:
        """The start of the message, one block of text piece by piece, and how it ended."""
        begun = False
        delta: Json = {"type": "text_delta", "text": sse.TEXT_HERE}
        text_event = sse.TextEvent(
            {"type": "content_block_delta", "index": 0, "delta": delta}, name="content_block_delta"
        )
        for _, piece in pieces:
            if not begun:
                begun = True
                yield from self._begin()
            if piece.text:
                yield text_event(piece.text)
            if piece.finish_reason is not None:
                yield _event("content_block_stop", index=0)
                usage = {**self._usage_in(), "output_tokens": self._reader.num_tokens}
                yield _event("message_delta", delta=_stop(piece), usage=usage)
        yield _event("message_stop")

    def _begin(self) -> Iterator[bytes]:
        """Comes with the first piece, since only then it is known what the cache had."""
        message = self._message([])
        message["usage"] = {**self._usage_in(), "output_tokens": 0}
        yield _event("message_start", message=message)
        yield _event("content_block_start", index=0, content_block={"type": "text", "text": ""})
        yield _event("ping")

    def _message(self, content: list[Json]) -> Json:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
        }

    def _usage_in(self) -> Json:
        """Anthropic counts prompt tokens that the cache had apart from the others."""
        cached = self._reader.num_cached_tokens
        return {
            "input_tokens": len(self._reader.request.prompt_ids) - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
        }


def _stop(piece: RequestOutput) -> Json:
    if piece.finish_reason is FinishReason.LENGTH:
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    if isinstance(piece.stop_reason, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": piece.stop_reason}
    return {"stop_reason": "end_turn", "stop_sequence": None}


def _event(name: str, **fields: Any) -> bytes:
    return sse.named_event(name, {"type": name, **fields})
