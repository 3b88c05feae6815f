"""From a checked body to what it asks for (steps 1 and 2): prompt ids and sampling, as an `Ask`.

Knows neither Flask nor the engine: `jaxserve batch` comes this way, too.
"""

from __future__ import annotations

from typing import Any

from jaxserve.config import ServerConfig
from jaxserve.errors import RequestError
from jaxserve.routing.requests import Ask
from jaxserve.tokenizer.protocol import Tokenizer
from server.openai.fields import refuse_unsupported
from server.openai.messages import read_messages
from server.openai.sampling import choices, max_tokens_field, sampling_params
from server.openai.schema import ChatBody, CompletionBody
from server.openai.structured import check_company, read_grammar
from server.openai.tools_style import answer_grammar, message_style, offered_tools
from server.prompts import Prompts

#: Prompts in one request, and answers to them.
MAX_PROMPTS = 256


def chat_ask(
    body: ChatBody,
    tokenizer: Tokenizer,
    prompts: Prompts,
    config: ServerConfig,
    *,
    request_id: str,
    arrival: float,
    reads_calls: bool = False,
) -> Ask:
    """A chat's one prompt. Raises RequestError naming the field.

    reads_calls: whoever asks reads calls of tools out of the answer (see `message_style`).
    """
    refuse_unsupported(body)
    sampling = sampling_params(body, tokenizer, config)
    n = choices(body, config)
    tools = offered_tools(body, prompts.template, config, reads_calls=reads_calls)
    prompt_ids = prompts.chat(
        read_messages(body.messages),
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=bool(body.continue_final_message),
        template_kwargs=body.chat_template_kwargs or {},
        tools=tools,
        keep_last=body.truncate_prompt_tokens,
    )
    style = message_style(body, tokenizer, prompts.template, config, prompt_ids)
    grammar = answer_grammar(body, tokenizer, prompts.template, config, style)
    if grammar is not None:
        check_company(grammar, sampling)
        prompts.check_grammar(grammar)
    return Ask(
        request_id=request_id,
        prompts=[prompt_ids],
        n=n,
        sampling=sampling,
        priority=body.priority or 0,
        cache_salt=body.cache_salt or "",
        arrival=arrival,
        eos_ids=tokenizer.eos_ids,
        max_tokens_param=max_tokens_field(body),
        prompt_param="messages",
        grammar=grammar,
        shown_ids=style.shown_ids if style is not None and reads_calls else frozenset(),
    )


def completion_ask(
    body: CompletionBody,
    tokenizer: Tokenizer,
    prompts: Prompts,
    config: ServerConfig,
    *,
    request_id: str,
    arrival: float,
) -> Ask:
    """A completion's prompts, one or many. Raises RequestError naming the field."""
    refuse_unsupported(body)
    texts = read_texts(body.prompt)
    sampling = sampling_params(body, tokenizer, config)
    n = choices(body, config)
    if len(texts) * n > MAX_PROMPTS:
        raise RequestError(
            f"{len(texts)} prompts with n {n} make {len(texts) * n} answers; at most "
            f"{MAX_PROMPTS} are taken",
            param="n",
        )
    grammar = read_grammar(body)
    if grammar is not None:
        check_company(grammar, sampling)
        prompts.check_grammar(grammar)
    ids = prompts.texts(
        texts, add_bos=body.add_special_tokens, keep_last=body.truncate_prompt_tokens
    )
    return Ask(
        request_id=request_id,
        prompts=ids,
        n=n,
        sampling=sampling,
        priority=body.priority or 0,
        cache_salt=body.cache_salt or "",
        arrival=arrival,
        eos_ids=tokenizer.eos_ids,
        grammar=grammar,
    )


def read_texts(
    given: str | list[Any], *, param: str = "prompt", most: int = MAX_PROMPTS
) -> list[str | list[int]]:
    """A string, a list of strings, token ids, or a list of lists of them: always as a list.

    param: the field that holds it. Raises RequestError.
    """
    items = [given] if isinstance(given, str) or _is_ids(given) else given
    if not items:
        raise RequestError(f"{param} must not be empty", param=param)
    if len(items) > most:
        raise RequestError(
            f"{param} holds {len(items)} of them; at most {most} are taken", param=param
        )
    if all(isinstance(item, str) for item in items) or all(_is_ids(item) for item in items):
        return list(items)
    raise RequestError(
        f"{param} must be a string, a list of strings, a list of token ids or a list of such lists",
        param=param,
        code="invalid_type",
    )


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(item) is int for item in value)
