"""Step 9 for OpenAI's Responses API: the answer to one request, as one object or as events."""

from __future__ import annotations

import itertools
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from jaxserve.errors import JaxserveError
from jaxserve.request import FinishReason, RequestOutput
from jaxserve.tokenizer.protocol import Tokenizer
from server import sse
from server.answers import AnswerReader
from server.errors import error_body
from server.openai.reasoning import ThoughtCounter
from server.openai.tools_message import MessageStyle
from server.responses.items import OutputItems
from server.responses.schema import ResponsesBody

Json = dict[str, Any]
#: What the object repeats of the request, with the value that a field has when it is left out.
_REPEATED: Json = {
    "instructions": None,
    "max_output_tokens": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "previous_response_id": None,
    "prompt_cache_key": None,
    "safety_identifier": None,
    "store": True,
    "temperature": 1.0,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_logprobs": 0,
    "top_p": 1.0,
    "user": None,
}


class ResponseAnswer:
    """Writes the answer to one request.

    keep: stores the finished object, or does nothing. style: how thoughts and calls of tools stand
    in the text, None for plain text.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        body: ResponsesBody,
        model: str,
        reader: AnswerReader,
        keep: Callable[[Json], None],
        style: MessageStyle | None = None,
    ) -> None:
        self._items = OutputItems(tokenizer, style, self._event)
        self._thoughts = ThoughtCounter(None if style is None else style.thinking, tokenizer)
        self._reader = reader
        self._keep = keep
        self._numbers = itertools.count()
        given = {name: getattr(body, name) for name in _REPEATED}
        self._head: Json = {
            "id": f"resp_{uuid.uuid4().hex}",
            "object": "response",
            "created_at": int(time.time()),
            "model": model,
            **{name: _REPEATED[name] if value is None else value for name, value in given.items()},
            "background": False,
            "reasoning": {"effort": None, "summary": None},
            "service_tier": "default",
            "truncation": "disabled",
        }

    def whole(self, answer: RequestOutput) -> Json:
        """The response object, from the complete answer; it is kept if that was asked for."""
        self._thoughts.push(answer.token_ids)
        for _ in self._items.push(answer):
            pass  # events that nobody asked for
        for _ in self._items.finish(cut=answer.finish_reason is FinishReason.LENGTH):
            pass
        return self._ended(answer)

    def events(self, pieces: Iterable[tuple[int, RequestOutput]]) -> Iterator[bytes]:
        """Every event with its number: created, the items part by part, and the end."""
        yield self._event("response.created", response=self._response("in_progress"))
        yield self._event("response.in_progress", response=self._response("in_progress"))
        for _, piece in pieces:
            self._thoughts.push(piece.token_ids)
            yield from self._items.push(piece)
            if piece.finish_reason is not None:
                yield from self._items.finish(cut=piece.finish_reason is FinishReason.LENGTH)
                whole = self._ended(piece)
                yield self._event(f"response.{whole['status']}", response=whole)

    def _ended(self, last: RequestOutput) -> Json:
        cut = last.finish_reason is FinishReason.LENGTH
        whole = self._response(
            "incomplete" if cut else "completed",
            output=self._items.items,
            incomplete_details={"reason": "max_output_tokens"} if cut else None,
            usage=self._usage(),
        )
        self._keep(whole)
        return whole

    def failed(self, error: Exception) -> bytes:
        """The two events that end a stream that cannot go on."""
        fields = error_body(error)["error"]
        known = isinstance(error, JaxserveError)
        words = {"code": "server_error", "message": fields["message"]}
        flat = {**words, "code": fields["code"] if known else None, "param": None}
        event = self._event("error", **flat, error=fields)  # clients look for either form
        return event + self._event(
            "response.failed", response=self._response("failed", error=words)
        )

    def _response(self, status: str, **fields: Any) -> Json:
        empty: Json = {"error": None, "incomplete_details": None, "output": [], "usage": None}
        return {**self._head, "status": status, **empty, **fields}

    def _usage(self) -> Json:
        reader = self._reader
        prompt = len(reader.request.prompt_ids)
        return {
            "input_tokens": prompt,
            "input_tokens_details": {
                "cached_tokens": reader.num_cached_tokens,
                "cache_write_tokens": 0,
            },
            "output_tokens": reader.num_tokens,
            "output_tokens_details": {"reasoning_tokens": self._thoughts.num_tokens},
            "total_tokens": prompt + reader.num_tokens,
        }

    def _event(self, name: str, /, **fields: Any) -> bytes:
        number = next(self._numbers)
        return sse.named_event(name, {"type": name, "sequence_number": number, **fields})
