"""An answer's text as a message: thoughts, content and calls of tools, in pieces or whole (step 9)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from jaxserve.request import FinishReason
from server.openai.reasoning import Thinking, ThinkingReader
from server.openai.tools_formats import ToolFormat
from server.openai.tools_parse import CallReader, Delta

Json = dict[str, Any]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MessageStyle:
    """How to read an answer.

    tools: None where nothing is a call. names: of the tools. parallel: more than one call counts.
    thinking: None where nothing is a thought. shown_ids: special tokens that the text must show.
    """

    tools: ToolFormat | None = None
    names: frozenset[str] = frozenset()
    parallel: bool = True
    thinking: Thinking | None = None
    shown_ids: frozenset[int] = frozenset()

    def reader(self) -> MessageReader:
        """A reader for one answer."""
        return MessageReader(self)


class MessageReader:
    """Reads one answer; `num_calls` are its calls so far."""

    def __init__(self, style: MessageStyle) -> None:
        self._thinking = ThinkingReader(style.thinking) if style.thinking is not None else None
        self._calls = (
            CallReader(style.tools, style.names, parallel=style.parallel)
            if style.tools is not None
            else None
        )

    @property
    def num_calls(self) -> int:
        """Calls of which at least the name was read."""
        return 0 if self._calls is None else self._calls.num_calls

    def push(self, text: str, *, last: bool = False) -> list[Delta]:
        """The deltas that may be shown now; last: no more text comes."""
        thoughts, answer = "", text
        if self._thinking is not None:
            thoughts, answer = self._thinking.push(text)
            if last:
                more_thoughts, more_answer = self._thinking.finish()
                thoughts, answer = thoughts + more_thoughts, answer + more_answer
        deltas: list[Delta] = [{"reasoning_content": thoughts}] if thoughts else []
        if self._calls is None:
            return [*deltas, {"content": answer}] if answer else deltas
        deltas += self._calls.push(answer)
        return deltas + (self._calls.finish() if last else [])

    def finish_reason(self, reason: FinishReason | None) -> str | None:
        """`tool_calls` for an answer that ended by itself with calls in it."""
        if reason is FinishReason.STOP and self.num_calls:
            return "tool_calls"
        return None if reason is None else str(reason)


def join_deltas(deltas: Iterable[Delta]) -> Json:
    """The message that deltas make; content is None where there is nothing but calls."""
    content: list[str] = []
    thoughts: list[str] = []
    calls: list[Json] = []
    for delta in deltas:
        content.append(delta.get("content", ""))
        thoughts.append(delta.get("reasoning_content", ""))
        for part in delta.get("tool_calls", ()):
            if part["index"] == len(calls):
                function = dict(part["function"])
                calls.append({"id": part["id"], "type": "function", "function": function})
            else:
                calls[part["index"]]["function"]["arguments"] += part["function"]["arguments"]
    text = "".join(content)
    message: Json = {"role": "assistant", "content": text, "refusal": None}
    if any(thoughts):
        message["reasoning_content"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
        message["content"] = text or None
    return message
