"""What a chat's body and its model together mean for tools and thoughts (step 1): prompt, grammar, reading.

The model's side is its chat template, or what the operator said (--tool-parser, --reasoning-parser).
"""

from __future__ import annotations

from jaxserve.config import ServerConfig
from jaxserve.context.chat_template import ChatTemplate
from jaxserve.errors import RequestError
from jaxserve.request import Grammar
from jaxserve.structured.grammars import after_text
from jaxserve.tokenizer.protocol import Tokenizer
from server.openai.reasoning import CLOSE, OPEN, find_thinking
from server.openai.schema import ChatBody
from server.openai.structured import read_grammar
from server.openai.tools import Json, read_tools
from server.openai.tools_formats import find_format
from server.openai.tools_grammars import forced_calls, free_calls, token_or_text
from server.openai.tools_message import MessageStyle


def offered_tools(
    body: ChatBody, template: ChatTemplate | None, config: ServerConfig, *, reads_calls: bool
) -> list[Json] | None:
    """What the prompt shows of tools; None for none. Raises RequestError.

    reads_calls: whether calls will be read out of the answer.
    """
    asked = read_tools(body)
    if asked is None:
        return None
    if not reads_calls:
        raise RequestError(
            "tools are not supported on this route; leave them out",
            param="tools",
            code="unsupported_parameter",
        )
    if template is None or not template.takes_tools:
        raise RequestError(
            "tools are not supported by this model: its chat template knows none",
            param="tools",
            code="unsupported_parameter",
        )
    if find_format(template, config.tool_parser) is None:
        raise RequestError(
            "tools are not supported: how this model writes calls is not known; "
            "start the server with --tool-parser",
            param="tools",
            code="unsupported_parameter",
        )
    return asked.tools


def message_style(
    body: ChatBody,
    tokenizer: Tokenizer,
    template: ChatTemplate | None,
    config: ServerConfig,
    prompt_ids: list[int],
) -> MessageStyle | None:
    """How the answer to this prompt is read; None for plain text."""
    asked = read_tools(body)
    form = find_format(template, config.tool_parser) if asked is not None else None
    thinking = find_thinking(config.reasoning_parser, template, tokenizer, prompt_ids)
    if body.continue_final_message:  # the message's beginning is not in the answer
        thinking = None
    if thinking is None and (asked is None or form is None):
        return None
    markers: tuple[str, ...] = (OPEN, CLOSE) if thinking is not None else ()
    if asked is not None and form is not None:
        form = asked.format(form)
        markers += form.markers
    tokens = {tokenizer.id_of(marker) for marker in markers}
    return MessageStyle(
        tools=form,
        names=asked.names if asked is not None else frozenset(),
        parallel=asked is None or asked.parallel,
        thinking=thinking,
        shown_ids=frozenset(token for token in tokens if token in tokenizer.special_ids),
    )


def answer_grammar(
    body: ChatBody,
    tokenizer: Tokenizer,
    template: ChatTemplate | None,
    config: ServerConfig,
    style: MessageStyle | None,
) -> Grammar | None:
    """The form of the answer: that of the body, or that of calls which must come or are strict;
    after thoughts.

    Raises RequestError.
    """
    grammar = read_grammar(body)
    asked = read_tools(body)
    if asked is not None and asked.forced:
        if grammar is not None:
            raise RequestError(
                f"{grammar.param} cannot be combined with a tool_choice that asks for a call",
                param=grammar.param,
            )
        form = find_format(template, config.tool_parser)
        assert form is not None, "offered_tools has refused it"
        grammar = forced_calls(asked, form, tokenizer)
    elif asked is not None and grammar is not None:
        raise RequestError(
            f"{grammar.param} cannot be combined with tools that may be called; "
            'set tool_choice to "none"',
            param=grammar.param,
        )
    elif asked is not None and asked.strict:
        form = find_format(template, config.tool_parser)
        assert form is not None, "offered_tools has refused it"
        thinking = style.thinking if style is not None else None
        thinks = thinking is not None and not thinking.opened and not thinking.done
        grammar = free_calls(asked, form, tokenizer, not_first=OPEN if thinks else "")
    if grammar is None or style is None or style.thinking is None or style.thinking.done:
        return grammar
    opening, closing = (token_or_text(marker, tokenizer) for marker in (OPEN, CLOSE))
    return after_text(grammar, closing, opening=None if style.thinking.opened else opening)
