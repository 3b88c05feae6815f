"""Streams that are opened and left, by the thousand: what memory, pages and slots come to.

    python benchmarks/aborts.py [--model small] [--seconds 420] [--clients 16]
    python benchmarks/aborts.py --model fake --seconds 120

Each client asks for a long answer, reads a random number of bytes of it (sometimes none) and closes
its connection. Prompts differ, so that nothing is spared. At the end no answer may be running and
no page taken, and memory of all processes (what they share counts once) must have stopped growing:
the growth of the last half is printed beside that of the first.
"""

from __future__ import annotations

import argparse
import json
import random
import socket
import sys
import threading
import time

from whole_server import FAKE, WholeServer, whole_server

_SAMPLES = 12
_SETTLE_SECONDS = 30.0


class Aborters:
    """Clients in threads. opened, refused: streams so far."""

    def __init__(self, server: WholeServer, model: str) -> None:
        self.opened = self.refused = 0
        self._server = server
        self._pause = "@pause:20@" if model == FAKE else ""
        self._over = threading.Event()
        self._threads: list[threading.Thread] = []

    def start(self, count: int) -> None:
        self._threads = [threading.Thread(target=self._run, args=(n,)) for n in range(count)]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    def _run(self, seed: int) -> None:
        chance, number = random.Random(seed), 0
        while not self._over.is_set():
            number += 1
            text = f"{self._pause}{seed}.{number}: " + "word " * chance.randrange(60)
            received = self._ask(text[:200], chance.choice((0, 1, 400, 2000)))
            self.opened += 1
            self.refused += bool(received) and not received.startswith(b"HTTP/1.1 200")

    def _ask(self, prompt: str, num_bytes: int) -> bytes:
        body = {"prompt": prompt, "max_tokens": 250, "ignore_eos": True, "stream": True}
        data = json.dumps(body).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        received = b""
        with socket.create_connection(self._server.address, timeout=60) as connection:
            connection.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
            while len(received) < num_bytes and (part := connection.recv(1000)):
                received += part
        return received


def shown(memory: dict[int, int]) -> str:
    """The sum, and each process's part."""
    parts = ", ".join(f"{size / 2**20:.1f}" for size in memory.values())
    return f"{sum(memory.values()) / 2**20:.1f} MiB ({parts})"


def settled(server: WholeServer) -> dict[str, float | None]:
    """What is still taken once nobody asks any more."""
    deadline = time.monotonic() + _SETTLE_SECONDS
    names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
    while True:
        found = {name: server.metric(name) for name in names}
        if not any(found.values()) or time.monotonic() > deadline:
            return found
        time.sleep(0.5)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="small", help="fake: the tests' stand-in for an engine")
    parser.add_argument("--seconds", type=float, default=420)
    parser.add_argument("--clients", type=int, default=16)
    options = parser.parse_args()
    with whole_server(options.model, slots=32) as server:
        print(f"before: {shown(server.memory_bytes())}", flush=True)
        clients = Aborters(server, options.model)
        clients.start(options.clients)
        samples = []
        try:
            for _ in range(_SAMPLES):
                time.sleep(options.seconds / _SAMPLES)
                memory = server.memory_bytes()
                samples.append(sum(memory.values()) / 2**20)
                print(f"{clients.opened} streams left: {shown(memory)}", flush=True)
        finally:
            clients.stop()
        taken = settled(server)
        print(f"after {clients.opened}: {shown(server.memory_bytes())}")
        print(f"{clients.refused} refused; still taken: {taken}")
        half = len(samples) // 2
        print(f"growth: {samples[half - 1] - samples[0]:.1f} MiB in the first half, ", end="")
        print(f"{samples[-1] - samples[half]:.1f} MiB in the last")
    return int(any(taken.values()))


if __name__ == "__main__":
    sys.exit(main())
