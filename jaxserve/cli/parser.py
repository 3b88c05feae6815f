"""argparse with one-line errors, and a help that prints every default."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any, NoReturn

Subparsers = argparse._SubParsersAction
Run = Callable[[argparse.Namespace], int]


class Parser(argparse.ArgumentParser):
    """Flags are written out in full; an error is one line and exit code 2."""

    def __init__(self, **settings: Any) -> None:
        settings.setdefault("formatter_class", _HelpFormatter)
        super().__init__(allow_abbrev=False, **settings)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message}; see `{self.prog} --help`\n")


class _HelpFormatter(argparse.HelpFormatter):
    """Leaves room for long flags."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=32)


def add_verb(verbs: Subparsers[Parser], name: str, run: Run, text: str) -> Parser:
    """A verb's parser. text: one line for the list of verbs; the verb's own help begins with it."""
    parser = verbs.add_parser(name, help=text, description=text[:1].upper() + text[1:] + ".")
    parser.set_defaults(run=run)
    return parser
