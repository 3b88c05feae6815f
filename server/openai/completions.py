"""POST /v1/completions: raw prompts, without a chat template.

The caller writes the whole prompt, so the text of a special token in it is that token.
"""

from __future__ import annotations

import flask
import msgspec

from server.body import read_json
from server.generation import Generation
from server.openai.ask import completion_ask
from server.openai.completion_answer import CompletionAnswer
from server.openai.schema import CompletionBody
from server.services import Services


def completions_blueprint(services: Services) -> flask.Blueprint:
    """The completions route."""
    blueprint = flask.Blueprint("completions", __name__)

    @blueprint.post("/v1/completions")
    def completions() -> flask.Response:
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
        generation = Generation(services, ask)
        answer = CompletionAnswer(services.tokenizer, body, model, generation.readers)
        if body.stream:
            return generation.stream(answer.events(generation.pieces()))
        whole = answer.whole(generation.whole())
        return flask.Response(msgspec.json.encode(whole), mimetype="application/json")

    return blueprint
