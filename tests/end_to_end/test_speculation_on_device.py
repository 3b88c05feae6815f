"""Guesses in a real engine with a tiny model: the same answers, log-probabilities included."""

import random

import pytest
from guessing import Reckless
from tiny_model import VOCAB, write_tiny_llama

from jaxserve.config import EngineConfig
from jaxserve.engine.build import make_engine
from jaxserve.engine.drafting import Drafting
from jaxserve.request import GenerationRequest, SamplingParams

SETTINGS = EngineConfig(
    max_num_seqs=5,
    max_num_batched_tokens=24,
    max_model_len=120,
    page_size=4,
    num_pages=60,
    num_speculative_tokens=15,
)
KINDS = (
    {"temperature": 0.0},
    {"temperature": 0.9, "top_p": 0.9, "top_k": 40},
    {"temperature": 1.2, "min_p": 0.02, "logit_bias": {5: 2.0}},
    {"temperature": 0.0, "min_tokens": 6, "ignore_eos": False},
    {"temperature": 0.7, "repetition_penalty": 1.3},
    {"temperature": 0.5, "allowed_token_ids": list(range(3, 30))},
)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    return make_engine(SETTINGS, write_tiny_llama(tmp_path_factory.mktemp("tiny")))


def make_requests():
    rng = random.Random(5)
    return [
        GenerationRequest(
            request_id=str(number),
            prompt_ids=[rng.randrange(3, VOCAB) for _ in range(rng.choice((1, 3, 18, 40, 77)))],
            sampling=SamplingParams(
                max_tokens=rng.choice((7, 20, 40)),
                seed=number,
                logprobs=3,
                **({"ignore_eos": True} | KINDS[number % len(KINDS)]),
            ),
        )
        for number in range(12)
    ]


def run(engine, requests):
    outputs = {request.request_id: [] for request in requests}
    for request in requests:
        engine.add(request)
    while engine.has_work:
        for output in engine.step():
            assert len(output.token_ids) == len(output.logprobs or [])
            outputs[output.request_id].append(output)
        engine.check_integrity()
    assert engine.scheduler.pool.num_owned == 0
    return outputs


def tokens_of(pieces):
    return [token for piece in pieces for token in piece.token_ids]


def logprobs_of(pieces):
    return [item.logprob for piece in pieces for item in piece.logprobs]


def test_greedy_and_sampled_answers_are_the_same_with_guesses_and_without(built):
    engine, report = built
    requests = make_requests()
    engine._drafting = None
    plain = run(engine, requests)
    compiled = report.compilation.after_ready
    answers = {tuple(r.prompt_ids): tokens_of(plain[r.request_id]) for r in requests}

    def recall(tokens, count):
        prompt = next(p for p in answers if tuple(tokens[: len(p)]) == p)
        return answers[prompt][len(tokens) - len(prompt) :][:count]

    for seed, wrong_in in ((0, 10**9), (1, 3)):
        speculation = Reckless(recall, vocab=VOCAB, seed=seed, wrong_in=wrong_in, read_in=1)
        engine._drafting = Drafting(speculation)
        guessed = run(engine, requests)
        assert speculation.num_chosen > 50
        for request in requests:
            name = request.request_id
            assert tokens_of(guessed[name]) == tokens_of(plain[name]), name
            assert logprobs_of(guessed[name]) == pytest.approx(
                logprobs_of(plain[name]), abs=1e-5, rel=1e-5
            )
            assert guessed[name][-1].finish_reason == plain[name][-1].finish_reason
    assert any(len(piece.token_ids) > 1 for pieces in guessed.values() for piece in pieces)
    assert engine.scheduler.num_preemptions > 0
    assert report.compilation.after_ready == compiled
