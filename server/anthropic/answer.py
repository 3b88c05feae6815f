"""Step 9 for Anthropic's Messages API: the answer to one request, as one object or as events."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator
from typing import Any

from jaxserve.request import FinishReason, RequestOutput
from server.answers import AnswerReader
from server.anthropic.blocks import Blocks, event
from server.openai.tools_message import MessageStyle

Json = dict[str, Any]


class MessageAnswer:
    """Writes the answer to one request, which `reader` reads.

    max_tokens: what was asked for, perhaps more than there is room for. style: see `Blocks`.
    """

    def __init__(
        self,
        model: str,
        reader: AnswerReader,
        max_tokens: int,
        style: MessageStyle | None = None,
    ) -> None:
        self._model = model
        self._reader = reader
        self._blocks = Blocks(style)
        self._max_tokens = max_tokens
        self._id = f"msg_{uuid.uuid4().hex}"

    def whole(self, answer: RequestOutput) -> Json:
        """The message object, from the complete answer."""
        return {
            **self._message(self._blocks.whole(answer)),
            **self._stop(answer),
            "usage": {**self._usage_in(), "output_tokens": self._reader.num_tokens},
        }

    def events(self, pieces: Iterable[tuple[int, RequestOutput]]) -> Iterator[bytes]:
        """The start of the message, its blocks piece by piece, and how it ended."""
        begun = False
        for _, piece in pieces:
            if not begun:
                begun = True
                yield from self._begin()
            yield from self._blocks.events(piece)
            if piece.finish_reason is not None:
                usage = {**self._usage_in(), "output_tokens": self._reader.num_tokens}
                yield event("message_delta", delta=self._stop(piece), usage=usage)
        yield event("message_stop")

    def _stop(self, piece: RequestOutput) -> Json:
        if (
            piece.finish_reason is FinishReason.LENGTH
            and self._reader.num_tokens < self._max_tokens
        ):
            return {"stop_reason": "model_context_window_exceeded", "stop_sequence": None}
        return self._blocks.stop(piece)

    def _begin(self) -> Iterator[bytes]:
        """Comes with the first piece, since only then it is known what the cache had."""
        message = self._message([])
        message["usage"] = {**self._usage_in(), "output_tokens": 0}
        yield event("message_start", message=message)
        yield from self._blocks.begin()
        yield event("ping")

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
