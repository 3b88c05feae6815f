"""How often guesses are right (after step 7): counted for the engine and for each sequence."""

from __future__ import annotations

from collections.abc import Sequence

#: The engine's counts forget: the last few hundred guesses of a class decide.
_KEPT = 0.995
#: How many guesses the assumed share counts for, of the prior and of the engine's share.
_PRIOR_WEIGHT = 8.0
_ENGINE_WEIGHT = 6.0
#: A sequence's counts forget sooner, since a text changes its kind.
_KEPT_BY_SEQUENCE = 0.95


class Acceptance:
    """Shares of right guesses by class of trust; see `Proposer.priors`."""

    def __init__(self, priors: Sequence[float]) -> None:
        self._hits = [_PRIOR_WEIGHT * share for share in priors]
        self._trials = [_PRIOR_WEIGHT for _ in priors]

    def of_engine(self, trust: int) -> float:
        """The share among all sequences."""
        return self._hits[trust] / self._trials[trust]

    def new_sequence(self) -> SequenceAcceptance:
        """For a sequence of which nothing is known yet."""
        return SequenceAcceptance(self, len(self._hits))

    def count(self, trust: int, hit: bool) -> None:
        """One guess turned out right or wrong."""
        self._hits[trust] = _KEPT * self._hits[trust] + hit
        self._trials[trust] = _KEPT * self._trials[trust] + 1.0


class SequenceAcceptance:
    """The same for one sequence: the engine's share until it has some guesses of its own."""

    def __init__(self, engine: Acceptance, num_classes: int) -> None:
        self._engine = engine
        self._hits = [0.0] * num_classes
        self._trials = [0.0] * num_classes

    def share(self, trust: int) -> float:
        """The expected share of right guesses, 0 to 1."""
        assumed = _ENGINE_WEIGHT * self._engine.of_engine(trust)
        return (self._hits[trust] + assumed) / (self._trials[trust] + _ENGINE_WEIGHT)

    def chances(self, trust: Sequence[int], least: float) -> list[float]:
        """Of each guessed token the probability that it and all before it are right.

        Only those of at least `least`.
        """
        chances, chance = [], 1.0
        for item in trust:
            chance *= self.share(item)
            if chance < least:
                break
            chances.append(chance)
        return chances

    def count(self, guessed: Sequence[int], trust: Sequence[int], found: Sequence[int]) -> None:
        """What was guessed against what came; nothing is learnt after the first wrong guess."""
        for guess, item, token in zip(guessed, trust, found, strict=False):
            hit = guess == token
            self._hits[item] = _KEPT_BY_SEQUENCE * self._hits[item] + hit
            self._trials[item] = _KEPT_BY_SEQUENCE * self._trials[item] + 1.0
            self._engine.count(item, hit)
            if not hit:
                return
