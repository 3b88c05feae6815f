"""The bodies of Anthropic's Messages API (step 1): every documented field, known or refused.

Accepted without effect, since they ask for nothing that this server could do otherwise:
metadata and service_tier (there is one tier), cache_control (every prompt is cached by itself),
speed standard, user_profile_id and workspace_id. Refused by name: see `REFUSALS`.
"""

from __future__ import annotations

from typing import Any

from server.openai.fields import Refusals
from server.openai.schema import Body


class PromptBody(Body, kw_only=True):
    """What makes a prompt, and what both routes take beside it."""

    messages: list[Any]
    system: str | list[Any] | None = None
    tools: list[Any] | None = None
    tool_choice: dict[str, Any] | None = None
    cache_control: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    speed: Any = None
    thinking: Any = None
    user_profile_id: str | None = None
    workspace_id: str | None = None
    context_management: Any = None
    mcp_servers: Any = None


class CountTokensBody(PromptBody, kw_only=True):
    """POST /v1/messages/count_tokens."""


class MessagesBody(PromptBody, kw_only=True):
    """POST /v1/messages. min_p, seed and the like are OpenAI's and vLLM's: not here."""

    max_tokens: int
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    metadata: dict[str, Any] | None = None
    service_tier: Any = None
    container: Any = None
    diagnostics: Any = None
    inference_geo: Any = None


PROMPT_REFUSALS: Refusals = {
    "speed": (("standard",), "there is one speed"),
    "thinking": (({"type": "disabled"},), "thinking cannot be switched on"),
    "context_management": ((), "the context is used as it is sent"),
    "mcp_servers": (([],), "this server calls no tools itself"),
}
REFUSALS: Refusals = {
    **PROMPT_REFUSALS,
    "service_tier": (("auto", "standard_only"), "there is one service tier"),
    "container": ((), "there are no containers"),
    "diagnostics": ((), "there are no diagnostics"),
    "inference_geo": ((), "the place cannot be chosen"),
}
