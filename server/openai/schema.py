"""The bodies of requests, as OpenAI documents them, with vLLM's additions (step 1).

Every documented field is listed: those that work with their type, the others as `Any`, which
`fields` checks against the few values that mean nothing. Unknown names are refused by name.
"""

from __future__ import annotations

from typing import Any

import msgspec


class Body(msgspec.Struct, kw_only=True):
    """Base of all bodies. `model` may be left out: a server has one model."""

    model: str | None = None


class StreamOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """include_usage: one more chunk, the last, holds the whole answer's usage."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class GenerationBody(Body, kw_only=True):
    """What chat and plain completions share."""

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    user: str | None = None
    # vLLM's additions
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None
    skip_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    priority: int | None = None
    cache_salt: str | None = None
    return_token_ids: bool | None = None
    # the form of the answer: vLLM's field, and those that it had before
    structured_outputs: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    guided_decoding_backend: Any = None
    guided_whitespace_pattern: Any = None
    prompt_logprobs: int | None = None


class ChatBody(GenerationBody, kw_only=True):
    """POST /v1/chat/completions."""

    messages: list[Any]
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    metadata: dict[str, str] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    audio: Any = None
    function_call: Any = None
    functions: Any = None
    modalities: Any = None
    moderation: Any = None
    parallel_tool_calls: bool | None = None
    prediction: Any = None
    prompt_cache_options: Any = None
    prompt_cache_retention: Any = None
    reasoning_effort: Any = None
    response_format: Any = None
    service_tier: Any = None
    store: Any = None
    tool_choice: Any = None
    tools: Any = None
    verbosity: Any = None
    web_search_options: Any = None


class CompletionBody(GenerationBody, kw_only=True):
    """POST /v1/completions. prompt: a string, a list of them, token ids, or a list of lists."""

    prompt: str | list[Any]
    logprobs: int | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = None
    best_of: int | None = None
    suffix: Any = None
    response_format: Any = None


class EmbeddingsBody(Body, kw_only=True):
    """POST /v1/embeddings. input as CompletionBody's prompt.

    pooling: mean or last; normalize false leaves the vectors as long as they are.
    """

    input: str | list[Any]
    dimensions: int | None = None
    encoding_format: str | None = None
    user: str | None = None
    pooling: str | None = None
    normalize: bool | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None


class TokenizeBody(Body, kw_only=True):
    """POST /tokenize: either `prompt` or `messages`, as in vLLM."""

    prompt: str | None = None
    messages: list[Any] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(Body, kw_only=True):
    """POST /detokenize."""

    tokens: list[int]
