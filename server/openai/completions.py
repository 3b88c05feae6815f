"""POST /v1/completions: raw prompts, without a chat template.

The caller writes the whole prompt, so the text of a special token in it is that token.
"""

from __future__ import annotations

import flask
import msgspec

from jaxserve.request import FinishReason, RequestOutput, Score, TokenLogprobs
from jaxserve.routing.requests import Ask, make_generation_requests
from server.answers import AnswerReader
from server.body import read_json
from server.described import EVENTS, JSON, Description, described
from server.generation import Generation
from server.openai.ask import completion_ask
from server.openai.completion_answer import CompletionAnswer
from server.openai.fields import refusals
from server.openai.schema import CompletionBody
from server.scores import check_prompt_logprobs, read_scores
from server.services import Services


def completions_blueprint(services: Services) -> flask.Blueprint:
    """The completions route."""
    blueprint = flask.Blueprint("completions", __name__)

    @blueprint.post("/v1/completions")
    @described(
        Description(body=CompletionBody, refusals=refusals(CompletionBody), answers=(JSON, EVENTS))
    )
    def completions() -> flask.Response:
        """Goes on from a text, or from several."""
        body = read_json(CompletionBody, services.config.max_body_bytes)
        model = services.check_model(body.model)
        ask = completion_ask(
            body,
            services.tokenizer,
            services.prompts,
            services.config,
            request_id=flask.g.request_id,
            arrival=flask.g.arrival,
        )
        scores = _prompt_scores(services, body, ask.prompts)
        if body.max_tokens == 0:
            return _only_echo(services, body, model, ask, scores)
        generation = Generation(services, ask)
        answer = CompletionAnswer(services.tokenizer, body, model, generation.readers, scores)
        if body.stream:
            return generation.stream(answer.events(generation.pieces()))
        whole = answer.whole(generation.whole())
        return flask.Response(msgspec.json.encode(whole), mimetype="application/json")

    return blueprint


def _prompt_scores(
    services: Services, body: CompletionBody, prompts: list[list[int]]
) -> list[list[TokenLogprobs]]:
    """What is wanted of the prompts' own tokens, read before anything is answered."""
    echoed = body.logprobs if body.echo else None
    wanted = [count for count in (echoed, body.prompt_logprobs) if count is not None]
    if not wanted:
        return []
    check_prompt_logprobs(services, "echo" if body.prompt_logprobs is None else "prompt_logprobs")
    most = max(wanted)
    outputs = read_scores(services, prompts, Score.LOGPROBS, param="prompt", logprobs=most)
    return [output.logprobs or [] for output in outputs]


def _only_echo(
    services: Services,
    body: CompletionBody,
    model: str,
    ask: Ask,
    scores: list[list[TokenLogprobs]],
) -> flask.Response:
    """The answer to max_tokens 0: the prompt, and nothing generated."""
    _, info = services.engine()
    readers = [
        AnswerReader(services.tokenizer, request) for request in make_generation_requests(ask, info)
    ]
    nothing = [
        RequestOutput(
            request_id=reader.request.request_id,
            text="",
            token_ids=[],
            num_prompt_tokens=len(reader.request.prompt_ids),
            logprobs=None if body.logprobs is None else [],
            finish_reason=FinishReason.LENGTH,
        )
        for reader in readers
    ]
    answer = CompletionAnswer(services.tokenizer, body, model, readers, scores)
    whole = answer.whole(nothing)
    return flask.Response(msgspec.json.encode(whole), mimetype="application/json")
