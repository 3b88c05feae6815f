"""Chooses what the next step computes (step 4 of the walk). Touches no array.

Decoding sequences come first, then prompts: those that were begun and those that are admitted now.
How many tokens of which prompt, `chunking.py` says; who may be admitted, `waiting.py`. When pages
run out the sequence that would be served last is preempted: it loses its pages and is computed again
later.
"""

from __future__ import annotations

import bisect
import time

from jaxserve.engine.chunking import ChunkPolicy, PromptPart
from jaxserve.engine.sequence import Sequence, SequenceStatus
from jaxserve.engine.step_costs import StepCosts
from jaxserve.engine.step_plan import ScheduledRow, StepPlan
from jaxserve.engine.waiting import Candidate, WaitingQueue
from jaxserve.kv.page_pool import PagePool


class Scheduler:
    """Owns the queue, the running batch (in order of rank), its slots and the page pool.

    chunks: how long steps may be; None for steps as large as they can be.
    """

    def __init__(
        self,
        pool: PagePool,
        *,
        max_num_seqs: int,
        max_step_tokens: int,
        prefix_caching: bool,
        chunks: ChunkPolicy | None = None,
    ) -> None:
        self.pool = pool
        self.running: list[Sequence] = []
        self.chunks = chunks or ChunkPolicy(
            StepCosts((max_step_tokens,)), max_step_tokens=max_step_tokens, objective=None
        )
        self.num_preemptions = 0
        self.num_prefix_queries = 0
        self.num_prefix_hits = 0
        self._max_step_tokens = max_step_tokens
        self._prefix_caching = prefix_caching
        self._free_slots = list(range(max_num_seqs - 1, -1, -1))
        self._queue = WaitingQueue()

    @property
    def num_waiting(self) -> int:
        return len(self._queue)

    @property
    def num_waiting_tokens(self) -> int:
        """Tokens that the waiting sequences have to compute."""
        return self._queue.num_tokens

    def num_waiting_of(self, tenant: str) -> int:
        """How many of one tenant's wait."""
        return self._queue.num_of(tenant)

    @property
    def may_admit(self) -> bool:
        """Whether the next step may take in a waiting sequence."""
        return bool(len(self._queue) and self._free_slots)

    @property
    def has_work(self) -> bool:
        return bool(self.running or len(self._queue))

    def add(self, sequence: Sequence) -> None:
        """Queues a sequence; it must fit the pool (the engine checked)."""
        sequence.status = SequenceStatus.WAITING
        self._queue.add(sequence)

    def schedule(self) -> StepPlan:
        """The next step. Afterwards each row's tokens count as computed and may be shared."""
        plan = StepPlan()
        begun = self._plan_answers(plan)
        candidates = [] if plan.preempted else self._candidates(begun)
        if begun or candidates:
            self._plan_prompts(plan, begun, candidates)
        self._add_drafts(plan)
        for row in plan.rows:
            self._commit(row)
        return plan

    def finish(self, sequence: Sequence) -> None:
        """Takes a sequence out, wherever it is, and frees what it holds."""
        self._queue.settle(sequence)
        if sequence.status is SequenceStatus.WAITING:
            self._queue.remove(sequence)
        elif sequence.status is SequenceStatus.RUNNING:
            self._insert_full_pages(sequence)
            self._release(sequence)
        sequence.status = SequenceStatus.FINISHED

    def check_integrity(self) -> None:
        """Asserts that pages and slots balance."""
        self.pool.check_integrity(sequence.pages for sequence in self.running)
        slots = [sequence.slot for sequence in self.running] + self._free_slots
        assert len(slots) == len(set(slots)), "two sequences share a slot"
        assert all(sequence.status is SequenceStatus.WAITING for sequence in self._queue)
        waiting = sum(sequence.num_queued_tokens for sequence in self._queue)
        assert waiting == self._queue.num_tokens, "the queue's tokens are off"

    def _plan_answers(self, plan: StepPlan) -> list[Sequence]:
        """Rows for the decoding sequences; returns those whose prompts are not computed yet."""
        budget, page_size = self._max_step_tokens, self.pool.page_size
        begun = []
        for sequence in tuple(self.running):
            count = sequence.num_uncomputed
            if count == 0 or sequence.status is not SequenceStatus.RUNNING:
                continue
            if not sequence.is_decoding:
                begun.append(sequence)
            elif budget > 0:
                count = min(count, budget)
                if sequence.num_computed_tokens + count > len(sequence.pages) * page_size:
                    budget += self._make_room(sequence, count, plan)
                if sequence.status is SequenceStatus.RUNNING:
                    self._plan_row(plan, sequence, count)
                    budget -= count
        return [sequence for sequence in begun if sequence.status is SequenceStatus.RUNNING]

    def _candidates(self, begun: list[Sequence]) -> list[Candidate]:
        if not self._free_slots or not len(self._queue):
            return []
        if not self._prefix_caching:
            return self._queue.candidates(len(self._free_slots), self._max_step_tokens)
        return self._queue.sharing_candidates(
            len(self._free_slots), self._max_step_tokens, self.pool, begun
        )

    def _plan_prompts(
        self, plan: StepPlan, begun: list[Sequence], candidates: list[Candidate]
    ) -> None:
        """Rows for prompts; admits the candidates that get any tokens and pages."""
        prompts = [(sequence, sequence.num_computed_tokens) for sequence in begun]
        prompts += [(candidate.sequence, candidate.cached) for candidate in candidates]
        prompts.sort(key=lambda prompt: prompt[0].request.priority)
        parts = [
            PromptPart(start, sequence.num_tokens - start, sequence.request.priority)
            for sequence, start in prompts
        ]
        counts = self.chunks.choose(parts, plan.num_tokens, plan.num_pairs)
        for (sequence, _), count in zip(prompts, counts, strict=True):
            if (
                count
                and sequence.status is SequenceStatus.WAITING
                and not self._admit(sequence, plan)
            ):
                break  # nor any after it
            if count:
                self._plan_row(plan, sequence, min(count, sequence.num_uncomputed))
        if plan.admitted:
            self._queue.count_overtaken(plan.admitted)

    def _plan_row(self, plan: StepPlan, sequence: Sequence, count: int) -> None:
        start = sequence.num_computed_tokens
        samples = start + count == sequence.num_tokens
        plan.rows.append(
            ScheduledRow(
                sequence=sequence,
                start=start,
                count=count,
                samples=samples,
                feeds_back=samples and sequence.num_pending > 0,
            )
        )

    def _add_drafts(self, plan: StepPlan) -> None:
        """Gives rows their sequence's guesses, as far as tokens and free pages go."""
        budget = self._max_step_tokens - plan.num_tokens
        for row in plan.rows:
            sequence, draft = row.sequence, row.sequence.draft
            if not draft or not row.samples or row.feeds_back:
                continue
            while len(sequence.pages) < self._pages_for(row.start + row.count + len(draft)):
                page = self.pool.allocate(1)
                if page is None:
                    break
                sequence.pages.extend(page)
            held = len(sequence.pages) * self.pool.page_size
            row.draft = draft[: min(budget, held - row.start - row.count)]
            row.count += len(row.draft)
            budget -= len(row.draft)

    def _commit(self, row: ScheduledRow) -> None:
        sequence = row.sequence
        sequence.num_computed_tokens = row.start + row.count
        sequence.draft = []
        if row.samples:
            sequence.num_pending += 1
        self._insert_full_pages(sequence)

    def _make_room(self, sequence: Sequence, count: int, plan: StepPlan) -> int:
        """Gets the pages for `count` more tokens, preempting if it must; returns tokens taken back."""
        taken_back = 0
        while True:
            missing = self._pages_for(sequence.num_computed_tokens + count) - len(sequence.pages)
            pages = self.pool.allocate(max(0, missing))
            if pages is not None:
                sequence.pages.extend(pages)
                return taken_back
            victim = self.running[-1]
            taken_back += self._preempt(victim, plan)
            if victim is sequence:
                return taken_back

    def _preempt(self, victim: Sequence, plan: StepPlan) -> int:
        planned = [row for row in plan.rows if row.sequence is victim]
        plan.rows = [row for row in plan.rows if row.sequence is not victim]
        self._insert_full_pages(victim)
        self._release(victim)
        victim.num_computed_tokens = 0
        victim.draft = []
        victim.num_inserted_pages = 0
        victim.num_preemptions += 1
        self.num_preemptions += 1
        plan.preempted.append(victim)
        self.add(victim)
        return sum(row.count for row in planned)

    def _release(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self.pool.free(sequence.pages)
        sequence.pages = []
        self._free_slots.append(sequence.slot)
        sequence.slot = -1

    def _admit(self, sequence: Sequence, plan: StepPlan) -> bool:
        """Takes a slot and pages for a waiting sequence; False if there are too few pages."""
        if not self._take_pages(sequence):
            return False
        self._queue.remove(sequence)
        sequence.status = SequenceStatus.RUNNING
        sequence.slot = self._free_slots.pop()
        if not sequence.times.scheduled:
            sequence.times.scheduled = time.monotonic()
        bisect.insort(self.running, sequence, key=_rank)
        plan.admitted.append(sequence)
        return True

    def _take_pages(self, sequence: Sequence) -> bool:
        """Pages for all known tokens, the longest cached prefix shared; False if there are too few.

        The newest token is never taken from the cache: its hidden state is needed to sample.
        """
        known = len(sequence.tokens)
        shared: list[int] = []
        if self._prefix_caching:
            shared = self.pool.match(sequence.page_hashes(self.pool.page_size, known - 1))
        self.pool.share(shared)
        fresh = self.pool.allocate(self._pages_for(known) - len(shared))
        if fresh is None:
            self.pool.free(shared)
            return False
        sequence.pages = shared + fresh
        cached = len(shared) * self.pool.page_size
        sequence.num_computed_tokens = cached
        sequence.num_inserted_pages = len(shared)
        if sequence.num_preemptions == 0:
            sequence.num_cached_tokens = cached
            self.num_prefix_queries += known
            self.num_prefix_hits += cached
        return True

    def _insert_full_pages(self, sequence: Sequence) -> None:
        if not self._prefix_caching:
            return
        known = min(sequence.num_computed_tokens, len(sequence.tokens))
        count = known // self.pool.page_size
        if count <= sequence.num_inserted_pages:
            return
        for index in range(sequence.num_inserted_pages, count):
            key = sequence.next_page_hash(self.pool.page_size, index * self.pool.page_size)
            assert key is not None
            self.pool.insert(sequence.pages[index], key)
        sequence.num_inserted_pages = count

    def _pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.pool.page_size)


def _rank(sequence: Sequence) -> tuple[int, float, int]:
    return sequence.rank
