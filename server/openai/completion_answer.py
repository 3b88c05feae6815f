"""Step 9 for completions: the answer to one request, as one object or as events.

Knows neither Flask's routes nor the engine: `jaxserve batch` comes this way, too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence

from jaxserve.request import RequestOutput, TokenLogprobs
from jaxserve.tokenizer.protocol import Tokenizer
from server import sse
from server.answers import AnswerReader
from server.openai.ask import read_texts
from server.openai.response import (
    CompletionLogprobs,
    Json,
    answer_head,
    finish_fields,
    prompt_logprobs,
    usage,
)
from server.openai.schema import CompletionBody


class CompletionAnswer:
    """Writes the answer to one request. readers: one per answer, those of a prompt side by side.

    scores: of each prompt, the log-probabilities of its tokens from the second on, if wanted.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        body: CompletionBody,
        model: str,
        readers: Sequence[AnswerReader],
        scores: Sequence[Sequence[TokenLogprobs]] = (),
    ) -> None:
        self._tokenizer = tokenizer
        self._body = body
        self._readers = readers
        self._scores = scores
        self._prompts = read_texts(body.prompt)
        self._n = len(readers) // len(self._prompts)
        self._head = answer_head("cmpl", "text_completion", model)
        self._logprobs = [
            CompletionLogprobs(tokenizer, skip_special=reader.request.sampling.skip_special_tokens)
            for reader in readers
        ]

    def whole(self, answers: Sequence[RequestOutput]) -> Json:
        """The answer object, from all complete answers."""
        choices = [
            self._choice(index, piece, self._echo(index) + piece.text, first=True)
            for index, piece in enumerate(answers)
        ]
        return {**self._head, "choices": choices, "usage": self._usage()}

    def events(self, pieces: Iterable[tuple[int, RequestOutput]]) -> Iterator[bytes]:
        """Per choice: text chunks, then one without text that says why it ended; then usage."""
        plain = self._body.logprobs is None and not self._body.return_token_ids
        text_events: dict[int, sse.TextEvent] = {}
        for index, piece in pieces:
            text, first = piece.text, index not in text_events
            if first:
                empty = {"index": index, "text": sse.TEXT_HERE}
                fields = {"logprobs": None, "finish_reason": None}
                text_events[index] = sse.TextEvent({**self._head, "choices": [empty | fields]})
                text = self._echo(index) + text
            if text and plain:
                yield text_events[index](text)
            elif text:
                choice = self._choice(index, piece, text, first=first)
                choice |= {"finish_reason": None, "stop_reason": None}
                yield sse.event({**self._head, "choices": [choice]})
            if piece.finish_reason is not None:
                last = {"index": index, "text": "", "logprobs": None, **finish_fields(piece)}
                if not text and not plain:
                    last = self._choice(index, piece, "", first=first)
                yield sse.event({**self._head, "choices": [last]})
        options = self._body.stream_options
        if options is not None and options.include_usage:
            yield sse.event({**self._head, "choices": [], "usage": self._usage()})

    def _choice(self, index: int, piece: RequestOutput, text: str, *, first: bool) -> Json:
        logprobs = self._echoed_logprobs(index) if first else None
        made = self._logprobs[index](piece.logprobs)
        if logprobs is not None and made is not None:
            made = {name: logprobs[name] + made[name] for name in logprobs}
        choice: Json = {"index": index, "text": text, "logprobs": made, **finish_fields(piece)}
        if first and self._body.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_logprobs(self._tokenizer, *self._score(index))
        if self._body.return_token_ids:
            choice["token_ids"] = piece.token_ids
            if first:
                choice["prompt_token_ids"] = self._readers[index].request.prompt_ids
        return choice

    def _score(self, index: int) -> tuple[int, Sequence[TokenLogprobs]]:
        """The first token of an answer's prompt, and what is known of the others."""
        return self._readers[index].request.prompt_ids[0], self._scores[index // self._n]

    def _echoed_logprobs(self, index: int) -> Json | None:
        if not self._body.echo or self._body.logprobs is None:
            return None
        first, tokens = self._score(index)
        wanted = self._body.logprobs
        cut = [
            dataclasses.replace(
                token, top_ids=token.top_ids[:wanted], top_logprobs=token.top_logprobs[:wanted]
            )
            for token in tokens
        ]
        return self._logprobs[index].prompt(first, cut)

    def _echo(self, index: int) -> str:
        """The prompt's text, if it was asked for."""
        if not self._body.echo:
            return ""
        prompt = self._prompts[index // self._n]
        if isinstance(prompt, str) and self._body.truncate_prompt_tokens is None:
            return prompt
        ids = self._readers[index].request.prompt_ids
        return self._tokenizer.decode(ids, skip_special=True)

    def _usage(self) -> Json:
        return usage(self._readers, self._n)
