"""An answer's pieces as output items of OpenAI's Responses API: thoughts, text, calls (step 9)."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from jaxserve.request import RequestOutput
from jaxserve.tokenizer.protocol import Tokenizer
from server.openai.response import chat_logprobs
from server.openai.tools_message import MessageStyle

Json = dict[str, Any]
_MESSAGE, _REASONING, _CALL = "message", "reasoning", "function_call"
_IDS = {_MESSAGE: "msg", _REASONING: "rs", _CALL: "fc"}


class OutputItems:
    """Reads one answer; `items` are those that are finished.

    style: how thoughts and calls stand in the text, None for plain text. event: writes one event.
    """

    def __init__(
        self, tokenizer: Tokenizer, style: MessageStyle | None, event: Callable[..., bytes]
    ) -> None:
        self.items: list[Json] = []
        self._tokenizer = tokenizer
        self._reader = None if style is None else style.reader()
        self._event = event
        self._open: Json | None = None
        self._text: list[str] = []
        self._logprobs: list[Json] = []

    def push(self, piece: RequestOutput) -> Iterator[bytes]:
        """The events of one piece. Log-probabilities go with the text that they come with."""
        logprobs = self._new_logprobs(piece)
        for delta in self._deltas(piece):
            if delta.get("content"):
                yield from self._add_text(delta["content"], logprobs)
                logprobs = []
            if delta.get("reasoning_content"):
                yield from self._add_thought(delta["reasoning_content"])
            for call in delta.get("tool_calls", ()):
                yield from self._add_call(call)

    def finish(self, *, cut: bool) -> Iterator[bytes]:
        """The events that end the answer; cut: it was not complete."""
        if self._open is None and not self.items:
            yield from self._begin(_MESSAGE)
        if self._open is not None:
            yield from self._end("incomplete" if cut else "completed")

    def _deltas(self, piece: RequestOutput) -> Iterable[Json]:
        if self._reader is not None:
            return self._reader.push(piece.text, last=piece.finish_reason is not None)
        return [{"content": piece.text}] if piece.text else []

    def _new_logprobs(self, piece: RequestOutput) -> list[Json]:
        found = chat_logprobs(self._tokenizer, piece.logprobs)
        return [] if found is None else list(found["content"])

    def _add_text(self, text: str, logprobs: list[Json]) -> Iterator[bytes]:
        yield from self._begin(_MESSAGE)
        self._text.append(text)
        self._logprobs += logprobs
        name = "response.output_text.delta"
        yield self._event(name, **self._at_part(), delta=text, logprobs=logprobs)

    def _add_thought(self, text: str) -> Iterator[bytes]:
        yield from self._begin(_REASONING)
        self._text.append(text)
        yield self._event("response.reasoning_text.delta", **self._at_part(), delta=text)

    def _add_call(self, call: Json) -> Iterator[bytes]:
        function = call.get("function", {})
        if call.get("id") is not None:
            fields = {"call_id": call["id"], "name": function["name"], "arguments": ""}
            yield from self._begin(_CALL, anew=True, **fields)
        if function.get("arguments"):
            self._text.append(function["arguments"])
            name = "response.function_call_arguments.delta"
            yield self._event(name, **self._at(), delta=function["arguments"])

    def _begin(self, kind: str, *, anew: bool = False, **fields: Any) -> Iterator[bytes]:
        """Opens an item of this kind, unless one is open."""
        if self._open is not None and self._open["type"] == kind and not anew:
            return
        if self._open is not None:
            yield from self._end("completed")
        empty: Json = {_MESSAGE: {"role": "assistant", "content": []}, _REASONING: {"summary": []}}
        item_id = f"{_IDS[kind]}_{uuid.uuid4().hex}"
        begun = {"id": item_id, "type": kind, "status": "in_progress"}
        self._open = {**begun, **empty.get(kind, {}), **fields}
        self._text, self._logprobs = [], []
        index = len(self.items)
        yield self._event("response.output_item.added", output_index=index, item=self._open)
        if kind != _CALL:
            part = self._part("", [])
            yield self._event("response.content_part.added", **self._at_part(), part=part)

    def _end(self, status: str) -> Iterator[bytes]:
        """Closes the open item."""
        assert self._open is not None
        text, kind = "".join(self._text), self._open["type"]
        item = {**self._open, "status": status}
        if kind == _CALL:
            item["arguments"] = text
            done, name = "response.function_call_arguments.done", item["name"]
            yield self._event(done, **self._at(), name=name, arguments=text)
        else:
            part = self._part(text, self._logprobs)
            item["content"] = [part]
            at = self._at_part()
            if kind == _MESSAGE:
                done = "response.output_text.done"
                yield self._event(done, **at, text=text, logprobs=self._logprobs)
            else:
                yield self._event("response.reasoning_text.done", **at, text=text)
            yield self._event("response.content_part.done", **at, part=part)
        yield self._event("response.output_item.done", output_index=len(self.items), item=item)
        self.items.append(item)
        self._open = None

    def _part(self, text: str, logprobs: list[Json]) -> Json:
        assert self._open is not None
        if self._open["type"] == _REASONING:
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}

    def _at(self) -> Json:
        assert self._open is not None
        return {"item_id": self._open["id"], "output_index": len(self.items)}

    def _at_part(self) -> Json:
        return {**self._at(), "content_index": 0}
