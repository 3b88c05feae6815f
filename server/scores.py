"""Prompts that the engine only reads: one HTTP request's, waited for (steps 3 to 8)."""

from __future__ import annotations

from collections.abc import Sequence

import flask

from jaxserve.errors import PromptTooLongError, RequestError
from jaxserve.messages import EngineInfo, Output
from jaxserve.request import GenerationRequest, SamplingParams, Score
from jaxserve.routing.limits import TOO_LONG
from jaxserve.routing.requests import check_prompt
from server.disconnect import ConnectionWatch
from server.services import Services


def read_scores(
    services: Services,
    prompts: Sequence[list[int]],
    score: Score,
    *,
    param: str,
    logprobs: int | None = None,
) -> list[Output]:
    """What the engine read in each prompt. param: the field that holds the prompts.

    logprobs: alternatives per token, for Score.LOGPROBS. Raises RequestError, RefusedError,
    EngineError, or HungUpError when the client left.
    """
    client, info = services.engine()
    requests = [
        GenerationRequest(
            request_id=f"{flask.g.request_id}-read-{number}",
            prompt_ids=_checked(prompt_ids, info, param),
            sampling=SamplingParams(max_tokens=1, logprobs=logprobs),
            arrival=flask.g.arrival,
            score=score,
        )
        for number, prompt_ids in enumerate(prompts)
    ]
    submission = services.meter.submit(client, requests, max_tokens=0)
    watch = ConnectionWatch(flask.request.environ, submission.hang_up)
    found: dict[int, Output] = {}
    try:
        submission.accept()
        while len(found) < len(requests):
            found |= {
                index: output
                for index, output in submission.get()
                if output.finish_reason is not None
            }
    finally:
        watch.stop()
        submission.close()
    return [found[index] for index in range(len(requests))]


def check_prompt_logprobs(services: Services, param: str) -> None:
    """Raises RequestError if the engine was not started for them."""
    _, info = services.engine()
    if not info.prompt_logprobs:
        raise RequestError(
            f"{param} needs log-probabilities of the prompt, which this server was not started "
            "for: start it with --prompt-logprobs",
            param=param,
            code="unsupported_parameter",
        )


def _checked(prompt_ids: list[int], info: EngineInfo, param: str) -> list[int]:
    check_prompt(prompt_ids, info.vocab_size, param)
    if len(prompt_ids) > info.max_model_len:
        raise PromptTooLongError(
            f"{param} holds {len(prompt_ids)} tokens; this server's context is "
            f"{info.max_model_len} tokens: shorten it",
            param=param,
            code=TOO_LONG,
        )
    return prompt_ids
