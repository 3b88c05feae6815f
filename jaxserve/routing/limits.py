"""What can never be served, refused before it waits for anything (part of step 3).

Rules: a prompt needs room for one more token. `max_tokens` left out means until the context is
full; a `max_tokens` that does not fit beside the prompt is refused, not clipped, so that an
answer is never shorter than what was asked for without a word.
"""

from __future__ import annotations

from jaxserve.errors import PromptTooLongError
from jaxserve.messages import EngineInfo

TOO_LONG = "context_length_exceeded"


def capacity(info: EngineInfo) -> int:
    """Tokens of prompt and answer together that one request can ever hold.

    The model's context, or the whole page pool if that is smaller (page 0 belongs to nobody).
    """
    return min(info.max_model_len, (info.num_pages - 1) * info.page_size)


def answer_length(
    info: EngineInfo, prompt_length: int, max_tokens: int | None, *, param: str, prompt_param: str
) -> int:
    """How many tokens the answer may have. Raises PromptTooLongError, naming both lengths.

    param: the field that `max_tokens` came from; prompt_param: the field that holds the prompt.
    """
    limit = capacity(info)
    what = "context" if limit == info.max_model_len else "memory for one request"
    if prompt_length >= limit:
        raise PromptTooLongError(
            f"the prompt has {prompt_length} tokens and needs room for an answer; this server's "
            f"{what} is {limit} tokens: shorten the prompt",
            param=prompt_param,
            code=TOO_LONG,
        )
    room = limit - prompt_length
    if max_tokens is None:
        return room
    if max_tokens > room:
        raise PromptTooLongError(
            f"the prompt has {prompt_length} tokens and {param} is {max_tokens}, together "
            f"{prompt_length + max_tokens}; this server's {what} is {limit} tokens: ask for at "
            f"most {room}, or shorten the prompt",
            param=param,
            code=TOO_LONG,
        )
    return max_tokens
