"""The scheduler under hand-made and random schedules, with a counting model instead of a device."""

from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.engine.chunking import ChunkPolicy
from jaxserve.engine.scheduler import Scheduler
from jaxserve.engine.sequence import Sequence
from jaxserve.engine.step_costs import StepCosts
from jaxserve.engine.waiting import MAX_OVERTAKEN
from jaxserve.kv.page_pool import PagePool
from jaxserve.request import GenerationRequest, SamplingParams


def make_sequence(order, prompt, max_tokens, priority=0):
    request = GenerationRequest(
        request_id=str(order), prompt_ids=prompt, sampling=SamplingParams(), priority=priority
    )
    return Sequence.from_request(request, max_tokens=max_tokens, order=order)


def make_scheduler(num_pages=32, page_size=4, slots=4, tokens=16, prefix_caching=True, chunks=None):
    return Scheduler(
        PagePool(num_pages, page_size),
        max_num_seqs=slots,
        max_step_tokens=tokens,
        prefix_caching=prefix_caching,
        chunks=chunks,
    )


def make_chunks(tokens, objective):
    """Steps take 10 ms and 1 ms per token; the bucket that is too large has never run."""
    costs = StepCosts([*range(1, tokens + 1), tokens + 7])
    for size in range(1, tokens + 1):
        costs.observe(size, 0, 0.01 + 0.001 * size)
    return ChunkPolicy(costs, max_step_tokens=tokens, objective=objective)


def read(scheduler, plan):
    """What the engine does with a step's tokens: token id = 1000 + its position."""
    for row in plan.rows:
        sequence = row.sequence
        if not row.samples:
            continue
        sequence.num_pending -= 1
        sequence.tokens.append(1000 + len(sequence.tokens))
        if sequence.num_output_tokens >= sequence.max_tokens:
            scheduler.finish(sequence)


def run(scheduler, sequences=(), lag=1, limit=2000):
    """Runs to the end, reading each step `lag` steps late as the asynchronous engine does."""
    for sequence in sequences:
        scheduler.add(sequence)
    plans, unread = [], []
    while scheduler.has_work or unread:
        plan = scheduler.schedule()
        scheduler.check_integrity()
        plans.append(plan)
        if plan.rows:
            unread.append(plan)
        if unread and (len(unread) > lag or not plan.rows):
            read(scheduler, unread.pop(0))
        scheduler.check_integrity()
        assert len(plans) < limit, "the schedule does not end"
    return plans


def counts(plan):
    return [(row.sequence.order, row.start, row.count) for row in plan.rows]


def test_a_long_prompt_is_read_in_chunks_beside_a_running_answer():
    scheduler = make_scheduler(tokens=8)
    scheduler.add(make_sequence(0, [1, 2, 3], 9))
    first = scheduler.schedule()
    assert counts(first) == [(0, 0, 3)]
    assert first.rows[0].samples
    assert not first.rows[0].feeds_back
    scheduler.add(make_sequence(1, list(range(20)), 2))
    second = scheduler.schedule()
    assert counts(second) == [(0, 3, 1), (1, 0, 7)]
    assert second.rows[0].feeds_back  # its token has not been read yet
    assert not second.rows[1].samples
    read(scheduler, first)
    assert counts(scheduler.schedule()) == [(0, 4, 1), (1, 7, 7)]


def test_no_token_is_computed_beyond_the_wanted_ones():
    scheduler = make_scheduler()
    plans = run(scheduler, [make_sequence(0, [5, 6], 3)])
    assert [counts(plan) for plan in plans if plan.rows] == [[(0, 0, 2)], [(0, 2, 1)], [(0, 3, 1)]]


def test_a_cached_prefix_is_shared_but_the_last_token_is_computed_again():
    scheduler = make_scheduler()
    prompt = list(range(8))
    run(scheduler, [make_sequence(0, prompt, 1)])
    again = make_sequence(1, prompt, 1)
    scheduler.add(again)
    plan = scheduler.schedule()
    assert again.num_cached_tokens == 4
    assert counts(plan) == [(1, 4, 4)]
    longer = make_sequence(2, [*prompt, 99], 1)
    scheduler.add(longer)
    scheduler.schedule()
    assert longer.num_cached_tokens == 8


def test_other_salts_share_nothing():
    scheduler = make_scheduler()
    run(scheduler, [make_sequence(0, list(range(12)), 1)])
    request = GenerationRequest(
        request_id="x", prompt_ids=list(range(12)), sampling=SamplingParams(), cache_salt="tenant"
    )
    other = Sequence.from_request(request, max_tokens=1, order=1)
    scheduler.add(other)
    scheduler.schedule()
    assert other.num_cached_tokens == 0


