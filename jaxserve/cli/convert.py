"""`jaxserve convert SRC DST`: any model that can be read becomes an Orbax checkpoint of ours."""

from __future__ import annotations

import argparse
import pathlib
import sys

from jaxserve.cli.parser import Parser, Subparsers, add_verb
from jaxserve.config import cache_folder


def add_parser(verbs: Subparsers[Parser]) -> None:
    """Adds the verb."""
    parser = add_verb(verbs, "convert", run, "write a model as an Orbax checkpoint, ready to serve")
    parser.add_argument("source", metavar="SRC", help="what --model takes: a name, folder or file")
    parser.add_argument("target", metavar="DST", type=pathlib.Path, help="a new or empty folder")
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="store floating-point tensors in this type; if not given, each in its own",
    )


def run(options: argparse.Namespace) -> int:
    """Prints where the checkpoint stands."""
    from checkpoints.convert import convert
    from checkpoints.open import open_checkpoint
    from checkpoints.resolve import resolve_model

    source = open_checkpoint(resolve_model(options.source, cache_folder()))
    convert(source, options.target, dtype=options.dtype, progress=True)
    print(f"{options.target} is ready: jaxserve serve {options.target}", file=sys.stderr)
    return 0
