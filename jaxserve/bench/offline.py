"""Throughput of workloads through `LLM`, as any program would use it (steps 4 to 8).

Every round has fresh prompts, so the prefix cache helps only inside a workload.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from jaxserve.bench.workloads import Request, make_named
from jaxserve.errors import EngineError
from jaxserve.request import FinishReason, SamplingParams

if TYPE_CHECKING:
    from jaxserve.llm import LLM

#: Seed of the warm-up's prompts; rounds count from 1.
WARM_SEED = 99
WARM_TOKENS = 8

MakeRequests = Callable[[int], list[Request]]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One workload, run once. Fields are those that all engines' drivers print.

    prefill_seconds and ttft_s: time until the first token, None where there are several requests.
    """

    engine: str
    workload: str
    seconds: float
    prefill_seconds: float | None
    output_tokens: int
    output_tok_s: float
    ttft_s: float | None


def warm_up(llm: LLM, vocab_size: int) -> None:
    """Eight short answers."""
    requests = make_named("batch8", WARM_SEED, vocab_size)
    run([dataclasses.replace(request, output_tokens=WARM_TOKENS) for request in requests], llm)


def measure(llm: LLM, name: str, make: MakeRequests, rounds: int) -> list[Round]:
    """make: requests of a seed. Raises EngineError where an answer fails or is too short."""
    return [_measure_once(llm, name, make(seed)) for seed in range(1, rounds + 1)]


def _measure_once(llm: LLM, name: str, requests: Sequence[Request]) -> Round:
    seconds, first = run(requests, llm)
    tokens = sum(request.output_tokens for request in requests)
    return Round(
        engine="jaxserve",
        workload=name,
        seconds=round(seconds, 3),
        prefill_seconds=None if first is None else round(first, 3),
        output_tokens=tokens,
        output_tok_s=round(tokens / seconds, 1),
        ttft_s=None if first is None else round(first, 3),
    )


def run(requests: Sequence[Request], llm: LLM) -> tuple[float, float | None]:
    """Greedy answers of full length: seconds for all, and until a lone request's first token."""
    first = None
    start = time.perf_counter()
    if len(requests) == 1:
        ((first, *_),) = [stream_times(requests[0], llm)]
    else:
        answers = llm.generate([r.prompt_ids for r in requests], [greedy(r) for r in requests])
        for request, answer in zip(requests, answers, strict=True):
            _check(request, len(answer.token_ids), answer.finish_reason, answer.error)
    return time.perf_counter() - start, first


def stream_times(request: Request, llm: LLM) -> list[float]:
    """Seconds from the start of one request to each of its tokens."""
    times: list[float] = []
    start = time.perf_counter()
    for piece in llm.stream(request.prompt_ids, greedy(request)):
        times += [time.perf_counter() - start] * len(piece.token_ids)
    _check(request, len(times), piece.finish_reason, piece.error)
    return times


def greedy(request: Request) -> SamplingParams:
    """The likeliest tokens, as many as were asked for."""
    return SamplingParams(temperature=0, max_tokens=request.output_tokens, ignore_eos=True)


def _check(request: Request, made: int, reason: FinishReason | None, error: str | None) -> None:
    if reason is not FinishReason.LENGTH or made != request.output_tokens:
        raise EngineError(
            f"an answer of {request.output_tokens} tokens ended after {made} with {reason}"
            + (f": {error}" if error else "")
        )


def medians(rounds: Sequence[Round]) -> dict[str, object]:
    """One workload's rounds as one line: the median of each measured field."""
    first = rounds[0]
    line: dict[str, object] = {"engine": first.engine, "workload": first.workload}
    for field in ("seconds", "prefill_seconds", "output_tokens", "output_tok_s", "ttft_s"):
        values = [getattr(each, field) for each in rounds]
        line[field] = None if None in values else statistics.median(values)
    return line | {"rounds": len(rounds)}
