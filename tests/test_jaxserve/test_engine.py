"""The engine's policy with a device whose arithmetic can be done by hand (`counting_engine`)."""

import dataclasses

import pytest
from counting_engine import VOCAB, check_solo_tokens, expected, make_engine, request, run, tokens_of
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.errors import DeviceLostError, PromptTooLongError, RefusedError, RequestError
from jaxserve.request import FinishReason


@pytest.mark.parametrize("asynchronous", [True, False])
def test_requests_of_odd_lengths_all_get_their_own_tokens(asynchronous):
    engine, runner = make_engine(asynchronous=asynchronous)
    prompts = {str(n): [n + 1] * (1 + 5 * n) for n in range(7)}
    for name, prompt in prompts.items():
        engine.add(request(name, prompt, max_tokens=9, ignore_eos=True))
    outputs = run(engine)
    for name, prompt in prompts.items():
        assert tokens_of(outputs[name]) == expected(prompt, 9)
        assert outputs[name][-1].finish_reason is FinishReason.LENGTH
    assert runner.max_unread == (2 if asynchronous else 1)


def test_an_end_token_stops_and_is_the_last_token():
    engine, _ = make_engine()
    prompt = next([n] for n in range(VOCAB) if 96 in expected([n], 30)[:-1])
    engine.add(request("a", prompt, max_tokens=30))
    pieces = run(engine)["a"]
    assert tokens_of(pieces) == expected(prompt, 30, ends={96})
    assert pieces[-1].finish_reason is FinishReason.STOP


def test_a_requests_own_end_tokens_count_like_the_models():
    engine, _ = make_engine()
    answer = expected([3], 12)
    ends = (answer[4],)
    for name, ignore in (("ends", False), ("ignores", True)):
        engine.add(
            dataclasses.replace(request(name, [3], max_tokens=12, ignore_eos=ignore), eos_ids=ends)
        )
    outputs = run(engine)
    assert tokens_of(outputs["ends"]) == answer[:5]
    assert tokens_of(outputs["ignores"]) == answer


def test_stop_token_ids_and_min_tokens():
    engine, _ = make_engine()
    answer = expected([3], 12)
    engine.add(request("early", [3], max_tokens=12, stop_token_ids=[answer[4]], ignore_eos=True))
    engine.add(
        request(
            "held", [3], max_tokens=12, stop_token_ids=[answer[4]], min_tokens=6, ignore_eos=True
        )
    )
    outputs = run(engine)
    assert tokens_of(outputs["early"]) == answer[:5]
    held = tokens_of(outputs["held"])
    assert held[:5] == answer[:5]
    assert len(held) > 5


def test_without_max_tokens_the_context_is_the_limit():
    engine, _ = make_engine(max_len=20)
    engine.add(request("a", [1, 2, 3], ignore_eos=True))
    pieces = run(engine)["a"]
    assert len(tokens_of(pieces)) == 17
    assert pieces[-1].finish_reason is FinishReason.LENGTH


def test_a_repeated_prompt_is_found_in_the_cache_and_gives_the_same_answer():
    engine, _ = make_engine()
    prompt = list(range(20))
    engine.add(request("cold", prompt, max_tokens=6, ignore_eos=True))
    cold = run(engine)["cold"]
    engine.add(request("warm", prompt, max_tokens=6, ignore_eos=True))
    engine.add(request("other", [*prompt[:11], 5], max_tokens=6, ignore_eos=True))
    outputs = run(engine)
    assert tokens_of(outputs["warm"]) == tokens_of(cold) == expected(prompt, 6)
    assert tokens_of(outputs["other"]) == expected([*prompt[:11], 5], 6)
    assert outputs["warm"][0].num_cached_tokens == 16
    assert outputs["other"][0].num_cached_tokens == 8


def test_preempted_requests_finish_with_the_same_tokens():
    engine, _ = make_engine(pages=12, caching=False)
    prompts = {str(n): [n] * 9 for n in range(4)}
    for name, prompt in prompts.items():
        engine.add(request(name, prompt, max_tokens=20, ignore_eos=True))
    outputs = run(engine)
    assert engine.scheduler.num_preemptions > 0
    for name, prompt in prompts.items():
        assert tokens_of(outputs[name]) == expected(prompt, 20)


def test_aborting_frees_everything_at_once_wherever_the_request_is():
    engine, _ = make_engine(slots=1)
    for name in ("running", "queued"):
        engine.add(request(name, [1] * 30, max_tokens=50))
    engine.step()
    for name in ("queued", "running"):
        assert engine.abort(name).finish_reason is FinishReason.ABORT
        assert engine.abort(name) is None
        engine.check_integrity()
    assert engine.scheduler.pool.num_owned == 0
    assert run(engine) == {}
    text = engine.metrics.text(engine.scheduler)
    assert 'request_success_total{finished_reason="abort",model_name="counting"} 2.0' in text


