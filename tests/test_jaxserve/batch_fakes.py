"""A fake engine with arithmetic done by hand, and a batch run around it that can be killed.

    python tests/test_jaxserve/batch_fakes.py IN OUT STEP_SECONDS

Its answer to any prompt is the alphabet from the prompt's length on, for max_tokens letters; so
lines finish out of order when their max_tokens differ. A prompt that holds "@fail@" fails.
"""

from __future__ import annotations

import pathlib
import sys
import time

from byte_tokenizer import ByteTokenizer

from jaxserve.cli.batch_api import OpenAIApi
from jaxserve.config import ServerConfig
from jaxserve.context.chat_template import ChatTemplate
from jaxserve.errors import RefusedError
from jaxserve.messages import EngineInfo
from jaxserve.offline.batch_input import open_input, read_lines
from jaxserve.offline.batch_output import BatchOutput
from jaxserve.offline.batch_run import BatchRun
from jaxserve.request import FinishReason, GenerationRequest, TokenOutput

TEMPLATE = "{% for m in messages %}<turn>{{ m.role }}:{{ m.content }}<end>{% endfor %}<turn>"
MAX_LINE = 4096
LIMITS = ServerConfig()


class AlphabetEngine:
    """Follows `jaxserve.offline.batch_run.BatchEngine`."""

    def __init__(self, pause: float = 0.0, refuse_after: int | None = None) -> None:
        self.broken: str | None = None
        self.break_at_step: int | None = None
        self.most_open = 0
        self.aborted: list[str] = []
        self._pause = pause
        self._refuse_after = refuse_after
        self._steps = 0
        self._open: dict[str, tuple[GenerationRequest, int]] = {}

    @property
    def num_open(self) -> int:
        return len(self._open)

    def add(self, request: GenerationRequest) -> None:
        if self._refuse_after is not None and len(self._open) >= self._refuse_after:
            raise RefusedError("too many", reason="queue_full")
        assert request.request_id not in self._open
        self._open[request.request_id] = (request, 0)
        self.most_open = max(self.most_open, len(self._open))

    def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> None:
        if self._open.pop(request_id, None):
            self.aborted.append(request_id)

    def step(self) -> list[TokenOutput]:
        time.sleep(self._pause)
        self._steps += 1
        if self._steps == self.break_at_step:
            self.broken = "three steps in a row failed"
        return [self._next(request_id) for request_id in list(self._open)]

    def _next(self, request_id: str) -> TokenOutput:
        request, made = self._open[request_id]
        if b"@fail@" in bytes(token for token in request.prompt_ids if token < 256):
            del self._open[request_id]
            return TokenOutput(
                request_id=request_id,
                token_ids=[],
                finish_reason=FinishReason.ERROR,
                error="told to fail",
            )
        token = 97 + (len(request.prompt_ids) + made) % 26
        self._open[request_id] = (request, made + 1)
        finish = None
        if made + 1 == request.sampling.max_tokens:
            finish = FinishReason.LENGTH
            del self._open[request_id]
        return TokenOutput(request_id=request_id, token_ids=[token], finish_reason=finish)


class Count:
    """Follows `jaxserve.offline.batch_run.Progress`."""

    def __init__(self) -> None:
        self.tokens = self.lines = self.failed = 0

    def made(self, tokens: int) -> None:
        self.tokens += tokens

    def finished(self, *, failed: bool) -> None:
        self.lines += 1
        self.failed += failed


def byte_api() -> OpenAIApi:
    """The server's parsing and writing for a model of bytes, 64 tokens long, called `bytes`."""
    info = EngineInfo(
        model_name="bytes",
        vocab_size=260,
        max_model_len=64,
        max_logprobs=20,
        page_size=16,
        num_pages=100,
    )
    return OpenAIApi(ByteTokenizer(), ChatTemplate(TEMPLATE, special={}), info, LIMITS)


def run_file(
    source: pathlib.Path, target: pathlib.Path, engine: AlphabetEngine, *, max_open: int = 8
) -> Count:
    """What `jaxserve batch` does, around a fake engine."""
    count = Count()
    with (
        open_input(source) as file,
        BatchOutput(target, max_number=source.stat().st_size + 1) as output,
    ):
        output.check_input(read_lines(file, MAX_LINE))
        BatchRun(engine, byte_api(), output, count, max_open=max_open).run(
            read_lines(file, MAX_LINE)
        )
    return count


if __name__ == "__main__":
    run_file(
        pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]), AlphabetEngine(float(sys.argv[3]))
    )
