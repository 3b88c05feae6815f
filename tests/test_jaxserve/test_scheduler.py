"""The scheduler under hand-made and random schedules, with a counting model instead of a device."""

from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.engine.scheduler import Scheduler
from jaxserve.engine.sequence import Sequence
from jaxserve.kv.page_pool import PagePool
from jaxserve.request import GenerationRequest, SamplingParams


def make_sequence(order, prompt, max_tokens, priority=0):
    request = GenerationRequest(
        request_id=str(order), prompt_ids=prompt, sampling=SamplingParams(), priority=priority
    )
    return Sequence.from_request(request, max_tokens=max_tokens, order=order)


def make_scheduler(num_pages=32, page_size=4, slots=4, tokens=16, prefix_caching=True):
    return Scheduler(
        PagePool(num_pages, page_size),
        max_num_seqs=slots,
        max_step_tokens=tokens,
        prefix_caching=prefix_caching,
    )


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


request = st.tuples(st.integers(1, 30), st.integers(1, 12), st.integers(0, 2), st.integers(0, 3))


@settings(max_examples=120, deadline=None)
@given(
    st.lists(request, min_size=1, max_size=12),
    st.integers(12, 30),
    st.integers(1, 5),
    st.integers(1, 20),
    st.booleans(),
    st.integers(0, 1),
)
def test_any_mixture_ends_with_all_tokens_and_all_pages_free(
    requests, pages, slots, tokens, caching, lag
):
    scheduler = make_scheduler(num_pages=pages, slots=slots, tokens=tokens, prefix_caching=caching)
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
