"""Documented fields that this server does not honour: refused by name unless they ask for nothing.

A field whose documented effect is on somebody else's bill or storage (user, metadata, ...) is
accepted; everything that would change the answer is not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxserve.errors import RequestError
from jaxserve.request import MAX_LOGPROBS
from server.openai.schema import Body, ChatBody, CompletionBody, GenerationBody

#: field -> (values besides null that ask for nothing, what to do instead)
Refusals = Mapping[str, tuple[tuple[Any, ...], str]]

_CHAT: Refusals = {
    "audio": ((), "only text is supported"),
    "function_call": (("none", "auto"), "function calling is not supported"),
    "functions": (([],), "function calling is not supported"),
    "modalities": ((["text"],), "only text is supported"),
    "moderation": ((), "there is no moderation model"),
    "prediction": ((), "predicted outputs are not supported"),
    "prompt_cache_options": (
        ({"mode": "implicit"},),
        "prompts are cached by themselves, in memory",
    ),
    "prompt_cache_retention": (("in_memory", "in-memory"), "prompts are cached in memory only"),
    "reasoning_effort": (("none",), "reasoning effort cannot be chosen"),
    "service_tier": (("auto", "default"), "there is one service tier"),
    "store": ((False,), "answers are not stored"),
    "verbosity": (("medium",), "verbosity cannot be chosen"),
    "web_search_options": ((), "web search is not supported"),
}
_COMPLETION: Refusals = {
    "suffix": (("",), "inserting text before a suffix is not supported"),
}

#: vLLM's earlier fields beside guided_json, guided_regex, guided_choice and guided_grammar.
_BOTH: Refusals = {
    "guided_decoding_backend": ((), "there is one backend"),
    "guided_whitespace_pattern": ((), "white space between the parts of JSON is bounded"),
}


def refusals(kind: type[GenerationBody]) -> Refusals:
    """The fields of a body that are refused unless they ask for nothing."""
    return {**(_CHAT if issubclass(kind, ChatBody) else _COMPLETION), **_BOTH}


def refuse_unsupported(body: GenerationBody) -> None:
    """Raises RequestError for the first field that asks for something we do not have."""
    refuse_fields(body, refusals(type(body)))
    if isinstance(body, CompletionBody):
        _check_best_of(body)
    if body.prompt_logprobs is not None:
        _check_prompt_logprobs(body.prompt_logprobs, stream=bool(body.stream))
    if body.stream_options is not None and body.stream_options.include_obfuscation:
        raise RequestError(
            "stream_options.include_obfuscation is not supported by this server; leave it out",
            param="stream_options",
            code="unsupported_parameter",
        )
    if body.stream_options is not None and not body.stream:
        raise RequestError(
            "stream_options may be given only with stream: true", param="stream_options"
        )


def refuse_fields(body: Body, refusals: Refusals) -> None:
    """Raises RequestError for the first field of `refusals` that asks for something."""
    for name, (empty, reason) in refusals.items():
        value = getattr(body, name)
        if value is None or any(type(value) is type(no) and value == no for no in empty):
            continue
        raise RequestError(
            f"{name} is not supported by this server: {reason}; leave it out",
            param=name,
            code="unsupported_parameter",
        )


def _check_prompt_logprobs(wanted: int, *, stream: bool) -> None:
    if stream:
        raise RequestError(
            "prompt_logprobs come with whole answers only; leave out stream",
            param="prompt_logprobs",
            code="unsupported_parameter",
        )
    if not 0 <= wanted <= MAX_LOGPROBS:
        raise RequestError(
            f"prompt_logprobs is {wanted}; it must be 0 to {MAX_LOGPROBS}", param="prompt_logprobs"
        )


def _check_best_of(body: CompletionBody) -> None:
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise RequestError(
            f"best_of {body.best_of} is not supported: it must equal n, which is {body.n or 1}",
            param="best_of",
            code="unsupported_parameter",
        )
