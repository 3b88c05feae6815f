"""`jaxserve keys add|list|revoke`: the file of API keys that `jaxserve serve --api-keys` reads."""

from __future__ import annotations

import argparse
import datetime
import pathlib

from jaxserve.cli.parser import Parser, Subparsers, add_verb
from jaxserve.errors import UsageError

_LIMITS = {
    "requests_per_minute": (float, "requests that the tenant may send in a minute"),
    "tokens_per_minute": (float, "tokens, of prompts and answers together, in a minute"),
    "concurrent_requests": (int, "requests that may be at work at the same time"),
    "daily_tokens": (int, "tokens in a day, which begins at midnight UTC"),
    "daily_cost": (float, "cost in a day, by the prices of `jaxserve serve`"),
    "weight": (
        float,
        "share of the engine beside other tenants while there is a queue (1 at first)",
    ),
}


def add_parser(verbs: Subparsers[Parser]) -> None:
    """Adds the verb and its parts."""
    parser = add_verb(verbs, "keys", _run_nothing, "make, list and revoke API keys")
    parts = parser.add_subparsers(
        title="what to do", metavar="WHAT", required=True, help="see `jaxserve keys WHAT -h`"
    )
    add = add_verb(parts, "add", _add, "add a key, and set the limits of its tenant")
    add.add_argument("file", help="the key file; made if it is not there")
    add.add_argument("tenant", help="whose key it is; a tenant may have several")
    for name, (kind, text) in _LIMITS.items():
        flag = f"--{name.replace('_', '-')}"
        add.add_argument(
            flag, type=kind, metavar="N" if kind is int else "X", help=f"{text}; 0 for no limit"
        )
    add.add_argument(
        "--admin",
        action=argparse.BooleanOptionalAction,
        help="may see the usage and the traces of all tenants",
    )
    show = add_verb(parts, "list", _list, "list tenants, their limits and the names of their keys")
    show.add_argument("file", help="the key file")
    revoke = add_verb(parts, "revoke", _revoke, "revoke a key, or all keys of a tenant")
    revoke.add_argument("file", help="the key file")
    revoke.add_argument("name", help="a key's id, as `jaxserve keys list` shows it, or a tenant")
    for added in parts.choices.values():
        added.add_argument(
            "--debug", action="store_true", default=argparse.SUPPRESS, help="show tracebacks"
        )


def _run_nothing(options: argparse.Namespace) -> int:
    """argparse demands a part, which brings its own function."""
    raise AssertionError(options)


def _add(options: argparse.Namespace) -> int:
    """Prints the new key, which is written down nowhere else."""
    from server.access.keyfile import Tenant, changing, make_key

    secret, key = make_key(datetime.datetime.now(datetime.UTC).date().isoformat())
    given = {name: getattr(options, name) for name in (*_LIMITS, "admin")}
    changes = {name: value for name, value in given.items() if value is not None}
    for name in _LIMITS.keys() - {"weight"}:
        if changes.get(name) == 0:
            changes[name] = None
    with changing(pathlib.Path(options.file)) as edit:
        before = edit.file.tenants.get(options.tenant, Tenant())
        fields = {name: getattr(before, name) for name in Tenant.__struct_fields__}
        edit.put(options.tenant, Tenant(**{**fields, **changes, "keys": [*before.keys, key]}))
    print(secret)
    return 0


def _list(options: argparse.Namespace) -> int:
    from server.access.keyfile import LIMITS, read_key_file

    for name, tenant in read_key_file(pathlib.Path(options.file)).tenants.items():
        limits = [(limit, getattr(tenant, limit)) for limit in LIMITS]
        words = [f"{limit.replace('_', ' ')}: {value:g}" for limit, value in limits if value]
        words += [f"weight: {tenant.weight:g}"] if tenant.weight != 1 else []
        words += ["admin"] if tenant.admin else []
        print(f"{name} ({', '.join(words) or 'no limits'})")
        for key in tenant.keys:
            print(f"    {key.id}  {key.created}")
    return 0


def _revoke(options: argparse.Namespace) -> int:
    """A tenant stays, without its keys, so that its limits need not be given again."""
    import msgspec

    from server.access.keyfile import changing

    found = False
    with changing(pathlib.Path(options.file)) as edit:
        for name, tenant in edit.file.tenants.items():
            kept = [key for key in tenant.keys if options.name not in (key.id, name)]
            if len(kept) < len(tenant.keys):
                found = True
                edit.put(name, msgspec.structs.replace(tenant, keys=kept))
        if not found:
            raise UsageError(
                f"there is no key or tenant {options.name!r}; `jaxserve keys list {options.file}` "
                "shows what there is"
            )
    return 0
