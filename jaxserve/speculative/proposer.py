"""What guesses tokens (before step 4): the interface of every proposer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol


class Draft(NamedTuple):
    """Guessed tokens, the likeliest continuation first to last.

    trust: one class per token, an index into the proposer's `priors`: tokens of one class are
    about equally likely to be right, given that those before them were.
    """

    tokens: list[int]
    trust: list[int]


NOTHING = Draft([], [])


class Proposer(Protocol):
    """Guesses what follows a sequence of tokens.

    priors: per class of trust the share of right guesses to assume until some were seen.
    """

    priors: Sequence[float]

    def begin(self, key: str, tokens: list[int]) -> None:
        """A new sequence; the list is kept and read again as it grows, and nobody shortens it."""
        ...

    def propose(self, wanted: Sequence[tuple[str, int]]) -> list[Draft]:
        """Of each key at most so many tokens that may follow all that its list holds now.

        All sequences of a step at once, so that a model that guesses can take them as one batch.
        """
        ...

    def end(self, key: str) -> None:
        """The sequence is over. Does nothing for a key that is not known."""
        ...
