"""jaxserve beside vLLM's CPU build and llama.cpp: same weights, prompts and greedy decoding.

    python benchmarks/peers.py --peers DIR [--workload single headline] [--rounds 3]

DIR holds `vllm` and `llamacpp` (virtual environments) and `models`; --drivers names the folder with
`bench_vllm.py` and `bench_llamacpp.py`, which print a JSON line per workload and seed, as
`jaxserve bench offline` does. Nothing is set up here. Engines run one after the other, each in a
process of its own, in an order that changes from round to round; a round runs every workload with
two seeds. Printed are medians over rounds and seeds, and ratios of output tokens per second: above 1
jaxserve is faster. jaxserve runs with its default settings, unless --jaxserve-flags changes them.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pathlib
import shlex
import statistics
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from side_by_side import ROOT, Peers, describe

WORKLOADS = ("single", "headline", "batch8", "batch64", "mixed32", "shared_prefix32")
OURS = "jaxserve"
VLLM = "vllm"
LLAMA_CPP = "llama.cpp"
SEEDS = "2"

Line = dict[str, Any]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """command: takes workloads as further arguments. together: all of them in one process."""

    name: str
    command: list[str]
    together: bool
    workload_flag: str | None = None

    def commands(self, workloads: Sequence[str]) -> list[list[str]]:
        """One command per process."""
        groups = [list(workloads)] if self.together else [[name] for name in workloads]
        flag = [] if self.workload_flag is None else [self.workload_flag]
        return [
            self.command + [part for name in group for part in (*flag, name)] for group in groups
        ]


def engines(options: argparse.Namespace) -> list[Engine]:
    """jaxserve and the peers that were asked for."""
    peers = Peers(folder=options.peers)
    command = [sys.executable, "-m", "jaxserve.cli.main", "bench", "offline"]
    command += ["--model", peers.gguf("q4_1"), "--rounds", SEEDS]
    command += shlex.split(options.jaxserve_flags)
    found = [Engine(name=OURS, command=command, together=True, workload_flag="--workload")]
    drivers = options.drivers.absolute()
    if VLLM in options.engine:
        driver = [peers.path("vllm", "bin", "python"), str(drivers / "bench_vllm.py")]
        found.append(Engine(name=VLLM, command=[*driver, peers.hugging_face], together=True))
    for kind in options.llamacpp if LLAMA_CPP in options.engine else ():
        driver = [peers.path("llamacpp", "bin", "python"), str(drivers / "bench_llamacpp.py")]
        name = f"{LLAMA_CPP} {kind}"
        found.append(Engine(name=name, command=[*driver, peers.gguf(kind)], together=False))
    return found


def run(engine: Engine, workloads: Sequence[str], timeout: float) -> tuple[list[Line], str]:
    """What an engine printed, and why it did not finish, if so."""
    lines: list[Line] = []
    trouble = ""
    for command in engine.commands(workloads):
        print(f"{engine.name}: {' '.join(command[-3:])}", file=sys.stderr, flush=True)
        try:
            done = subprocess.run(
                command,
                cwd=ROOT,
                env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
                capture_output=True,
                text=True,
                timeout=timeout,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            trouble = f"longer than {timeout:g} s"
            output = error.stdout or b""
            lines += _json_lines(output.decode() if isinstance(output, bytes) else output)
            continue
        lines += _json_lines(done.stdout)
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            trouble = f"exit code {done.returncode}: {last[:200]}"
    return lines, trouble


def _json_lines(text: str) -> list[Line]:
    """Measurements; lines that sum up others (`rounds`) are left out."""
    found = [json.loads(line) for line in text.splitlines() if line.startswith('{"engine"')]
    return [line for line in found if "rounds" not in line]


def median(lines: Sequence[Line], workload: str, field: str) -> float | None:
    """Over all rounds and seeds; None where there is nothing."""
    values = [line[field] for line in lines if line["workload"] == workload]
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def speed_table(found: dict[str, list[Line]], workloads: Sequence[str]) -> list[str]:
    """Output tokens per second, and how many times each peer's jaxserve's is."""
    peers = [name for name in found if name != OURS]
    head = ["workload", *found, *(f"of {name}" for name in peers), "of the best peer"]
    rows = [head, ["---"] * len(head)]
    for workload in workloads:
        speeds = {name: median(lines, workload, "output_tok_s") for name, lines in found.items()}
        ours = speeds[OURS]
        ratios = [_ratio(ours, speeds[name]) for name in peers]
        best = max((speed for name in peers if (speed := speeds[name]) is not None), default=None)
        cells = [_number(speed, ".1f") for speed in speeds.values()]
        rows.append([workload, *cells, *ratios, _ratio(ours, best)])
    return ["| " + " | ".join(row) + " |" for row in rows]


def first_token_table(found: dict[str, list[Line]], workloads: Sequence[str]) -> list[str]:
    """Seconds to the first token of the workloads with a lone request, and shares of each peer's."""
    peers = [name for name in found if name != OURS]
    head = ["workload", *found, *(f"of {name}" for name in peers)]
    rows = [head, ["---"] * len(head)]
    for workload in workloads:
        times = {name: median(lines, workload, "ttft_s") for name, lines in found.items()}
        if any(time is not None for time in times.values()):
            cells = [_number(time, ".3f") for time in times.values()]
            ratios = [_ratio(times[OURS], times[name]) for name in peers]
            rows.append([workload, *cells, *ratios])
    return ["| " + " | ".join(row) + " |" for row in rows] if len(rows) > 2 else []


