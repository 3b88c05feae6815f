"""Many open streams at once: none lost, and what the front end adds to each token.

    python benchmarks/connections.py [--streams 2000] [--tokens 20] [--pause-ms 1000] [--workers 1]
    python benchmarks/connections.py --model small --streams 256 --tokens 400
    python benchmarks/connections.py --url http://127.0.0.1:8000 --streams 256 --tokens 64

With --model alone, a server of that model is started, with a slot for every stream. With neither,
the real server (`jaxserve serve`'s own processes) runs before the tests' stand-in for the engine,
which notes when it sends each token; so the time from the engine's send to the client's read is
the front end's, sockets and this client included. All streams are open at once: no stream may end
before the last one has had its first event.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import pathlib
import statistics
import sys
import tempfile
import time
import urllib.parse
from collections import defaultdict

CONNECT_AT_ONCE = 64


@dataclasses.dataclass(slots=True, kw_only=True)
class Stream:
    """What one client saw; times in seconds of time.monotonic()."""

    request_id: str
    first: float = 0.0
    end: float = 0.0
    tokens: list[float] = dataclasses.field(default_factory=list)
    text: str = ""
    problem: str = ""


async def read_stream(
    address: tuple[str, int], stream: Stream, body: bytes, gate: asyncio.Semaphore
) -> None:
    """One request, read to its end. What goes wrong is kept in stream.problem."""
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: jaxserve\r\nContent-Type: application/json\r\n"
        f"X-Request-Id: {stream.request_id}\r\nConnection: close\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    try:
        async with gate:
            reader, writer = await asyncio.open_connection(*address)
            writer.write(head.encode() + body)
            await writer.drain()
        await read_events(reader, stream)
        writer.close()
    except (OSError, asyncio.IncompleteReadError, ValueError) as error:
        stream.problem = f"{type(error).__name__}: {error}"
    stream.end = time.monotonic()


async def read_events(reader: asyncio.StreamReader, stream: Stream) -> None:
    """Raises ValueError for an answer that is no whole stream."""
    status = (await reader.readline()).split()
    if status[1:2] != [b"200"]:
        raise ValueError(f"status {status}")
    done = False
    while line := await reader.readline():
        if not line.startswith(b"data: "):
            continue
        data = line[6:].strip()
        if data == b"[DONE]":
            done = True
            continue
        now = time.monotonic()
        event = json.loads(data)
        if "error" in event:
            raise ValueError(str(event["error"]))
        stream.first = stream.first or now
        if text := event["choices"][0]["text"] if event["choices"] else "":
            stream.text += text
            stream.tokens.append(now)
    if not done:
        raise ValueError("the stream broke off")


async def run_clients(
    address: tuple[str, int], model: str | None, options: argparse.Namespace
) -> list[Stream]:
    """All streams, opened as fast as the server takes them."""
    gate = asyncio.Semaphore(CONNECT_AT_ONCE)
    streams = [Stream(request_id=f"stream-{i}") for i in range(options.streams)]
    made_up = options.url is None and model is None
    jobs = []
    for i, stream in enumerate(streams):
        prompt = f"@pause:{options.pause_ms}@ {i}" if made_up else f"Number {i} is"
        body = {
            "prompt": prompt,
            "max_tokens": options.tokens,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
        } | ({"model": model} if model else {})
        jobs.append(read_stream(address, stream, json.dumps(body).encode(), gate))
    await asyncio.gather(*jobs)
    return streams


def added_seconds(streams: list[Stream], log: pathlib.Path) -> list[float]:
    """From the engine's note of each token to the client's read of it.

    A token without text (part of a character) is held back, so counts must agree to be compared.
    """
    sent = defaultdict(list)
    for line in log.read_text().splitlines():
        event = json.loads(line)
        if event["event"] == "token":
            sent[event["id"]].append(event["t"])
    added: list[float] = []
    for stream in streams:
        times = sent[f"{stream.request_id}-0"]  # the request's first answer
        if len(times) == len(stream.tokens):
            added += [read - send for read, send in zip(stream.tokens, times, strict=True)]
    return added


def report(streams: list[Stream], added: list[float]) -> int:
    """Prints what happened; returns the number of streams that were lost."""
    lost = [stream for stream in streams if stream.problem]
    whole = [stream for stream in streams if not stream.problem]
    print(f"{len(streams)} streams, {len(lost)} lost")
    for stream in lost[:5]:
        print(f"  {stream.request_id}: {stream.problem}")
    if whole:
        together = min(s.end for s in whole) >= max(s.first for s in whole)
        print(f"all open at once: {'yes' if together else 'no'}")
        print(f"events: {sum(len(stream.tokens) for stream in whole)}")
        gaps = [b - a for s in whole for a, b in zip(s.tokens, s.tokens[1:], strict=False)]
        if gaps:
            print(f"gap between tokens: median {statistics.median(gaps) * 1e3:.1f} ms")
    if added:
        added.sort()
        shares = {50: 0.5, 90: 0.9, 99: 0.99}
        texts = [f"p{n} {added[int(len(added) * q)] * 1e3:.2f} ms" for n, q in shares.items()]
        print(f"added by the front end per token: {', '.join(texts)}")
    return len(lost)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--url", help="a running server; if not given, one is started")
    parser.add_argument("--model", help="of the server at --url, or of one to start")
    parser.add_argument("--streams", type=int, default=2000)
    parser.add_argument("--tokens", type=int, default=20)
    parser.add_argument("--pause-ms", type=int, default=1000, help="between a stream's tokens")
    parser.add_argument("--workers", type=int, default=1)
    options = parser.parse_args()
    if options.url is not None:
        parts = urllib.parse.urlsplit(options.url)
        address = (parts.hostname or "127.0.0.1", parts.port or 80)
        return min(1, report(asyncio.run(run_clients(address, options.model, options)), []))
    if options.model is not None:
        from whole_server import whole_server

        with whole_server(options.model, slots=options.streams) as server:
            streams = asyncio.run(run_clients(server.address, options.model, options))
            return min(1, report(streams, []))
    sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "tests"))
    from running_server import RunningServer

    from jaxserve.config import EngineConfig, ServerConfig

    with tempfile.TemporaryDirectory() as folder:
        server = RunningServer(
            pathlib.Path(folder),
            engine=EngineConfig(
                model="fake", max_num_seqs=options.streams, max_queue_len=options.streams
            ),
            server=ServerConfig(port=0, workers=options.workers),
            fake_engine=["--log-tokens"],
        )
        try:
            address = server.wait_ready().address
            streams = asyncio.run(run_clients(address, None, options))
            return min(1, report(streams, added_seconds(streams, server.log)))
        finally:
            server.stop()


if __name__ == "__main__":
    sys.exit(main())
