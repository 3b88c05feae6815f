"""`jaxserve usage`: what requests took and cost, from the ledger that the server keeps."""

from __future__ import annotations

import argparse
import csv
import pathlib
import sqlite3
import sys
from typing import Any

from jaxserve.cli.parser import Parser, Subparsers, add_verb
from jaxserve.config import state_folder
from jaxserve.errors import RequestError, ResourceError, UsageError


def add_parser(verbs: Subparsers[Parser]) -> None:
    """Adds the verb."""
    parser = add_verb(verbs, "usage", run, "show what requests took and cost")
    add = parser.add_argument
    add("--data-dir", metavar="TEXT", help="the server's; if not given, its default")
    add(
        "--by",
        metavar="TEXT",
        default="day,tenant,model",
        help="what to add up by: some of day, tenant, model (default: day,tenant,model)",
    )
    add("--tenant", metavar="TEXT", help="this tenant only")
    add("--since", metavar="DAY", help="from this day (UTC) on, as in 2026-12-31")
    add("--until", metavar="DAY", help="up to this day, which counts")
    add("--csv", action="store_true", help="comma-separated values with all columns")


def run(options: argparse.Namespace) -> int:
    """Prints one line per group."""
    from server.usage.summary import SUMS, Question, read_day, read_groups, summarise

    try:
        question = Question(
            groups=read_groups(options.by),
            tenant=options.tenant,
            since=read_day(options.since, "since"),
            until=read_day(options.until, "until"),
        )
    except RequestError as error:
        raise UsageError(str(error).replace("group_by", "--by")) from None
    folder = pathlib.Path(options.data_dir).expanduser() if options.data_dir else state_folder()
    rows = _read(folder, lambda db: summarise(db, question))
    columns = [*question.groups, *SUMS]
    if options.csv:
        writer = csv.DictWriter(sys.stdout, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    else:
        _print_table(columns, rows)
    return 0


def _read(folder: pathlib.Path, work: Any) -> list[dict[str, Any]]:
    from server.usage.ledger_file import FILE

    path = folder / FILE
    if not path.exists():
        raise ResourceError(
            f"there is no ledger in {str(folder)!r}; --data-dir says where the server keeps it"
        )
    try:
        db = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=10)
        try:
            found: list[dict[str, Any]] = work(db)
            return found
        finally:
            db.close()
    except sqlite3.Error as error:
        raise ResourceError(f"the ledger {str(path)!r} cannot be read: {error}") from None


def _print_table(columns: list[str], rows: list[dict[str, Any]]) -> None:
    table = [columns] + [[_show(row[column]) for column in columns] for row in rows]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for line in table:
        cells = [
            cell.ljust(width) if column in ("day", "tenant", "model") else cell.rjust(width)
            for column, cell, width in zip(columns, line, widths, strict=True)
        ]
        print("  ".join(cells).rstrip())


def _show(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6f}".rstrip("0").rstrip(".") or "0"
    return str(value) or "-"
