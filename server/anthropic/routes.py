"""POST /v1/messages and /v1/messages/count_tokens.

The `anthropic-version` header may be left out; given, it must be one that this server speaks. They
differ in what is refused; temperature, top_p and top_k work with either of them here.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import flask
import msgspec

from jaxserve.errors import RequestError
from jaxserve.routing.limits import capacity
from jaxserve.routing.requests import Ask
from server import sse
from server.anthropic.answer import MessageAnswer
from server.anthropic.errors import anthropic_error
from server.anthropic.read import to_chat
from server.anthropic.schema import (
    PROMPT_REFUSALS,
    REFUSALS,
    CountTokensBody,
    MessagesBody,
)
from server.body import read_json
from server.described import EVENTS, JSON, Description, described
from server.errors import error_response
from server.generation import Generation
from server.openai.question import chat_question
from server.openai.tools_message import MessageStyle
from server.services import Services

VERSIONS = ("2023-06-01", "2026-10-21")


def messages_blueprint(services: Services) -> flask.Blueprint:
    """Both routes, whose errors have Anthropic's shape."""
    blueprint = flask.Blueprint("messages", __name__)
    blueprint.register_error_handler(Exception, _error_response)
    blueprint.after_request(_send_request_id)

    @blueprint.post("/v1/messages")
    @described(Description(body=MessagesBody, refusals=REFUSALS, answers=(JSON, EVENTS)))
    def messages() -> flask.Response:
        """Answers a conversation, as Anthropic's API does."""
        _check_version()
        body = read_json(MessagesBody, services.config.max_body_bytes)
        model = services.check_model(body.model)
        ask, style = _ask(services, body)
        generation = Generation(services, ask)
        answer = MessageAnswer(model, generation.readers[0], body.max_tokens, style)
        if body.stream:
            failed = functools.partial(_error_event, request_id=flask.g.request_id)
            return generation.stream(answer.events(generation.pieces()), done=b"", failed=failed)
        whole = answer.whole(generation.whole()[0])
        return flask.Response(msgspec.json.encode(whole), mimetype="application/json")

    @blueprint.post("/v1/messages/count_tokens")
    @described(Description(body=CountTokensBody, refusals=PROMPT_REFUSALS))
    def count_tokens() -> dict[str, Any]:
        """How many tokens the prompt of such a conversation has."""
        _check_version()
        body = read_json(CountTokensBody, services.config.max_body_bytes)
        services.check_model(body.model)
        return {"input_tokens": len(_ask(services, body)[0].prompts[0])}

    return blueprint


def _ask(
    services: Services, body: MessagesBody | CountTokensBody
) -> tuple[Ask, MessageStyle | None]:
    """What is asked, and how the answer is to be read."""
    ask, style = chat_question(services, to_chat(body))
    return _within_context(services, ask), style


def _within_context(services: Services, ask: Ask) -> Ask:
    """Anthropic's clients ask for more tokens than there is room for: the context's end is the limit.

    The answer says so then, with the stop_reason model_context_window_exceeded.
    """
    _, info = services.engine()
    room = capacity(info) - len(ask.prompts[0])
    wanted = ask.sampling.max_tokens
    if wanted is None or wanted <= room:
        return ask
    return dataclasses.replace(ask, sampling=dataclasses.replace(ask.sampling, max_tokens=None))


def _check_version() -> None:
    given = flask.request.headers.get("anthropic-version", VERSIONS[0])
    if given not in VERSIONS:
        raise RequestError(
            f"anthropic-version is {given[:40]!r}; this server speaks {' and '.join(VERSIONS)}",
            param="anthropic-version",
        )


def _error_event(error: Exception, *, request_id: str) -> bytes:
    return sse.named_event("error", anthropic_error(error, request_id))


def _error_response(error: Exception) -> flask.Response:
    response = error_response(error)
    if response.content_length or response.data:
        response.set_data(msgspec.json.encode(anthropic_error(error, flask.g.request_id)))
    return response


def _send_request_id(response: flask.Response) -> flask.Response:
    response.headers["request-id"] = flask.g.request_id
    return response
