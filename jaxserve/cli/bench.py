"""`jaxserve bench serve|offline|latency`: how fast a server, or the engine in this process, is."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import pathlib
from typing import Any

from jaxserve.bench.workloads import NAMED, make_named, make_random
from jaxserve.cli import bench_serve
from jaxserve.cli.bench_output import write_json
from jaxserve.cli.flags import add_model_flags, read_engine_config
from jaxserve.cli.generate import SERVER_ONLY
from jaxserve.cli.loading import load_llm
from jaxserve.cli.parser import Parser, Subparsers, add_verb
from jaxserve.errors import UsageError

RANDOM = "random"
DEFAULT_WORKLOADS = ("single", "headline")


def add_parser(verbs: Subparsers[Parser]) -> None:
    """Adds the verb and its parts."""
    parser = add_verb(verbs, "bench", run_nothing, "measure speed")
    parts = parser.add_subparsers(
        title="what to measure", metavar="WHAT", required=True, help="see `jaxserve bench WHAT -h`"
    )
    bench_serve.add_parser(parts)
    _add_offline(parts)
    _add_latency(parts)
    for added in parts.choices.values():
        added.add_argument(
            "--debug",
            action="store_true",
            default=argparse.SUPPRESS,
            help="show tracebacks and the engine's log",
        )


def run_nothing(options: argparse.Namespace) -> int:
    """argparse demands a part, which brings its own function."""
    raise AssertionError(options)


def _add_offline(parts: Subparsers[Parser]) -> None:
    parser = add_verb(
        parts,
        "offline",
        run_offline,
        "throughput of workloads, without a server, by default settings",
    )
    add = parser.add_argument
    add(
        "--workload",
        action="append",
        choices=(*NAMED, RANDOM),
        help="what to run; may be given several times "
        f"(default: {' and '.join(DEFAULT_WORKLOADS)})",
    )
    add("--rounds", type=int, metavar="N", default=3, help="times to run each (default: 3)")
    add("--num-prompts", type=int, metavar="N", default=8, help="of random (default: 8)")
    _add_lengths(parser, "of random")
    add(
        "--profile-steps",
        action="store_true",
        help="print where the time of a step goes, by bucket",
    )
    _add_json(parser)
    add_model_flags(parser, without=SERVER_ONLY)


def _add_latency(parts: Subparsers[Parser]) -> None:
    parser = add_verb(parts, "latency", run_latency, "latency of one request at a time")
    _add_lengths(parser, "of the request")
    parser.add_argument(
        "--repeats", type=int, metavar="N", default=10, help="how many requests (default: 10)"
    )
    _add_json(parser)
    add_model_flags(parser, without=SERVER_ONLY)


def _add_lengths(parser: Parser, what: str) -> None:
    for name in ("input", "output"):
        parser.add_argument(
            f"--{name}-len",
            type=int,
            metavar="N",
            default=128,
            help=f"{name} tokens {what} (default: 128)",
        )


def _add_json(parser: Parser) -> None:
    parser.add_argument(
        "--json", type=pathlib.Path, metavar="FILE", help="also write everything to this file"
    )


def run_offline(options: argparse.Namespace) -> int:
    """A JSON line per round, one with the medians per workload, and the profile as a table."""
    from jaxserve.bench import offline, step_table

    _check_counts(options, "rounds", "num_prompts", "input_len", "output_len")
    config = read_engine_config(options)
    llm = load_llm(config, debug=options.debug)
    vocab_size = llm.report.model.vocab_size
    offline.warm_up(llm, vocab_size)
    profile = llm.profile_steps() if options.profile_steps else None
    rounds: list[dict[str, object]] = []
    medians: list[dict[str, object]] = []
    for name in options.workload or DEFAULT_WORKLOADS:
        make = functools.partial(make_named, name, vocab_size=vocab_size)
        if name == RANDOM:
            make = functools.partial(
                make_random,
                options.num_prompts,
                options.input_len,
                options.output_len,
                vocab_size=vocab_size,
            )
        found = []
        for each in offline.measure(llm, name, make, options.rounds):
            found.append(each)
            _print_line(dataclasses.asdict(each))
        rounds += map(dataclasses.asdict, found)
        medians.append(offline.medians(found))
        _print_line(medians[-1])
    everything: dict[str, Any] = {"weights": llm.report.weights, "medians": medians}
    everything["rounds"] = rounds
    if profile is not None:
        times = step_table.bucket_times(profile.steps())
        print("\n".join(step_table.to_text(times)))
        everything["step_profile"] = step_table.to_json(times)
    write_json(options.json, everything)
    return 0


def run_latency(options: argparse.Namespace) -> int:
    """A table in milliseconds."""
    from jaxserve.bench import latency, offline
    from jaxserve.bench.spread import spread_table

    _check_counts(options, "repeats", "input_len", "output_len")
    llm = load_llm(read_engine_config(options), debug=options.debug)
    vocab_size = llm.report.model.vocab_size
    offline.warm_up(llm, vocab_size)
    found = latency.measure(
        llm,
        input_tokens=options.input_len,
        output_tokens=options.output_len,
        repeats=options.repeats,
        vocab_size=vocab_size,
    )
    titles = {"ttft": "TTFT (ms)", "tpot": "TPOT (ms)", "itl": "ITL (ms)", "e2el": "E2EL (ms)"}
    print("\n".join(spread_table({title: getattr(found, n) for n, title in titles.items()})))
    write_json(options.json, dataclasses.asdict(found))
    return 0


def _check_counts(options: argparse.Namespace, *names: str) -> None:
    for name in names:
        value = getattr(options, name)
        if value < 1:
            raise UsageError(f"--{name.replace('_', '-')} is {value}; it must be at least 1")


def _print_line(values: dict[str, object]) -> None:
    print(json.dumps(values), flush=True)
