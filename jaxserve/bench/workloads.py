"""Workloads for the engine in this process: lists of token ids with the length of the answer.

All ids come from `random.Random("NAME-SEED")` in a fixed order, so any engine can be given the same.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Mapping

from jaxserve.errors import UsageError

#: Ids are drawn from these, or from what the vocabulary has of them: no special tokens.
LOWEST_ID, HIGHEST_ID = 5, 39_999

PREFIX_TOKENS = 1024


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One prompt, and how many tokens are asked for."""

    prompt_ids: list[int]
    output_tokens: int


class Ids:
    """Draws random token ids."""

    def __init__(self, rng: random.Random, vocab_size: int) -> None:
        self._stop = min(HIGHEST_ID + 1, vocab_size)
        if self._stop <= LOWEST_ID:
            raise UsageError(f"a vocabulary of {vocab_size} tokens is too small for random prompts")
        self.rng = rng

    def draw(self, count: int) -> list[int]:
        """So many ids."""
        return [self.rng.randrange(LOWEST_ID, self._stop) for _ in range(count)]


def _same(count: int, input_tokens: int, output_tokens: int) -> Callable[[Ids], list[Request]]:
    def make(ids: Ids) -> list[Request]:
        return [
            Request(prompt_ids=ids.draw(input_tokens), output_tokens=output_tokens)
            for _ in range(count)
        ]

    return make


def _mixed(ids: Ids) -> list[Request]:
    """Every user at another length."""
    inputs, outputs = (32, 100, 333, 700, 1024), (16, 64, 150, 256)
    requests = []
    for _ in range(32):
        prompt_ids = ids.draw(ids.rng.choice(inputs))
        requests.append(Request(prompt_ids=prompt_ids, output_tokens=ids.rng.choice(outputs)))
    return requests


def _shared_prefix(ids: Ids) -> list[Request]:
    """One system prompt, many users."""
    prefix = ids.draw(PREFIX_TOKENS)
    return [Request(prompt_ids=prefix + ids.draw(64), output_tokens=64) for _ in range(32)]


NAMED: Mapping[str, Callable[[Ids], list[Request]]] = {
    "single": _same(1, 128, 128),
    "headline": _same(1, 4000, 300),
    "batch8": _same(8, 128, 128),
    "batch64": _same(64, 128, 128),
    "mixed32": _mixed,
    "shared_prefix32": _shared_prefix,
}


def make_named(name: str, seed: int, vocab_size: int) -> list[Request]:
    """The workload of that name; another seed gives other prompts."""
    return NAMED[name](Ids(random.Random(f"{name}-{seed}"), vocab_size))


def make_random(
    count: int, input_tokens: int, output_tokens: int, seed: int, vocab_size: int
) -> list[Request]:
    """`count` requests of these lengths."""
    ids = Ids(random.Random(f"random-{seed}"), vocab_size)
    return _same(count, input_tokens, output_tokens)(ids)
