"""What one step will do: which sequences compute how many tokens (between steps 4 and 5)."""

from __future__ import annotations

import dataclasses

from jaxserve.engine.chunking import query_key_pairs
from jaxserve.engine.sequence import Sequence


@dataclasses.dataclass(slots=True, kw_only=True)
class ScheduledRow:
    """`count` query tokens of one sequence, from position `start` on.

    samples: the last of them is the sequence's newest token, so a token is sampled after it.
    feeds_back: that newest token is still on the device only.
    """

    sequence: Sequence
    start: int
    count: int
    samples: bool
    feeds_back: bool


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
    def num_pairs(self) -> float:
        """Query-key pairs of the step's attention."""
        return sum(query_key_pairs(row.start, row.count) for row in self.rows)
