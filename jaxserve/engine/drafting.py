"""Guesses for the sequences of the next step (between steps 7 and 4): the engine's side of
`jaxserve.speculative`, which knows no sequences.

Only steps in which every row decodes hold guesses: a step that reads a prompt is full of work
already. A sequence whose sampling depends on its own output has none.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence as Rows

from jaxserve.config import EngineConfig
from jaxserve.engine.buckets import Bucket
from jaxserve.engine.scheduler import Scheduler
from jaxserve.engine.sequence import Sequence
from jaxserve.engine.step_plan import StepPlan
from jaxserve.sampling.limits import reads_output
from jaxserve.speculative.ngram import NgramProposer
from jaxserve.speculative.speculation import Candidate, Speculation

logger = logging.getLogger("jaxserve.engine")


class Drafting:
    """What the engine asks in each step. One thread calls it."""

    def __init__(self, speculation: Speculation) -> None:
        self._speculation = speculation

    def must_read_first(self, scheduler: Scheduler, in_flight: StepPlan) -> bool:
        """Whether the step in flight must be read before the next one is scheduled."""
        if in_flight.has_drafts:
            return True
        rows = self._decoding(scheduler)
        return bool(rows) and self._speculation.worth_reading(_candidates(rows), len(rows))

    def draft(self, scheduler: Scheduler) -> None:
        """Sets `Sequence.draft` for the next step; no token is pending."""
        rows = self._decoding(scheduler)
        if not rows:
            return
        chosen = self._speculation.choose(_candidates(rows), len(rows))
        for sequence in rows:
            sequence.draft = chosen.get(sequence.request.request_id, [])

    def learn(self, sequence: Sequence, found: list[int]) -> None:
        """What a step sampled for a sequence, before it is appended to its tokens."""
        self._speculation.learn(sequence.request.request_id, len(sequence.tokens), found)

    def count_step(self, size: int, read_first: bool, seconds: float) -> None:
        """See `TurnCosts.count`."""
        self._speculation.count_step(size, read_first, seconds)

    def forget(self, sequence: Sequence) -> None:
        """A sequence has finished."""
        self._speculation.forget(sequence.request.request_id)

    def _decoding(self, scheduler: Scheduler) -> list[Sequence]:
        """The rows of the next step, if all of them decode; else none."""
        running = scheduler.running
        if scheduler.may_admit or not self._speculation.may_pay(len(running)):
            return []
        rows = [sequence for sequence in running if sequence.num_uncomputed]
        return rows if all(sequence.is_decoding for sequence in rows) else []


def make_drafting(config: EngineConfig, buckets: Rows[Bucket]) -> Drafting | None:
    """What the settings ask for; None if nothing is to be guessed."""
    if config.speculative == "off":
        return None
    logger.info(
        "speculation: %s, up to %d tokens per answer and step where that pays",
        config.speculative,
        config.num_speculative_tokens,
    )
    return Drafting(
        Speculation(
            NgramProposer(),
            sizes=[bucket.tokens for bucket in buckets],
            max_guesses=config.num_speculative_tokens,
            max_sampled=buckets[-1].rows,
        )
    )


def _candidates(rows: list[Sequence]) -> list[Candidate]:
    return [
        Candidate(sequence.request.request_id, sequence.tokens, sequence.num_wanted - 1)
        for sequence in rows
        if sequence.matcher is None and not reads_output(sequence.request.sampling)
    ]
