"""From a checked API request to the engine's requests (part of step 3)."""

from __future__ import annotations

import dataclasses

from jaxserve.errors import RequestError
from jaxserve.messages import EngineInfo
from jaxserve.request import GenerationRequest, Grammar, SamplingParams
from jaxserve.routing.limits import answer_length
from jaxserve.routing.seeds import derive_seed, random_seed

MAX_PRIORITY = 2**31 - 1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """What one API request asks for, whichever route it came by.

    prompts: token ids of each prompt; n: answers to each.
    sampling: shared by all; `max_tokens` and `seed` may be None.
    max_tokens_param, prompt_param: what the request calls these fields, for messages.
    arrival: seconds of `time.monotonic()`. eos_ids: see GenerationRequest.
    """

    request_id: str
    prompts: list[list[int]]
    n: int
    sampling: SamplingParams
    priority: int
    cache_salt: str
    arrival: float
    eos_ids: tuple[int, ...] = ()
    max_tokens_param: str = "max_tokens"
    prompt_param: str = "prompt"
    grammar: Grammar | None = None
    #: Special tokens that the answer's text shows all the same, for whoever parses it.
    shown_ids: frozenset[int] = frozenset()


def make_generation_requests(ask: Ask, info: EngineInfo) -> list[GenerationRequest]:
    """Prompts x n requests, the choices of one prompt side by side.

    Every request leaves with a seed and with the number of tokens it may make.
    Raises RequestError naming the field that cannot be honoured.
    """
    sampling = ask.sampling
    sampling.validate(vocab_size=info.vocab_size)
    if sampling.logprobs is not None and sampling.logprobs > info.max_logprobs:
        raise RequestError(
            f"{sampling.logprobs} alternatives per token were asked for; at most "
            f"{info.max_logprobs} are available",
            param="logprobs",
        )
    if abs(ask.priority) > MAX_PRIORITY:
        raise RequestError(
            f"priority is {ask.priority}; it must be -{MAX_PRIORITY} to {MAX_PRIORITY}",
            param="priority",
        )
    seed = random_seed() if sampling.seed is None else sampling.seed
    requests: list[GenerationRequest] = []
    for prompt_ids in ask.prompts:
        check_prompt(prompt_ids, info.vocab_size, ask.prompt_param)
        max_tokens = answer_length(
            info,
            len(prompt_ids),
            sampling.max_tokens,
            param=ask.max_tokens_param,
            prompt_param=ask.prompt_param,
        )
        if sampling.min_tokens > max_tokens:
            raise RequestError(
                f"min_tokens is {sampling.min_tokens}; there is room for {max_tokens}",
                param="min_tokens",
            )
        for choice in range(ask.n):
            requests.append(
                GenerationRequest(
                    request_id=f"{ask.request_id}-{len(requests)}",
                    prompt_ids=prompt_ids,
                    sampling=dataclasses.replace(
                        sampling, max_tokens=max_tokens, seed=derive_seed(seed, choice)
                    ),
                    priority=ask.priority,
                    cache_salt=ask.cache_salt,
                    arrival=ask.arrival,
                    eos_ids=ask.eos_ids,
                    grammar=ask.grammar,
                    n=0 if choice else ask.n,
                )
            )
    return requests


def check_prompt(prompt_ids: list[int], vocab_size: int, param: str) -> None:
    """Raises RequestError, naming the field `param`, for an empty prompt and for unknown ids."""
    if not prompt_ids:
        raise RequestError("the prompt is empty; it needs at least one token", param=param)
    low, high = min(prompt_ids), max(prompt_ids)
    if low < 0 or high >= vocab_size:
        raise RequestError(
            f"the prompt holds token id {low if low < 0 else high}; this model's ids are 0 to "
            f"{vocab_size - 1}",
            param=param,
        )
