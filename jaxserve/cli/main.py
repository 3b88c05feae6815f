"""`jaxserve VERB ...`: finds the verb, runs it, and turns errors into one line and an exit code.

Exit codes: 0 all right, 1 what a user can cause, 2 wrong usage, 130 Ctrl-C, 141 broken pipe.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

import jaxserve
from jaxserve.cli.parser import Parser
from jaxserve.errors import USER_ERRORS

#: Modules of this package, each of which adds its verb.
VERBS = (
    "serve",
    "generate",
    "chat",
    "batch",
    "pull",
    "convert",
    "plan",
    "bench",
    "quality",
    "doctor",
    "keys",
    "usage",
)
INTERRUPTED = 130
BROKEN_PIPE = 141


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command. Returns its exit code; argparse raises SystemExit for usage and --help."""
    arguments = sys.argv[1:] if arguments is None else arguments
    first = arguments[:1]  # where that is the verb, other verbs' modules would only cost time
    parser = make_parser(first if set(first) & set(VERBS) else VERBS)
    options = parser.parse_args(arguments)
    if options.run is None:
        parser.print_help(sys.stderr)
        return 2
    _quieten_libraries()
    try:
        code: int = options.run(options)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # The reader left; what Python still holds back must not fail again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except Exception as error:
        if options.debug:
            raise
        print(f"error: {_one_line(error)}", file=sys.stderr)
        return getattr(error, "exit_code", 1)


def make_parser(names: Sequence[str] = VERBS) -> Parser:
    """The command line with the verbs of these names; every verb's module adds its own part."""
    parser = Parser(prog="jaxserve", description="A JAX inference runtime, from prompt to token.")
    parser.add_argument("--version", action="version", version=f"jaxserve {jaxserve.__version__}")
    parser.add_argument("--debug", action="store_true", help="show tracebacks and the engine's log")
    parser.set_defaults(run=None)
    verbs = parser.add_subparsers(title="verbs", metavar="VERB")
    for name in names:
        importlib.import_module(f"jaxserve.cli.{name}").add_parser(verbs)
    for added in verbs.choices.values():
        added.add_argument(
            "--debug",
            action="store_true",
            default=argparse.SUPPRESS,  # or it would undo a --debug before the verb
            help="show tracebacks and the engine's log",
        )
    return parser


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    if isinstance(error, USER_ERRORS):
        return text
    return f"{type(error).__name__}: {text[:300]}; run it again with --debug for the traceback"


def _quieten_libraries() -> None:
    """XLA's C++ log (missing accelerators, slow compilations) is not for users; errors are raised."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")


if __name__ == "__main__":
    sys.exit(main())