def _number(value: float | None, form: str) -> str:
    return "did not run" if value is None else format(value, form)


def _ratio(ours: float | None, theirs: float | None) -> str:
    return "-" if ours is None or not theirs else f"{ours / theirs:.2f}"


def report(
    found: dict[str, list[Line]], troubles: dict[str, str], options: argparse.Namespace
) -> list[str]:
    """The whole text, in Markdown."""
    facts = describe()
    flags = options.jaxserve_flags or "default settings"
    lines = [
        f"{facts['date']}, {facts['machine']}, commit {facts['commit']}; jaxserve with {flags}; "
        f"medians of {options.rounds} alternating rounds of two seeds.",
        "",
        "Output tokens per second, prompts included in the time:",
        "",
        *speed_table(found, options.workload),
    ]
    first = first_token_table(found, options.workload)
    if first:
        lines += ["", "Seconds to the first token (less is better):", "", *first]
    if any(name.startswith(LLAMA_CPP) for name in found):
        lines += [
            "",
            "llama.cpp gets all prompts at the start, reads them 2,048 tokens at a time and decodes "
            "all live sequences in one batch; it has neither a queue nor shared prefixes here.",
        ]
    lines += [f"\n{name}: {text}" for name, text in troubles.items()]
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--peers", type=pathlib.Path, required=True, metavar="DIR")
    parser.add_argument(
        "--drivers", type=pathlib.Path, default=ROOT.parent / "shared" / "peers", metavar="DIR"
    )
    parser.add_argument("--workload", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--engine", nargs="*", choices=(VLLM, LLAMA_CPP), default=[VLLM, LLAMA_CPP])
    parser.add_argument("--llamacpp", nargs="+", choices=("q8_0", "q4_1", "bf16"), default=["q8_0"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--jaxserve-flags", default="", metavar="TEXT")
    parser.add_argument("--timeout", type=float, default=1800.0, metavar="SECONDS")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE")
    options = parser.parse_args()
    chosen = engines(options)
    found: dict[str, list[Line]] = {engine.name: [] for engine in chosen}
    troubles: dict[str, str] = {}
    for number in range(options.rounds):
        shift = number % len(chosen)
        for engine in chosen[shift:] + chosen[:shift]:
            lines, trouble = run(engine, options.workload, options.timeout)
            found[engine.name] += lines
            if trouble:
                troubles[engine.name] = trouble
                print(f"{engine.name}: {trouble}", file=sys.stderr, flush=True)
    print("\n".join(report(found, troubles, options)))
    if options.json is not None:
        everything = describe() | {"flags": options.jaxserve_flags, "lines": found}
        options.json.write_text(json.dumps(everything | {"troubles": troubles}, indent=1) + "\n")


if __name__ == "__main__":
    main()
