"""`jaxserve pull NAME`: a model of the table into the cache folder."""

from __future__ import annotations

import argparse
import sys

from jaxserve.cli.parser import Parser, Subparsers, add_verb
from jaxserve.config import cache_folder
from jaxserve.errors import UsageError


def add_parser(verbs: Subparsers[Parser]) -> None:
    """Adds the verb."""
    parser = add_verb(verbs, "pull", run, "fetch a model into the cache folder")
    parser.add_argument("name", metavar="NAME", nargs="?", help="a name of --list, or a hub id")
    parser.add_argument("--list", action="store_true", help="show the names that can be pulled")


def run(options: argparse.Namespace) -> int:
    """Prints the model's path, or the table."""
    if options.list:
        _print_table()
        return 0
    if options.name is None:
        raise UsageError("pull needs a NAME; `jaxserve pull --list` shows what there is")
    from checkpoints.resolve import resolve_model

    print(resolve_model(options.name, cache_folder(), progress=True))
    return 0


def _print_table() -> None:
    from checkpoints.model_table import pullable_models
    from checkpoints.pull import pulled_file

    cache = cache_folder()
    for name, model in pullable_models().items():
        here = "pulled" if pulled_file(name, cache) else "      "
        size = f"{model.download_bytes / 1e6:.0f} MB"
        print(f"{name:<24} {size:>7}  {here}  {model.license}, {model.terms}")
    print(f"cache folder: {cache}", file=sys.stderr)
