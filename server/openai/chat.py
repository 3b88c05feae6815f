"""POST /v1/chat/completions: one request of the walk, from its body to its answer or events."""

from __future__ import annotations

import flask
import msgspec

from server.body import read_json
from server.generation import Generation
from server.openai.ask import chat_ask
from server.openai.chat_answer import ChatAnswer
from server.openai.schema import ChatBody
from server.services import Services


def chat_blueprint(services: Services) -> flask.Blueprint:
    """The chat route."""
    blueprint = flask.Blueprint("chat", __name__)

    @blueprint.post("/v1/chat/completions")
    def chat_completions() -> flask.Response:
        body = read_json(ChatBody, services.config.max_body_bytes)
        model = services.check_model(body.model)
        ask = chat_ask(
            body,
            services.tokenizer,
            services.prompts,
            services.config,
            request_id=flask.g.request_id,
            arrival=flask.g.arrival,
        )
        generation = Generation(services, ask)
        answer = ChatAnswer(services.tokenizer, body, model, generation.readers)
        if body.stream:
            return generation.stream(answer.events(generation.pieces()))
        whole = answer.whole(generation.whole())
        return flask.Response(msgspec.json.encode(whole), mimetype="application/json")

    return blueprint
