"""What waits for a slot, and who of it may be admitted next (step 4). Takes nothing itself.

The order is that of rank. Of the first few, those go ahead whose prompt is mostly in the prefix
cache: they cost little, and their pages may be gone later. One whose next page is being computed for
another prompt waits for that page instead of computing it as well. Both are bounded: who has been
overtaken often enough is next.
"""

from __future__ import annotations

import bisect
import collections
import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator

from jaxserve.engine.fair_queue import FairQueue, keep_turns
from jaxserve.engine.sequence import Sequence
from jaxserve.kv.page_pool import PagePool

#: How many of the waiting are looked at in one step, if they fill it.
_WINDOW = 16
#: So many admissions of later ones, and no more, pass a waiting sequence (those of one step aside).
MAX_OVERTAKEN = 16
#: The share of a prompt that must be cached to go ahead.
_MOSTLY = 0.5


@dataclasses.dataclass(frozen=True, slots=True)
class Candidate:
    """A waiting sequence and the tokens of it that the prefix cache has now."""

    sequence: Sequence
    cached: int

    @property
    def rank(self) -> tuple[int, bool, bool, float, int]:
        """Order of admission."""
        sequence = self.sequence
        mostly = self.cached >= _MOSTLY * len(sequence.tokens)
        priority, turn, order = sequence.rank
        return priority, not _is_due(sequence), not mostly, turn, order


class WaitingQueue:
    """Sequences in order of rank. num_tokens: what they counted for when they came."""

    def __init__(self) -> None:
        self._entries: list[tuple[tuple[int, float, int], Sequence]] = []
        self._fair = FairQueue()
        self._of_tenant: collections.Counter[str] = collections.Counter()
        self.num_tokens = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Sequence]:
        return (sequence for _, sequence in self._entries)

    def add(self, sequence: Sequence) -> None:
        """Puts a sequence in its place; one that comes back keeps its turn."""
        request = sequence.request
        if sequence.turn is None:
            tokens = sequence.num_expected_tokens
            sequence.turn = self._fair.start(request.tenant, tokens, request.weight)
        self._of_tenant[request.tenant] += 1
        sequence.num_queued_tokens = len(sequence.tokens)
        self.num_tokens += sequence.num_queued_tokens
        bisect.insort(self._entries, (sequence.rank, sequence))  # no two ranks are equal

    def remove(self, sequence: Sequence) -> None:
        """Takes out a sequence that is in the queue."""
        index = bisect.bisect_left(self._entries, sequence.rank, key=lambda entry: entry[0])
        assert self._entries[index][1] is sequence
        del self._entries[index]
        self.num_tokens -= sequence.num_queued_tokens
        tenant = sequence.request.tenant
        self._of_tenant[tenant] -= 1
        if not self._of_tenant[tenant]:
            del self._of_tenant[tenant]

    def num_of(self, tenant: str) -> int:
        """How many of one tenant's wait."""
        return self._of_tenant[tenant]

    def settle(self, sequence: Sequence) -> None:
        """A sequence has ended: its tenant's next turn comes by what it really took."""
        taken = sequence.num_output_tokens
        if sequence.times.scheduled:
            taken += sequence.num_prompt_tokens - sequence.num_cached_tokens
        more = taken - sequence.num_expected_tokens
        self._fair.settle(sequence.request.tenant, more, sequence.request.weight)

    def candidates(self, count: int, tokens: int) -> list[Candidate]:
        """The first `count` where prefixes are not kept, or fewer, see `_look`."""
        return list(itertools.islice(self._look(tokens, lambda sequence: 0), count))

    def sharing_candidates(
        self, count: int, tokens: int, pool: PagePool, begun: Iterable[Sequence]
    ) -> list[Candidate]:
        """At most `count`, in the order in which they should be admitted.

        tokens: see `_look`. begun: those whose prompts are being computed, for whose pages others
        wait.
        """
        size = pool.page_size
        coming = {sequence.next_page_hash(size, sequence.num_computed_tokens) for sequence in begun}

        def find(sequence: Sequence) -> int:
            return size * len(pool.match(sequence.page_hashes(size, len(sequence.tokens) - 1)))

        found = list(self._look(tokens, find))
        chosen: list[Candidate] = []
        preferred = sorted(found, key=lambda each: each.rank)
        for candidate in keep_turns(found, preferred, lambda each: each.sequence.request.tenant):
            sequence = candidate.sequence
            key = sequence.next_page_hash(size, candidate.cached)
            helps = candidate.cached + size < len(sequence.tokens)
            if len(chosen) == count:
                break
            if key is not None and helps and key in coming and not _is_due(sequence):
                continue
            coming.add(key)
            chosen.append(candidate)
            if _is_due(sequence):
                break  # nobody else before it
        return chosen

    def _look(self, tokens: int, find: Callable[[Sequence], int]) -> Iterator[Candidate]:
        """The first few, and more until they have `tokens` to compute, which fill a step.

        find: tokens of a sequence that are cached.
        """
        for number, sequence in enumerate(self):
            if number >= _WINDOW and tokens <= 0:
                return
            candidate = Candidate(sequence, find(sequence))
            tokens -= len(sequence.tokens) - candidate.cached
            yield candidate

    def count_overtaken(self, admitted: Iterable[Sequence]) -> None:
        """Those that were in the queue before an admitted one have been overtaken."""
        ranks = sorted(sequence.rank for sequence in admitted)
        self._fair.admitted(max(turn for _, turn, _ in ranks))
        for rank, sequence in self._entries:
            later = len(ranks) - bisect.bisect(ranks, rank)
            if not later:
                return
            sequence.num_overtaken += later


def _is_due(sequence: Sequence) -> bool:
    return sequence.num_overtaken >= MAX_OVERTAKEN
