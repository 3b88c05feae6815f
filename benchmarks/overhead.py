"""What the ledger and traces cost: processor time of all processes per 10,000 streamed tokens.

    python benchmarks/overhead.py [--model fake] [--rounds 8] [--streams 32] [--waves 8]

Two servers run, one with the ledger and traces and one without; they take turns, each round begun
by the other. Processor time is less noisy than throughput, which it bounds. Of each round the ratio
counts, so that a slow minute of the machine meets both.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time

from connections import run_clients
from whole_server import FAKE, WholeServer, whole_server

#: Until what was measured is written, too.
_SETTLE_SECONDS = 1.0


def cost(server: WholeServer, options: argparse.Namespace) -> float:
    """Seconds of processor time per 10,000 tokens of one round."""
    before = server.cpu_seconds()
    model = None if options.model == FAKE else options.model
    streams = []
    for _ in range(options.waves):
        streams += asyncio.run(run_clients(server.address, model, options))
    time.sleep(_SETTLE_SECONDS)
    used = server.cpu_seconds() - before
    lost = [stream.problem for stream in streams if stream.problem]
    if lost:
        raise SystemExit(f"error: {len(lost)} streams are lost, the first by {lost[0]}")
    return used / (len(streams) * options.tokens) * 10_000


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default=FAKE, help="fake: the tests' stand-in for an engine")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=300, help="of a stream")
    parser.add_argument("--waves", type=int, default=8, help="of streams, in a round")
    options = parser.parse_args()
    options.pause_ms = 0
    options.url = None
    ratios: list[float] = []
    with (
        whole_server(options.model, slots=32) as measured,
        whole_server(options.model, slots=32, measured=False) as bare,
    ):
        for server in (measured, bare):
            cost(server, options)  # warms up
        for number in range(options.rounds):
            order = (measured, bare) if number % 2 else (bare, measured)
            found = {server: cost(server, options) for server in order}
            ratios.append(found[measured] / found[bare])
            print(
                f"with: {found[measured]:.2f} s, without: {found[bare]:.2f} s, "
                f"ratio {ratios[-1]:.3f}",
                flush=True,
            )
    ratios.sort()
    print(
        f"processor time with ledger and traces, as a multiple of that without: median "
        f"{statistics.median(ratios):.3f}, {ratios[0]:.3f} to {ratios[-1]:.3f}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
