"""Step 9 for chats: the answer to one request, as one object or as events.

Knows neither Flask's routes nor the engine: `jaxserve batch` comes this way, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from jaxserve.request import RequestOutput, TokenLogprobs
from jaxserve.tokenizer.protocol import Tokenizer
from server import sse
from server.answers import AnswerReader
from server.openai.reasoning import ThoughtCounter
from server.openai.response import (
    Json,
    answer_head,
    chat_logprobs,
    finish_fields,
    prompt_logprobs,
    usage,
)
from server.openai.schema import ChatBody
from server.openai.tools_message import MessageStyle, join_deltas


class ChatAnswer:
    """Writes the answer to one request. readers: one per choice.

    scores: log-probabilities of the prompt's tokens from the second on, if wanted. style: how
    thoughts and calls of tools stand in the text; None for plain text.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        body: ChatBody,
        model: str,
        readers: Sequence[AnswerReader],
        scores: Sequence[TokenLogprobs] | None = None,
        *,
        style: MessageStyle | None = None,
    ) -> None:
        self._messages = None if style is None else [style.reader() for _ in readers]
        thinking = None if style is None else style.thinking
        self._thoughts = [ThoughtCounter(thinking, tokenizer) for _ in readers]
        self._scores = scores
        self._tokenizer = tokenizer
        self._body = body
        self._model = model
        self._readers = readers

    def whole(self, answers: Sequence[RequestOutput]) -> Json:
        """The answer object, from the complete answer of each choice."""
        answer = answer_head("chatcmpl", "chat.completion", self._model)
        for counter, piece in zip(self._thoughts, answers, strict=True):
            counter.push(piece.token_ids)
        answer["choices"] = [
            {
                "index": index,
                "message": self._message(index, piece),
                "logprobs": chat_logprobs(self._tokenizer, piece.logprobs),
                **self._finish_fields(index, piece),
                **({"token_ids": piece.token_ids} if self._body.return_token_ids else {}),
            }
            for index, piece in enumerate(answers)
        ]
        answer["usage"] = self._usage()
        if self._body.return_token_ids:
            answer["prompt_token_ids"] = self._readers[0].request.prompt_ids
        if self._scores is not None:
            first = self._readers[0].request.prompt_ids[0]
            answer["prompt_logprobs"] = prompt_logprobs(self._tokenizer, first, self._scores)
        return answer

    def events(self, pieces: Iterable[tuple[int, RequestOutput]]) -> Iterator[bytes]:
        """Per choice: a role chunk, content chunks, and a finish chunk; then usage if asked for."""
        body = self._body
        head = answer_head("chatcmpl", "chat.completion.chunk", self._model)
        plain = not (body.logprobs or body.return_token_ids)
        text_events: dict[int, sse.TextEvent] = {}
        for index, piece in pieces:
            self._thoughts[index].push(piece.token_ids)
            if index not in text_events:
                text_events[index] = sse.TextEvent(_chunk(head, index, {"content": sse.TEXT_HERE}))
                first = _chunk(head, index, {"role": "assistant", "content": ""})
                if body.return_token_ids:
                    first["prompt_token_ids"] = self._readers[index].request.prompt_ids
                yield sse.event(first)
            extra = {} if plain else self._extra(piece)
            if self._messages is not None:
                last = piece.finish_reason is not None
                for delta in self._messages[index].push(piece.text, last=last):
                    yield sse.event(_chunk(head, index, delta, **extra))
                    extra = {}
            elif piece.text:
                if plain:
                    yield text_events[index](piece.text)
                else:
                    yield sse.event(_chunk(head, index, {"content": piece.text}, **extra))
                    extra = {}
            if piece.finish_reason is not None:
                finish = self._finish_fields(index, piece)
                yield sse.event(_chunk(head, index, {}, **extra, **finish))
            elif extra.get("logprobs") or extra.get("token_ids"):
                yield sse.event(_chunk(head, index, {}, **extra))
        if body.stream_options is not None and body.stream_options.include_usage:
            yield sse.event({**head, "choices": [], "usage": self._usage()})

    def _message(self, index: int, piece: RequestOutput) -> Json:
        if self._messages is None:
            return {"role": "assistant", "content": piece.text, "refusal": None}
        return join_deltas(self._messages[index].push(piece.text, last=True))

    def _finish_fields(self, index: int, piece: RequestOutput) -> Json:
        fields = finish_fields(piece)
        if self._messages is not None:
            fields["finish_reason"] = self._messages[index].finish_reason(piece.finish_reason)
        return fields

    def _extra(self, piece: RequestOutput) -> Json:
        extra: Json = {}
        if piece.logprobs:
            extra["logprobs"] = chat_logprobs(self._tokenizer, piece.logprobs)
        if self._body.return_token_ids:
            extra["token_ids"] = piece.token_ids
        return extra

    def _usage(self) -> Json:
        reasoning = sum(counter.num_tokens for counter in self._thoughts)
        return usage(self._readers, len(self._readers), reasoning)


def _chunk(head: Json, index: int, delta: Json, **fields: Any) -> Json:
    choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None, **fields}
    return {**head, "choices": [choice]}
