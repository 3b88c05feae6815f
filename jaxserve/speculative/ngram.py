"""Guesses that what followed the last words before will follow again (prompt lookup; before step 4).

Each sequence has an index of its own: the last n tokens, for every n from min_n to max_n, to the
place after their latest occurrence. A new token costs one look-up and one entry per n, however
long the context is. Where a guess came true, the place moves on with the answer, so the match is
known to be longer than max_n and is trusted more.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence

from jaxserve.speculative.proposer import NOTHING, Draft

#: Lengths of match at which trust grows by one class, and what each class is worth at first.
_LONGER = (3, 4, 6, 9, 17)
_TRUST = tuple(bisect.bisect(_LONGER, matched) for matched in range(_LONGER[-1] + 1))
_PRIORS = (0.35, 0.45, 0.55, 0.65, 0.75, 0.85)


class NgramProposer:
    """See `Proposer`. min_n, max_n: the shortest and longest suffix that is looked up."""

    priors: Sequence[float] = _PRIORS

    def __init__(self, *, min_n: int = 2, max_n: int = 4) -> None:
        assert 1 <= min_n <= max_n
        self._lengths = range(max_n, min_n - 1, -1)
        self._histories: dict[str, _History] = {}

    def begin(self, key: str, tokens: list[int]) -> None:
        """See `Proposer`."""
        self._histories[key] = _History(tokens, self._lengths)

    def propose(self, wanted: Sequence[tuple[str, int]]) -> list[Draft]:
        """See `Proposer`."""
        return [self._histories[key].propose(count) for key, count in wanted]

    def end(self, key: str) -> None:
        """See `Proposer`."""
        self._histories.pop(key, None)


class _History:
    """One sequence. place: where the guess is read from, -1 for no guess; matched: see above."""

    def __init__(self, tokens: list[int], lengths: range) -> None:
        self._tokens = tokens
        self._lengths = lengths
        self._index: dict[tuple[int, ...], int] = {}
        self._num_indexed = 0
        self._place = -1
        self._matched = 0

    def propose(self, count: int) -> Draft:
        self._catch_up()
        place, tokens = self._place, self._tokens
        if place < 0:
            return NOTHING
        guessed = tokens[place : place + count]
        period = len(tokens) - place  # beyond the end the guess repeats itself
        while len(guessed) < count:
            guessed.append(guessed[len(guessed) - period])
        trust = list(_TRUST[self._matched : self._matched + count])
        trust += [len(_LONGER)] * (count - len(trust))
        return Draft(guessed, trust)

    def _catch_up(self) -> None:
        tokens, end = self._tokens, len(self._tokens)
        if end - self._num_indexed > 2 * self._lengths[0]:
            self._index_many(end - 1)
        for position in range(self._num_indexed, end):
            self._follow(position, tokens[position])
        self._num_indexed = end

    def _follow(self, position: int, token: int) -> None:
        """Takes in the token at `position`."""
        followed = self._place >= 0 and self._tokens[self._place] == token
        found, matched = -1, 0
        for length in self._lengths:
            start = position + 1 - length
            if start < 0:
                continue
            key = tuple(self._tokens[start : position + 1])
            earlier = self._index.get(key, -1)
            self._index[key] = position + 1
            if found < 0 and earlier >= 0:
                found, matched = earlier, length
        if followed:
            self._place, self._matched = self._place + 1, self._matched + 1
        else:
            self._place, self._matched = found, matched

    def _index_many(self, end: int) -> None:
        """Takes in the tokens before `end` at once, all that were not; there is no guess then."""
        first = max(0, self._num_indexed - self._lengths[0])
        tokens = self._tokens[first:end]
        for length in self._lengths:
            grams = zip(*(tokens[i:] for i in range(length)), strict=False)
            self._index.update(zip(grams, range(first + length, end + 1), strict=False))
        self._num_indexed, self._place, self._matched = end, -1, 0
