"""How many tokens of which prompt the next step computes (step 4). Plain numbers, no sequences.

Running answers wait for whole steps, so a step may only take as long as their inter-token latency
objective says; `StepCosts` knows what steps take. With no answer running, a step is as large as it
can be. A step's prompts share its tokens in order of service, but short ones need not wait behind a
long one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from jaxserve.engine.step_costs import StepCosts

#: The objective is aimed at from below: steps scatter.
_AIM = 0.9
#: Where answers alone take longer than the objective, prompts may add this share to a step.
_LEAST_SHARE = 0.5
#: Tokens that prompts always get together, so that they come to an end.
_LEAST_TOKENS = 4
#: A prompt overtakes another if it has this share of the other's tokens left, or less.
_SHORT = 0.5


@dataclasses.dataclass(frozen=True, slots=True)
class PromptPart:
    """What is left of one prompt: `remaining` tokens after the first `start`."""

    start: int
    remaining: int
    priority: int = 0


class ChunkPolicy:
    """Chooses chunks. costs: of the engine's buckets; objective: seconds, None for no limit."""

    def __init__(self, costs: StepCosts, *, max_step_tokens: int, objective: float | None) -> None:
        self.costs = costs
        self._max_step_tokens = max_step_tokens
        self._objective = objective

    def choose(
        self, prompts: Sequence[PromptPart], answer_tokens: int = 0, answer_pairs: float = 0
    ) -> list[int]:
        """Tokens of each prompt for the next step, most of them possibly 0.

        prompts: in order of service. answer_tokens, answer_pairs: query tokens of the running
        answers in the same step, and their query-key pairs.
        """
        room = self._max_step_tokens - answer_tokens
        if not prompts or room <= 0:
            return [0] * len(prompts)
        if answer_tokens == 0 or self._objective is None or not self.costs.measured:
            return share_out(room, prompts)
        return self._fit(prompts, answer_tokens, answer_pairs, self._objective)

    def _fit(
        self, prompts: Sequence[PromptPart], answer_tokens: int, answer_pairs: float, goal: float
    ) -> list[int]:
        costs = self.costs
        limit = goal * _AIM
        alone = self._bucket(answer_tokens)
        if alone in costs.measured:
            limit = max(limit, costs.predict(alone, answer_pairs) * (1 + _LEAST_SHARE))
        wanted = answer_tokens + sum(prompt.remaining for prompt in prompts)
        least = self._bucket(answer_tokens + min(_LEAST_TOKENS, wanted - answer_tokens))
        most = self._bucket(wanted)
        for size in reversed(costs.sizes):
            if not least <= size <= most:
                continue
            room = min(size, self._max_step_tokens) - answer_tokens
            chosen = share_out(room, prompts)
            pairs = sum(
                query_key_pairs(prompt.start, count)
                for prompt, count in zip(prompts, chosen, strict=True)
            )
            if size == least or costs.predict(size, answer_pairs + pairs) <= limit:
                return chosen
        raise AssertionError(f"no bucket for {answer_tokens} tokens and prompts: {costs.sizes}")

    def _bucket(self, tokens: int) -> int:
        sizes = self.costs.sizes
        return next((size for size in sizes if size >= tokens), sizes[-1])


def query_key_pairs(start: int, count: int) -> float:
    """Pairs of a query token and a token it attends to, for `count` tokens from `start` on."""
    return count * (start + (count + 1) / 2)


def share_out(tokens: int, prompts: Sequence[PromptPart]) -> list[int]:
    """`tokens` for `prompts` (in order of service), all of them if the prompts have so many.

    The first in order gets what it needs. Where that is more than there is, much shorter ones of
    the same priority share at most half of the tokens, shortest first, and the first has the rest;
    so a prompt takes at most twice as long for being overtaken.
    """
    counts = [0] * len(prompts)
    for index, prompt in enumerate(prompts):
        if prompt.remaining > tokens:
            counts[index] = tokens - _let_pass(tokens // 2, prompts, index, counts)
            break
        counts[index] = prompt.remaining
        tokens -= prompt.remaining
    return counts


def _let_pass(tokens: int, prompts: Sequence[PromptPart], first: int, counts: list[int]) -> int:
    """Gives up to `tokens` to prompts that are much shorter than the first; returns how many."""
    longest = prompts[first].remaining * _SHORT
    shorter = [
        index
        for index in range(first + 1, len(prompts))
        if prompts[index].priority == prompts[first].priority
        and prompts[index].remaining <= longest
    ]
    given = 0
    for index in sorted(shorter, key=lambda each: prompts[each].remaining):
        counts[index] = min(prompts[index].remaining, tokens - given)
        given += counts[index]
    return given
