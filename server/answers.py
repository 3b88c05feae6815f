"""Steps 8 and 9 between: the engine's outputs become pieces of text, one reader per answer.

`read_answers` is what streamed and whole answers share; it knows no format of OpenAI's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from jaxserve.client import Submission
from jaxserve.errors import EngineGoneError
from jaxserve.messages import Output
from jaxserve.request import FinishReason, GenerationRequest, RequestOutput, TokenLogprobs
from jaxserve.tokenizer.detokenizer import IncrementalDetokenizer
from jaxserve.tokenizer.protocol import Tokenizer


class AnswerReader:
    """Reads one answer: detokenises it, finds its stop string, counts its tokens.

    The result does not depend on how the engine's outputs were cut into messages: tokens that
    come after a stop string are neither shown nor counted.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        request: GenerationRequest,
        *,
        shown: frozenset[int] = frozenset(),
    ) -> None:
        """shown: special tokens that the text shows, for whoever reads it further."""
        sampling = request.sampling
        self.request = request
        self.num_tokens = 0
        self.num_cached_tokens = 0
        self.finished = False
        self._detokenizer = IncrementalDetokenizer(
            tokenizer,
            skip_special=sampling.skip_special_tokens,
            stop=sampling.stop,
            include_stop=sampling.include_stop_str_in_output,
            shown=shown,
            stop_after=sampling.min_tokens,
        )
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprobs] = []

    def read(self, output: Output) -> RequestOutput | None:
        """The next piece; None while there is nothing to show. A piece without text is the last."""
        text = ""
        finish: FinishReason | None = None
        stop_reason: str | int | None = None
        for position, token in enumerate(output.token_ids):
            last = position == len(output.token_ids) - 1
            ends = last and output.finish_reason == "stop" and self._is_end(token)
            self.num_tokens += 1
            self._token_ids.append(token)
            if output.logprobs is not None:
                self._logprobs.append(output.logprobs[position])
            if not ends or self.request.sampling.include_stop_str_in_output:
                text += self._detokenizer.push([token])
            if self._detokenizer.stopped is not None:
                break
            if ends and token in self.request.sampling.stop_token_ids:
                stop_reason = token
        if output.finish_reason is not None and self._detokenizer.stopped is None:
            finish = FinishReason(output.finish_reason)
            text += self._detokenizer.finish()
        if self._detokenizer.stopped is not None:
            finish, stop_reason = FinishReason.STOP, self._detokenizer.stopped
        if finish is FinishReason.ABORT:
            raise EngineGoneError("the engine is shutting down")
        self.num_cached_tokens = max(self.num_cached_tokens, output.num_cached_tokens)
        self.finished = finish is not None
        return self._piece(text, finish, stop_reason) if text or self.finished else None

    def _is_end(self, token: int) -> bool:
        """Whether the token that an answer stopped with is no part of its text.

        An answer of a given form also stops where nothing can follow.
        """
        request = self.request
        return (
            request.grammar is None
            or token in request.eos_ids
            or token in request.sampling.stop_token_ids
        )

    def _piece(
        self, text: str, finish: FinishReason | None, stop_reason: str | int | None
    ) -> RequestOutput:
        piece = RequestOutput(
            request_id=self.request.request_id,
            text=text,
            token_ids=self._token_ids,
            num_prompt_tokens=len(self.request.prompt_ids),
            num_cached_tokens=self.num_cached_tokens,
            logprobs=self._logprobs if self.request.sampling.logprobs is not None else None,
            finish_reason=finish,
            stop_reason=stop_reason,
        )
        self._token_ids, self._logprobs = [], []
        return piece


def read_answers(
    submission: Submission, readers: Sequence[AnswerReader]
) -> Iterator[tuple[int, RequestOutput]]:
    """Pieces of all answers with their numbers, as they come, until every answer has ended.

    What is already there when it is asked for comes as one piece, so that a client that reads
    slowly catches up. Raises EngineError, or HungUpError when the client left.
    """
    left = {index for index, reader in enumerate(readers) if not reader.finished}
    while left:
        pieces: dict[int, RequestOutput] = {}
        for index, output in submission.get():
            if index not in left:
                continue
            piece = readers[index].read(output)
            if piece is not None:
                pieces[index] = join(pieces[index], piece) if index in pieces else piece
            if readers[index].finished:
                left.discard(index)
                submission.stop(index)
        yield from pieces.items()


def join(first: RequestOutput, second: RequestOutput) -> RequestOutput:
    """Two pieces of one answer, one after the other, as one."""
    logprobs = None
    if first.logprobs is not None and second.logprobs is not None:
        logprobs = first.logprobs + second.logprobs
    return dataclasses.replace(
        second,
        text=first.text + second.text,
        token_ids=first.token_ids + second.token_ids,
        logprobs=logprobs,
    )
