"""Prompts that are only read: embeddings and log-probabilities agree with what the engine answers."""

from __future__ import annotations

import pathlib
import random
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from tiny_model import VOCAB, write_tiny_llama

from jaxserve.config import EngineConfig
from jaxserve.engine.build import make_engine
from jaxserve.request import GenerationRequest, SamplingParams, Score, TokenOutput

SETTINGS = EngineConfig(
    max_num_seqs=2,
    max_num_batched_tokens=19,
    max_model_len=120,
    page_size=4,
    num_pages=64,
    embeddings="mean",
    prompt_logprobs=True,
    speculative="off",
    quantization="none",
)
RNG = random.Random(3)
PROMPTS = [[RNG.randrange(3, VOCAB) for _ in range(length)] for length in (1, 5, 31, 90, 2, 120)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return write_tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def built(folder: pathlib.Path) -> Any:
    return make_engine(SETTINGS, folder)


def read(scorer: Any, prompts: list[list[int]], score: Score) -> list[TokenOutput]:
    for number, prompt in enumerate(prompts):
        sampling = SamplingParams(logprobs=3)
        scorer.add(
            GenerationRequest(
                request_id=str(number), prompt_ids=prompt, sampling=sampling, score=score
            )
        )
    found = {}
    while scorer.has_work:
        found |= {output.request_id: output for output in scorer.step()}
    return [found[str(number)] for number in range(len(prompts))]


def vectors(scorer: Any, prompts: list[list[int]], score: Score) -> np.ndarray:
    return np.array(
        [np.frombuffer(output.embedding, np.float32) for output in read(scorer, prompts, score)]
    )


def answer(engine: Any, prompt: list[int], **sampling: Any) -> Any:
    params = SamplingParams(max_tokens=1, temperature=0.0, logprobs=20, **sampling)
    engine.add(GenerationRequest(request_id="a", prompt_ids=prompt, sampling=params))
    outputs = []
    while engine.has_work:
        outputs += engine.step()
    return outputs[-1].logprobs[0]


def test_log_probabilities_are_those_of_answers(built: Any) -> None:
    engine, report = built
    for prompt, output in zip(PROMPTS, read(report.scorer, PROMPTS, Score.LOGPROBS), strict=True):
        assert [item.token_id for item in output.logprobs] == prompt[1:]
        for at in {1, len(prompt) // 2, len(prompt) - 1} - {0}:
            if at >= len(prompt):
                continue
            found = output.logprobs[at - 1]
            want = answer(engine, prompt[:at], allowed_token_ids=[prompt[at]])
            assert found.logprob == pytest.approx(want.logprob, abs=1e-4)
            assert found.top_ids == want.top_ids[:3]
            assert found.top_logprobs == pytest.approx(want.top_logprobs[:3], abs=1e-4)


def test_the_last_hidden_state_gives_the_answer_s_distribution(
    built: Any, folder: pathlib.Path
) -> None:
    engine, report = built
    head = load_file(folder / "model.safetensors")["lm_head.weight"]
    for prompt, hidden in zip(PROMPTS, vectors(report.scorer, PROMPTS, Score.LAST), strict=True):
        if len(prompt) == 120:  # no room for an answer
            continue
        logits = head @ hidden
        logprobs = logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max()
        want = answer(engine, prompt)
        assert logprobs[want.top_ids] == pytest.approx(want.top_logprobs, abs=1e-3)


def test_the_mean_is_that_of_all_positions_across_chunks(built: Any) -> None:
    _, report = built
    prompt = PROMPTS[3]
    prefixes = [prompt[: end + 1] for end in range(len(prompt))]
    every = vectors(report.scorer, prefixes, Score.LAST)
    mean = vectors(report.scorer, [prompt], Score.MEAN)[0]
    assert mean == pytest.approx(every.mean(axis=0), abs=1e-4)


def test_nothing_is_compiled_later_and_pages_come_back(built: Any) -> None:
    _, report = built
    scorer = report.scorer
    assert report.compilation.after_ready == 0
    assert len(scorer._free) == scorer._runner.shapes[0].num_pages - 1
