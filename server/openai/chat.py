"""POST /v1/chat/completions: one request of the walk, from its body to its answer or events."""

from __future__ import annotations

import flask
import msgspec

from jaxserve.request import Score, TokenLogprobs
from server.body import read_json
from server.described import EVENTS, JSON, Description, described
from server.generation import Generation
from server.openai.chat_answer import ChatAnswer
from server.openai.fields import refusals
from server.openai.question import chat_question
from server.openai.schema import ChatBody
from server.scores import check_prompt_logprobs, read_scores
from server.services import Services


def chat_blueprint(services: Services) -> flask.Blueprint:
    """The chat route."""
    blueprint = flask.Blueprint("chat", __name__)

    @blueprint.post("/v1/chat/completions")
    @described(Description(body=ChatBody, refusals=refusals(ChatBody), answers=(JSON, EVENTS)))
    def chat_completions() -> flask.Response:
        """Answers a chat."""
        body = read_json(ChatBody, services.config.max_body_bytes)
        model = services.check_model(body.model)
        ask, style = chat_question(services, body)
        scores = _prompt_scores(services, body, ask.prompts)
        generation = Generation(services, ask)
        answer = ChatAnswer(
            services.tokenizer, body, model, generation.readers, scores, style=style
        )
        if body.stream:
            return generation.stream(answer.events(generation.pieces()))
        whole = answer.whole(generation.whole())
        return flask.Response(msgspec.json.encode(whole), mimetype="application/json")

    return blueprint


def _prompt_scores(
    services: Services, body: ChatBody, prompts: list[list[int]]
) -> list[TokenLogprobs] | None:
    """What is wanted of the prompt's own tokens, read before anything is answered."""
    if body.prompt_logprobs is None:
        return None
    check_prompt_logprobs(services, "prompt_logprobs")
    most = body.prompt_logprobs
    outputs = read_scores(services, prompts, Score.LOGPROBS, param="messages", logprobs=most)
    return outputs[0].logprobs or []
