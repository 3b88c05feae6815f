"""`jaxserve bench serve`: load on a running OpenAI-compatible server. A client only: no jax."""

from __future__ import annotations

import argparse
import asyncio
import math
import pathlib
import sys
import time
from typing import Any

from tqdm import tqdm

from jaxserve.bench.serving import arrivals, conversations, load, metrics, report
from jaxserve.bench.serving.answers import Record
from jaxserve.bench.serving.conversations import Conversation, Lengths, Style, Writer
from jaxserve.bench.serving.http_stream import Server
from jaxserve.cli.bench_output import write_json
from jaxserve.cli.parser import Parser, Subparsers, add_verb
from jaxserve.errors import EngineError, UsageError

NUM_PROMPTS = 64
WORKLOADS = ("random", "shared-prefix", "multi-turn", "jsonl")
ENDPOINTS = ("completions", "chat")


def add_parser(parts: Subparsers[Parser]) -> None:
    """Adds the part."""
    parser = add_verb(
        parts, "serve", run, "load on a running OpenAI-compatible server, any engine's"
    )
    add = parser.add_argument
    add("--base-url", metavar="URL", default="http://127.0.0.1:8000", help=_text("of the server"))
    add("--model", metavar="TEXT", help="the model to ask; if not given, the server's first one")
    add("--endpoint", choices=ENDPOINTS, default="completions", help=_text("what to call"))
    add("--api-key", metavar="TEXT", help="sent as a bearer token")
    _add_workload_flags(parser)
    _add_arrival_flags(parser)
    _add_output_flags(parser)


def _add_workload_flags(parser: Parser) -> None:
    add = parser.add_argument_group("what is asked").add_argument
    add("--workload", choices=WORKLOADS, default="random", help=_text("kind of requests"))
    add(
        "--num-prompts",
        type=int,
        metavar="N",
        help=f"requests, of multi-turn conversations; if not given, {NUM_PROMPTS}, of jsonl all",
    )
    add(
        "--input-len",
        type=int,
        metavar="N",
        default=512,
        help=_text(
            "tokens of a prompt, of shared-prefix after the prefix, of multi-turn in a turn"
        ),
    )
    add("--output-len", type=int, metavar="N", default=128, help=_text("tokens of an answer"))
    add(
        "--range-ratio",
        type=float,
        metavar="X",
        default=0.0,
        help=_text("both lengths vary evenly by this share up and down, 0 to 1"),
    )
    add(
        "--prefix-len",
        type=int,
        metavar="N",
        default=1024,
        help=_text("tokens of a prefix of shared-prefix"),
    )
    add(
        "--num-prefixes",
        type=int,
        metavar="N",
        default=1,
        help=_text("different prefixes of shared-prefix"),
    )
    add("--turns", type=int, metavar="N", default=4, help=_text("requests in a conversation"))
    add(
        "--file",
        type=pathlib.Path,
        metavar="FILE",
        help='of jsonl: lines like {"prompt": ...} or {"messages": [...]}, with "max_tokens" or not',
    )
    add(
        "--text-prompts",
        action="store_true",
        help="send completions words, about one token each, instead of token ids",
    )
    add(
        "--vocab-size",
        type=int,
        metavar="N",
        default=32000,
        help=_text("random token ids are below this"),
    )
    add(
        "--ignore-eos",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="answers of full length, for servers that know ignore_eos (default: on)",
    )
    add("--temperature", type=float, metavar="X", default=0.0, help=_text("of all requests"))
    add("--seed", type=int, metavar="N", default=0, help=_text("of prompts and arrivals"))


def _add_arrival_flags(parser: Parser) -> None:
    add = parser.add_argument_group("when it is asked").add_argument
    add(
        "--request-rate",
        type=float,
        metavar="X",
        default=math.inf,
        help="requests (multi-turn: conversations) per second; inf for all at once (default: inf)",
    )
    add(
        "--burstiness",
        type=float,
        metavar="X",
        default=1.0,
        help=_text("shape of the gamma distribution of gaps: 1 is Poisson, less is burstier"),
    )
    add(
        "--max-concurrency",
        type=int,
        metavar="N",
        help="requests (multi-turn: conversations) that are open at the same time; "
        "if not given, any number",
    )
    add(
        "--num-warmups",
        type=int,
        metavar="N",
        default=1,
        help=_text("requests that are sent before and not counted"),
    )
    add(
        "--timeout-seconds",
        type=float,
        metavar="X",
        default=600.0,
        help=_text("longest time for one answer"),
    )


def _add_output_flags(parser: Parser) -> None:
    add = parser.add_argument_group("what comes out").add_argument
    add(
        "--goodput",
        nargs="+",
        metavar="NAME:MS",
        default=[],
        help="objectives for each request, as in ttft:2000 itl:200 tpot:50 e2el:10000; "
        "itl bounds every gap",
    )
    add("--json", type=pathlib.Path, metavar="FILE", help="also write everything to this file")
    add(
        "--png",
        type=pathlib.Path,
        metavar="FILE",
        help="also draw the distributions (needs the extra `bench`)",
    )


