"""`jaxserve chat`: a conversation in the terminal, or line by line through a pipe."""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
from collections.abc import Generator, Iterator
from types import FrameType
from typing import TYPE_CHECKING

from jaxserve.cli.flags import (
    add_model_flags,
    add_sampling_flags,
    read_engine_config,
    read_sampling,
)
from jaxserve.cli.generate import SERVER_ONLY
from jaxserve.cli.loading import load_llm
from jaxserve.cli.parser import Parser, Subparsers, add_verb
from jaxserve.errors import EngineError, RequestError
from jaxserve.request import SamplingParams

if TYPE_CHECKING:
    from jaxserve.llm import LLM

HELP = """\
/reset   forget the conversation
/quit    leave (so does the end of input, Ctrl-D)
/help    this text
Ctrl-C stops an answer that is being written; what there is of it stays in the conversation."""


def add_parser(verbs: Subparsers[Parser]) -> None:
    """Adds the verb."""
    parser = add_verb(verbs, "chat", run, "talk with a model; /help there says how")
    parser.add_argument("--system", metavar="TEXT", help="instructions before the conversation")
    add_sampling_flags(parser)
    add_model_flags(parser, without=SERVER_ONLY, positional=True)


def run(options: argparse.Namespace) -> int:
    """Talks until the input ends or /quit."""
    config, sampling = read_engine_config(options), read_sampling(options)
    llm = load_llm(config, debug=options.debug)
    conversation = Conversation(llm, sampling, options.system)
    conversation.check_template()
    if sys.stdin.isatty():
        print(f"{config.model}; /help says how to leave", file=sys.stderr)
    for line in read_lines():
        words = line.strip()
        if words == "/quit":
            break
        if words == "/reset":
            conversation.reset()
        elif words == "/help":
            print(HELP)
        elif words.startswith("/") and " " not in words:
            print(f"{words} is no command; /help lists them", file=sys.stderr)
        elif words:
            _answer(conversation, line)
    return 0


def read_lines() -> Iterator[str]:
    """What the user types, with line editing and history on a terminal, until the input ends."""
    prompt = ""
    if sys.stdin.isatty():
        with contextlib.suppress(ImportError):  # without it, input() still reads lines
            import readline  # noqa: F401
        prompt = "> "
    while True:
        try:
            yield input(prompt)
        except EOFError:
            if prompt:
                print()
            return
        except KeyboardInterrupt:
            if not prompt:
                raise
            print("\nto leave: /quit or Ctrl-D", file=sys.stderr)


class Conversation:
    """The messages so far, and the next answer."""

    def __init__(self, llm: LLM, sampling: SamplingParams, system: str | None) -> None:
        self._llm = llm
        self._sampling = sampling
        self._begin = [] if system is None else [{"role": "system", "content": system}]
        self.messages: list[dict[str, str]] = []
        self.reset()

    def reset(self) -> None:
        """Forgets all but the instructions."""
        self.messages = list(self._begin)

    def check_template(self) -> None:
        """Raises RequestError before anybody has typed anything, if the model cannot chat."""
        self._llm.chat_prompt([*self._begin, {"role": "user", "content": "?"}])

    def answer(self, text: str) -> Generator[str]:
        """Pieces of the answer to `text`. What was taken of them is remembered, unless it failed."""
        asked = {"role": "user", "content": text}
        pieces: list[str] = []
        try:
            for piece in self._llm.stream_chat([*self.messages, asked], self._sampling):
                if piece.error is not None:
                    pieces.clear()
                    raise EngineError(piece.error)
                pieces.append(piece.text)
                yield piece.text
        finally:
            if pieces:
                self.messages += [asked, {"role": "assistant", "content": "".join(pieces)}]


def _answer(conversation: Conversation, text: str) -> None:
    """Prints the answer as it comes. What is wrong with one question does not end the program."""
    with _interruptible() as interrupted, contextlib.closing(conversation.answer(text)) as pieces:
        try:
            for piece in pieces:
                print(piece, end="", flush=True)
                if interrupted:
                    print(" [stopped]", end="", file=sys.stderr)
                    break
            print(flush=True)
        except (RequestError, EngineError) as error:
            print(f"error: {error} (/reset begins anew)", file=sys.stderr)


@contextlib.contextmanager
def _interruptible() -> Iterator[list[int]]:
    """A list that Ctrl-C fills: the engine is never cut off in the middle of a step.

    A second Ctrl-C, before the first had its effect, raises KeyboardInterrupt.
    """
    signals: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        if signals:
            raise KeyboardInterrupt
        signals.append(number)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield signals
    finally:
        signal.signal(signal.SIGINT, before)
