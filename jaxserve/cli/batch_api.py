"""Lines of a batch file as the HTTP API would take and answer them: the server's own code does it.

The command line is the one part of jaxserve that stands above `server`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from jaxserve.config import ServerConfig
from jaxserve.context.chat_template import ChatTemplate
from jaxserve.errors import NotFoundError, RequestError
from jaxserve.messages import EngineInfo, Output
from jaxserve.offline.batch_input import LineRequest
from jaxserve.request import GenerationRequest, RequestOutput, TokenOutput
from jaxserve.routing.requests import Ask, make_generation_requests
from jaxserve.tokenizer.protocol import Tokenizer
from server.answers import AnswerReader, join
from server.errors import error_body, error_status
from server.openai.ask import chat_ask, completion_ask
from server.openai.chat_answer import ChatAnswer
from server.openai.completion_answer import CompletionAnswer
from server.openai.decode import decode_body
from server.openai.schema import ChatBody, CompletionBody, GenerationBody
from server.prompts import Prompts

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


class OpenAIApi:
    """Reads bodies and describes errors for one model; follows `jaxserve.offline.batch_run.Api`."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        info: EngineInfo,
        config: ServerConfig,
    ) -> None:
        self._tokenizer = tokenizer
        self._prompts = Prompts(tokenizer, template, max_bytes=config.max_prompt_bytes)
        self._info = info
        self._config = config

    def read_body(self, request: LineRequest, request_id: str) -> Answers:
        """What the line asks for. Raises RequestError naming the field."""
        if request.url == CHAT:
            body: ChatBody | CompletionBody = decode_body(request.body, ChatBody)
        elif request.url == COMPLETIONS:
            body = decode_body(request.body, CompletionBody)
        else:
            raise NotFoundError(
                f"url is {request.url[:64]!r}; it must be {CHAT} or {COMPLETIONS}", param="url"
            )
        self._check(body)
        ask = self._ask(body, request_id)
        requests = make_generation_requests(ask, self._info)
        return Answers(self._tokenizer, body, self._info.model_name, requests)

    def describe(self, error: Exception) -> tuple[int, dict[str, Any]]:
        """The status and body that the HTTP API would send."""
        return error_status(error), error_body(error)

    def _check(self, body: GenerationBody) -> None:
        if body.model is not None and body.model != self._info.model_name:
            raise NotFoundError(
                f"the model {body.model[:200]!r} does not exist; this run has "
                f"{self._info.model_name!r} (--served-name gives it another name)",
                param="model",
                code="model_not_found",
            )
        if body.prompt_logprobs is not None:
            raise RequestError(
                "prompt_logprobs are not available here; leave it out",
                param="prompt_logprobs",
                code="unsupported_parameter",
            )
        if isinstance(body, CompletionBody) and body.echo:
            self._check_echo(body)
        if body.stream:
            raise RequestError("stream is not possible in a batch; leave it out", param="stream")

    def _check_echo(self, body: CompletionBody) -> None:
        if body.logprobs is not None or body.max_tokens == 0:
            raise RequestError(
                "echo with logprobs, or without tokens, is not available here; leave it out",
                param="echo",
                code="unsupported_parameter",
            )

    def _ask(self, body: ChatBody | CompletionBody, request_id: str) -> Ask:
        arrival = time.monotonic()
        parts = (self._tokenizer, self._prompts, self._config)
        if isinstance(body, ChatBody):
            return chat_ask(body, *parts, request_id=request_id, arrival=arrival)
        return completion_ask(body, *parts, request_id=request_id, arrival=arrival)


class Answers:
    """The answers to one body; follows `jaxserve.offline.batch_run.OpenAnswer`."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        body: ChatBody | CompletionBody,
        model: str,
        requests: Sequence[GenerationRequest],
    ) -> None:
        self.requests = requests
        self._readers = [AnswerReader(tokenizer, request) for request in requests]
        self._pieces: list[list[RequestOutput]] = [[] for _ in requests]
        self._writer: ChatAnswer | CompletionAnswer
        if isinstance(body, ChatBody):
            self._writer = ChatAnswer(tokenizer, body, model, self._readers)
        else:
            self._writer = CompletionAnswer(tokenizer, body, model, self._readers)

    def read(self, index: int, output: TokenOutput) -> bool:
        """Takes in what came for one answer; True when it is complete."""
        reason = output.finish_reason
        reader = self._readers[index]
        piece = reader.read(
            Output(
                rid=index,
                token_ids=output.token_ids,
                finish_reason=None if reason is None else str(reason),
                num_cached_tokens=output.num_cached_tokens,
                logprobs=output.logprobs,
            )
        )
        if piece is not None:
            self._pieces[index].append(piece)
        return reader.finished

    def whole(self) -> dict[str, Any]:
        """The answer's body."""
        return self._writer.whole([_join(pieces) for pieces in self._pieces])


def _join(pieces: Sequence[RequestOutput]) -> RequestOutput:
    whole = pieces[0]
    for piece in pieces[1:]:
        whole = join(whole, piece)
    return whole
