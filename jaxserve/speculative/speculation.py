"""Decides in each step how many guesses to have confirmed, if any (before step 4).

Guesses are made, and counted right or wrong, whether or not a step confirms them, so what they
would bring is always known; what a larger step costs is measured. A guess goes into a step where
the expected tokens per second grow by it. So a text that repeats itself gets long guesses, a batch
in which guesses would need a step that costs too much gets none, and random text costs nothing.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from jaxserve.speculative.acceptance import Acceptance, SequenceAcceptance
from jaxserve.speculative.costs import TurnCosts
from jaxserve.speculative.proposer import NOTHING, Draft, Proposer

#: What guesses must promise: costs and shares are estimates.
_MARGIN = 1.05
#: What is hoped of a size that was never run: this much more than the next smaller one's cost.
_HOPED = 1.1
#: A guess less likely than this is left out even where it costs nothing.
_UNLIKELY = 0.05
#: In larger batches looking for guesses would take the host too long.
_MOST_ROWS = 64
#: After so many steps in which guesses were too dear, their cost is measured again; each time
#: twice as many, up to the second number.
_AGAIN, _AGAIN_AT_MOST = 256, 4096


class Candidate(NamedTuple):
    """A sequence that could have guesses confirmed.

    tokens: all that is known of it, a list that grows. room: the most guesses it could use.
    """

    key: str
    tokens: list[int]
    room: int


class _Known:
    """What is kept for a sequence: its last guess, made when it had `length` tokens."""

    __slots__ = ("acceptance", "guess", "length")

    def __init__(self, acceptance: SequenceAcceptance) -> None:
        self.acceptance = acceptance
        self.guess: Draft = NOTHING
        self.length = -1


class Speculation:
    """For one engine. sizes: of steps, ascending; max_guesses: per sequence and step.

    max_sampled: how many positions a step can sample at.
    """

    def __init__(
        self, proposer: Proposer, *, sizes: Sequence[int], max_guesses: int, max_sampled: int
    ) -> None:
        self._proposer = proposer
        self._sizes = sizes
        self._max_guesses = max_guesses
        self._max_sampled = min(max_sampled, sizes[-1])
        self._costs = TurnCosts()
        self._acceptance = Acceptance(proposer.priors)
        self._known: dict[str, _Known] = {}
        self._num_too_dear = 0
        self._again = _AGAIN

    def may_pay(self, num_rows: int) -> bool:
        """Whether a step of so many sequences has room for guesses at all."""
        return num_rows < self._max_sampled and num_rows <= _MOST_ROWS

    def worth_reading(self, candidates: Sequence[Candidate], num_rows: int) -> bool:
        """Whether to read the step in flight before the next one, of `num_rows` rows, is planned.

        Each candidate has one token more than is known: its first guess is about that one.
        """
        chances = [row[1:] for row in self._guess(candidates, ahead=1)]
        return self._choose_size(chances, num_rows) is not None

    def choose(self, candidates: Sequence[Candidate], num_rows: int) -> Mapping[str, list[int]]:
        """The guesses for a step of `num_rows` rows, by key; all tokens are known."""
        chances = self._guess(candidates, ahead=0)
        size = self._choose_size(chances, num_rows)
        if size is None:
            return {}
        room = min(size, self._max_sampled) - num_rows
        ranked = sorted(itertools.chain.from_iterable(chances), reverse=True)
        lowest = ranked[room - 1] if room <= len(ranked) else 0.0
        chosen: dict[str, list[int]] = {}
        for candidate, row in zip(candidates, chances, strict=True):
            count = min(sum(chance >= lowest for chance in row), room)
            if count:
                chosen[candidate.key] = self._known[candidate.key].guess.tokens[:count]
                room -= count
        return chosen

    def learn(self, key: str, length: int, found: Sequence[int]) -> None:
        """A sequence went on from `length` tokens with `found`."""
        known = self._known.get(key)
        if known is not None and known.length == length:
            known.acceptance.count(*known.guess, found)

    def count_step(self, size: int, read_first: bool, seconds: float) -> None:
        """See `TurnCosts.count`."""
        self._costs.count(size, read_first, seconds)

    def forget(self, key: str) -> None:
        """A sequence is over."""
        if self._known.pop(key, None) is not None:
            self._proposer.end(key)

    def _guess(self, candidates: Sequence[Candidate], ahead: int) -> list[list[float]]:
        """Makes each candidate's guesses, `ahead` more than it could use; their chances."""
        wanted = []
        for key, tokens, room in candidates:
            if key not in self._known:
                self._proposer.begin(key, tokens)
                self._known[key] = _Known(self._acceptance.new_sequence())
            wanted.append((key, min(room, self._max_guesses) + ahead))
        chances = []
        for candidate, guess in zip(candidates, self._proposer.propose(wanted), strict=True):
            known = self._known[candidate.key]
            known.length, known.guess = len(candidate.tokens), guess
            chances.append(known.acceptance.chances(guess.trust, _UNLIKELY))
        return chances

    def _choose_size(self, chances: Sequence[Sequence[float]], num_rows: int) -> int | None:
        """The size of step with the most expected tokens per second; None without guesses."""
        ranked = sorted(itertools.chain.from_iterable(chances), reverse=True)
        if not ranked:
            return None
        first = bisect.bisect_left(self._sizes, num_rows)
        plain = self._costs.known(self._sizes[first], False)
        if plain is None:
            return None
        sums = [0.0, *itertools.accumulate(ranked)]
        wanted = _MARGIN * num_rows / plain
        best, best_rate, hopeful, cost = None, wanted, False, plain
        for size in self._sizes[first:]:
            room = min(min(size, self._max_sampled) - num_rows, len(ranked))
            known = self._costs.read_first(size)
            cost = cost * _HOPED if known is None else known
            if room > 0:
                expected = num_rows + sums[room]
                hopeful = hopeful or expected / plain > wanted
                if expected / cost > best_rate:
                    best, best_rate = size, expected / cost
            if room == len(ranked) or size >= self._max_sampled or known is None:
                break  # sizes that were never run are tried one after the other
        if best is None and hopeful:
            self._note_too_dear()
        return best

    def _note_too_dear(self) -> None:
        self._num_too_dear += 1
        if self._num_too_dear >= self._again:
            self._num_too_dear = 0
            self._again = min(2 * self._again, _AGAIN_AT_MOST)
            self._costs.forget_read_first()
