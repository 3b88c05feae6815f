"""POST /v1/completions: raw prompts, without a chat template.

The caller writes the whole prompt, so the text of a special token in it is that token.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import flask
import msgspec

from jaxserve.errors import RequestError
from jaxserve.request import RequestOutput
from jaxserve.routing.requests import Ask
from server import sse
from server.body import read_json
from server.generation import Generation
from server.openai.fields import refuse_unsupported
from server.openai.response import CompletionLogprobs, Json, answer_head, finish_fields, usage
from server.openai.sampling import choices, sampling_params
from server.openai.schema import CompletionBody
from server.services import Services

#: Prompts in one request.
MAX_PROMPTS = 256


def completions_blueprint(services: Services) -> flask.Blueprint:
    """The completions route."""
    blueprint = flask.Blueprint("completions", __name__)

    @blueprint.post("/v1/completions")
    def completions() -> flask.Response:
        body = read_json(CompletionBody, services.config.max_body_bytes)
        model = services.check_model(body.model)
        refuse_unsupported(body)
        if body.echo and body.logprobs is not None:
            raise RequestError(
                "echo with logprobs is not supported: the prompt's are not computed",
                param="echo",
                code="unsupported_parameter",
            )
        prompts = _prompts(body.prompt)
        generation = Generation(services, _ask(services, body, prompts))
        answer = _Answer(services, body, model, generation, prompts)
        return generation.stream(answer.events()) if body.stream else answer.whole()

    return blueprint


def _prompts(prompt: str | list[Any]) -> list[str | list[int]]:
    """A string, a list of strings, token ids, or a list of lists of them: always as a list."""
    items = [prompt] if isinstance(prompt, str) or _is_ids(prompt) else prompt
    if not items:
        raise RequestError("prompt must not be empty", param="prompt")
    if len(items) > MAX_PROMPTS:
        raise RequestError(
            f"prompt holds {len(items)} prompts; at most {MAX_PROMPTS} are taken", param="prompt"
        )
    if all(isinstance(item, str) for item in items) or all(_is_ids(item) for item in items):
        return list(items)
    raise RequestError(
        "prompt must be a string, a list of strings, a list of token ids or a list of such lists",
        param="prompt",
        code="invalid_type",
    )


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(item) is int for item in value)


def _ask(services: Services, body: CompletionBody, prompts: list[str | list[int]]) -> Ask:
    sampling = sampling_params(body, services.tokenizer, services.config)
    n = choices(body, services.config)
    if len(prompts) * n > MAX_PROMPTS:
        raise RequestError(
            f"{len(prompts)} prompts with n {n} make {len(prompts) * n} answers; at most "
            f"{MAX_PROMPTS} are taken",
            param="n",
        )
    ids = services.prompts.texts(
        prompts, add_bos=body.add_special_tokens, keep_last=body.truncate_prompt_tokens
    )
    return Ask(
        request_id=flask.g.request_id,
        prompts=ids,
        n=n,
        sampling=sampling,
        priority=body.priority or 0,
        cache_salt=body.cache_salt or "",
        arrival=flask.g.arrival,
    )


class _Answer:
    """Writes the answer to one request, whole or in chunks."""

    def __init__(
        self,
        services: Services,
        body: CompletionBody,
        model: str,
        generation: Generation,
        prompts: list[str | list[int]],
    ) -> None:
        self._services = services
        self._body = body
        self._generation = generation
        self._prompts = prompts
        self._head = answer_head("cmpl", "text_completion", model)
        self._logprobs = [
            CompletionLogprobs(
                services.tokenizer, skip_special=reader.request.sampling.skip_special_tokens
            )
            for reader in generation.readers
        ]

    def whole(self) -> flask.Response:
        pieces = self._generation.whole()
        choices = [
            self._choice(index, piece, self._echo(index) + piece.text, first=True)
            for index, piece in enumerate(pieces)
        ]
        answer = {**self._head, "choices": choices, "usage": self._usage()}
        return flask.Response(msgspec.json.encode(answer), mimetype="application/json")

    def events(self) -> Iterator[bytes]:
        """Per choice: text chunks, then one without text that says why it ended; then usage."""
        plain = self._body.logprobs is None and not self._body.return_token_ids
        text_events: dict[int, sse.TextEvent] = {}
        for index, piece in self._generation.pieces():
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
        choice: Json = {
            "index": index,
            "text": text,
            "logprobs": self._logprobs[index](piece.logprobs),
            **finish_fields(piece),
        }
        if self._body.return_token_ids:
            choice["token_ids"] = piece.token_ids
            if first:
                choice["prompt_token_ids"] = self._generation.readers[index].request.prompt_ids
        return choice

    def _echo(self, index: int) -> str:
        """The prompt's text, if it was asked for."""
        if not self._body.echo:
            return ""
        prompt = self._prompts[index // self._generation.n]
        if isinstance(prompt, str) and self._body.truncate_prompt_tokens is None:
            return prompt
        ids = self._generation.readers[index].request.prompt_ids
        return self._services.tokenizer.decode(ids, skip_special=True)

    def _usage(self) -> Json:
        return usage(self._generation.readers, self._generation.n)