def _text(text: str) -> str:
    return f"{text} (default: %(default)s)"


def run(options: argparse.Namespace) -> int:
    """Prints the table. 0 if at least one request succeeded, else 1."""
    _check(options)
    objectives = metrics.parse_objectives(options.goodput)
    if options.png is not None:
        from jaxserve.bench.serving import plot  # needs numpy, which the help must not wait for

        plot.check_can_plot()
    records, duration, model = asyncio.run(_measure(options))
    summary = metrics.summarise(records, duration, objectives)
    print("\n".join(report.to_text(summary, objectives)))
    write_json(options.json, _settings(options, model) | metrics.to_json(summary, records))
    if options.png is not None:
        title = f"{model}, {options.workload}: {summary.completed} of {len(records)} requests"
        plot.write_png(options.png, title, metrics.milliseconds(records), objectives)
    if not summary.completed:
        raise EngineError(f"all {summary.failed} requests failed")
    return 0


async def _measure(options: argparse.Namespace) -> tuple[list[Record], float, str]:
    """Records, seconds, and the model's name."""
    server = Server.parse(options.base_url, options.api_key)
    found = await load.find_model(server, options.model)
    asked = load.Load(
        server=server,
        model=found,
        chat=options.endpoint == "chat",
        fields={"temperature": options.temperature}
        | ({"ignore_eos": True} if options.ignore_eos else {}),
        timeout=options.timeout_seconds,
        max_concurrency=options.max_concurrency,
    )
    made = make_conversations(options)
    starts = arrivals.start_times(len(made), options.request_rate, options.burstiness, options.seed)
    if options.num_warmups:
        await load.warm_up(asked, make_warmups(options))
    count = sum(len(each.turns) for each in made)
    with tqdm(total=count, unit="request", disable=not sys.stderr.isatty(), leave=False) as bar:
        records, duration = await load.run(asked, made, starts, lambda _: bar.update())
    return records, duration, found


def make_conversations(options: argparse.Namespace) -> list[Conversation]:
    """What the options ask for. Raises UsageError."""
    if options.workload == "jsonl":
        if options.file is None:
            raise UsageError("--workload jsonl needs --file")
        style = Style.CHAT if options.endpoint == "chat" else Style.TEXT
        return conversations.read_file(options.file, options.num_prompts, options.output_len, style)
    writer = Writer(_style(options), options.vocab_size, f"{options.seed}")
    count = NUM_PROMPTS if options.num_prompts is None else options.num_prompts
    lengths = Lengths(
        input_tokens=options.input_len,
        output_tokens=options.output_len,
        range_ratio=options.range_ratio,
    )
    if options.workload == "multi-turn":
        return conversations.make_multi_turn(count, lengths, writer, turns=options.turns)
    if options.workload == "shared-prefix":
        return conversations.make_shared_prefix(
            count,
            lengths,
            writer,
            prefix_tokens=options.prefix_len,
            num_prefixes=options.num_prefixes,
        )
    return conversations.make_random(count, lengths, writer)


def make_warmups(options: argparse.Namespace) -> list[Conversation]:
    """Requests of the same length that share nothing with those that are measured."""
    writer = Writer(_style(options), options.vocab_size, f"warm-{options.seed}")
    lengths = Lengths(input_tokens=options.input_len, output_tokens=options.output_len)
    return conversations.make_random(options.num_warmups, lengths, writer)


def _style(options: argparse.Namespace) -> Style:
    """Of random contents. Conversations go on from answers, which are text."""
    if options.endpoint == "chat":
        return Style.CHAT
    as_text = options.text_prompts or options.workload == "multi-turn"
    return Style.TEXT if as_text else Style.IDS


def _settings(options: argparse.Namespace, model: str) -> dict[str, Any]:
    rate = options.request_rate
    return {
        "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "model_id": model,
        "base_url": options.base_url,
        "endpoint": options.endpoint,
        "workload": options.workload,
        "request_rate": "inf" if math.isinf(rate) else rate,
        "burstiness": options.burstiness,
        "max_concurrency": options.max_concurrency,
        "seed": options.seed,
    }


def _check(options: argparse.Namespace) -> None:
    """Raises UsageError naming the flag to change."""
    for name, low in (
        *((name, 1) for name in ("num_prompts", "input_len", "output_len", "prefix_len")),
        *((name, 1) for name in ("num_prefixes", "turns", "max_concurrency", "vocab_size")),
        ("num_warmups", 0),
        ("temperature", 0),
    ):
        value = getattr(options, name)
        if value is not None and not value >= low:
            flag = f"--{name.replace('_', '-')}"
            raise UsageError(f"{flag} is {value}; it must be at least {low}")
    for name in ("request_rate", "burstiness", "timeout_seconds"):
        value = getattr(options, name)
        if not value > 0:
            raise UsageError(f"--{name.replace('_', '-')} is {value}; it must be above 0")
    if not 0 <= options.range_ratio <= 1:
        raise UsageError(f"--range-ratio is {options.range_ratio}; it must be 0 to 1")
