"""The highest request rate that jaxserve's and vLLM's servers hold, by one and the same client.

    python benchmarks/server_rates.py --peers DIR [--rates 0.5 1 2 4] [--seconds 30]

DIR is as in `peers.py`. Each server is started in turn on the same weights, and vLLM's own client,
`vllm bench serve`, asks it at rising rates (Poisson arrivals, random prompts, answers of full
length). A rate is held if a share of all requests (--share), failed ones included, has its first
token within --ttft-ms and its inter-token latency within --itl-ms: by the mean of the request's
gaps, and more strictly by the largest one. A server's turn ends with the first rate that it does not
hold by the mean.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import http.client
import json
import os
import pathlib
import shlex
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any

from side_by_side import ROOT, Peers, describe

NAME = "benchmark"
OURS, VLLM = "jaxserve", "vllm"
START_SECONDS = 900.0
STOP_SECONDS = 60.0
_LEAST_PROMPTS = 12


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """One rate on one server; shares of all requests, times in milliseconds."""

    rate: float
    requests: int
    completed: int
    share_mean_itl: float
    share_every_itl: float
    median_ttft: float
    median_tpot: float
    output_rate: float


def commands(options: argparse.Namespace, port: int) -> dict[str, list[str]]:
    """What starts each server on `port`."""
    peers = Peers(folder=options.peers)
    ours = [sys.executable, "-m", "jaxserve.cli.main", "serve", "--model", peers.gguf("q4_1")]
    ours += ["--served-name", NAME, "--port", str(port), "--log-level", "warning"]
    theirs = [*peers.vllm, "serve", peers.hugging_face]
    theirs += ["--served-model-name", NAME, "--port", str(port), "--dtype", "bfloat16"]
    theirs += ["--max-model-len", "8192", "--max-num-seqs", "64"]
    return {
        OURS: ours + shlex.split(options.jaxserve_flags),
        VLLM: theirs + shlex.split(options.vllm_flags),
    }


def peer_environment() -> dict[str, str]:
    """As the drivers of `peers.py` set it."""
    return {"VLLM_CPU_KVCACHE_SPACE": "4", "HF_HUB_OFFLINE": "1", **os.environ}


@contextlib.contextmanager
def running(command: Sequence[str], port: int, log: pathlib.Path, key: str = "") -> Iterator[None]:
    """The server while the block runs; its output goes to `log`. key: if it asks for one."""
    with log.open("wb") as file:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=peer_environment(),
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            _wait_until_it_answers(process, port, log, key)
            yield
        finally:
            _stop(process)


def _wait_until_it_answers(
    process: subprocess.Popen[bytes], port: int, log: pathlib.Path, key: str
) -> None:
    head = {"Content-Type": "application/json"}
    head |= {"Authorization": f"Bearer {key}"} if key else {}
    deadline = time.monotonic() + START_SECONDS
    body = json.dumps({"model": NAME, "prompt": "a", "max_tokens": 1})
    while time.monotonic() < deadline:
        if process.poll() is not None:
            last = log.read_text(errors="replace").strip().splitlines()[-1:]
            raise SystemExit(
                f"error: the server ended with {process.returncode}: {last}; see {log}"
            )
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        try:
            connection.request("POST", "/v1/completions", body, head)
            if connection.getresponse().status == 200:
                return
        except OSError:
            pass
        finally:
            connection.close()
        time.sleep(1)
    raise SystemExit(f"error: the server does not answer after {START_SECONDS:g} s; see {log}")


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Ends the server with all processes of its session."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_SECONDS)


def measure(options: argparse.Namespace, port: int, rate: float, folder: str) -> Rate:
    """One run of the client."""
    peers = Peers(folder=options.peers)
    count = max(_LEAST_PROMPTS, round(rate * options.seconds))
    command = [*peers.vllm, "bench", "serve", "--backend", "openai"]
    command += ["--endpoint", "/v1/completions", "--base-url", f"http://127.0.0.1:{port}"]
    command += ["--model", NAME, "--tokenizer", peers.hugging_face, "--ignore-eos"]
    command += ["--dataset-name", "random", "--random-input-len", str(options.input_len)]
    command += ["--random-output-len", str(options.output_len), "--num-prompts", str(count)]
    command += ["--request-rate", str(rate), "--seed", str(round(1000 * rate))]
    command += ["--save-result", "--save-detailed", "--result-dir", folder]
    command += ["--result-filename", "result.json", "--disable-tqdm"]
    done = subprocess.run(
        command, env=peer_environment(), capture_output=True, text=True, check=False
    )
    path = pathlib.Path(folder, "result.json")
    if done.returncode or not path.exists():
        raise SystemExit(f"error: the client failed: {(done.stderr or done.stdout)[-2000:]}")
    result = json.loads(path.read_text())
    path.unlink()
    return judge(result, rate, count, options.ttft_ms, options.itl_ms)


def judge(result: dict[str, Any], rate: float, count: int, ttft_ms: float, itl_ms: float) -> Rate:
    """result: what the client saved; count: requests that were meant to be sent."""
    mean = every = 0
    for ttft, itls, error in zip(result["ttfts"], result["itls"], result["errors"], strict=True):
        if error or 1000 * ttft > ttft_ms:
            continue
        mean += 1000 * statistics.fmean(itls or [0.0]) <= itl_ms
        every += 1000 * max(itls, default=0.0) <= itl_ms
    return Rate(
        rate=rate,
        requests=count,
        completed=result["completed"],
        share_mean_itl=mean / count,
        share_every_itl=every / count,
        median_ttft=result["median_ttft_ms"],
        median_tpot=result["median_tpot_ms"],
        output_rate=result["output_throughput"],
    )


def highest(rates: Sequence[Rate], field: str, share: float) -> float:
    """The highest rate below which every rate was held; 0 for none."""
    held = 0.0
    for rate in sorted(rates, key=lambda each: each.rate):
        if getattr(rate, field) < share:
            break
        held = rate.rate
    return held


def report(found: dict[str, list[Rate]], options: argparse.Namespace) -> list[str]:
    """The whole text, in Markdown."""
    facts = describe()
    lines = [
        f"{facts['date']}, {facts['machine']}, commit {facts['commit']}; client `vllm bench serve`, "
        f"{options.input_len} tokens in and {options.output_len} out, {options.seconds:g} s a rate; "
        f"jaxserve with {options.jaxserve_flags or 'default settings'}.",
        "",
        "| server | requests/s | done | TTFT p50 (ms) | TPOT p50 (ms) | tokens/s "
        "| in time, mean ITL | in time, every ITL |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, rates in found.items():
        lines += [
            f"| {name} | {each.rate:g} | {each.completed}/{each.requests} | {each.median_ttft:.0f} "
            f"| {each.median_tpot:.1f} | {each.output_rate:.1f} | {each.share_mean_itl:.0%} "
            f"| {each.share_every_itl:.0%} |"
            for each in rates
        ]
    what = f"TTFT within {options.ttft_ms:g} ms for {options.share:.0%} of requests"
    for field, words in (("share_mean_itl", "mean ITL"), ("share_every_itl", "every ITL")):
        best = {name: highest(rates, field, options.share) for name, rates in found.items()}
        text = ", ".join(f"{name} {rate:g}/s" for name, rate in best.items())
        ratio = f"; ratio {best[OURS] / best[VLLM]:.2f}" if best.get(VLLM) and OURS in best else ""
        lines += [
            "",
            f"Highest rate with {what} and {words} within {options.itl_ms:g} ms: {text}{ratio}.",
        ]
    return lines


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    add = parser.add_argument
    add("--peers", type=pathlib.Path, required=True, metavar="DIR")
    add("--server", nargs="+", choices=(OURS, VLLM), default=[OURS, VLLM])
    add("--rates", type=float, nargs="+", default=[0.25, 0.5, 0.75, 1, 1.5, 2, 3, 4, 6, 8])
    add("--seconds", type=float, default=30.0, help="of arrivals at each rate")
    add("--input-len", type=int, default=512)
    add("--output-len", type=int, default=128)
    add("--ttft-ms", type=float, default=2000.0)
    add("--itl-ms", type=float, default=200.0)
    add("--share", type=float, default=0.9)
    add("--jaxserve-flags", default="", metavar="TEXT")
    add("--vllm-flags", default="", metavar="TEXT")
    add("--json", type=pathlib.Path, metavar="FILE")
    options = parser.parse_args()
    found: dict[str, list[Rate]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in options.server:
            port = free_port()
            log = pathlib.Path(tempfile.gettempdir(), f"server_rates_{name}.log")
            with running(commands(options, port)[name], port, log):
                measure(options, port, options.rates[0], folder)  # warms up what is still cold
                found[name] = []
                for rate in sorted(options.rates):
                    found[name].append(measure(options, port, rate, folder))
                    print(name, found[name][-1], file=sys.stderr, flush=True)
                    if found[name][-1].share_mean_itl < options.share:
                        break
    print("\n".join(report(found, options)))
    if options.json is not None:
        rates = {name: [dataclasses.asdict(each) for each in all_] for name, all_ in found.items()}
        options.json.write_text(json.dumps(describe() | {"rates": rates}, indent=1) + "\n")


if __name__ == "__main__":
    main()
