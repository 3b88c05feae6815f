"""The engine's Prometheus metrics (observes steps 4 to 7).

Names are vLLM's where the meaning is the same, so that existing dashboards and routers work;
what only we have is called `jaxserve:`.
"""

from __future__ import annotations

import time

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

from jaxserve.engine.scheduler import Scheduler
from jaxserve.engine.sequence import Sequence
from jaxserve.engine.step_plan import StepPlan
from jaxserve.engine.tally import TallyHistogram
from jaxserve.request import FinishReason, GenerationRequest

_TIME_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0),
)
_TOKEN_BUCKETS = tuple(float(2**power) for power in range(18))


class EngineMetrics:
    """All metrics of one engine; `text` gives the exposition format."""

    def __init__(self, model_name: str) -> None:
        self._registry = CollectorRegistry()
        self._model = model_name
        gauge, counter, times = self._gauge, self._counter, self._times
        self.running = gauge("vllm:num_requests_running", "Requests in the running batch")
        self.waiting = gauge("vllm:num_requests_waiting", "Requests waiting for a slot or pages")
        self.kv_usage = gauge("vllm:kv_cache_usage_perc", "Share of KV pages in use, 0 to 1")
        self.cached_pages = gauge(
            "jaxserve:prefix_cache_pages", "Pages that the prefix cache knows"
        )
        self.compiled_after_ready = gauge(
            "jaxserve:compilations_after_ready", "Programs compiled after ready; must be 0"
        )
        self.prompt_tokens = counter("vllm:prompt_tokens", "Prompt tokens of started requests")
        self.generation_tokens = counter("vllm:generation_tokens", "Generated tokens")
        self.prefix_queries = counter("vllm:prefix_cache_queries", "Tokens looked up in the cache")
        self.prefix_hits = counter("vllm:prefix_cache_hits", "Tokens found in the prefix cache")
        self.preemptions = counter("vllm:num_preemptions", "Requests that lost their pages")
        self.drafts = counter("vllm:spec_decode_num_drafts", "Rows that held guesses")
        self.draft_tokens = counter("vllm:spec_decode_num_draft_tokens", "Guesses put to the test")
        self.accepted_tokens = counter(
            "vllm:spec_decode_num_accepted_tokens", "Guesses that came true"
        )
        self.step_tokens = counter("jaxserve:step_tokens", "Query tokens computed", "bucket")
        self.padding_tokens = counter("jaxserve:padding_tokens", "Padding computed", "bucket")
        self.success = counter("vllm:request_success", "Finished requests", "finished_reason")
        self.refusals = counter("vllm:admission_rejections", "Refused requests", "reason")
        self.device_seconds = counter(
            "jaxserve:device_seconds", "Device time of finished requests", "tenant"
        )
        self.time_to_first_token = times("vllm:time_to_first_token_seconds", "Arrival to token 1")
        self.inter_token_latency = times("vllm:inter_token_latency_seconds", "Between two tokens")
        self.end_to_end = times("vllm:e2e_request_latency_seconds", "Arrival to the last token")
        self.queue_time = times("vllm:request_queue_time_seconds", "Arrival to the first step")
        self.prefill_time = times("vllm:request_prefill_time_seconds", "First step to token 1")
        self.decode_time = times("vllm:request_decode_time_seconds", "Token 1 to the last token")
        self.step_time = times("jaxserve:step_seconds", "Dispatch of a step to its tokens read")
        sizes = self._sizes
        self.request_prompt = sizes("vllm:request_prompt_tokens", "Prompt tokens of a request")
        self.request_generation = sizes("vllm:request_generation_tokens", "Tokens of an answer")
        self.params_max_tokens = sizes(
            "vllm:request_params_max_tokens", "Tokens that an answer may have"
        )
        self.params_n = sizes("vllm:request_params_n", "Answers that a request asks for")
        self.iteration_tokens = sizes("vllm:iteration_tokens_total", "Query tokens of a step")
        for reason in FinishReason:
            self.success.labels(model_name=self._model, finished_reason=reason.value)
        self._num_generated = 0
        self._seen = (0, 0, 0, 0)

    def text(self, scheduler: Scheduler) -> str:
        """Exposition text, with the gauges as they are now."""
        pool = scheduler.pool
        self.running.set(len(scheduler.running))
        self.waiting.set(scheduler.num_waiting)
        self.kv_usage.set(pool.num_owned / pool.capacity)
        self.cached_pages.set(pool.num_cached)
        now = (
            self._num_generated,
            scheduler.num_prefix_queries,
            scheduler.num_prefix_hits,
            scheduler.num_preemptions,
        )
        metrics = (self.generation_tokens, self.prefix_queries, self.prefix_hits, self.preemptions)
        for metric, value, seen in zip(metrics, now, self._seen, strict=True):
            metric.inc(value - seen)
        self._seen = now
        exposition: bytes = generate_latest(self._registry)
        return exposition.decode()

    def on_step(self, plan: StepPlan, bucket_tokens: int) -> None:
        bucket = str(bucket_tokens)
        self.step_tokens.labels(model_name=self._model, bucket=bucket).inc(plan.num_tokens)
        padding = bucket_tokens - plan.num_tokens
        self.padding_tokens.labels(model_name=self._model, bucket=bucket).inc(padding)
        self.iteration_tokens.observe(plan.num_tokens)

    def on_admitted(self, sequence: Sequence) -> None:
        """The first time that a request gets a slot."""
        self.prompt_tokens.inc(sequence.num_prompt_tokens)
        self.queue_time.observe(max(0.0, sequence.times.scheduled - sequence.times.arrival))

    def on_draft(self, num_guessed: int, num_accepted: int) -> None:
        """A row's guesses were put to the test."""
        self.drafts.inc()
        self.draft_tokens.inc(num_guessed)
        self.accepted_tokens.inc(num_accepted)

    def on_tokens(self, sequence: Sequence, count: int) -> None:
        """More tokens of a request, all of one step, have reached the host."""
        now = time.monotonic()
        times = sequence.times
        self._num_generated += count
        if times.first_token:
            self.inter_token_latency.observe(now - times.last_token)
        else:
            times.first_token = now
            self.time_to_first_token.observe(max(0.0, now - times.arrival))
            self.prefill_time.observe(now - times.scheduled)
        times.last_token = now

    def on_finished(self, sequence: Sequence, reason: FinishReason) -> None:
        now = time.monotonic()
        times = sequence.times
        self.success.labels(model_name=self._model, finished_reason=reason.value).inc()
        self.end_to_end.observe(max(0.0, now - times.arrival))
        self.request_prompt.observe(sequence.num_prompt_tokens)
        self.request_generation.observe(sequence.num_output_tokens)
        self.params_max_tokens.observe(sequence.max_tokens)
        if sequence.request.n:
            self.params_n.observe(sequence.request.n)
        if times.first_token:
            self.decode_time.observe(times.last_token - times.first_token)

    def on_read(self, request: GenerationRequest, reason: FinishReason) -> None:
        """A prompt that was only read has ended."""
        self.prompt_tokens.inc(len(request.prompt_ids))
        self.success.labels(model_name=self._model, finished_reason=reason.value).inc()
        self.end_to_end.observe(max(0.0, time.monotonic() - request.arrival))
        self.request_prompt.observe(len(request.prompt_ids))

    def on_device_time(self, tenant: str, seconds: float) -> None:
        """A request has ended that took so much of the steps' time."""
        self.device_seconds.labels(model_name=self._model, tenant=tenant).inc(seconds)

    def on_refused(self, reason: str) -> None:
        self.refusals.labels(model_name=self._model, reason=reason).inc()

    def _gauge(self, name: str, text: str) -> Gauge:
        metric = Gauge(name, text, ["model_name"], registry=self._registry)
        return metric.labels(model_name=self._model)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        metric = Counter(name, text, ["model_name", *labels], registry=self._registry)
        return metric if labels else metric.labels(model_name=self._model)

    def _times(self, name: str, text: str) -> TallyHistogram:
        return self._histogram(name, text, _TIME_BUCKETS)

    def _sizes(self, name: str, text: str) -> TallyHistogram:
        return self._histogram(name, text, _TOKEN_BUCKETS)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> TallyHistogram:
        labels = {"model_name": self._model}
        return TallyHistogram(name, text, buckets, labels, self._registry)
