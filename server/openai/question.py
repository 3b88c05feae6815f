"""What a conversation asks of the engine, and how its answer is read (steps 1 to 3).

One place for every API whose requests become a chat.
"""

from __future__ import annotations

import flask

from jaxserve.routing.requests import Ask
from server.openai.ask import chat_ask
from server.openai.schema import ChatBody
from server.openai.tools_message import MessageStyle
from server.openai.tools_style import message_style
from server.services import Services


def chat_question(services: Services, body: ChatBody) -> tuple[Ask, MessageStyle | None]:
    """The current request's question; no style for an answer of plain text. Raises RequestError."""
    tokenizer, prompts, config = services.tokenizer, services.prompts, services.config
    ask = chat_ask(
        body,
        tokenizer,
        prompts,
        config,
        request_id=flask.g.request_id,
        arrival=flask.g.arrival,
        reads_calls=True,
    )
    return ask, message_style(body, tokenizer, prompts.template, config, ask.prompts[0])
