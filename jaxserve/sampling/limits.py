"""What a request's parameters mean for the sampler's arrays (step 3). Imports no jax."""

from __future__ import annotations

import dataclasses

from jaxserve.errors import RequestError
from jaxserve.request import SamplingParams


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SamplingLimits:
    """Sizes of the per-slot arrays. Allowed tokens and stop tokens are bit masks: no limit there."""

    bias_tokens: int = 1024
    bad_words: int = 64


def reads_output(params: SamplingParams) -> bool:
    """Whether what may be sampled depends on the tokens sampled before, beside the model.

    Then a token can be sampled only once the one before it is certain.
    """
    return bool(
        params.repetition_penalty != 1.0
        or params.presence_penalty
        or params.frequency_penalty
        or params.bad_words
    )


def check_limits(params: SamplingParams, limits: SamplingLimits) -> None:
    """Raises RequestError naming the field that asks for more than `limits`."""
    for field, size, limit in (
        ("logit_bias", len(params.logit_bias), limits.bias_tokens),
        ("bad_words", len(params.bad_words), limits.bad_words),
    ):
        if size > limit:
            raise RequestError(
                f"{field} has {size} entries; this server takes at most {limit}", param=field
            )
