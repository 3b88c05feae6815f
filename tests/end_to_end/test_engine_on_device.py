"""A real engine with a tiny model: an answer does not depend on how or beside what it was computed."""

import dataclasses
import random

import pytest
from guessing import Reckless
from tiny_model import VOCAB, write_tiny_llama

from jaxserve.config import EngineConfig
from jaxserve.engine.build import make_engine
from jaxserve.engine.drafting import Drafting
from jaxserve.errors import UsageError
from jaxserve.request import FinishReason, GenerationRequest, SamplingParams

SETTINGS = EngineConfig(
    quantization="none",
    max_num_seqs=5,
    max_num_batched_tokens=12,
    max_model_len=120,
    page_size=4,
    num_pages=140,
)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def built(model):
    return make_engine(SETTINGS, model)


def make_requests(count=9, **sampling):
    rng = random.Random(5)
    settings = {"temperature": 0.0, "ignore_eos": True, "logprobs": 3} | sampling
    return [
        GenerationRequest(
            request_id=str(number),
            prompt_ids=[rng.randrange(3, VOCAB) for _ in range(rng.choice((1, 3, 18, 40, 77)))],
            sampling=SamplingParams(max_tokens=rng.choice((1, 7, 20)), seed=number, **settings),
        )
        for number in range(count)
    ]


def run(engine, requests):
    outputs = {request.request_id: [] for request in requests}
    for request in requests:
        engine.add(request)
    while engine.has_work:
        for output in engine.step():
            outputs[output.request_id].append(output)
        engine.check_integrity()
    assert engine.scheduler.pool.num_owned == 0
    return {
        name: (
            [token for piece in pieces for token in piece.token_ids],
            [item.logprob for piece in pieces for item in piece.logprobs or ()],
        )
        for name, pieces in outputs.items()
    }


def solo(engine, requests):
    answers = {}
    for request in requests:
        engine.scheduler.pool.forget_all()
        answers |= run(engine, [request])
    return answers


def check_equal(left, right):
    for name, (tokens, logprobs) in left.items():
        assert right[name][0] == tokens, name
        assert right[name][1] == pytest.approx(logprobs, abs=1e-5, rel=1e-5)


@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"temperature": 0.9, "top_p": 0.9, "top_k": 40},
        {"repetition_penalty": 1.2, "presence_penalty": 0.3, "frequency_penalty": 0.7},
    ],
)
def test_alone_in_company_and_from_the_cache_the_answer_is_the_same(built, sampling):
    engine, _ = built
    requests = make_requests(**sampling)
    alone = solo(engine, requests)
    engine.scheduler.pool.forget_all()
    check_equal(alone, run(engine, requests))
    hits = engine.scheduler.num_prefix_hits
    check_equal(alone, run(engine, requests[::-1]))
    assert engine.scheduler.num_prefix_hits > hits


