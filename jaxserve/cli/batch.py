"""`jaxserve batch IN OUT`: a file of requests in OpenAI's batch format, answered line by line.

May be killed at any time: the same command goes on where it was.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import pathlib
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from jaxserve.cli.flags import (
    add_hosts_flags,
    add_model_flags,
    read_engine_config,
    read_hosts_config,
)
from jaxserve.cli.following import follow_leader
from jaxserve.cli.loading import announce_loading
from jaxserve.cli.parser import Parser, Subparsers, add_verb
from jaxserve.config import EngineConfig, ServerConfig, cache_folder
from jaxserve.engine.hosts.detect import find_hosts
from jaxserve.engine.hosts.lead import Hosts, lead
from jaxserve.errors import UsageError

if TYPE_CHECKING:
    from jaxserve.offline.batch_run import Api, BatchEngine

#: The run itself decides how much waits; the engine need not refuse anything.
NO_LIMIT = 2**62
#: Bytes of a line around its body.
ENVELOPE_BYTES = 65536


def add_parser(verbs: Subparsers[Parser]) -> None:
    """Adds the verb."""
    parser = add_verb(verbs, "batch", run, "answer a file of requests in OpenAI's batch format")
    parser.add_argument("input", metavar="IN.jsonl", type=pathlib.Path, help="requests, one a line")
    parser.add_argument(
        "output",
        metavar="OUT.jsonl",
        type=pathlib.Path,
        help="answers, one a line, in the order in which they finish; a run that was stopped goes "
        "on if OUT.jsonl is there",
    )
    add_model_flags(parser, without=("max_queue_len", "max_queued_tokens"))
    add_hosts_flags(parser)


def run(options: argparse.Namespace) -> int:
    """Answers what is not answered yet. Bad lines are no failure of the run.

    Over several hosts only the first reads and writes the files; the others follow it.
    """
    from jaxserve.offline.batch_input import open_input, read_lines
    from jaxserve.offline.batch_output import BatchOutput
    from jaxserve.offline.batch_run import BatchRun

    config = read_engine_config(options)
    limits = ServerConfig()
    hosts = find_hosts(read_hosts_config(options))
    if not hosts.leads:
        return follow_leader(hosts, config, "info" if options.debug else "warning")
    with contextlib.ExitStack() as stack:
        others = stack.enter_context(lead(hosts, config))
        file = stack.enter_context(open_input(options.input))
        if options.output.exists() and options.output.samefile(options.input):
            raise UsageError(f"{options.output} is the input, too; give the answers another file")
        size = options.input.stat().st_size
        output = stack.enter_context(BatchOutput(options.output, max_number=size + 1))
        max_bytes = limits.max_body_bytes + ENVELOPE_BYTES
        total = output.check_input(read_lines(file, max_bytes))
        if output.done.count == total:
            print(f"{options.output} has all {total} answers already", file=sys.stderr)
            return 0
        engine, api = _load(config, limits, others, debug=options.debug)
        with _Bar.show(total, output.done.count) as bar:
            batch = BatchRun(engine, api, output, bar, max_open=2 * config.max_num_seqs)
            batch.run(read_lines(file, max_bytes))
        print(f"{options.output}: {bar.summary()}", file=sys.stderr)
    return 0


def _load(
    config: EngineConfig, limits: ServerConfig, others: Hosts, *, debug: bool
) -> tuple[BatchEngine, Api]:
    with announce_loading(config, debug=debug):
        from checkpoints.assets import read_tokenizer_files
        from checkpoints.resolve import resolve_model
        from jaxserve.cli.batch_api import OpenAIApi
        from jaxserve.context.chat_template import load_chat_template
        from jaxserve.engine.build import make_engine
        from jaxserve.engine.process import engine_info
        from jaxserve.tokenizer.load import load_tokenizer

        path = resolve_model(config.model, cache_folder())
        files = read_tokenizer_files(path)
        tokenizer, template = load_tokenizer(files), load_chat_template(files)
        config = dataclasses.replace(config, max_queue_len=NO_LIMIT, max_queued_tokens=NO_LIMIT)
        engine, report = make_engine(config, path, others)
        return engine, OpenAIApi(tokenizer, template, engine_info(report, config), limits)


class _Bar:
    """Finished lines of all, and tokens per second, on standard error."""

    def __init__(self, total: int, done: int) -> None:
        from tqdm import tqdm

        seconds = 0.2 if sys.stderr.isatty() else 10.0  # few lines in a log file
        self._bar = tqdm(total=total, initial=done, unit="line", mininterval=seconds, miniters=0)
        self._start = time.monotonic()
        self._tokens = 0
        self._finished = 0
        self._failed = 0

    @classmethod
    @contextlib.contextmanager
    def show(cls, total: int, done: int) -> Iterator[_Bar]:
        """The bar while a block runs."""
        bar = cls(total, done)
        try:
            yield bar
        finally:
            bar._bar.close()

    def made(self, tokens: int) -> None:
        """So many more tokens."""
        self._tokens += tokens
        self._bar.set_postfix_str(f"{self._rate():.0f} tok/s", refresh=False)
        self._bar.update(0)

    def finished(self, *, failed: bool) -> None:
        """One more line."""
        self._finished += 1
        self._failed += failed
        self._bar.update(1)

    def summary(self) -> str:
        """What this run did."""
        seconds = time.monotonic() - self._start
        errors = f", {self._failed} of them errors" if self._failed else ""
        return (
            f"{self._finished} lines{errors}; {self._tokens} tokens in {seconds:.1f} s "
            f"({self._rate():.0f} tok/s)"
        )

    def _rate(self) -> float:
        return self._tokens / max(time.monotonic() - self._start, 1e-9)
