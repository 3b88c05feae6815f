"""From a body's fields to `SamplingParams` (step 1); ranges are `SamplingParams.validate`'s."""

from __future__ import annotations

from typing import TypeVar

from jaxserve.config import ServerConfig
from jaxserve.errors import RequestError
from jaxserve.request import MAX_BAD_WORD_TOKENS, SamplingParams
from jaxserve.tokenizer.protocol import Tokenizer
from server.openai.schema import ChatBody, CompletionBody, GenerationBody

#: OpenAI's documented default for /v1/completions.
COMPLETION_MAX_TOKENS = 16
_MAX_TOKEN_LISTS = 1024

Value = TypeVar("Value")


def sampling_params(
    body: GenerationBody, tokenizer: Tokenizer, config: ServerConfig
) -> SamplingParams:
    """Every field of `body` that says how tokens are chosen. Raises RequestError."""
    sampling = SamplingParams(
        max_tokens=_max_tokens(body),
        min_tokens=_or(body.min_tokens, 0),
        temperature=_or(body.temperature, 1.0),
        top_k=_top_k(body),
        top_p=_or(body.top_p, 1.0),
        min_p=_or(body.min_p, 0.0),
        repetition_penalty=_or(body.repetition_penalty, 1.0),
        presence_penalty=_or(body.presence_penalty, 0.0),
        frequency_penalty=_or(body.frequency_penalty, 0.0),
        logit_bias=_logit_bias(body),
        bad_words=_bad_words(body, tokenizer),
        allowed_token_ids=body.allowed_token_ids,
        seed=body.seed,
        stop=_stop(body, config),
        include_stop_str_in_output=bool(body.include_stop_str_in_output),
        stop_token_ids=_bounded(body.stop_token_ids or [], "stop_token_ids"),
        ignore_eos=bool(body.ignore_eos),
        logprobs=_logprobs(body),
        skip_special_tokens=_or(body.skip_special_tokens, True),
    )
    sampling.validate()
    return sampling


def choices(body: GenerationBody, config: ServerConfig) -> int:
    """`n`, checked."""
    n = _or(body.n, 1)
    if not 1 <= n <= config.max_n:
        raise RequestError(f"n is {n}; it must be 1 to {config.max_n}", param="n")
    return n


def _or(value: Value | None, default: Value) -> Value:
    return default if value is None else value


def _max_tokens(body: GenerationBody) -> int | None:
    value, name = body.max_tokens, max_tokens_field(body)
    if isinstance(body, ChatBody) and body.max_completion_tokens is not None:
        value = body.max_completion_tokens
    if value == 0 and isinstance(body, CompletionBody) and body.echo and not body.stream:
        return 1  # the route generates nothing
    if value is not None and value < 1:
        raise RequestError(f"{name} is {value}; it must be at least 1", param=name)
    if value is None and isinstance(body, CompletionBody):
        return COMPLETION_MAX_TOKENS
    return value


def max_tokens_field(body: GenerationBody) -> str:
    """Which field the answer's length came from."""
    if isinstance(body, ChatBody) and body.max_completion_tokens is not None:
        return "max_completion_tokens"
    return "max_tokens"


def _top_k(body: GenerationBody) -> int:
    """vLLM's -1 means all tokens, and so does more than any vocabulary holds."""
    top_k = _or(body.top_k, 0)
    return 0 if top_k == -1 or top_k >= 2**31 else top_k


def _logprobs(body: GenerationBody) -> int | None:
    if isinstance(body, ChatBody):
        if body.top_logprobs is not None and not body.logprobs:
            raise RequestError("top_logprobs needs logprobs: true", param="top_logprobs")
        if body.top_logprobs is not None and not 0 <= body.top_logprobs <= 20:
            raise RequestError(
                f"top_logprobs is {body.top_logprobs}; it must be 0 to 20", param="top_logprobs"
            )
        return _or(body.top_logprobs, 0) if body.logprobs else None
    return body.logprobs if isinstance(body, CompletionBody) else None


def _stop(body: GenerationBody, config: ServerConfig) -> list[str]:
    stop = [body.stop] if isinstance(body.stop, str) else body.stop or []
    if any(not text for text in stop):
        raise RequestError("stop must not hold an empty string", param="stop")
    if len(stop) > config.max_stop:
        raise RequestError(
            f"stop holds {len(stop)} strings; at most {config.max_stop} are taken", param="stop"
        )
    if sum(len(text.encode()) for text in stop) > config.max_stop_bytes:
        raise RequestError(
            f"stop strings may have {config.max_stop_bytes} bytes altogether", param="stop"
        )
    return stop


def _logit_bias(body: GenerationBody) -> dict[int, float]:
    bias: dict[int, float] = {}
    for key, value in (body.logit_bias or {}).items():
        if not (key.isascii() and key.isdigit() and len(key) < 16):
            raise RequestError(
                f"logit_bias has the key {key[:32]!r}; keys are token ids", param="logit_bias"
            )
        bias[int(key)] = value
    _bounded(list(bias), "logit_bias")
    return bias


def _bad_words(body: GenerationBody, tokenizer: Tokenizer) -> list[list[int]]:
    """Each word's token ids as it stands at a text's start and after a space."""
    words: list[list[int]] = []
    for word in _bounded(body.bad_words or [], "bad_words"):
        if not word.strip():
            raise RequestError("bad_words must not hold an empty string", param="bad_words")
        bare = word.lstrip(" ")
        if len(bare) > 64 * MAX_BAD_WORD_TOKENS:
            raise RequestError("bad_words holds a word that is too long", param="bad_words")
        for text in (bare, " " + bare):
            ids = tokenizer.encode(text, add_bos=False)
            if ids not in words:
                words.append(ids)
    return words


def _bounded(items: list[Value], name: str) -> list[Value]:
    if len(items) > _MAX_TOKEN_LISTS:
        raise RequestError(
            f"{name} holds {len(items)} entries; at most {_MAX_TOKEN_LISTS} are taken", param=name
        )
    return items