@pytest.mark.parametrize(
    "changes",
    [
        {"num_pages": 31},  # too few for all: requests are preempted
        pytest.param(
            {"prefix_caching": False, "max_num_batched_tokens": 24, "max_num_seqs": 8},
            marks=pytest.mark.slow,
        ),
        {"tensor_parallel": 4, "async_scheduling": False},
        pytest.param({"async_scheduling": False}, marks=pytest.mark.slow),
        pytest.param({"tensor_parallel": 2}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_other_settings_give_the_same_answers(built, model, changes):
    requests = make_requests(temperature=0.7, repetition_penalty=1.3)
    expected = solo(built[0], requests)
    engine, report = make_engine(dataclasses.replace(SETTINGS, **changes), model)
    check_equal(expected, run(engine, requests))
    if "num_pages" in changes:
        assert engine.scheduler.num_preemptions > 0
    assert report.compilation.after_ready == 0


def test_nothing_is_compiled_after_ready_whatever_is_asked_for(built):
    engine, report = built
    options = [
        {"top_k": 3},
        {"min_p": 0.2, "temperature": 1.5},
        {"presence_penalty": 1.0, "frequency_penalty": -0.5, "repetition_penalty": 1.1},
        {"logit_bias": {5: 20.0}},
        {"bad_words": [[7], [8, 9]]},
        {"allowed_token_ids": [10, 11, 12]},
        {"min_tokens": 4, "ignore_eos": False},
        {"logprobs": 20},
    ]
    assert report.compilation.total > 0
    before = report.compilation.after_ready  # other engines of this process count, too
    for count in range(1, 14):
        requests = make_requests(count)
        for number, request in enumerate(requests):
            changed = dataclasses.replace(request.sampling, **options[number % len(options)])
            requests[number] = dataclasses.replace(request, sampling=changed)
        run(engine, requests)
    assert report.compilation.after_ready == before


def test_parameters_have_their_effect_in_the_engine(built):
    engine, _ = built

    def answer(**sampling):
        settings = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True} | sampling
        request = GenerationRequest(
            request_id="a", prompt_ids=[5, 6, 7, 8], sampling=SamplingParams(**settings)
        )
        return run(engine, [request])["a"][0]

    plain = answer()
    assert set(answer(allowed_token_ids=[10, 11])) <= {10, 11}
    assert answer(logit_bias={33: 100.0}) == [33] * 12
    assert plain[0] not in answer(bad_words=[[plain[0]]])
    assert answer(bad_words=[plain[:2]])[:2] != plain[:2]
    assert answer(stop_token_ids=[plain[2]])[-1] == plain[2]
    assert plain[2] not in answer(stop_token_ids=[plain[2]], min_tokens=12)[:11]
    penalised = answer(repetition_penalty=50.0)
    assert len(set(penalised)) == 12
    assert answer(temperature=3.0, top_k=1) == answer(temperature=3.0, min_p=1.0) == plain
    assert answer(temperature=2.0, seed=1) != answer(temperature=2.0, seed=2)
    assert answer(temperature=2.0, seed=1) == answer(temperature=2.0, seed=1)


def test_a_request_that_reaches_the_context_ends_there(built):
    engine, _ = built
    engine.add(
        GenerationRequest(
            request_id="a",
            prompt_ids=[3] * 100,
            sampling=SamplingParams(temperature=0.0, ignore_eos=True),
        )
    )
    outputs = []
    while engine.has_work:
        outputs += engine.step()
    assert sum(len(output.token_ids) for output in outputs) == 20
    assert outputs[-1].finish_reason is FinishReason.LENGTH


def test_an_impossible_split_names_both_numbers(model):
    with pytest.raises(UsageError, match=r"3.*4|4.*3"):
        make_engine(dataclasses.replace(SETTINGS, tensor_parallel=3), model)


def test_a_context_beyond_the_models_is_refused(model):
    with pytest.raises(UsageError, match=r"--max-model-len is 600.*512"):
        make_engine(dataclasses.replace(SETTINGS, max_model_len=600), model)


def test_greedy_and_sampled_answers_are_the_same_with_guesses_and_without(built):
    engine, report = built
    kinds = (
        {"temperature": 0.0},
        {"temperature": 0.9, "top_p": 0.9, "top_k": 40},
        {"temperature": 1.2, "min_p": 0.02, "logit_bias": {5: 2.0}},
        {"temperature": 0.0, "min_tokens": 6, "ignore_eos": False},
        {"temperature": 0.7, "repetition_penalty": 1.3},  # gets none, but has company
    )
    requests = make_requests(10)
    for number, request in enumerate(requests):
        params = dataclasses.replace(request.sampling, max_tokens=20, **kinds[number % len(kinds)])
        requests[number] = dataclasses.replace(request, sampling=params)
    groups, drafting = (requests[:5], requests[5:]), engine._drafting
    compiled = report.compilation.after_ready
    engine._drafting = None
    plain = [run(engine, group) for group in groups]
    answers = {
        tuple(request.prompt_ids): found[request.request_id][0]
        for group, found in zip(groups, plain, strict=True)
        for request in group
    }

    def recall(tokens, count):
        prompt = next(prompt for prompt in answers if tuple(tokens[: len(prompt)]) == prompt)
        return answers[prompt][len(tokens) - len(prompt) :][:count]

    for seed, wrong_in in ((0, 10**9), (1, 3)):
        engine.scheduler.pool.forget_all()
        speculation = Reckless(recall, vocab=VOCAB, seed=seed, wrong_in=wrong_in, read_in=1)
        engine._drafting = Drafting(speculation)
        for group, found in zip(groups, plain, strict=True):
            check_equal(found, run(engine, group))
        assert speculation.num_chosen > 50
    engine._drafting = drafting
    assert report.compilation.after_ready == compiled
