"""`jaxserve doctor`: what this machine, this installation and these settings come to, in words."""

from __future__ import annotations

import argparse
import logging
import warnings

from jaxserve.cli.doctor_report import Section
from jaxserve.cli.flags import (
    add_model_flags,
    add_server_flags,
    read_engine_config,
    read_server_config,
)
from jaxserve.cli.parser import Parser, Subparsers, add_verb


def add_parser(verbs: Subparsers[Parser]) -> None:
    """Adds the verb."""
    parser = add_verb(verbs, "doctor", run, "show what would be used, and say what is wrong")
    add_model_flags(parser, positional=True)
    add_server_flags(parser, only=("host", "port"))


def run(options: argparse.Namespace) -> int:
    """Prints the sections as they are found out. 0 if all is right, 1 otherwise."""
    engine, server = read_engine_config(options), read_server_config(options)
    logging.getLogger("jax").setLevel(logging.CRITICAL)
    warnings.simplefilter("ignore")
    from jaxserve.cli import doctor_machine as machine

    sections = [
        machine.look_at_installation(),
        machine.look_at_processor(),
        machine.look_at_cache(),
        machine.look_at_port(server),
    ]
    for section in sections:
        _print(section)
    from jaxserve.cli import doctor_engine as resolved

    for look in (resolved.look_at_devices, resolved.look_at_model):
        sections.append(look(engine))
        _print(sections[-1])
    troubles = [trouble for section in sections for trouble in section.troubles]
    print("\nall right" if not troubles else f"\n{len(troubles)} wrong:")
    for trouble in troubles:
        print(f"  - {trouble}")
    return 1 if troubles else 0


def _print(section: Section) -> None:
    print(section.title)
    for name, value in section.lines:
        print(f"  {name:<18} {value}")
    for trouble in section.troubles:
        print(f"  WRONG: {trouble}")
