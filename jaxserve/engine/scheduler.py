"""Chooses what the next step computes (step 4 of the walk). Touches no array.

Decoding sequences come first, then prefills that were begun, then new admissions, all within the
step's token budget; so a long prompt is read in chunks beside running answers. When pages run out
the sequence that would be served last is preempted: it loses its pages and is computed again later.
"""

from __future__ import annotations

import heapq
import time

from jaxserve.engine.sequence import Sequence, SequenceStatus
from jaxserve.engine.step_plan import ScheduledRow, StepPlan
from jaxserve.kv.page_pool import PagePool


class Scheduler:
    """Owns the queue, the running batch, its slots and the page pool."""

    def __init__(
        self, pool: PagePool, *, max_num_seqs: int, max_step_tokens: int, prefix_caching: bool
    ) -> None:
        self.pool = pool
        self.running: list[Sequence] = []
        self.num_preemptions = 0
        self.num_prefix_queries = 0
        self.num_prefix_hits = 0
        self._max_step_tokens = max_step_tokens
        self._prefix_caching = prefix_caching
        self._free_slots = list(range(max_num_seqs - 1, -1, -1))
        self._queue: list[tuple[tuple[int, int], Sequence]] = []
        self._num_waiting = 0
        self._num_waiting_tokens = 0

    @property
    def num_waiting(self) -> int:
        return self._num_waiting

    @property
    def num_waiting_tokens(self) -> int:
        """Tokens that the waiting sequences have to compute."""
        return self._num_waiting_tokens

    @property
    def has_work(self) -> bool:
        return bool(self._num_waiting or self.running)

    def add(self, sequence: Sequence) -> None:
        """Queues a sequence; it must fit the pool (the engine checked)."""
        sequence.status = SequenceStatus.WAITING
        sequence.num_queued_tokens = len(sequence.tokens)
        self._num_waiting += 1
        self._num_waiting_tokens += sequence.num_queued_tokens
        heapq.heappush(self._queue, (sequence.rank, sequence))

    def schedule(self) -> StepPlan:
        """The next step. Afterwards each row's tokens count as computed and may be shared."""
        plan = StepPlan()
        budget = self._max_step_tokens
        for sequence in sorted(self.running, key=lambda s: (not s.is_decoding, s.rank)):
            count = min(sequence.num_uncomputed, budget)
            if count == 0 or sequence.status is not SequenceStatus.RUNNING:
                continue
            budget += self._make_room(sequence, count, plan)
            if sequence.status is SequenceStatus.RUNNING:
                self._plan_row(plan, sequence, count)
                budget -= count
        if not plan.preempted:
            self._admit(plan, budget)
        for row in plan.rows:
            self._commit(row)
        return plan

    def finish(self, sequence: Sequence) -> None:
        """Takes a sequence out, wherever it is, and frees what it holds."""
        if sequence.status is SequenceStatus.WAITING:
            self._leave_queue(sequence)  # its heap entry is skipped when it comes up
        elif sequence.status is SequenceStatus.RUNNING:
            self._insert_full_pages(sequence)
            self._release(sequence)
        sequence.status = SequenceStatus.FINISHED

    def check_integrity(self) -> None:
        """Asserts that pages and slots balance."""
        self.pool.check_integrity(sequence.pages for sequence in self.running)
        slots = [sequence.slot for sequence in self.running] + self._free_slots
        assert len(slots) == len(set(slots)), "two sequences share a slot"
        waiting = {id(s) for _, s in self._queue if s.status is SequenceStatus.WAITING}
        assert len(waiting) == self._num_waiting, "the queue's count is off"
        if not waiting:
            assert self._num_waiting_tokens == 0, "the queue's tokens are off"

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

    def _commit(self, row: ScheduledRow) -> None:
        sequence = row.sequence
        sequence.num_computed_tokens = row.start + row.count
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
            victim = max(self.running, key=lambda s: s.rank)
            taken_back += self._preempt(victim, plan)
            if victim is sequence:
                return taken_back

    def _preempt(self, victim: Sequence, plan: StepPlan) -> int:
        planned = [row for row in plan.rows if row.sequence is victim]
        plan.rows = [row for row in plan.rows if row.sequence is not victim]
        self._insert_full_pages(victim)
        self._release(victim)
        victim.num_computed_tokens = 0
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

    def _admit(self, plan: StepPlan, budget: int) -> None:
        while budget > 0 and self._free_slots:
            sequence = self._next_waiting()
            if sequence is None or not self._take_pages(sequence):
                return
            heapq.heappop(self._queue)
            self._leave_queue(sequence)
            sequence.status = SequenceStatus.RUNNING
            sequence.slot = self._free_slots.pop()
            if not sequence.times.scheduled:
                sequence.times.scheduled = time.monotonic()
            self.running.append(sequence)
            plan.admitted.append(sequence)
            count = min(sequence.num_uncomputed, budget)
            self._plan_row(plan, sequence, count)
            budget -= count

    def _next_waiting(self) -> Sequence | None:
        while self._queue:
            sequence = self._queue[0][1]
            if sequence.status is SequenceStatus.WAITING:
                return sequence
            heapq.heappop(self._queue)
        return None

    def _leave_queue(self, sequence: Sequence) -> None:
        self._num_waiting -= 1
        self._num_waiting_tokens -= sequence.num_queued_tokens

    def _take_pages(self, sequence: Sequence) -> bool:
        """Pages for all known tokens, the longest cached prefix shared; False if there are too few.

        The newest token is never taken from the cache: its hidden state is needed to sample.
        """
        known = len(sequence.tokens)
        shared: list[int] = []
        if self._prefix_caching:
            hashes = sequence.full_page_hashes(self.pool.page_size, known - 1)
            shared = self.pool.match(hashes)
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
        hashes = sequence.full_page_hashes(self.pool.page_size, known)
        for index in range(sequence.num_inserted_pages, count):
            self.pool.insert(sequence.pages[index], hashes[index])
        sequence.num_inserted_pages = count

    def _pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.pool.page_size)
