"""A chat or completion request to the prompt's token ids (steps 1 and 2).

The one place that decides where special tokens in text are parsed: in the chat template's own
text, never in a message, and in a completion's prompt if the caller says so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxserve.context.chat_template import ChatTemplate
from jaxserve.context.literal_text import LiteralText
from jaxserve.errors import RequestError
from jaxserve.tokenizer.protocol import Tokenizer

_OWN_ARGUMENTS = frozenset({"messages", "tools", "add_generation_prompt", "continue_final_message"})


def assemble_chat(
    tokenizer: Tokenizer,
    template: ChatTemplate | None,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    template_arguments: Mapping[str, Any] | None = None,
    on_rendered: Callable[[], None] | None = None,
) -> list[int]:
    """The prompt of a chat. Special tokens written in messages or tools stay ordinary text.

    template_arguments: more variables for the template. on_rendered: called between the two steps,
    once the text is there.
    Raises RequestError that names the field: no template, refused messages, text that is not
    Unicode.
    """
    if template is None:
        raise RequestError(
            "this model has no chat template, so it cannot chat; send text to /v1/completions",
            param="messages",
        )
    arguments = dict(template_arguments or {})
    taken = sorted(_OWN_ARGUMENTS & arguments.keys())
    if taken:
        raise RequestError(
            f"chat_template_kwargs must not hold {taken[0]!r}, which is a field of its own",
            param="chat_template_kwargs",
        )
    literal = LiteralText(tokenizer.special_spans)
    rendered = template.render(
        literal.hide(template.prepare(messages)),
        tools=literal.hide(tools),
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continue_final_message,
        **literal.hide(arguments),
    )
    text, ranges = literal.reveal(rendered)
    if on_rendered is not None:
        on_rendered()
    return _encode(tokenizer, text, param="messages", parse_special=True, literal=ranges)


def assemble_completion(
    tokenizer: Tokenizer,
    prompt: str | Sequence[int],
    *,
    parse_special: bool = True,
    add_bos: bool | None = None,
    vocab_size: int | None = None,
) -> list[int]:
    """The prompt of a completion: a text, or token ids, which are taken as they are.

    parse_special: special tokens written in the text count (a completion's text is the whole
        prompt, so this is how its caller writes them). add_bos: None for the model's own rule.
    vocab_size: number of ids of the model, which may be more than the tokeniser's (the default).
    Raises RequestError (param "prompt"): an id that does not exist, text that is not Unicode,
    nothing at all.
    """
    if isinstance(prompt, str):
        ids = _encode(
            tokenizer, prompt, param="prompt", parse_special=parse_special, add_bos=add_bos
        )
    else:
        ids = list(prompt)
        size = tokenizer.vocab_size if vocab_size is None else vocab_size
        for token in ids:
            if isinstance(token, bool) or not isinstance(token, int):
                raise RequestError("prompt holds something that is no token id", param="prompt")
            if not 0 <= token < size:
                raise RequestError(
                    f"prompt holds token id {token}; this model's ids are 0 to {size - 1}",
                    param="prompt",
                )
    if not ids:
        raise RequestError("prompt is empty; send at least one token", param="prompt")
    return ids


def _encode(
    tokenizer: Tokenizer,
    text: str,
    *,
    param: str,
    parse_special: bool,
    add_bos: bool | None = None,
    literal: Sequence[tuple[int, int]] = (),
) -> list[int]:
    try:
        return tokenizer.encode(text, parse_special=parse_special, add_bos=add_bos, literal=literal)
    except RequestError as error:
        raise RequestError(str(error), param=error.param or param, code=error.code) from None
