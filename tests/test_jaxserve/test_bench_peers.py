"""The comparisons' arithmetic and their way with engines that fail; the engines are made up."""

from __future__ import annotations

import importlib
import json
import pathlib
import sys
from types import ModuleType
from typing import Any

import pytest

BENCHMARKS = pathlib.Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("peers")


@pytest.fixture
def server_rates(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("server_rates")


def line(workload: str, speed: float, ttft: float | None = None) -> dict[str, Any]:
    return {"engine": "x", "workload": workload, "output_tok_s": speed, "ttft_s": ttft}


def test_ratios_are_of_medians_and_against_the_best(peers: ModuleType) -> None:
    found = {
        "jaxserve": [line("single", speed, 0.5) for speed in (10.0, 90.0, 30.0)],
        "vllm": [line("single", 15.0, 1.0)],
        "llama.cpp q8_0": [line("single", 20.0), line("batch8", 5.0)],
    }
    table = peers.speed_table(found, ["single", "batch8"])
    assert table[2] == "| single | 30.0 | 15.0 | 20.0 | 2.00 | 1.50 | 1.50 |"
    assert table[3] == "| batch8 | did not run | did not run | 5.0 | - | - | - |"
    (first,) = peers.first_token_table(found, ["single", "batch8"])[2:]
    assert first == "| single | 0.500 | 1.000 | did not run | 0.50 | - |"


def test_what_an_engine_printed_before_it_failed_counts(peers: ModuleType) -> None:
    program = (
        f"print({json.dumps(line('single', 3.0))!r}); print('noise'); "
        f"print({json.dumps({**line('single', 9.0), 'rounds': 2})!r}); "
        "raise SystemExit('no such workload')"
    )
    engine = peers.Engine(name="x", command=[sys.executable, "-c", program], together=False)
    lines, trouble = peers.run(engine, ["single", "batch8"], 30.0)
    assert lines == [line("single", 3.0)] * 2  # a process per workload; sums are left out
    assert trouble == "exit code 1: no such workload"


def test_a_rate_is_held_by_the_share_of_all_requests(server_rates: ModuleType) -> None:
    result = {
        "ttfts": [0.5, 2.5, 0.1, 0.0],
        "itls": [[0.1, 0.25], [0.1], [], []],
        "errors": ["", "", "", "refused"],
        "completed": 3,
        "median_ttft_ms": 500.0,
        "median_tpot_ms": 100.0,
        "output_throughput": 7.0,
    }
    rate = server_rates.judge(result, 1.5, 5, ttft_ms=2000, itl_ms=200)
    assert rate.share_mean_itl == 2 / 5
    assert rate.share_every_itl == 1 / 5


def test_the_highest_rate_ends_before_the_first_that_was_not_held(
    server_rates: ModuleType,
) -> None:
    def rate(number: float, share: float) -> Any:
        return server_rates.Rate(
            rate=number,
            requests=10,
            completed=10,
            share_mean_itl=share,
            share_every_itl=0.0,
            median_ttft=1.0,
            median_tpot=1.0,
            output_rate=1.0,
        )

    rates = [rate(4, 1.0), rate(1, 1.0), rate(3, 0.5), rate(2, 0.9)]
    assert server_rates.highest(rates, "share_mean_itl", 0.9) == 2
    assert server_rates.highest(rates, "share_every_itl", 0.9) == 0
