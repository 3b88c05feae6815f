"""Offline use: a model in this process, from text to text (enters the walk at step 1, leaves after 8).

from jaxserve import LLM, SamplingParams

llm = LLM("smollm2-135m-instruct")
for answer in llm.generate(["The sea is", "A cat"], SamplingParams(max_tokens=20)):
    print(answer.text)
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar

from checkpoints.assets import read_tokenizer_files
from checkpoints.resolve import resolve_model
from jaxserve.config import DEFAULT_MODEL, EngineConfig, cache_folder
from jaxserve.context.assemble import assemble_chat, assemble_completion
from jaxserve.context.chat_template import ChatTemplate
from jaxserve.engine.build import make_engine
from jaxserve.engine.step_profile import StepProfile
from jaxserve.errors import EngineError, RefusedError, RequestError, UsageError
from jaxserve.request import (
    FinishReason,
    GenerationRequest,
    RequestOutput,
    SamplingParams,
    TokenLogprobs,
    TokenOutput,
)
from jaxserve.tokenizer.detokenizer import IncrementalDetokenizer
from jaxserve.tokenizer.load import load_tokenizer

Key = TypeVar("Key")
Prompt = str | Sequence[int]
Messages = Sequence[Mapping[str, Any]]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Job(Generic[Key]):
    """One prompt for `LLM.run`; `key` comes back with its answer."""

    key: Key
    prompt_ids: list[int]
    sampling: SamplingParams


class LLM:
    """A loaded model. Not thread-safe; one thread calls it."""

    def __init__(self, model: str = DEFAULT_MODEL, **settings: Any) -> None:
        """model: a name that can be pulled, a folder, a GGUF file or a hub id.

        settings: fields of `jaxserve.config.EngineConfig`. Raises JaxserveError or CheckpointError.
        """
        try:
            config = EngineConfig(model=model, **settings)
        except TypeError as error:
            known = ", ".join(field.name for field in dataclasses.fields(EngineConfig))
            raise UsageError(f"{error}; the settings are: {known}") from None
        if config.itl_target_ms is None:
            config = dataclasses.replace(config, itl_target_ms=0.0)
        path = resolve_model(config.model, cache_folder())
        files = read_tokenizer_files(path)
        self.tokenizer = load_tokenizer(files)
        self._template = (
            None
            if files.chat_template is None
            else ChatTemplate(files.chat_template, special=files.special)
        )
        self._engine, self.report = make_engine(config, path)
        self._numbers = itertools.count()
        self._window = min(config.max_num_seqs * 2, config.max_queue_len)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Whole answers, in the order of the prompts (texts, or lists of token ids)."""
        many = _as_list(prompts)
        ids = [self._prompt_ids(prompt) for prompt in many]
        return self._whole(ids, sampling)

    def chat(
        self,
        conversations: Messages | Sequence[Messages],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Whole answers to conversations, through the model's chat template."""
        one = bool(conversations) and isinstance(conversations[0], Mapping)
        many: Any = [conversations] if one else conversations
        return self._whole([self.chat_prompt(messages) for messages in many], sampling)

    def stream(
        self, prompt: Prompt, sampling: SamplingParams | None = None
    ) -> Iterator[RequestOutput]:
        """Pieces of one answer as they arrive; the last has a finish_reason.

        Leaving the iterator early ends the request.
        """
        return self._stream(self._prompt_ids(prompt), sampling or SamplingParams())

    def stream_chat(
        self, messages: Messages, sampling: SamplingParams | None = None
    ) -> Iterator[RequestOutput]:
        """`stream` for a conversation."""
        return self._stream(self.chat_prompt(messages), sampling or SamplingParams())

    def run(self, jobs: Iterable[Job[Key]]) -> Iterator[tuple[Key, RequestOutput]]:
        """Whole answers in the order in which they finish, in constant memory.

        Takes jobs as room appears. A job that cannot run comes back with FinishReason.ERROR.
        """
        source = iter(jobs)
        open_answers: dict[str, _Answer] = {}
        keys: dict[str, Key] = {}
        job = next(source, None)
        try:
            while job is not None or open_answers:
                while job is not None and len(open_answers) < self._window:
                    try:
                        answer = self._submit(job.prompt_ids, job.sampling)
                    except RefusedError:
                        if not open_answers:
                            raise
                        break  # too much is waiting; the next steps make room
                    except RequestError as error:
                        yield job.key, _failed(job, error)
                    else:
                        open_answers[answer.request_id] = answer
                        keys[answer.request_id] = job.key
                    job = next(source, None)
                for output in self._step(open_answers):
                    if output.finish_reason is not None:
                        answer = open_answers.pop(output.request_id)
                        yield keys.pop(output.request_id), answer.whole()
        finally:
            for request_id in open_answers:
                self._engine.abort(request_id)

    def metrics(self) -> str:
        """The engine's metrics in Prometheus' text format."""
        return self._engine.metrics.text(self._engine.scheduler)

    def profile_steps(self) -> StepProfile:
        """Measures every step of the engine from now on."""
        return self._engine.profile_steps()

    @property
    def has_chat_template(self) -> bool:
        """Whether the model knows conversations."""
        return self._template is not None

    def text_prompt(self, text: str) -> list[int]:
        """Token ids of a text to continue."""
        return assemble_completion(self.tokenizer, text)

    def chat_prompt(self, messages: Messages) -> list[int]:
        """Token ids of a conversation, ready for the answer."""
        return assemble_chat(self.tokenizer, self._template, messages)

    def _prompt_ids(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            return self.text_prompt(prompt)
        return list(prompt)

    def _whole(
        self, prompts: list[list[int]], sampling: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[RequestOutput]:
        if sampling is None or isinstance(sampling, SamplingParams):
            each = [sampling or SamplingParams()] * len(prompts)
        else:
            each = list(sampling)
        if len(each) != len(prompts):
            raise UsageError(f"{len(prompts)} prompts but {len(each)} sampling parameters")
        jobs = (
            Job(key=index, prompt_ids=ids, sampling=params)
            for index, (ids, params) in enumerate(zip(prompts, each, strict=True))
        )
        found = dict(self.run(jobs))
        return [found[index] for index in range(len(prompts))]

    def _stream(self, prompt_ids: list[int], sampling: SamplingParams) -> Iterator[RequestOutput]:
        answer = self._submit(prompt_ids, sampling)
        open_answers = {answer.request_id: answer}
        try:
            while open_answers:
                for output in self._step(open_answers):
                    if output.finish_reason is not None:
                        del open_answers[output.request_id]
                    yield output
        finally:
            for request_id in open_answers:
                self._engine.abort(request_id)

    def _submit(self, prompt_ids: list[int], sampling: SamplingParams) -> _Answer:
        request_id = f"offline-{next(self._numbers)}"
        self._engine.add(
            GenerationRequest(
                request_id=request_id,
                prompt_ids=prompt_ids,
                sampling=sampling,
                eos_ids=self.tokenizer.eos_ids,
            )
        )
        detokenizer = IncrementalDetokenizer(
            self.tokenizer,
            skip_special=sampling.skip_special_tokens,
            stop=sampling.stop,
            include_stop=sampling.include_stop_str_in_output,
            stop_after=sampling.min_tokens,
        )
        return _Answer(request_id, len(prompt_ids), detokenizer)

    def _step(self, open_answers: Mapping[str, _Answer]) -> list[RequestOutput]:
        """One engine step; pieces for the open answers. Stop strings end their request here."""
        pieces = []
        for output in self._engine.step():
            answer = open_answers.get(output.request_id)
            if answer is None:
                continue
            piece = answer.take(output)
            if answer.stopped and output.finish_reason is None:
                self._engine.abort(output.request_id, FinishReason.STOP)
            pieces.append(piece)
        if self._engine.broken:
            raise EngineError(self._engine.broken)
        return pieces


class _Answer:
    """One answer while it grows."""

    def __init__(
        self, request_id: str, num_prompt_tokens: int, detokenizer: IncrementalDetokenizer
    ) -> None:
        self.request_id = request_id
        self._num_prompt_tokens = num_prompt_tokens
        self._detokenizer = detokenizer
        self._pieces: list[RequestOutput] = []

    @property
    def stopped(self) -> bool:
        return self._detokenizer.stopped is not None

    def take(self, output: TokenOutput) -> RequestOutput:
        """The next piece."""
        token_ids, logprobs = output.token_ids, output.logprobs
        text = ""
        for count, token in enumerate(token_ids, 1):
            text += self._detokenizer.push([token])
            if self.stopped:  # what a step made beyond a stop string does not count
                token_ids = token_ids[:count]
                logprobs = logprobs and logprobs[:count]
                break
        reason, stop = output.finish_reason, self._detokenizer.stopped
        if stop is not None and reason is not FinishReason.ERROR:
            reason = FinishReason.STOP
        if reason is not None:
            text += self._detokenizer.finish()
        piece = RequestOutput(
            request_id=self.request_id,
            text=text,
            token_ids=token_ids,
            num_prompt_tokens=self._num_prompt_tokens,
            num_cached_tokens=output.num_cached_tokens,
            logprobs=logprobs,
            finish_reason=reason,
            stop_reason=stop,
            error=output.error,
        )
        self._pieces.append(piece)
        return piece

    def whole(self) -> RequestOutput:
        """All pieces as one."""
        last = self._pieces[-1]
        logprobs: list[TokenLogprobs] = [
            item for piece in self._pieces for item in piece.logprobs or ()
        ]
        return dataclasses.replace(
            last,
            text="".join(piece.text for piece in self._pieces),
            token_ids=[token for piece in self._pieces for token in piece.token_ids],
            logprobs=logprobs or None,
        )


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def _failed(job: Job[Any], error: RequestError) -> RequestOutput:
    return RequestOutput(
        request_id="",
        text="",
        token_ids=[],
        num_prompt_tokens=len(job.prompt_ids),
        finish_reason=FinishReason.ERROR,
        error=str(error),
    )
