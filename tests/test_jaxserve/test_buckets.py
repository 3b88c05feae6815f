"""Buckets and their padding, from the scheduler with a made-up device on the benchmark's workloads."""

import dataclasses

import pytest

from jaxserve.bench.workloads import make_named
from jaxserve.config import EngineConfig
from jaxserve.engine.buckets import Bucket, choose_bucket, make_buckets
from jaxserve.engine.chunking import ChunkPolicy
from jaxserve.engine.metrics import EngineMetrics
from jaxserve.engine.scheduler import Scheduler
from jaxserve.engine.sequence import Sequence
from jaxserve.engine.step_costs import StepCosts
from jaxserve.kv.page_pool import PagePool
from jaxserve.request import GenerationRequest, SamplingParams


@dataclasses.dataclass
class Tokens:
    real: int = 0
    padded: int = 0

    @property
    def padding(self):
        return 1 - self.real / self.padded


def serve(workload, objective):
    """Tokens of all steps, and of those that hold answers only. A step takes 10 ms and 1 ms a token."""
    config = EngineConfig()
    buckets = make_buckets(config.max_num_batched_tokens, config.max_num_seqs)
    costs = StepCosts([bucket.tokens for bucket in buckets])
    most = config.max_num_batched_tokens
    scheduler = Scheduler(
        PagePool(4096, config.page_size),
        max_num_seqs=config.max_num_seqs,
        max_step_tokens=most,
        prefix_caching=True,
        chunks=ChunkPolicy(costs, max_step_tokens=most, objective=objective),
    )
    for order, each in enumerate(make_named(workload, 0, 49152)):
        request = GenerationRequest(
            request_id=str(order), prompt_ids=each.prompt_ids, sampling=SamplingParams()
        )
        scheduler.add(Sequence.from_request(request, max_tokens=each.output_tokens, order=order))
    everything, answers = Tokens(), Tokens()
    while scheduler.has_work:
        plan = scheduler.schedule()
        size = choose_bucket(buckets, plan.num_tokens, len(plan.rows)).tokens
        costs.observe(size, plan.num_pairs, 0.01 + 0.001 * size)
        counted = [everything]
        if all(row.count == 1 for row in plan.rows):
            counted.append(answers)
        for tokens in counted:
            tokens.real += plan.num_tokens
            tokens.padded += size
        for row in plan.rows:
            if row.samples:
                sequence = row.sequence
                sequence.num_pending -= 1
                sequence.tokens.append(7)
                if sequence.num_output_tokens == sequence.max_tokens:
                    scheduler.finish(sequence)
    return everything, answers


@pytest.mark.parametrize("objective", [None, 0.1])
def test_on_mixed_lengths_less_than_a_fifth_is_padding(objective):
    everything, answers = serve("mixed32", objective)
    assert everything.padding < 0.05
    assert answers.padding < 0.2


def test_metrics_tell_the_padding_of_each_bucket():
    metrics = EngineMetrics("m")
    scheduler = Scheduler(PagePool(64, 16), max_num_seqs=4, max_step_tokens=64, prefix_caching=True)
    for order, length in enumerate((5, 20)):
        request = GenerationRequest(
            request_id=str(order), prompt_ids=[order] * length, sampling=SamplingParams()
        )
        scheduler.add(Sequence.from_request(request, max_tokens=1, order=order))
        metrics.on_step(scheduler.schedule(), 8 if length == 5 else 32)
    text = metrics.text(scheduler)
    for bucket, tokens, padding in ((8, 5, 3), (32, 20, 12)):
        labels = f'{{bucket="{bucket}",model_name="m"}}'
        assert f"jaxserve:step_tokens_total{labels} {tokens}.0" in text
        assert f"jaxserve:padding_tokens_total{labels} {padding}.0" in text
    assert 'vllm:iteration_tokens_total_bucket{le="8.0",model_name="m"} 1.0' in text
    assert 'vllm:iteration_tokens_total_count{model_name="m"} 2.0' in text
    assert 'vllm:iteration_tokens_total_sum{model_name="m"} 25.0' in text


def test_every_step_has_a_bucket_and_the_largest_is_what_was_asked_for():
    buckets = make_buckets(100, 20)
    assert buckets[0] == Bucket(tokens=1, rows=1)
    assert buckets[-1] == Bucket(tokens=104, rows=20)
    for tokens in range(1, 101):
        bucket = choose_bucket(buckets, tokens, min(tokens, 20))
        assert bucket.tokens < max(2 * tokens, 8)
        assert bucket.rows == min(bucket.tokens, 20)


def test_sampling_is_compiled_for_few_sizes_that_hold_every_bucket() -> None:
    buckets = make_buckets(512, 32)
    assert all(bucket.sampled >= bucket.rows for bucket in buckets)
    assert {bucket.sampled for bucket in buckets} == {1, 4, 8, 16, 32}
    assert Bucket(tokens=9000, rows=5000).sampled == 5000
