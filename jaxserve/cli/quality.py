"""`jaxserve quality MODEL`: how far ways of storing weights move a model's answers from float32."""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import pathlib
import sys

from jaxserve.cli.flags import add_model_flags, read_engine_config
from jaxserve.cli.loading import load_llm
from jaxserve.cli.parser import Parser, Subparsers, add_verb
from jaxserve.config import EngineConfig, cache_folder
from jaxserve.errors import UsageError

#: Settings that this verb sets itself, or that matter only in a server.
NOT_HERE = (
    "quantization",
    "served_name",
    "max_queue_len",
    "max_queued_tokens",
    "random_weights",
    "prefix_caching",
)


def add_parser(verbs: Subparsers[Parser]) -> None:
    """Adds the verb."""
    parser = add_verb(
        verbs, "quality", run, "compare quantised weights with float32: log-probabilities, answers"
    )
    parser.add_argument(
        "--quantization",
        metavar="SCHEME",
        nargs="+",
        action="extend",
        help="what to compare: none, auto or names of schemes, one or several; "
        f"none is what --dtype says (default: {EngineConfig().quantization})",
    )
    parser.add_argument(
        "--golden",
        type=pathlib.Path,
        metavar="PATH",
        help="a JSON file with another implementation's values, or a folder of such files; if not "
        "given, the model is run in float32 first",
    )
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    add_model_flags(parser, without=NOT_HERE, positional=True)


def run(options: argparse.Namespace) -> int:
    """Prints the comparison; 0 whatever it says."""
    schemes = options.quantization or [EngineConfig().quantization]
    options.quantization = None
    config = read_engine_config(options)
    if len(set(schemes)) < len(schemes):
        raise UsageError(f"--quantization names a scheme twice: {' '.join(schemes)}")
    from checkpoints.resolve import resolve_model
    from jaxserve.quality.measure import measure
    from jaxserve.quality.reference import make_reference, read_reference
    from jaxserve.quality.report import to_json, to_text

    if options.golden is not None:
        path = resolve_model(config.model, cache_folder())
        reference = read_reference(options.golden, path)
    else:
        _say(f"{config.model} in float32")
        plain = dataclasses.replace(
            config, quantization="none", dtype="float32", kv_cache_dtype="auto"
        )
        reference = make_reference(load_llm(plain, debug=options.debug))
    found = []
    for scheme in schemes:
        gc.collect()  # the model before
        _say(f"{config.model}, --quantization {scheme}")
        llm = load_llm(dataclasses.replace(config, quantization=scheme), debug=options.debug)
        found.append(measure(llm, reference, scheme, _show))
        del llm
    if options.json:
        print(json.dumps(to_json(config.model, reference, found), indent=2))
    else:
        print(to_text(config.model, reference, found))
    return 0


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _show(done: int, of: int) -> None:
    """On a terminal, one line that grows."""
    if sys.stderr.isatty():
        end = "\n" if done == of else "\r"
        print(f"{done} of {of} requests", end=end, file=sys.stderr, flush=True)
