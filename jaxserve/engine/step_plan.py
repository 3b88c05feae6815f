"""What one step will do: which sequences compute how many tokens (between steps 4 and 5)."""

from __future__ import annotations

import dataclasses

from jaxserve.engine.chunking import query_key_pairs
from jaxserve.engine.sequence import Sequence


@dataclasses.dataclass(slots=True, kw_only=True)
class ScheduledRow:
    """`count` query tokens of one sequence, from position `start` on.

    samples: the sequence's newest token is among them, so a token is sampled after it.
    feeds_back: that newest token is still on the device only.
    draft: guesses of what follows it, the last of the `count` tokens; after each of them a token
    is sampled, too, which counts if the guesses before it came true.
    """

    sequence: Sequence
    start: int
    count: int
    samples: bool
    feeds_back: bool
    draft: list[int] = dataclasses.field(default_factory=list)

    @property
    def num_known(self) -> int:
        """Position after the last query token that is not a guess."""
        return self.start + self.count - len(self.draft)

    @property
    def num_samples(self) -> int:
        """Query tokens after which a token is sampled: the last ones."""
        return len(self.draft) + 1 if self.samples else 0


@dataclasses.dataclass(slots=True, kw_only=True)
class StepPlan:
    """The rows of one step, in the order of the flat batch.

    admitted: sequences that took their slot in this step. preempted: those that lost theirs.
    """

    rows: list[ScheduledRow] = dataclasses.field(default_factory=list)
    admitted: list[Sequence] = dataclasses.field(default_factory=list)
    preempted: list[Sequence] = dataclasses.field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum(row.count for row in self.rows)

    @property
    def num_samples(self) -> int:
        return sum(row.num_samples for row in self.rows)

    @property
    def constrained(self) -> list[Sequence]:
        """The sequences whose next token must be one that their matcher allows."""
        return [
            row.sequence for row in self.rows if row.samples and row.sequence.matcher is not None
        ]

    @property
    def has_drafts(self) -> bool:
        return any(row.draft for row in self.rows)

    @property
    def num_pairs(self) -> float:
        """Query-key pairs of the step's attention."""
        return sum(query_key_pairs(row.start, row.count) for row in self.rows)
