"""An answer's pieces as Anthropic's content blocks: thoughts, text, and uses of tools (step 9)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from jaxserve.request import FinishReason, RequestOutput
from server import sse
from server.openai.tools_message import MessageStyle, join_deltas

Json = dict[str, Any]
_TEXT = "text"
_text_delta = {"type": "text_delta", "text": sse.TEXT_HERE}


class Blocks:
    """Reads one answer. style: how thoughts and calls stand in the text; None for plain text."""

    def __init__(self, style: MessageStyle | None) -> None:
        self._reader = None if style is None else style.reader()
        self._kind = ""
        self._index = -1
        self._text_event: sse.TextEvent | None = None

    def whole(self, answer: RequestOutput) -> list[Json]:
        """All blocks of a complete answer."""
        message = join_deltas(self._deltas(answer))
        blocks: list[Json] = []
        if message.get("reasoning_content"):
            blocks.append(_thinking(message["reasoning_content"]))
        if message["content"] or not message.get("tool_calls"):
            blocks.append({"type": "text", "text": message["content"] or ""})
        for call in message.get("tool_calls", ()):
            function = call["function"]
            given = _object(function["arguments"])
            blocks.append(_use(call["id"], function["name"], given))
        return blocks

    def begin(self) -> Iterator[bytes]:
        """What an answer of plain text begins with; other answers begin with what comes first."""
        if self._reader is None:
            yield from self._open(_TEXT, {"type": "text", "text": ""})

    def events(self, piece: RequestOutput) -> Iterator[bytes]:
        """The events of one piece; with the last one, the end of the last block."""
        for delta in self._deltas(piece):
            if delta.get("content"):
                yield from self._text(delta["content"])
            if delta.get("reasoning_content"):
                if self._kind != "thinking":
                    yield from self._open("thinking", _thinking(""))
                yield self._delta("thinking_delta", thinking=delta["reasoning_content"])
            for call in delta.get("tool_calls", ()):
                yield from self._call(call)
        if piece.finish_reason is not None:
            if self._index < 0:
                yield from self._open(_TEXT, {"type": "text", "text": ""})
            yield event("content_block_stop", index=self._index)

    def stop(self, piece: RequestOutput) -> Json:
        """Why the answer ended."""
        if piece.finish_reason is FinishReason.LENGTH:
            return {"stop_reason": "max_tokens", "stop_sequence": None}
        if isinstance(piece.stop_reason, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": piece.stop_reason}
        used = self._reader is not None and self._reader.num_calls
        return {"stop_reason": "tool_use" if used else "end_turn", "stop_sequence": None}

    def _deltas(self, piece: RequestOutput) -> Iterable[Json]:
        if self._reader is not None:
            return self._reader.push(piece.text, last=piece.finish_reason is not None)
        return [{"content": piece.text}] if piece.text else []

    def _text(self, text: str) -> Iterator[bytes]:
        if self._kind != _TEXT:
            yield from self._open(_TEXT, {"type": "text", "text": ""})
        if self._text_event is None:
            self._text_event = sse.TextEvent(
                {"type": "content_block_delta", "index": self._index, "delta": _text_delta},
                name="content_block_delta",
            )
        yield self._text_event(text)

    def _call(self, call: Json) -> Iterator[bytes]:
        function = call.get("function", {})
        if call.get("id") is not None:
            yield from self._open("tool_use", _use(call["id"], function["name"], {}))
        if function.get("arguments"):
            yield self._delta("input_json_delta", partial_json=function["arguments"])

    def _open(self, kind: str, block: Json) -> Iterator[bytes]:
        if self._index >= 0:
            yield event("content_block_stop", index=self._index)
        self._kind, self._text_event = kind, None
        self._index += 1
        yield event("content_block_start", index=self._index, content_block=block)

    def _delta(self, kind: str, **fields: Any) -> bytes:
        return event("content_block_delta", index=self._index, delta={"type": kind, **fields})


def event(name: str, /, **fields: Any) -> bytes:
    """One event; its name stands in it, too."""
    return sse.named_event(name, {"type": name, **fields})


def _thinking(text: str) -> Json:
    return {"type": "thinking", "thinking": text, "signature": ""}


def _use(call_id: str, name: str, given: Json) -> Json:
    return {"type": "tool_use", "id": call_id, "name": name, "input": given}


def _object(arguments: str) -> Json:
    """Arguments as an object; an empty one where the answer was cut inside them."""
    try:
        return dict(msgspec.json.decode(arguments, type=dict[str, Any]))
    except msgspec.MsgspecError:
        return {}
