"""The body of OpenAI's Responses API (step 1): every documented field, known or refused.

Accepted without effect, since they ask for nothing that this server could do otherwise: metadata
(given back), user, safety_identifier, prompt_cache_key (every prompt is cached by itself),
service_tier auto and default, truncation disabled, background false.
"""

from __future__ import annotations

from typing import Any

from server.openai.fields import Refusals
from server.openai.schema import Body, StreamOptions


class PromptBody(Body, kw_only=True):
    """What makes a prompt, and what the counting route takes beside it."""

    input: str | list[Any] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    text: dict[str, Any] | None = None
    conversation: Any = None
    reasoning: Any = None
    truncation: Any = None


class CountBody(PromptBody, kw_only=True):
    """POST /v1/responses/input_tokens."""


class ResponsesBody(PromptBody, kw_only=True):
    """POST /v1/responses."""

    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: int | None = None
    include: list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    store: bool | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    access_programs: Any = None
    background: Any = None
    background_options: Any = None
    context_management: Any = None
    image: Any = None
    max_tool_calls: Any = None
    moderation: Any = None
    prompt: Any = None
    prompt_cache_options: Any = None
    prompt_cache_retention: Any = None
    service_tier: Any = None


PROMPT_REFUSALS: Refusals = {
    "conversation": ((), "conversations are not kept; use previous_response_id"),
    "reasoning": (
        ({}, {"effort": "none"}, {"effort": None}, {"effort": None, "summary": None}),
        "reasoning effort cannot be chosen",
    ),
    "truncation": (("disabled",), "an input that is too long is refused"),
}
REFUSALS: Refusals = {
    **PROMPT_REFUSALS,
    "access_programs": ((), "there are no access programs"),
    "background": ((False,), "answers are made while the client waits; use /v1/batches"),
    "background_options": ((), "answers are made while the client waits; use /v1/batches"),
    "context_management": (([],), "the context is used as it is sent"),
    "image": ((), "only text is supported"),
    "max_tool_calls": ((), "this server calls no tools itself"),
    "moderation": ((), "there is no moderation model"),
    "prompt": ((), "there are no stored prompts"),
    "prompt_cache_options": (({"mode": "implicit"},), "prompts are cached by themselves"),
    "prompt_cache_retention": (("in_memory", "in-memory"), "prompts are cached in memory only"),
    "service_tier": (("auto", "default"), "there is one service tier"),
}
