"""Chunk sizes from made-up step times: 20 ms and 1 ms per token, and 1 us per query-key pair."""

import pytest

from jaxserve.engine.chunking import ChunkPolicy, PromptPart, query_key_pairs, share_out
from jaxserve.engine.step_costs import StepCosts

SIZES = (1, 8, 16, 32, 64, 128, 256, 512)


def seconds(size, pairs=0.0, speed=1.0):
    return speed * (0.020 + 0.001 * size + 1e-6 * pairs)


def learned(sizes=SIZES, starts=range(0, 4000, 250)):
    """After chunks of a prompt of 4,000 tokens in each of the buckets."""
    costs = StepCosts(SIZES)
    for size in sizes:
        for pairs in (query_key_pairs(start, size) for start in starts):
            costs.observe(size, pairs, seconds(size, pairs))
    return costs


def make_policy(costs, objective=0.1):
    return ChunkPolicy(costs, max_step_tokens=512, objective=objective)


def test_pairs_are_counted_as_attention_counts_them():
    assert query_key_pairs(0, 3) == 1 + 2 + 3
    assert query_key_pairs(10, 2) == 11 + 12


def test_costs_are_learned_per_bucket_with_a_common_slope():
    costs = learned()
    for size in SIZES:
        assert costs.predict(size, 0) == pytest.approx(seconds(size), rel=0.1)
    assert costs.predict(512, 2e6) == pytest.approx(seconds(512, 2e6), rel=0.1)


def test_a_bucket_that_never_ran_is_estimated_from_its_neighbours():
    costs = learned(sizes=(8, 64), starts=(0, 0))
    assert costs.predict(32, 0) == pytest.approx(seconds(32), rel=0.05)  # between them: a line
    assert costs.predict(1, 0) == pytest.approx(seconds(8), rel=0.05)  # below all: as the smallest
    assert costs.predict(512, 0) == pytest.approx(
        8 * seconds(64), rel=0.05
    )  # above all: in proportion


def test_a_slow_first_run_and_single_hiccups_are_forgotten_but_a_slower_machine_is_not():
    costs = StepCosts(SIZES)
    costs.observe(64, 0, 5.0)
    for _ in range(5):
        costs.observe(64, 0, seconds(64))
    assert costs.predict(64, 0) == pytest.approx(seconds(64))
    costs.observe(64, 0, 5.0)
    assert costs.predict(64, 0) < 1.5 * seconds(64)
    for _ in range(20):
        costs.observe(64, 0, seconds(64, speed=3))
    assert costs.predict(64, 0) == pytest.approx(seconds(64, speed=3), rel=0.1)


def test_what_once_was_slow_is_tried_again_when_smaller_steps_are_fast():
    costs = learned(sizes=(8, 16, 32))
    for _ in range(5):
        costs.observe(64, 0, 10 * seconds(64))
    assert costs.predict(64, 0) == pytest.approx(10 * seconds(64))
    for _ in range(301):
        costs.observe(32, 0, seconds(32))
    assert costs.predict(64, 0) == pytest.approx(2 * seconds(32))


def test_decodes_of_growing_length_do_not_make_up_a_slope():
    costs = StepCosts(SIZES)
    for step in range(200):  # 8 rows, each one pair more per step; times scatter by a fifth
        costs.observe(8, 800 + 8 * step, seconds(8) * (1 + 0.2 * (step % 3 - 1)))
    assert costs.predict(8, 1e6) < 3 * seconds(8)


@pytest.mark.parametrize(
    ("objective", "expected"), [(None, 512), (0.02, 16), (0.06, 32), (0.1, 64), (0.2, 128)]
)
def test_a_step_fills_the_largest_bucket_that_keeps_the_objective(objective, expected):
    policy = make_policy(learned(), objective)
    (count,) = policy.choose([PromptPart(0, 4000)], 4, 400)
    assert count == expected - 4


def test_attention_to_a_long_context_makes_chunks_smaller():
    policy = make_policy(learned(), 0.2)
    early = policy.choose([PromptPart(0, 4000)], 4, 400)
    late = policy.choose([PromptPart(3000, 1000)], 4, 400)
    assert (early, late) == ([124], [28])


def test_without_answers_or_measurements_a_step_is_as_large_as_can_be():
    policy = make_policy(learned())
    assert policy.choose([PromptPart(0, 4000)]) == [512]
    assert make_policy(StepCosts(SIZES)).choose([PromptPart(0, 4000)], 4, 400) == [508]


def test_where_answers_alone_break_the_objective_prompts_still_get_on():
    policy = make_policy(learned(), 0.001)
    (count,) = policy.choose([PromptPart(0, 4000)], 120, 12_000)
    assert count == 8  # what the bucket has left beside 120


def test_large_steps_alone_tell_nothing_of_small_ones_so_the_least_is_tried():
    policy = make_policy(learned(sizes=(512,)), 0.2)
    assert policy.choose([PromptPart(0, 4000)], 4, 400) == [4]
    policy.costs.observe(8, 400, seconds(8, 400))
    assert policy.choose([PromptPart(0, 4000)], 4, 400) == [124]


def test_answers_that_fill_a_step_leave_nothing():
    assert make_policy(learned()).choose([PromptPart(0, 10)], 512, 0) == [0]


def test_a_prompt_that_ends_gets_no_larger_bucket_than_it_needs():
    assert make_policy(learned(), 1.0).choose([PromptPart(0, 20)], 4, 400) == [20]


def test_short_prompts_pass_a_long_one_which_still_gets_half():
    long, short = PromptPart(0, 4000), PromptPart(0, 100)
    assert share_out(512, [long]) == [512]
    assert share_out(512, [long, short, short]) == [312, 100, 100]
    assert share_out(128, [long, short, short]) == [64, 64, 0]
    assert share_out(512, [long, PromptPart(0, 3000)]) == [512, 0]  # as good as equal: in order
    assert share_out(512, [short, long]) == [100, 412]
    assert share_out(512, [long, PromptPart(0, 100, priority=1)]) == [512, 0]
    assert share_out(1, [long, short]) == [1, 0]
