"""Every op and named case on this machine, beside the definition, XLA's best, and the ceilings.

    python benchmarks/kernels.py [--op paged_attention] [--filter smollm2] [--rounds 7]
        [--page-size 16] [--page-dtype float32] [--schemes int8_group32_a8,int4_group32]
        [--large] [--json FILE]

The same command on CPU, GPU and TPU: the implementation is what `dispatch` chooses there. Each
round runs everything of a case once, in turn, after measuring the ceilings, so that what else the
machine does hits all alike; the table shows medians over rounds, of times and of ratios.
"of reading" is the time of reading the call's bytes once at the bandwidth measured in that round,
as a share of the call's time; "of arithmetic" likewise for its operations at the rate of a large
matmul of the same dtype. For `sample` the XLA column is the matmul that makes the logits.
"""

from __future__ import annotations

import argparse
import datetime
import json
import pathlib
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator

import jax
from ceilings import make_multiplier, make_reader, seconds
from kernel_entries import OURS, REFERENCE, Entry, Maker, attention, grouped, quantized, sample
from tqdm import tqdm

OPS = ("paged_attention", "quantized_matmul", "grouped_matmul", "sample")
HEADINGS = ("case", "kernel", "ms", "reference x", "xla x", "of reading", "of arithmetic")


def chosen(options: argparse.Namespace) -> Iterator[tuple[str, Maker]]:
    """What the flags ask for."""
    makers = {
        "paged_attention": lambda: attention(options.page_size, options.page_dtype),
        "quantized_matmul": lambda: quantized(tuple(options.schemes.split(",")), options.large),
        "grouped_matmul": lambda: grouped(options.large),
        "sample": sample,
    }
    for op in options.op or OPS:
        for name, maker in makers[op]():
            if options.filter in name:
                yield f"{op} {name}", maker


def measure(
    entry: Entry, rounds: int, read: Callable[[], float], rate: Callable[[], float]
) -> dict[str, object]:
    """Medians over rounds."""
    calls = 1 if jax.default_backend() == "cpu" else 20
    times: dict[str, list[float]] = {name: [] for name in entry.runners}
    reading, arithmetic = [], []
    for _ in range(rounds):
        reading.append(entry.num_bytes / read())
        arithmetic.append(entry.operations / rate())
        for name, run in entry.runners.items():
            times[name].append(seconds(run, 1 if name == REFERENCE else 5, calls))
    ours = times[OURS]

    def ratio(others: list[float]) -> float:
        return statistics.median(o / mine for o, mine in zip(others, ours, strict=True))

    xla = [name for name in times if name.startswith("xla")]
    best = min(xla, key=lambda name: statistics.median(times[name]), default=None)
    return {
        "op": entry.op,
        "case": entry.case,
        "kernel": entry.choice,
        "ms": statistics.median(ours) * 1e3,
        "reference x": ratio(times[REFERENCE]) if REFERENCE in times else None,
        "xla x": None if best is None else ratio(times[best]),
        "xla": best,
        "of reading": ratio(reading),
        "of arithmetic": ratio(arithmetic) if entry.operations else None,
    }


def show(rows: list[dict[str, object]]) -> str:
    """The table, as Markdown that reads well as text, too."""
    texts = [[_text(row[name], name) for name in HEADINGS] for row in rows]
    widths = [max(map(len, column)) for column in zip(HEADINGS, *texts, strict=True)]
    lines = [HEADINGS, ["-" * width for width in widths], *texts]
    return "\n".join(
        "| " + " | ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)) + " |"
        for line in lines
    )


def _text(value: object, name: str) -> str:
    if value is None:
        return "-"
    if not isinstance(value, float):
        return str(value)
    if name.startswith("of "):
        return f"{value:.0%}"
    return f"{value:.3f}" if name == "ms" else f"{value:.2f}"


def machine() -> str:
    """Date, commit and device, for the line above a table."""
    device = jax.devices()[0]
    kind = platform.processor() if device.platform == "cpu" else device.device_kind
    cpuinfo = pathlib.Path("/proc/cpuinfo")
    if device.platform == "cpu" and cpuinfo.exists():
        lines = cpuinfo.read_text().splitlines()
        kind = next((x.split(":")[1].strip() for x in lines if x.startswith("model name")), kind)
    git = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    commit = git.stdout.strip() or "no git"
    return f"{datetime.date.today()}, commit {commit}, {device.platform}: {kind}, jax {jax.__version__}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--op", action="append", choices=OPS, help="only this; may be repeated")
    parser.add_argument("--filter", default="", help="only cases whose names contain this")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--page-dtype", default=None, help="if not given, float32 or bfloat16")
    parser.add_argument("--schemes", default="int8_group32_a8,int8_group32,int4_group32")
    parser.add_argument("--large", action="store_true", help="on a CPU, too: what takes minutes")
    parser.add_argument("--json", type=pathlib.Path, help="write the numbers here, too")
    options = parser.parse_args()
    on_cpu = jax.default_backend() == "cpu"
    if options.page_dtype is None:
        options.page_dtype = "float32" if on_cpu else "bfloat16"
    work = list(chosen(options))
    if not work:
        parser.error(f"no case's name contains {options.filter!r}")
    read, rates = make_reader(), {}
    rows = []
    for name, make in tqdm(work, file=sys.stderr):
        try:
            entry = make()
            if entry.operand_dtype not in rates:
                rates[entry.operand_dtype] = make_multiplier(entry.operand_dtype)
            rows.append(measure(entry, options.rounds, read, rates[entry.operand_dtype]))
        except (jax.errors.JaxRuntimeError, MemoryError) as error:
            print(f"{name}: {str(error).splitlines()[0]}", file=sys.stderr)
    print(machine())
    print(f"reads {read() / 1e9:.1f} GB/s; multiplies", end=" ")
    print(", ".join(f"{dtype} at {rate() / 1e9:.0f} GFLOP/s" for dtype, rate in rates.items()))
    for op in OPS:
        mine = [row for row in rows if row["op"] == op]
        if mine:
            print(f"\n{op}\n\n{show(mine)}")
    if options.json is not None:
        options.json.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
