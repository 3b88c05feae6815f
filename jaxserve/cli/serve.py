"""`jaxserve serve`: the server with its engine and its workers. This process stays free of jax."""

from __future__ import annotations

import argparse

from jaxserve.cli.flags import (
    add_hosts_flags,
    add_model_flags,
    add_server_flags,
    read_engine_config,
    read_hosts_config,
    read_server_config,
)
from jaxserve.cli.following import follow_leader
from jaxserve.cli.parser import Parser, Subparsers, add_verb
from jaxserve.engine.hosts.detect import find_hosts


def add_parser(verbs: Subparsers[Parser]) -> None:
    """Adds the verb."""
    parser = add_verb(verbs, "serve", run, "answer requests over HTTP, as OpenAI's API does")
    add_model_flags(parser, positional=True)
    add_server_flags(parser)
    add_hosts_flags(parser)


def run(options: argparse.Namespace) -> int:
    """Serves until it is told to stop; on another host than the first, follows that one."""
    engine, server = read_engine_config(options), read_server_config(options)
    hosts = find_hosts(read_hosts_config(options))
    if not hosts.leads:
        return follow_leader(hosts, engine, server.log_level)
    from server.launch import serve

    return serve(engine, server, hosts=hosts)
