"""The benchmarks' arithmetic, done by hand."""

from __future__ import annotations

import functools
import itertools
import math
import statistics
from types import SimpleNamespace

import pytest

from jaxserve.bench import offline, step_table
from jaxserve.bench.serving import arrivals, metrics
from jaxserve.bench.serving.answers import Record
from jaxserve.bench.spread import Spread
from jaxserve.bench.workloads import NAMED, Request, make_named, make_random
from jaxserve.engine.step_profile import StepTimes
from jaxserve.errors import EngineError, UsageError
from jaxserve.request import FinishReason, RequestOutput

#: What any engine's driver makes of the seed 1: requests, first and last ids, tokens in and out.
SEED_1 = {
    "single": (1, [38010, 24391, 1552], [18631, 22221], 128, 128),
    "headline": (1, [24065, 25768, 4316], [30950, 7822], 4000, 300),
    "batch8": (8, [14645, 39131, 28624], [9385, 39040], 1024, 1024),
    "batch64": (64, [16219, 20940, 7619], [17385, 21303], 8192, 8192),
    "mixed32": (32, [10781, 30547, 20422], [314, 28231], 15670, 4636),
    "shared_prefix32": (32, [27207, 9550, 37110], [938, 11034], 34816, 2048),
}


@pytest.mark.parametrize("name", NAMED)
def test_workloads_are_those_that_other_engines_get(name: str) -> None:
    requests = make_named(name, 1, 49152)
    count, first, last, inputs, outputs = SEED_1[name]
    assert len(requests) == count
    assert requests[0].prompt_ids[:3] == first
    assert requests[-1].prompt_ids[-2:] == last
    assert sum(len(request.prompt_ids) for request in requests) == inputs
    assert sum(request.output_tokens for request in requests) == outputs


def test_ids_fit_a_small_vocabulary() -> None:
    (request,) = make_random(1, 500, 3, seed=1, vocab_size=20)
    assert {5, 19} <= set(request.prompt_ids) <= set(range(5, 20))
    with pytest.raises(UsageError, match="5 tokens is too small"):
        make_random(1, 1, 1, seed=1, vocab_size=5)


def test_gaps_are_poisson_by_default_and_follow_burstiness() -> None:
    def variation(burstiness: float) -> float:
        times = arrivals.start_times(4000, 20.0, burstiness, seed=3)
        assert times[-1] == pytest.approx(200.0)
        gaps = [later - earlier for earlier, later in itertools.pairwise([0.0, *times])]
        return statistics.stdev(gaps) / statistics.mean(gaps)

    assert variation(1.0) == pytest.approx(1.0, rel=0.1)  # exponential
    assert variation(4.0) == pytest.approx(0.5, rel=0.1)  # gamma: 1 / sqrt(shape)
    assert variation(0.25) == pytest.approx(2.0, rel=0.15)
    assert arrivals.start_times(3, math.inf, 1.0, seed=3) == [0.0, 0.0, 0.0]
    assert arrivals.start_times(9, 2, 1, seed=3) != arrivals.start_times(9, 2, 1, seed=4)


def record(ttft: float, gaps: list[float], tokens: int) -> Record:
    return Record(
        started=0.0,
        ttft=ttft,
        gaps=gaps,
        latency=ttft + sum(gaps),
        prompt_tokens=10,
        output_tokens=tokens,
        counted=True,
    )


def test_metrics_are_as_defined() -> None:
    records = [
        record(0.5, [0.1, 0.3], 3),
        record(1.5, [0.2] * 4, 9),  # two tokens in a chunk
        record(0.1, [], 1),
        Record(started=0.0, error="HTTP 429: no"),
    ]
    objectives = metrics.parse_objectives(["ttft:1000", "itl:250", "tpot:210"])
    summary = metrics.summarise(records, 4.0, objectives)
    assert (summary.completed, summary.failed, summary.errors) == (3, 1, {"HTTP 429: no": 1})
    assert (summary.input_tokens, summary.output_tokens) == (30, 13)
    assert (summary.request_rate, summary.output_rate, summary.total_rate) == (0.75, 3.25, 10.75)
    values = metrics.milliseconds(records)
    assert values["tpot"] == pytest.approx([200, 100])  # of one token there is none
    assert values["itl"] == pytest.approx([100, 300, 200, 200, 200, 200])
    assert values["e2el"] == pytest.approx([900, 2300, 100])
    assert (summary.goodput, summary.good_share) == (0.25, 0.25)  # the third only
    assert metrics.is_good(records[0], {"tpot": 210, "ttft": 500, "itl": 301})
    assert not metrics.is_good(records[0], {"itl": 299})