def test_when_pages_run_out_the_last_in_rank_is_computed_again_later():
    scheduler = make_scheduler(num_pages=6, prefix_caching=False)  # 5 pages of 4 tokens
    old, young = make_sequence(0, [1] * 8, 8), make_sequence(1, [2] * 4, 8)
    plans = run(scheduler, [old, young])
    assert young.num_preemptions > 0
    assert old.num_preemptions == 0
    assert young.num_output_tokens == old.num_output_tokens == 8
    assert any(plan.preempted for plan in plans)


def test_smaller_priority_goes_first():
    scheduler = make_scheduler(slots=1)
    late = make_sequence(1, [1], 1, priority=-1)
    scheduler.add(make_sequence(0, [1], 1))
    scheduler.add(late)
    assert scheduler.schedule().rows[0].sequence is late


def test_a_waiting_sequence_can_be_taken_out():
    scheduler = make_scheduler(slots=1)
    scheduler.add(make_sequence(0, [1], 4))
    waiting = make_sequence(1, [1] * 5, 4)
    scheduler.add(waiting)
    scheduler.schedule()
    scheduler.finish(waiting)
    scheduler.check_integrity()
    assert scheduler.num_waiting == 0
    assert scheduler.num_waiting_tokens == 0


def test_a_short_prompt_does_not_wait_for_the_end_of_a_long_one():
    scheduler = make_scheduler(num_pages=300, tokens=16)
    long, short = make_sequence(0, list(range(400)), 2), make_sequence(1, [7] * 12, 2)
    scheduler.add(long)
    scheduler.schedule()
    scheduler.add(short)
    assert counts(scheduler.schedule()) == [(0, 16, 8), (1, 0, 8)]
    assert counts(scheduler.schedule()) == [(0, 24, 12), (1, 8, 4)]


def test_prompts_that_begin_alike_compute_their_prefix_once_even_if_they_come_at_once():
    scheduler = make_scheduler(num_pages=100, slots=8, tokens=64)
    prefix = list(range(24))
    sequences = [make_sequence(order, [*prefix, 50 + order, 60], 2) for order in range(6)]
    plans = run(scheduler, sequences)
    assert [sequence.num_cached_tokens for sequence in sequences] == [0] + 5 * [24]
    prompt_tokens = sum(plan.num_tokens for plan in plans) - len(sequences)  # one decode each
    assert prompt_tokens == 24 + 6 * 2


def test_who_waits_for_anothers_pages_computes_them_when_that_one_is_gone():
    scheduler = make_scheduler(tokens=8)
    prompt = list(range(24))
    first, second = make_sequence(0, prompt, 1), make_sequence(1, prompt, 1)
    scheduler.add(first)
    scheduler.add(second)
    assert counts(scheduler.schedule()) == [(0, 0, 8)]
    scheduler.finish(first)
    assert counts(scheduler.schedule()) == [(1, 8, 8)]


def test_cached_prompts_go_ahead_but_pass_a_waiting_one_only_so_often():
    scheduler = make_scheduler(num_pages=200, slots=1, tokens=64)
    prefix = list(range(16))
    run(scheduler, [make_sequence(0, [*prefix, 99], 1)])
    fresh = make_sequence(1, [70] * 17, 1)
    warm = [make_sequence(order, [*prefix, order], 1) for order in range(2, 40)]
    plans = run(scheduler, [fresh, *warm])
    order = [row.sequence.order for plan in plans for row in plan.rows if row.samples]
    assert order.index(1) == MAX_OVERTAKEN
    assert order[:3] == [2, 3, 4]


request = st.tuples(st.integers(1, 30), st.integers(1, 12), st.integers(0, 2), st.integers(0, 3))


@settings(max_examples=120, deadline=None)
@given(
    st.lists(request, min_size=1, max_size=12),
    st.integers(12, 30),
    st.integers(1, 5),
    st.integers(1, 20),
    st.booleans(),
    st.integers(0, 1),
    st.sampled_from([None, 0.001, 0.015, 0.02]),
)
def test_any_mixture_ends_with_all_tokens_and_all_pages_free(
    requests, pages, slots, tokens, caching, lag, objective
):
    scheduler = make_scheduler(
        num_pages=pages,
        slots=slots,
        tokens=tokens,
        prefix_caching=caching,
        chunks=make_chunks(tokens, objective),
    )
    sequences = [
        make_sequence(order, [kind] * length, answer, priority)
        for order, (length, answer, priority, kind) in enumerate(requests)
    ]
    plans = run(scheduler, sequences, lag=lag)
    for sequence in sequences:
        length = sequence.num_prompt_tokens
        assert sequence.tokens[length:] == [1000 + length + i for i in range(sequence.max_tokens)]
    assert scheduler.pool.num_available == scheduler.pool.capacity
    for plan in plans:
        assert plan.num_tokens <= tokens
        assert len(plan.rows) <= slots
