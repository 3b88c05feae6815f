"""POST /v1/chat/completions: one request of the walk, from its body to its answer or events."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import flask
import msgspec

from jaxserve.request import RequestOutput
from jaxserve.routing.requests import Ask
from server import sse
from server.body import read_json
from server.generation import Generation
from server.openai.fields import refuse_unsupported
from server.openai.messages import read_messages
from server.openai.response import Json, answer_head, chat_logprobs, finish_fields, usage
from server.openai.sampling import choices, max_tokens_field, sampling_params
from server.openai.schema import ChatBody
from server.services import Services


def chat_blueprint(services: Services) -> flask.Blueprint:
    """The chat route."""
    blueprint = flask.Blueprint("chat", __name__)

    @blueprint.post("/v1/chat/completions")
    def chat_completions() -> flask.Response:
        body = read_json(ChatBody, services.config.max_body_bytes)
        model = services.check_model(body.model)
        refuse_unsupported(body)
        generation = Generation(services, _ask(services, body))
        if body.stream:
            return generation.stream(_events(services, body, model, generation))
        return _whole(services, body, model, generation)

    return blueprint


def _ask(services: Services, body: ChatBody) -> Ask:
    sampling = sampling_params(body, services.tokenizer, services.config)
    n = choices(body, services.config)
    prompt_ids = services.prompts.chat(
        read_messages(body.messages),
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=bool(body.continue_final_message),
        template_kwargs=body.chat_template_kwargs or {},
        keep_last=body.truncate_prompt_tokens,
    )
    return Ask(
        request_id=flask.g.request_id,
        prompts=[prompt_ids],
        n=n,
        sampling=sampling,
        priority=body.priority or 0,
        cache_salt=body.cache_salt or "",
        arrival=flask.g.arrival,
        max_tokens_param=max_tokens_field(body),
        prompt_param="messages",
    )


def _whole(
    services: Services, body: ChatBody, model: str, generation: Generation
) -> flask.Response:
    answers = generation.whole()
    answer = answer_head("chatcmpl", "chat.completion", model)
    answer["choices"] = [
        {
            "index": index,
            "message": {"role": "assistant", "content": piece.text, "refusal": None},
            "logprobs": chat_logprobs(services.tokenizer, piece.logprobs),
            **finish_fields(piece),
            **({"token_ids": piece.token_ids} if body.return_token_ids else {}),
        }
        for index, piece in enumerate(answers)
    ]
    answer["usage"] = usage(generation.readers, generation.n)
    if body.return_token_ids:
        answer["prompt_token_ids"] = generation.readers[0].request.prompt_ids
    return flask.Response(msgspec.json.encode(answer), mimetype="application/json")


def _events(
    services: Services, body: ChatBody, model: str, generation: Generation
) -> Iterator[bytes]:
    """Per choice: a role chunk, content chunks, and a finish chunk; then usage if asked for."""
    head = answer_head("chatcmpl", "chat.completion.chunk", model)
    plain = not (body.logprobs or body.return_token_ids)
    text_events: dict[int, sse.TextEvent] = {}
    for index, piece in generation.pieces():
        if index not in text_events:
            text_events[index] = sse.TextEvent(_chunk(head, index, {"content": sse.TEXT_HERE}))
            first = _chunk(head, index, {"role": "assistant", "content": ""})
            if body.return_token_ids:
                first["prompt_token_ids"] = generation.readers[index].request.prompt_ids
            yield sse.event(first)
        extra = {} if plain else _extra(services, body, piece)
        if piece.text:
            if plain:
                yield text_events[index](piece.text)
            else:
                yield sse.event(_chunk(head, index, {"content": piece.text}, **extra))
                extra = {}
        if piece.finish_reason is not None:
            yield sse.event(_chunk(head, index, {}, **extra, **finish_fields(piece)))
    if body.stream_options is not None and body.stream_options.include_usage:
        yield sse.event({**head, "choices": [], "usage": usage(generation.readers, generation.n)})


def _chunk(head: Json, index: int, delta: Json, **fields: Any) -> Json:
    choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None, **fields}
    return {**head, "choices": [choice]}


def _extra(services: Services, body: ChatBody, piece: RequestOutput) -> Json:
    extra: Json = {}
    if piece.logprobs:
        extra["logprobs"] = chat_logprobs(services.tokenizer, piece.logprobs)
    if body.return_token_ids:
        extra["token_ids"] = piece.token_ids
    return extra
