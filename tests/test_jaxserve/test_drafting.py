"""Guesses in the engine's steps: whatever is guessed, every answer is what it was without."""

import pytest
from counting_engine import (
    VOCAB,
    check_solo_tokens,
    expected,
    make_engine,
    next_token,
    request,
    run,
    tokens_of,
)
from guessing import Reckless
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.engine.drafting import Drafting
from jaxserve.engine.runner import num_accepted
from jaxserve.request import FinishReason


def oracle(tokens, count):
    for _ in range(count):
        tokens.append(next_token(tokens))
        yield tokens[-1]


def guessing_engine(seed=0, *, wrong_in=4, read_in=2, **settings):
    speculation = Reckless(oracle, vocab=VOCAB, seed=seed, wrong_in=wrong_in, read_in=read_in)
    engine, runner = make_engine(drafting=Drafting(speculation), **settings)
    return engine, runner, speculation


@pytest.mark.parametrize(
    ("draft", "tokens", "count"),
    [([], [5], 1), ([5, 6], [5, 6, 7], 3), ([5, 6], [5, 7, 8], 2), ([5, 6], [6, 6, 7], 1)],
)
def test_tokens_count_up_to_the_first_wrong_guess(draft, tokens, count):
    assert num_accepted(draft, tokens) == count


def test_right_guesses_save_steps_and_several_tokens_come_at_once():
    engine, _, _ = guessing_engine(wrong_in=10**9, read_in=1)
    engine.add(request("a", [3] * 6, max_tokens=40, ignore_eos=True))
    pieces = run(engine)["a"]
    assert tokens_of(pieces) == expected([3] * 6, 40)
    assert len(pieces) < 20
    lines = engine.metrics.text(engine.scheduler).splitlines()
    values = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    label = '{model_name="counting"}'
    steps, guessed, true = (
        float(values[f"vllm:spec_decode_num_{name}_total{label}"])
        for name in ("drafts", "draft_tokens", "accepted_tokens")
    )
    assert guessed == true
    assert true == 40 - len(pieces)
    assert steps < guessed
    assert float(values[f"vllm:generation_tokens_total{label}"]) == 40


@pytest.mark.parametrize("seed", range(6))
def test_an_answer_ends_at_the_stop_token_in_the_midst_of_right_guesses(seed):
    answer = expected([3], 30)
    stop = next(i for i in range(11, 30) if answer[i] not in answer[:i])
    engine, _, _ = guessing_engine(seed, wrong_in=10**9, read_in=1)
    for name in ("a", "b"):
        engine.add(
            request(name, [3], max_tokens=30, stop_token_ids=[answer[stop]], ignore_eos=True)
        )
    for pieces in run(engine).values():
        assert tokens_of(pieces) == answer[: stop + 1]
        assert pieces[-1].finish_reason is FinishReason.STOP


def test_what_depends_on_the_tokens_before_gets_no_guesses():
    engine, _, speculation = guessing_engine(read_in=1)
    engine.add(request("a", [3], max_tokens=20, ignore_eos=True, frequency_penalty=0.5))
    engine.add(request("b", [4], max_tokens=20, ignore_eos=True, bad_words=[[1, 2]]))
    outputs = run(engine)
    assert tokens_of(outputs["a"]) == expected([3], 20)
    assert speculation.num_chosen == 0


def test_pages_that_are_full_of_confirmed_tokens_are_found_again_and_no_others():
    engine, _, _ = guessing_engine(3, wrong_in=2, read_in=1)
    prompt = [5] * 7
    engine.add(request("a", prompt, max_tokens=30, ignore_eos=True))
    first = tokens_of(run(engine)["a"])
    longer = [*prompt, *first]
    engine.add(request("b", longer, max_tokens=6, ignore_eos=True))
    pieces = run(engine)["b"]
    assert tokens_of(pieces) == expected(longer, 6)
    assert pieces[0].num_cached_tokens == 36


def test_sound_tokens_before_a_nan_are_delivered_then_the_error():
    engine, runner, _ = guessing_engine(wrong_in=10**9, read_in=1)
    runner.bad = {7: 20}
    engine.add(request("a", [7] * 4, max_tokens=40, ignore_eos=True))
    pieces = run(engine)["a"]
    assert tokens_of(pieces) == expected([7] * 4, 16)
    assert pieces[-1].finish_reason is FinishReason.ERROR
    assert pieces[-1].token_ids == []


def test_outputs_read_early_are_not_lost_when_the_next_step_fails():
    engine, runner, _ = guessing_engine(wrong_in=10**9, read_in=1)
    engine.add(request("a", [1] * 4, max_tokens=9, ignore_eos=True))
    engine.add(request("b", [2] * 4, max_tokens=30, ignore_eos=True))
    outputs, dispatch = [], runner.dispatch

    def fail(plan):
        if all(row.sequence.request.request_id == "b" for row in plan.rows):
            raise RuntimeError("the device is on fire")
        return dispatch(plan)

    runner.dispatch = fail
    while engine.has_work:
        outputs += engine.step()
    ends = {output.request_id: output for output in outputs if output.finish_reason}
    assert ends["a"].finish_reason is FinishReason.LENGTH
    assert ends["b"].finish_reason is FinishReason.ERROR
    assert tokens_of([o for o in outputs if o.request_id == "a"]) == expected([1] * 4, 9)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(1, 30), st.integers(1, 16), st.integers(0, 3), st.integers(0, 40)),
        min_size=1,
        max_size=8,
    ),
    st.tuples(st.integers(14, 40), st.integers(1, 5), st.integers(1, 20)),
    st.booleans(),
    st.booleans(),
    st.tuples(st.integers(0, 10**6), st.integers(1, 8), st.integers(1, 4)),
)
def test_under_any_schedule_and_any_guesses_each_request_gets_its_solo_tokens(
    specs, sizes, caching, asynchronous, guessing
):
    pages, slots, tokens = sizes
    seed, wrong_in, read_in = guessing
    engine, _, _ = guessing_engine(
        seed,
        wrong_in=wrong_in,
        read_in=read_in,
        pages=pages,
        slots=slots,
        tokens=tokens,
        caching=caching,
        asynchronous=asynchronous,
        max_len=(pages - 1) * 4,
    )
    check_solo_tokens(engine, specs, abort_at=9)