def test_what_cannot_run_is_refused_by_name():
    engine, _ = make_engine(max_len=10)
    with pytest.raises(PromptTooLongError, match=r"10 tokens.*allows 9") as caught:
        engine.add(request("long", [1] * 10))
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(RequestError, match="empty"):
        engine.add(request("empty", []))
    with pytest.raises(RequestError, match="outside 0 to 96"):
        engine.add(request("alien", [97]))
    with pytest.raises(RequestError, match="stop_token_ids holds token id 97"):
        engine.add(request("stop", [1], stop_token_ids=[97]))
    with pytest.raises(RequestError) as caught:
        engine.add(request("bias", [1], logit_bias={1: 1.0}))
    assert caught.value.param == "logit_bias"
    assert not engine.has_work


def test_a_full_queue_refuses_and_says_which_limit():
    engine, _ = make_engine(slots=1, max_queue_len=2, max_queued_tokens=20)
    engine.add(request("0", [1] * 5, max_tokens=3))
    with pytest.raises(RefusedError, match="5 prompt tokens are waiting") as caught:
        engine.add(request("1", [1] * 16))
    assert caught.value.reason == "queue_tokens"
    engine.add(request("2", [1] * 5, max_tokens=3))
    with pytest.raises(RefusedError, match="2 requests are waiting") as caught:
        engine.add(request("3", [1]))
    assert caught.value.reason == "queue_full"
    assert set(run(engine)) == {"0", "2"}


def test_a_failing_step_ends_its_requests_with_an_error_and_others_go_on():
    engine, runner = make_engine(slots=2)
    runner.fail_on = 13
    engine.add(request("good", [1] * 4, max_tokens=3, ignore_eos=True))
    engine.add(request("bad", [13] * 4, max_tokens=3))
    engine.add(request("later", [2] * 4, max_tokens=3, ignore_eos=True))
    outputs = run(engine)
    assert outputs["bad"][-1].finish_reason is FinishReason.ERROR
    assert "on fire" in outputs["bad"][-1].error
    assert tokens_of(outputs["later"]) == expected([2] * 4, 3)
    assert engine.broken is None


def test_a_device_that_is_lost_ends_everything_at_once():
    engine, runner = make_engine(slots=1)

    def lose(plan):
        raise DeviceLostError("process 3 is gone")

    for name in ("running", "waiting"):
        engine.add(request(name, [1] * 4, max_tokens=3))
    runner.dispatch, runner.reset = lose, None  # there is nothing left to reset
    outputs = run(engine)
    assert set(outputs) == {"running", "waiting"}
    assert all("process 3 is gone" in pieces[-1].error for pieces in outputs.values())
    assert engine.broken == "process 3 is gone"


def test_logits_that_are_not_numbers_end_only_their_own_request():
    engine, runner = make_engine()
    runner.bad = {7: 0}
    engine.add(request("nan", [7] * 4, max_tokens=5))
    engine.add(request("fine", [1] * 4, max_tokens=5, ignore_eos=True))
    outputs = run(engine)
    assert outputs["nan"][-1].finish_reason is FinishReason.ERROR
    assert tokens_of(outputs["fine"]) == expected([1] * 4, 5)


def test_metrics_move_by_exactly_one_requests_amounts():
    engine, _ = make_engine()
    engine.add(request("a", [1] * 10, max_tokens=4, ignore_eos=True))
    run(engine)
    lines = engine.metrics.text(engine.scheduler).splitlines()
    values = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    label = '{model_name="counting"}'
    for name, value in {
        "vllm:prompt_tokens_total": 10,
        "vllm:generation_tokens_total": 4,
        "vllm:time_to_first_token_seconds_count": 1,
        "vllm:inter_token_latency_seconds_count": 3,
        "vllm:e2e_request_latency_seconds_count": 1,
        "vllm:request_queue_time_seconds_count": 1,
        "vllm:prefix_cache_queries_total": 10,
        "vllm:prefix_cache_hits_total": 0,
        "vllm:num_requests_running": 0,
    }.items():
        assert float(values[name + label]) == value, name


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(1, 30), st.integers(1, 12), st.integers(0, 3), st.integers(0, 40)),
        min_size=1,
        max_size=10,
    ),
    st.integers(12, 40),
    st.integers(1, 5),
    st.integers(1, 20),
    st.booleans(),
    st.booleans(),
)
def test_under_any_schedule_each_request_gets_its_solo_tokens(
    specs, pages, slots, tokens, caching, asynchronous
):
    engine, _ = make_engine(
        pages=pages,
        slots=slots,
        tokens=tokens,
        caching=caching,
        asynchronous=asynchronous,
        max_len=(pages - 1) * 4,
    )
    check_solo_tokens(engine, specs, abort_at=15)
