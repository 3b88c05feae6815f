"""Compares a loaded model with a reference, through the engine's own requests (before step 1).

Log-probabilities after given tokens come from requests for one token; where a token is not among
the likeliest ones, a bias makes the engine take it, and it tells that token's log-probability of
the unbiased logits.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable
from typing import TypeVar

from jaxserve.errors import EngineError
from jaxserve.llm import LLM, Job
from jaxserve.quality.reference import PromptReference, Reference
from jaxserve.request import MAX_LOGPROBS, RequestOutput, SamplingParams, TokenLogprobs

#: What counts as right: root mean square of the likeliest tokens' deviations, in nat.
LARGEST_RMS = 0.1
_GREEDY = SamplingParams(temperature=0.0, ignore_eos=True, logprobs=MAX_LOGPROBS, max_tokens=1)
_BIAS = 100.0

#: Told the number of finished requests and of all requests.
Progress = Callable[[int, int], None]
#: Prompt (its index) and number of ids before the token.
_Place = tuple[int, int]
Key = TypeVar("Key")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PromptQuality:
    """One prompt. Deviations are of log-probabilities, in nat.

    steps_equal of steps: places of the reference's continuation, near-ties left out, at which the
    likeliest token is the reference's. first_difference: the step at which the model's own greedy
    continuation leaves the reference's, None where it does not; first_near_tie: the reference's
    first one, None without.
    """

    name: str
    rms: float
    worst: float
    steps: int
    steps_equal: int
    first_difference: int | None
    first_near_tie: int | None

    @property
    def continues_equally(self) -> bool:
        """Whether the greedy continuation is the reference's up to its first near-tie."""
        if self.first_difference is None:
            return True
        return self.first_near_tie is not None and self.first_difference >= self.first_near_tie


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Quality:
    """All prompts together; weight_bytes: as the devices hold them. asked: what was asked for,
    weights: what it became."""

    asked: str
    weights: str
    weight_bytes: int
    rms: float
    worst: float
    prompts: tuple[PromptQuality, ...]

    @property
    def is_within(self) -> bool:
        """Whether this is as good as float32 for greedy answers."""
        return self.rms <= LARGEST_RMS and all(each.continues_equally for each in self.prompts)


def measure(llm: LLM, reference: Reference, asked: str, progress: Progress) -> Quality:
    """Runs all prompts. asked: what --quantization said. Raises EngineError."""
    prompts = reference.prompts
    free = _generate(
        llm,
        {
            (index, len(prompt.ids)): (
                list(prompt.ids),
                dataclasses.replace(_GREEDY, max_tokens=len(prompt.greedy_ids)),
            )
            for index, prompt in enumerate(prompts)
        },
        progress,
    )
    own = [free[index, len(prompt.ids)] for index, prompt in enumerate(prompts)]
    known = _along_the_reference(prompts, own)
    asked_for = dict.fromkeys(_places(prompts))
    known |= {
        place: (answer.logprobs or [])[0]
        for place, answer in _generate(
            llm,
            {
                (index, length): (prompts[index].prefix(length), _GREEDY)
                for index, length in asked_for
                if (index, length) not in known
            },
            progress,
        ).items()
    }
    deviations = _deviations(llm, prompts, known, progress)
    every = [value for values in deviations for value in values]
    return Quality(
        asked=asked,
        weights=llm.report.weights,
        weight_bytes=llm.report.memory.weights * llm.report.mesh.size,
        rms=_rms(every),
        worst=max(every, default=0.0),
        prompts=tuple(
            _judge(index, prompt, answer.token_ids, known, values)
            for index, (prompt, answer, values) in enumerate(
                zip(prompts, own, deviations, strict=True)
            )
        ),
    )


def _places(prompts: tuple[PromptReference, ...]) -> Iterable[_Place]:
    for index, prompt in enumerate(prompts):
        for point in prompt.points:
            yield index, point.length
        for step in range(len(prompt.greedy_ids)):
            yield index, len(prompt.ids) + step


def _along_the_reference(
    prompts: tuple[PromptReference, ...], own: list[RequestOutput]
) -> dict[_Place, TokenLogprobs]:
    """Of the model's own continuations, the steps that had the reference's tokens before them."""
    known = {}
    for index, (prompt, answer) in enumerate(zip(prompts, own, strict=True)):
        for step, item in enumerate(answer.logprobs or []):
            known[index, len(prompt.ids) + step] = item
            if item.token_id != prompt.greedy_ids[step]:
                break
    return known


def _deviations(
    llm: LLM,
    prompts: tuple[PromptReference, ...],
    known: dict[_Place, TokenLogprobs],
    progress: Progress,
) -> list[list[float]]:
    """Per prompt: |log-probability - reference| of every token of every point."""
    missing: dict[tuple[int, int, int], tuple[list[int], SamplingParams]] = {}
    for index, prompt in enumerate(prompts):
        for point in prompt.points:
            for token in set(point.ids) - set(known[index, point.length].top_ids):
                sampling = dataclasses.replace(_GREEDY, logit_bias={token: _BIAS})
                missing[index, point.length, token] = prompt.prefix(point.length), sampling
    taken = _generate(llm, missing, progress)
    deviations = []
    for index, prompt in enumerate(prompts):
        values = []
        for point in prompt.points:
            item = known[index, point.length]
            found = dict(zip(item.top_ids, item.top_logprobs, strict=True))
            for token, logprob in zip(point.ids, point.logprobs, strict=True):
                if token not in found:
                    (other,) = taken[index, point.length, token].logprobs or []
                    assert other.token_id == token, "a bias of 100 makes a token the likeliest"
                    found[token] = other.logprob
                values.append(abs(found[token] - logprob))
        deviations.append(values)
    return deviations


def _judge(
    index: int,
    prompt: PromptReference,
    own: list[int],
    known: dict[_Place, TokenLogprobs],
    deviations: list[float],
) -> PromptQuality:
    steps = [step for step in range(len(prompt.greedy_ids)) if step not in prompt.near_ties]
    pairs = enumerate(zip(own, prompt.greedy_ids, strict=True))
    return PromptQuality(
        name=prompt.name,
        rms=_rms(deviations),
        worst=max(deviations, default=0.0),
        steps=len(steps),
        steps_equal=sum(
            known[index, len(prompt.ids) + step].top_ids[0] == prompt.greedy_ids[step]
            for step in steps
        ),
        first_difference=next((step for step, (a, b) in pairs if a != b), None),
        first_near_tie=min(prompt.near_ties, default=None),
    )


def _generate(
    llm: LLM, requests: dict[Key, tuple[list[int], SamplingParams]], progress: Progress
) -> dict[Key, RequestOutput]:
    jobs = (
        Job(key=key, prompt_ids=ids, sampling=sampling) for key, (ids, sampling) in requests.items()
    )
    found = {}
    for key, answer in llm.run(jobs):
        if answer.error is not None:
            raise EngineError(answer.error)
        found[key] = answer
        progress(len(found), len(requests))
    return found


def _rms(values: list[float]) -> float:
    return math.sqrt(sum(value * value for value in values) / max(len(values), 1))
