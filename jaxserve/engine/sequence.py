"""One request inside the engine: its tokens, its pages, and how far it has come (step 4)."""

from __future__ import annotations

import dataclasses
import enum
import time
from collections.abc import Iterator

from jaxserve.engine.account import Account
from jaxserve.engine.fair_queue import EXPECTED_ANSWER
from jaxserve.kv import hashing
from jaxserve.request import FinishReason, GenerationRequest
from jaxserve.routing.seeds import random_seed
from jaxserve.structured.matcher import Matcher


class SequenceStatus(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class SequenceTimes:
    """Moments in seconds of `time.monotonic()`; 0.0 means not yet."""

    arrival: float
    scheduled: float = 0.0
    first_token: float = 0.0
    last_token: float = 0.0


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class Sequence:
    """A request's bookkeeping. Only the engine's thread touches it.

    tokens: prompt and the answer as far as the host knows it. num_pending: tokens that the device
    has sampled and the host has not read (0 or 1). num_computed_tokens: tokens whose KV is written,
    or will be by a step already dispatched (with its guesses, until that step was read).
    num_queued_tokens: what it counted for when it was queued. num_overtaken: later ones that were
    admitted while it waited. slot: its row of the device's sampling state. draft: guesses of what
    follows its newest token, for the next step only. turn: its place among those of all tenants,
    given when it is first queued. account: what it has taken so far.
    """

    request: GenerationRequest
    max_tokens: int
    order: int
    seed: int
    tokens: list[int]
    times: SequenceTimes
    status: SequenceStatus = SequenceStatus.WAITING
    slot: int = -1
    num_pending: int = 0
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    num_inserted_pages: int = 0
    num_preemptions: int = 0
    num_queued_tokens: int = 0
    num_overtaken: int = 0
    turn: float | None = None
    account: Account = dataclasses.field(default_factory=Account)
    pages: list[int] = dataclasses.field(default_factory=list)
    hashes: list[bytes] = dataclasses.field(default_factory=list)
    draft: list[int] = dataclasses.field(default_factory=list)
    finish_reason: FinishReason | None = None
    #: Says which tokens may come next; None for a free answer.
    matcher: Matcher | None = None

    @classmethod
    def from_request(cls, request: GenerationRequest, *, max_tokens: int, order: int) -> Sequence:
        """An unseeded request gets a seed here, so that a preempted one goes on with the same."""
        seed = request.sampling.seed
        return cls(
            seed=random_seed() if seed is None else seed,
            request=request,
            max_tokens=max_tokens,
            order=order,
            tokens=list(request.prompt_ids),
            times=SequenceTimes(arrival=request.arrival or time.monotonic()),
        )

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt_ids)

    @property
    def num_output_tokens(self) -> int:
        """Generated tokens that the host knows."""
        return len(self.tokens) - self.num_prompt_tokens

    @property
    def num_tokens(self) -> int:
        """All tokens, the pending one included."""
        return len(self.tokens) + self.num_pending

    @property
    def num_wanted(self) -> int:
        """Tokens that are still to be sampled, beside the pending one."""
        return self.max_tokens - (self.num_tokens - self.num_prompt_tokens)

    @property
    def num_uncomputed(self) -> int:
        """Tokens that could be computed now; 0 once the last wanted token is on its way."""
        if self.num_wanted <= 0:
            return 0
        return self.num_tokens - self.num_computed_tokens

    @property
    def is_decoding(self) -> bool:
        """Everything but the newest token is computed."""
        return self.num_tokens - self.num_computed_tokens <= 1 and self.num_computed_tokens > 0

    @property
    def rank(self) -> tuple[int, float, int]:
        """Order of service: smaller priority first, then tenants by turns, then by arrival."""
        return self.request.priority, self.turn or 0.0, self.order

    @property
    def num_expected_tokens(self) -> int:
        """What it may take, prompt and answer, as far as that can be told before its end."""
        return self.num_prompt_tokens + min(self.max_tokens, EXPECTED_ANSWER)

    def page_hashes(self, page_size: int, num_tokens: int) -> Iterator[bytes]:
        """Hashes of the pages that the first `num_tokens` known tokens fill completely.

        Each is computed when it is first asked for: 4,000 tokens at once would hold up a step.
        """
        for index in range(num_tokens // page_size):
            if index == len(self.hashes):
                self._hash_next_page(page_size)
            yield self.hashes[index]

    def next_page_hash(self, page_size: int, num_computed: int) -> bytes | None:
        """Of the page that comes after `num_computed` tokens; None while its tokens are unknown."""
        index = num_computed // page_size
        if (index + 1) * page_size > len(self.tokens):
            return None
        while len(self.hashes) <= index:
            self._hash_next_page(page_size)
        return self.hashes[index]

    def _hash_next_page(self, page_size: int) -> None:
        start = len(self.hashes) * page_size
        parent = self.hashes[-1] if self.hashes else hashing.chain_start(self.request.cache_salt)
        self.hashes.append(hashing.page_hash(parent, self.tokens[start : start + page_size]))
