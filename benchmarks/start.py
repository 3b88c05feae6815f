"""How long `jaxserve serve` takes to be ready, and the memory of its processes.

    python benchmarks/start.py [MODEL] [--rounds 3] [--cold-rounds 1] [-- FLAGS OF SERVE]

A cold start has an empty cache folder (kernels, programs and quantised weights are made), except
for models that were pulled; a warm one finds what the one before left. Memory is what Linux counts
once the server is ready, and again after 8 answers at once: PSS, in which a page that several
processes share counts once, and RSS. The bar: twice the weights, the pool, and 600 MB.
Prints every start and the medians.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import dataclasses
import http.client
import json
import os
import pathlib
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator

import psutil

from jaxserve.config import DEFAULT_MODEL, cache_folder

EXTRA_BYTES = 600_000_000
REQUESTS, ANSWER_TOKENS = 8, 64
PROMPT = "The history of the lighthouse begins with a fire on a hill. " * 40
READY = re.compile(r"^ready: http://(\S+?):(\d+)$")
WEIGHTS = re.compile(r"weights \(.*\) (\d+) MB")
POOL = re.compile(r"KV pool: .*? (\d+) MB")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """One start. Bytes by process; after: once it has answered."""

    kind: str
    seconds: float
    cpu_seconds: float
    weights: int
    pool: int
    ready: dict[str, tuple[int, int]]
    after: dict[str, tuple[int, int]]

    @property
    def bar(self) -> int:
        return 2 * self.weights + self.pool + EXTRA_BYTES


def measure(kind: str, cache: pathlib.Path, model: str, flags: list[str]) -> Start:
    """Starts the server, asks it something, ends it."""
    command = [sys.executable, "-m", "jaxserve.cli.main", "serve", model, "--port", "0", *flags]
    environment = {**os.environ, "JAXSERVE_CACHE": str(cache)}
    begin = time.monotonic()
    with _running(command, environment) as process:
        assert process.stdout is not None
        log: list[str] = []
        for line in process.stdout:
            log.append(line.rstrip())
            if found := READY.match(log[-1]):
                break
        else:
            raise SystemExit("\n".join(["the server did not start", *log]))
        seconds = time.monotonic() - begin
        processes = _family(process.pid)
        cpu_seconds = sum(sum(each.cpu_times()[:2]) for each in processes.values())
        ready = _memory(processes)
        _ask(found[1], int(found[2]))
        return Start(
            kind=kind,
            seconds=seconds,
            cpu_seconds=cpu_seconds,
            weights=_megabytes(WEIGHTS, log),
            pool=_megabytes(POOL, log),
            ready=ready,
            after=_memory(processes),
        )


@contextlib.contextmanager
def _running(command: list[str], environment: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        yield process
    finally:
        process.terminate()
        process.wait(60)


def _family(pid: int) -> dict[str, psutil.Process]:
    """The parent and its children by what they are."""
    parent = psutil.Process(pid)
    found = {"parent": parent}
    for child in parent.children(recursive=True):
        kind = "engine" if "jaxserve.engine.process" in child.cmdline() else "front end"
        found[kind if kind not in found else f"{kind} ({len(found)})"] = child
    return found


def _memory(processes: dict[str, psutil.Process]) -> dict[str, tuple[int, int]]:
    """(PSS, RSS) by process."""
    infos = {name: process.memory_full_info() for name, process in processes.items()}
    return {name: (info.pss, info.rss) for name, info in infos.items()}


def _ask(host: str, port: int) -> None:
    def one(number: int) -> None:
        connection = http.client.HTTPConnection(host, port, timeout=600)
        body = {"prompt": f"{number}. {PROMPT}", "max_tokens": ANSWER_TOKENS, "ignore_eos": True}
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": JSON})
        answer = connection.getresponse()
        if answer.status != 200:
            raise SystemExit(f"the server answered {answer.status}: {answer.read()!r}")
        answer.read()

    with concurrent.futures.ThreadPoolExecutor(REQUESTS) as executor:
        list(executor.map(one, range(REQUESTS)))


JSON = "application/json"


def _megabytes(pattern: re.Pattern[str], log: list[str]) -> int:
    return next(int(found[1]) * 1_000_000 for line in log if (found := pattern.search(line)))


def report(starts: list[Start]) -> str:
    """Every start, then medians by kind."""
    lines = [f"{platform.processor() or platform.machine()}, {os.cpu_count()} processors", ""]
    lines.append(
        f"{'start':8}{'seconds':>9}{'CPU s':>8}{'PSS ready':>12}{'PSS after':>12}{'bar':>8}  MB"
    )
    lines += [_line(each.kind, [each]) for each in starts]
    for kind in dict.fromkeys(each.kind for each in starts):
        same = [each for each in starts if each.kind == kind]
        lines.append(_line(f"{kind}*", same))
    lines += [
        "",
        "* medians",
        "",
        f"{'process':14}{'PSS ready':>12}{'after':>8}{'RSS ready':>12}{'after':>8}  MB",
    ]
    last = starts[-1]
    for name, (pss, rss) in last.ready.items():
        pss_after, rss_after = last.after[name]
        lines.append(
            f"{name:14}{pss / 1e6:12.0f}{pss_after / 1e6:8.0f}{rss / 1e6:12.0f}{rss_after / 1e6:8.0f}"
        )
    lines.append(f"weights {last.weights / 1e6:.0f} MB, pool {last.pool / 1e6:.0f} MB")
    return "\n".join(lines)


def _line(name: str, starts: list[Start]) -> str:
    median = statistics.median
    ready, after = (
        median(sum(pss for pss, _ in table.values()) for table in tables)
        for tables in ([each.ready for each in starts], [each.after for each in starts])
    )
    return (
        f"{name:8}{median(each.seconds for each in starts):9.1f}"
        f"{median(each.cpu_seconds for each in starts):8.1f}"
        f"{ready / 1e6:12.0f}{after / 1e6:12.0f}{starts[0].bar / 1e6:8.0f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("model", nargs="?", default=DEFAULT_MODEL)
    parser.add_argument("--rounds", type=int, default=3, help="warm starts (default: 3)")
    parser.add_argument("--cold-rounds", type=int, default=1, help="cold starts (default: 1)")
    given = sys.argv[1:]
    at = given.index("--") if "--" in given else len(given)
    options = parser.parse_args(given[:at])
    flags, starts = given[at + 1 :], []
    for number in range(max(1, options.cold_rounds)):
        with tempfile.TemporaryDirectory(prefix="jaxserve-start-") as folder:
            cache = pathlib.Path(folder)
            (cache / "models").symlink_to(cache_folder() / "models")
            starts.append(measure("cold", cache, options.model, flags))
            if number == max(1, options.cold_rounds) - 1:
                starts += [
                    measure("warm", cache, options.model, flags) for _ in range(options.rounds)
                ]
    print(report(starts))


if __name__ == "__main__":
    main()
