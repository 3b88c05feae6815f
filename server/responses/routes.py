"""POST /v1/responses, what was stored of them, and how many tokens an input has."""

from __future__ import annotations

import dataclasses
import uuid
from typing import Any

import flask
import msgspec

from jaxserve.errors import RequestError
from jaxserve.routing.requests import Ask
from server.body import read_json
from server.described import EVENTS, JSON, Description, described
from server.generation import Generation
from server.openai.question import chat_question
from server.openai.tools_message import MessageStyle
from server.paging import PAGE_QUERY, list_body, read_page
from server.responses.answer import ResponseAnswer
from server.responses.read import input_items, to_chat
from server.responses.schema import (
    PROMPT_REFUSALS,
    REFUSALS,
    CountBody,
    PromptBody,
    ResponsesBody,
)
from server.responses.store import ResponseStore
from server.services import Services
from server.tenant import current_tenant

#: The chat's names of fields -> what they are called here.
_NAMES = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text",
}
_PATH = "/v1/responses"


def responses_blueprint(services: Services) -> flask.Blueprint:
    """All routes."""
    blueprint = flask.Blueprint("responses", __name__)
    store = ResponseStore(services.storage, services.config.max_data_bytes)

    @blueprint.post(_PATH)
    @described(Description(body=ResponsesBody, refusals=REFUSALS, answers=(JSON, EVENTS)))
    def create_response() -> flask.Response:
        """Answers an input, whole or as events, and keeps the answer unless told otherwise."""
        body = read_json(ResponsesBody, services.config.max_body_bytes)
        model = services.check_model(body.model)
        tenant = current_tenant()
        ask, style = _ask(services, store, body)
        items = [{"id": f"item_{uuid.uuid4().hex}", **item} for item in input_items(body)]

        def keep(whole: dict[str, Any]) -> None:
            if body.store is not False:
                store.save(whole, items, tenant)

        generation = Generation(services, ask)
        answer = ResponseAnswer(services.tokenizer, body, model, generation.readers[0], keep, style)
        if body.stream:
            return generation.stream(
                answer.events(generation.pieces()), done=b"", failed=answer.failed
            )
        whole = answer.whole(generation.whole()[0])
        return flask.Response(msgspec.json.encode(whole), mimetype="application/json")

    @blueprint.post(f"{_PATH}/input_tokens")
    @described(Description(body=CountBody, refusals=PROMPT_REFUSALS))
    def count_input_tokens() -> dict[str, Any]:
        """How many tokens the prompt of such a request has."""
        body = read_json(CountBody, services.config.max_body_bytes)
        services.check_model(body.model)
        count = len(_ask(services, store, body)[0].prompts[0])
        return {"object": "response.input_tokens", "input_tokens": count}

    @blueprint.get(f"{_PATH}/<response_id>")
    def retrieve_response(response_id: str) -> dict[str, Any]:
        """A stored response."""
        for name in ("stream", "starting_after", "include", "include_obfuscation"):
            if flask.request.args.get(name, "false") != "false":
                raise RequestError(f"{name} is not supported here", param=name)
        return store.load(response_id, current_tenant())

    @blueprint.delete(f"{_PATH}/<response_id>")
    def delete_response(response_id: str) -> dict[str, Any]:
        """Forgets a stored response."""
        store.delete(response_id, current_tenant())
        return {"id": response_id, "object": "response", "deleted": True}

    @blueprint.get(f"{_PATH}/<response_id>/input_items")
    @described(Description(query=PAGE_QUERY))
    def list_input_items(response_id: str) -> dict[str, Any]:
        """The items that a stored response answered."""
        page = read_page()
        items = store.items(response_id, current_tenant())
        return list_body(items[::-1] if page.descending else items, page)

    return blueprint


def _ask(
    services: Services, store: ResponseStore, body: PromptBody
) -> tuple[Ask, MessageStyle | None]:
    """What is asked, and how the answer is to be read."""
    earlier: list[Any] = []
    if body.previous_response_id is not None:
        earlier = store.conversation(body.previous_response_id, current_tenant())
    try:
        ask, style = chat_question(services, to_chat(body, earlier))
    except RequestError as error:
        if error.param in _NAMES:
            error.param = _NAMES[error.param]
        raise
    ask = dataclasses.replace(ask, max_tokens_param="max_output_tokens", prompt_param="input")
    return ask, style
