"""What each request cost: shares of steps add up, memory stays constant, aborted ones count."""

from __future__ import annotations

import itertools

import pytest
from counting_engine import make_engine, request, run

from jaxserve.engine import accounting
from jaxserve.engine.account import MAX_STRETCHES, Stretches
from jaxserve.request import (
    FinishReason,
    GenerationRequest,
    RequestFacts,
    SamplingParams,
    StepStretch,
)


def traced(name: str, prompt: list[int], max_tokens: int) -> GenerationRequest:
    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    return GenerationRequest(request_id=name, prompt_ids=prompt, sampling=sampling, trace=True)


def facts_of(pieces: list) -> RequestFacts:
    assert all(piece.facts is None for piece in pieces[:-1])
    assert pieces[-1].facts is not None
    return pieces[-1].facts


@pytest.mark.parametrize("asynchronous", [True, False])
def test_shares_add_up_to_the_steps(asynchronous: bool) -> None:
    engine, runner = make_engine(asynchronous=asynchronous)
    runner.bucket_tokens = lambda plan: 16 if plan.num_tokens > 4 else 4
    steps = []
    count = engine._accounting.count_step

    def note(plan, bucket, begun, ended):
        steps.append(
            (plan.num_tokens, bucket, ended - begun, {r.sequence.order for r in plan.rows})
        )
        count(plan, bucket, begun, ended)

    engine._accounting.count_step = note
    for name, length in (("a", 30), ("b", 7), ("c", 3)):
        engine.add(traced(name, [1] * length, 6))
    facts = {name: facts_of(pieces) for name, pieces in run(engine).items()}
    assert sum(f.device_seconds for f in facts.values()) == pytest.approx(
        sum(seconds for *_, seconds, _ in steps)
    )
    assert sum(f.padding_tokens for f in facts.values()) == pytest.approx(
        sum(bucket - tokens for tokens, bucket, *_ in steps)
    )
    for order, (name, length) in enumerate((("a", 30), ("b", 7), ("c", 3))):
        fact = facts[name]
        assert fact.num_generated_tokens == 6
        assert fact.num_prefill_tokens + fact.num_cached_tokens == length
        assert fact.steps == sum(order in rows for *_, rows in steps)
        assert 0 < fact.scheduled <= fact.first_token <= fact.last_token <= fact.ended
        kinds = [stretch.kind for stretch in fact.stretches]
        assert kinds == ["prefill"] * kinds.count("prefill") + ["decode"] * 5
        chunks = [stretch for stretch in fact.stretches if stretch.kind == "prefill"]
        assert sum(chunk.tokens for chunk in chunks) == fact.num_prefill_tokens
        assert all(chunk.bucket_tokens in (4, 16) for chunk in chunks)
    assert len([s for s in facts["a"].stretches if s.kind == "prefill"]) >= 2


def test_an_aborted_and_a_preempted_request_have_their_facts_too() -> None:
    engine, _ = make_engine(pages=9, page_size=4, slots=3, max_len=30)
    for name in ("a", "b", "c"):
        engine.add(traced(name, [ord(name) % 90] * 8, 20))
    for _ in range(3):
        engine.step()
    output = engine.abort("c")
    assert output is not None
    assert facts_of([output]).finish_reason is FinishReason.ABORT
    assert output.facts is not None
    assert output.facts.device_seconds > 0
    facts = [facts_of(pieces) for name, pieces in run(engine).items() if name != "c"]
    again = [fact for fact in facts if fact.num_preemptions]
    assert again
    assert all(fact.num_prefill_tokens + fact.num_cached_tokens >= 8 for fact in again)


def test_a_request_that_is_not_traced_keeps_no_steps() -> None:
    engine, _ = make_engine()
    engine.add(request("a", [1, 2, 3], max_tokens=5))
    facts = facts_of(run(engine)["a"])
    assert facts.stretches == []
    assert facts.steps > 0


def test_a_long_answer_keeps_a_bounded_number_of_stretches_that_lose_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also one that outlives the sums of single steps, and beside one that comes and goes."""
    monkeypatch.setattr(accounting, "_RING", 64)
    engine, _ = make_engine(pages=300, max_len=1000)
    engine.add(traced("long", [1, 2, 3], 500))
    done = {}
    for number in range(40):
        engine.add(traced(str(number), [4] * (1 + number % 3), 5))
        for _ in range(10):
            done |= {o.request_id: o.facts for o in engine.step() if o.facts}
    done |= {name: facts_of(pieces) for name, pieces in run(engine).items()}
    for name, fact in done.items():
        assert fact.steps == (500 if name == "long" else 5), name
        assert sum(each.steps for each in fact.stretches) == fact.steps
        assert (
            sum(each.tokens for each in fact.stretches) == fact.num_prefill_tokens + fact.steps - 1
        )
        seconds = sum(each.device_seconds for each in fact.stretches)
        assert seconds == pytest.approx(fact.device_seconds)
        moments = [m for each in fact.stretches for m in (each.begun, each.ended)]
        assert moments == sorted(moments)
    decode = [each for each in done["long"].stretches if each.kind == "decode"]
    assert 2 <= len(decode) <= MAX_STRETCHES
    rows = sum(each.rows for each in decode)
    assert rows >= 499 + 40 * 4, "those beside it are counted"


def test_steps_that_come_one_by_one_are_summed_up_too() -> None:
    stretches = Stretches()
    for number in range(10_000):
        stretches.add(StepStretch(kind="decode", begun=number, ended=number + 1, steps=1, tokens=2))
        assert len(stretches.entries) <= MAX_STRETCHES
    entries = stretches.entries
    assert sum(entry.tokens for entry in entries) == 20_000
    assert all(a.ended == b.begun for a, b in itertools.pairwise(entries))
    assert (entries[0].begun, entries[-1].ended) == (0, 10_000)