def test_percentiles_interpolate() -> None:
    spread = Spread.of([4.0, 1.0, 2.0, 3.0])
    assert (spread.mean, spread.p50, spread.max) == (2.5, 2.5, 4.0)
    assert (spread.p90, spread.p99) == pytest.approx((3.7, 3.97))


class FakeLLM:
    """Answers at once; `short` tokens too few."""

    def __init__(self, short: int = 0) -> None:
        self.short = short

    def _answer(self, count: int) -> RequestOutput:
        return RequestOutput(
            request_id="x",
            text="",
            token_ids=[7] * (count - self.short),
            num_prompt_tokens=1,
            finish_reason=FinishReason.LENGTH,
        )

    def generate(self, prompts, sampling):
        return [self._answer(each.max_tokens) for each in sampling]

    def stream(self, prompt, sampling):
        yield self._answer(sampling.max_tokens)


def test_rounds_have_fresh_prompts_and_print_the_drivers_fields() -> None:
    seeds = []

    def make(seed: int) -> list[Request]:
        seeds.append(seed)
        return make_named("batch8", seed, 49152)

    rounds = offline.measure(FakeLLM(), "batch8", make, 3)
    assert seeds == [1, 2, 3]
    line = offline.medians(rounds)
    assert line["output_tokens"] == 1024
    assert line["ttft_s"] is None
    assert line["seconds"] == statistics.median(each.seconds for each in rounds)
    single = functools.partial(make_named, "single", vocab_size=49152)
    assert offline.measure(FakeLLM(), "single", single, 1)[0].ttft_s is not None


@pytest.mark.parametrize("name", ["single", "batch8"])
def test_answers_that_are_too_short_are_no_measurement(name: str) -> None:
    make = functools.partial(make_named, name, vocab_size=49152)
    with pytest.raises(EngineError, match="of 128 tokens ended after 127"):
        offline.measure(FakeLLM(short=1), name, make, 1)


def step(**times: float) -> StepTimes:
    fields = {"tokens": 6, "rows": 6, "follows": True, "bucket": 8}
    return StepTimes(**{**fields, **times})


def test_the_device_is_idle_only_while_there_is_work() -> None:
    steps = [
        # The device works from 1 to 5; the host waits for it from 3 on, and reads until 6.
        step(follows=False, handed_over=0.9, returned=1, ended=5, read_from=3, read_until=6),
        # Told at 2, so begun at 5: nothing idle. Ended before it was read.
        step(handed_over=1.8, returned=2, ended=8, read_from=9, read_until=9.5),
        # Told at 10, two after the device had nothing more.
        step(handed_over=9.6, returned=10, ended=13, read_from=12, read_until=13),
        # The call itself computed.
        step(
            bucket=16, handed_over=14, returned=18, ended=17, read_from=18, read_until=18, emit=0.5
        ),
    ]
    assert [each.wait for each in steps] == [2, 0, 1, 0]
    assert [each.read for each in steps] == [1, 0.5, 0, 0]
    eight, sixteen, every = step_table.bucket_times(steps)
    assert (eight.bucket, eight.steps, eight.padding) == (8, 3, 0.25)
    assert eight.milliseconds["device"] == pytest.approx(1000 * (4 + 3 + 3) / 3)
    assert eight.milliseconds["idle"] == pytest.approx(1000 * 2 / 3)
    assert (sixteen.milliseconds["device"], sixteen.milliseconds["idle"]) == (3000, 1000)
    assert every.bucket is None
    assert every.idle_share == pytest.approx(3 / (3 + 13))
    assert every.host_share == pytest.approx(1 - 3 / 5)


class StubDevice:
    """Hands out results that are there at once."""

    def forward(self, bucket, packed):
        pass

    def sample(self, rows, packed):
        return SimpleNamespace(tokens=SimpleNamespace(block_until_ready=lambda: None))


def test_every_moment_of_the_loop_has_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that goes on by one second per look: each phase is one look long."""
    from jaxserve.engine import step_profile

    ticks = itertools.count(1.0)
    profile = step_profile.StepProfile()
    device = profile.watch(StubDevice())
    monkeypatch.setattr(profile, "_now", lambda: next(ticks))
    plan = SimpleNamespace(rows=[None] * 3, num_tokens=3)
    for turn in range(3):
        profile.start()
        profile.scheduled(plan)
        device.forward(SimpleNamespace(tokens=4), None)
        device.sample(4, None)
        if turn:
            profile.reading()
            profile.read()
    first, second = profile.steps()
    assert (first.bucket, first.tokens, first.rows) == (4, 3, 3)
    assert (first.schedule, first.build, first.dispatch) == (1, 2, 2)
    assert first.read_until - first.read_from == 1
    assert first.emit == 2  # counting before it was read, and until the loop came round
    assert (first.follows, second.follows) == (False, True)
