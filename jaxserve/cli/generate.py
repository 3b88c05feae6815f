"""`jaxserve generate "prompt"`: one answer, streamed to standard output."""

from __future__ import annotations

import argparse
import sys

from jaxserve.cli.flags import (
    add_model_flags,
    add_sampling_flags,
    read_engine_config,
    read_sampling,
)
from jaxserve.cli.loading import load_llm
from jaxserve.cli.parser import Parser, Subparsers, add_verb
from jaxserve.errors import EngineError, UsageError

#: Settings that matter only where many requests come from outside.
SERVER_ONLY = ("served_name", "max_queue_len", "max_queued_tokens")


def add_parser(verbs: Subparsers[Parser]) -> None:
    """Adds the verb."""
    parser = add_verb(verbs, "generate", run, "continue a text")
    parser.add_argument("prompt", metavar="PROMPT", help="the text; - reads it from standard input")
    parser.add_argument(
        "--chat",
        action="store_true",
        help="ask the text as a question, through the model's chat template",
    )
    add_sampling_flags(parser)
    add_model_flags(parser, without=SERVER_ONLY)


def run(options: argparse.Namespace) -> int:
    """Streams the answer; its last line always ends."""
    config, sampling = read_engine_config(options), read_sampling(options)
    prompt = _read_standard_input() if options.prompt == "-" else options.prompt
    llm = load_llm(config, debug=options.debug)
    if options.chat:
        pieces = llm.stream_chat([{"role": "user", "content": prompt}], sampling)
    else:
        pieces = llm.stream(prompt, sampling)
    last = ""
    for piece in pieces:
        print(piece.text, end="", flush=True)
        last = piece.text[-1:] or last
        if piece.error is not None:
            raise EngineError(piece.error)
    if last != "\n":
        print()
    return 0


def _read_standard_input() -> str:
    data = sys.stdin.buffer.read()
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise UsageError(f"standard input is not UTF-8 text: {error}") from None
