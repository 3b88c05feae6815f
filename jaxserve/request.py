"""What a user asks for and gets back: the nouns that every step of the walk shares.

Imports nothing of ours but the error tree. `GenerationRequest` is the user's side;
the engine's own bookkeeping of it is `jaxserve.engine.sequence.Sequence`.
"""

from __future__ import annotations

import dataclasses
import enum
import math

from jaxserve.errors import RequestError

MAX_LOGPROBS = 20
MAX_BAD_WORD_TOKENS = 8


class FinishReason(enum.StrEnum):
    """Why an answer ended; `stop` and `length` as in OpenAI's API."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are chosen and when to stop. Every field is honoured; `validate` refuses the rest.

    temperature 0 is greedy. top_k 0 means all tokens, top_p 1 and min_p 0 switch those filters off.
    repetition_penalty counts prompt and output, presence and frequency penalties output only.
    max_tokens None means: until the model stops or the context is full.
    seed None means: a random one is drawn when the request is made.
    stop strings are found by the detokeniser, stop_token_ids by the engine.
    logprobs: how many alternatives (0..20) to return per token, None for none at all.
    bad_words are token id sequences that must not appear; allowed_token_ids, when given, are
    the only tokens that may.
    """

    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = dataclasses.field(default_factory=dict)
    bad_words: list[list[int]] = dataclasses.field(default_factory=list)
    allowed_token_ids: list[int] | None = None
    seed: int | None = None
    stop: list[str] = dataclasses.field(default_factory=list)
    include_stop_str_in_output: bool = False
    stop_token_ids: list[int] = dataclasses.field(default_factory=list)
    ignore_eos: bool = False
    logprobs: int | None = None
    skip_special_tokens: bool = True

    def validate(self, *, vocab_size: int | None = None) -> None:
        """Raises RequestError naming the first field whose value cannot be honoured."""
        number = _check_number
        if self.max_tokens is not None:
            number("max_tokens", self.max_tokens, 1, math.inf)
        number("min_tokens", self.min_tokens, 0, math.inf)
        number("temperature", self.temperature, 0, 1e6)
        number("top_k", self.top_k, 0, math.inf)
        number("top_p", self.top_p, 0, 1, open_low=True)
        number("min_p", self.min_p, 0, 1)
        number("repetition_penalty", self.repetition_penalty, 0, math.inf, open_low=True)
        number("presence_penalty", self.presence_penalty, -2, 2)
        number("frequency_penalty", self.frequency_penalty, -2, 2)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens {self.min_tokens} is larger than max_tokens {self.max_tokens}",
                param="min_tokens",
            )
        if self.logprobs is not None:
            number("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        if self.seed is not None:
            number("seed", self.seed, -(2**63), 2**63 - 1)
        if any(not text for text in self.stop):
            raise RequestError("stop must not hold an empty string", param="stop")
        for value in self.logit_bias.values():
            number("logit_bias", value, -100, 100)
        for word in self.bad_words:
            if not 1 <= len(word) <= MAX_BAD_WORD_TOKENS:
                raise RequestError(
                    f"a bad word has {len(word)} tokens; 1 to {MAX_BAD_WORD_TOKENS} are supported",
                    param="bad_words",
                )
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise RequestError("allowed_token_ids must not be empty", param="allowed_token_ids")
        if vocab_size is not None:
            self._check_token_ids(vocab_size)

    def _check_token_ids(self, vocab_size: int) -> None:
        for field, ids in (
            ("logit_bias", list(self.logit_bias)),
            ("bad_words", [token for word in self.bad_words for token in word]),
            ("allowed_token_ids", self.allowed_token_ids or []),
            ("stop_token_ids", self.stop_token_ids),
        ):
            for token in ids:
                if not 0 <= token < vocab_size:
                    raise RequestError(
                        f"{field} holds token id {token}; this model's ids are 0 to {vocab_size - 1}",
                        param=field,
                    )


def _check_number(
    field: str, value: float, low: float, high: float, *, open_low: bool = False
) -> None:
    too_low = value <= low if open_low else value < low
    if isinstance(value, bool) or math.isnan(value) or math.isinf(value) or too_low or value > high:
        bounds = f"{'above' if open_low else 'at least'} {low}"
        if high != math.inf:
            bounds += f" and at most {high}"
        raise RequestError(f"{field} is {value}; it must be {bounds}", param=field)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Grammar:
    """The form that an answer must have; made by `jaxserve.structured`.

    text: JSON as llguidance reads it. param: the request's field that asked for it.
    """

    text: str
    param: str


class Score(enum.StrEnum):
    """What is wanted of a prompt that is only read: a pooled hidden state, or log-probabilities."""

    MEAN = "mean"
    LAST = "last"
    LOGPROBS = "logprobs"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One prompt with one answer to come. `n` answers are n requests that share their prompt.

    prompt_ids: the prompt's token ids, at least one.
    priority: smaller runs earlier; equal ones run in order of arrival.
    cache_salt: requests share cached prefixes only with requests of the same salt.
    eos_ids: ids that end the answer as the model's own end tokens do (unless ignore_eos); the
        tokeniser knows of some, such as the enders of chat turns, that the model's config does not.
    arrival: seconds of `time.monotonic()` at which the server received the request.
    grammar: the form of the answer, None for any.
    score: the prompt is only read, for this; of `sampling` only `logprobs` counts then.
    tenant: who asks; tenants take turns, and one of weight 2 gets twice as many tokens as one of 1.
    trace: the facts at the end are to hold the steps, too.
    n: answers to this prompt in all, told by the first of them; 0 for the others.
    """

    request_id: str
    prompt_ids: list[int]
    sampling: SamplingParams
    priority: int = 0
    cache_salt: str = ""
    arrival: float = 0.0
    eos_ids: tuple[int, ...] = ()
    grammar: Grammar | None = None
    score: Score | None = None
    tenant: str = ""
    weight: float = 1.0
    trace: bool = False
    n: int = 1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprobs:
    """Natural-log probabilities of one generated token, from the model's unmodified logits."""

    token_id: int
    logprob: float
    top_ids: list[int]
    top_logprobs: list[float]


@dataclasses.dataclass(slots=True, kw_only=True)
class StepStretch:
    """Steps of one request, one after the other, summed up.

    kind: "prefill" or "decode". begun, ended: seconds of `time.monotonic()`. tokens and
    device_seconds are this request's, padding_tokens its share of the padding; bucket_tokens and
    rows (requests that were computed together) are those of all `steps` steps added up.
    """

    kind: str
    begun: float
    ended: float
    steps: int = 0
    tokens: int = 0
    bucket_tokens: int = 0
    rows: int = 0
    padding_tokens: float = 0.0
    device_seconds: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RequestFacts:
    """What a request that has ended took, whatever ended it.

    Times of `scheduled` and below are seconds of `time.monotonic()`, 0 for what never came.
    num_prefill_tokens: prompt tokens that were computed, again ones after a preemption included.
    num_pages: pages of the KV pool that its tokens filled, num_cached_pages: of those, the ones that
    were in the prefix cache.
    device_seconds: its share, by tokens, of the time of each step that it was part of.
    stretches: the steps, if the request was traced.
    """

    finish_reason: FinishReason
    num_cached_tokens: int = 0
    num_generated_tokens: int = 0
    num_prefill_tokens: int = 0
    num_preemptions: int = 0
    num_pages: int = 0
    num_cached_pages: int = 0
    padding_tokens: float = 0.0
    queue_seconds: float = 0.0
    device_seconds: float = 0.0
    steps: int = 0
    scheduled: float = 0.0
    first_token: float = 0.0
    last_token: float = 0.0
    ended: float = 0.0
    stretches: list[StepStretch] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TokenOutput:
    """What one engine step produced for one request (before detokenising).

    finish_reason is set on a request's last output and on no other; every accepted request
    gets exactly one. With FinishReason.ERROR, `error` says why.
    num_cached_tokens: prompt tokens found in the prefix cache, known from the first output on.
    embedding: float32 numbers, for a request with `score` MEAN or LAST; with LOGPROBS `logprobs`
    are those of the prompt's tokens from the second on. facts: with the last output.
    """

    request_id: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    num_cached_tokens: int = 0
    error: str | None = None
    embedding: bytes | None = None
    facts: RequestFacts | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """A detokenised piece (streaming) or the whole (offline) of one answer.

    text and token_ids are what is new since the previous piece; in a whole answer, everything.
    """

    request_id: str
    text: str
    token_ids: list[int]
    num_prompt_tokens: int
    num_cached_tokens: int = 0
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    error: str | None = None
