"""Step 3: seeds, limits, and the spreading of prompts and choices."""

from __future__ import annotations

import dataclasses

import pytest

from jaxserve.errors import EngineGoneError, PromptTooLongError, RequestError
from jaxserve.messages import EngineInfo
from jaxserve.request import SamplingParams
from jaxserve.routing.engines import choose_engine
from jaxserve.routing.limits import answer_length, capacity
from jaxserve.routing.requests import Ask, make_generation_requests
from jaxserve.routing.seeds import derive_seed, random_seed

INFO = EngineInfo("m", 100, 64, 20, 16, 1000)
ASK = Ask(
    request_id="r",
    prompts=[[1, 2, 3], [4]],
    n=2,
    sampling=SamplingParams(seed=5),
    priority=1,
    cache_salt="s",
    arrival=7.0,
)


def test_seeds() -> None:
    assert derive_seed(5, 0) == 5
    seeds = [
        derive_seed(seed, index) for seed in (-(2**63), -1, 0, 1, 2**63 - 1) for index in range(64)
    ]
    assert len(set(seeds)) == len(seeds)
    assert all(-(2**63) <= seed < 2**63 for seed in seeds)
    assert derive_seed(1, 3) == derive_seed(1, 3)
    assert random_seed() != random_seed()


def test_capacity_is_context_or_pool() -> None:
    assert capacity(INFO) == 64
    small = EngineInfo("m", 100, 64, 20, 16, 3)
    assert capacity(small) == 32  # page 0 belongs to nobody
    with pytest.raises(PromptTooLongError, match="memory for one request is 32"):
        answer_length(small, 40, None, param="max_tokens", prompt_param="prompt")


@pytest.mark.parametrize(
    ("prompt", "asked", "granted"), [(10, None, 54), (10, 54, 54), (63, 1, 1), (63, None, 1)]
)
def test_lengths_that_fit(prompt: int, asked: int | None, granted: int) -> None:
    assert answer_length(INFO, prompt, asked, param="m", prompt_param="p") == granted


@pytest.mark.parametrize(
    ("prompt", "asked", "param", "words"),
    [
        (10, 55, "m", ("10", "55", "65", "64", "54")),
        (64, None, "p", ("64",)),
        (70, 1, "p", ("70",)),
    ],
)
def test_lengths_that_do_not(
    prompt: int, asked: int | None, param: str, words: tuple[str, ...]
) -> None:
    with pytest.raises(PromptTooLongError) as caught:
        answer_length(INFO, prompt, asked, param="m", prompt_param="p")
    assert caught.value.param == param
    assert all(word in str(caught.value) for word in words)


def test_prompts_times_choices() -> None:
    requests = make_generation_requests(ASK, INFO)
    assert [request.prompt_ids for request in requests] == [[1, 2, 3]] * 2 + [[4]] * 2
    assert len({request.request_id for request in requests}) == 4
    seeds = [request.sampling.seed for request in requests]
    assert seeds == [5, derive_seed(5, 1)] * 2
    assert [request.sampling.max_tokens for request in requests] == [61, 61, 63, 63]
    assert {(request.priority, request.cache_salt, request.arrival) for request in requests} == {
        (1, "s", 7.0)
    }


def test_unseeded_requests_get_a_seed() -> None:
    unseeded = dataclasses.replace(ASK, sampling=SamplingParams())
    seeds = [request.sampling.seed for request in make_generation_requests(unseeded, INFO)]
    assert None not in seeds
    assert len(set(seeds)) == 2


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"prompts": [[]]}, "prompt"),
        ({"prompts": [[100]]}, "prompt"),
        ({"prompts": [[-1]]}, "prompt"),
        ({"priority": 2**40}, "priority"),
        ({"sampling": SamplingParams(min_tokens=62)}, "min_tokens"),
        ({"sampling": SamplingParams(logit_bias={100: 1.0})}, "logit_bias"),
        ({"sampling": SamplingParams(temperature=-1.0)}, "temperature"),
    ],
)
def test_refusals(change: dict[str, object], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        make_generation_requests(dataclasses.replace(ASK, **change), INFO)  # type: ignore[arg-type]
    assert caught.value.param == param


@dataclasses.dataclass
class State:
    """An engine as `choose_engine` sees it."""

    num_running: int
    num_waiting: int
    reason: str | None = None

    def not_ready_reason(self) -> str | None:
        return self.reason


def test_choose_engine() -> None:
    idle, busy = State(0, 0, "loading"), State(3, 4)
    free = State(5, 1)
    assert choose_engine([idle, busy, free]) is free
    with pytest.raises(EngineGoneError, match="loading; try again"):
        choose_engine([idle])
