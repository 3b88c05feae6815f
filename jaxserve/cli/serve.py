"""`jaxserve serve`: the server with its engine and its workers. This process stays free of jax."""

from __future__ import annotations

import argparse

from jaxserve.cli.flags import (
    add_model_flags,
    add_server_flags,
    read_engine_config,
    read_server_config,
)
from jaxserve.cli.parser import Parser, Subparsers, add_verb


def add_parser(verbs: Subparsers[Parser]) -> None:
    """Adds the verb."""
    parser = add_verb(verbs, "serve", run, "answer requests over HTTP, as OpenAI's API does")
    add_model_flags(parser, positional=True)
    add_server_flags(parser)


def run(options: argparse.Namespace) -> int:
    """Serves until it is told to stop."""
    engine, server = read_engine_config(options), read_server_config(options)
    from server.launch import serve

    return serve(engine, server)
