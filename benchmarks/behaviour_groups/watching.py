"""Clients that leave, metrics, and keys."""

from __future__ import annotations

import re
import socket
import struct
import time
from typing import Any

from behaviour_groups.client import CHAT, COMPLETIONS, ROUTES, Server, UntriedError, must, together
from behaviour_groups.listed import Behaviour

STORY = "Tell me a very long story about the sea."
RUNNING, WAITING = "vllm:num_requests_running", "vllm:num_requests_waiting"
#: Names that hold for any server that follows vLLM's set.
NAMES = (
    RUNNING, WAITING, "vllm:kv_cache_usage_perc", "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total", "vllm:prefix_cache_queries_total",
    "vllm:prefix_cache_hits_total", "vllm:num_preemptions_total", "vllm:request_success_total",
    "vllm:time_to_first_token_seconds", "vllm:inter_token_latency_seconds",
    "vllm:e2e_request_latency_seconds", "vllm:request_queue_time_seconds",
    "vllm:request_prefill_time_seconds", "vllm:request_decode_time_seconds",
    "vllm:request_params_n", "vllm:request_params_max_tokens", "vllm:admission_rejections_total",
)  # fmt: skip
_LINE = re.compile(r'[a-zA-Z_:][\w:]*(\{(\w+="(\\.|[^"\\])*",?)*\})? (NaN|[+-]?(Inf|[\d.e+-]+))')
#: Open by the list itself: alive, ready, metrics.
OPEN = ("/health", "/ready", "/live", "/ping", "/metrics")
#: Words of paths that one does not try for the sake of a test.
_POWERFUL = (
    "pause",
    "resume",
    "sleep",
    "wake",
    "reset",
    "load",
    "update",
    "init",
    "scale",
    "abort",
)


def _leave(connection: socket.socket, *, reset: bool) -> None:
    if reset:  # no farewell: a RST instead of a FIN
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def disconnects(server: Server) -> str:
    """Within 2 s of a close or reset, streamed, whole, n > 1 or queued: nothing runs, pages free."""
    server.rests()
    slowest = 0.0
    fields: dict[str, Any] = {"max_tokens": 2000, "ignore_eos": True, "temperature": 1}
    for reset in (False, True):
        for more in ({"stream": True}, {"stream": False}, {"stream": True, "n": 3}):
            for route in ROUTES:
                connection = server.open(route, STORY, **{**fields, **more})
                _wait_running(server, more.get("n", 1))
                _leave(connection, reset=reset)
                slowest = max(slowest, server.rests(10))
    crowd = [server.open(COMPLETIONS, f"{i} {STORY}", **fields, stream=True) for i in range(96)]
    _wait_running(server, 96)
    for connection in crowd:
        _leave(connection, reset=False)
    queued = server.rests(10)
    must(queued <= 2, f"96 at once, some of them queued: gone after {queued:.1f} s")
    must(slowest <= 2, f"gone after {slowest:.1f} s")
    usage = server.metric("vllm:kv_cache_usage_perc")
    must(usage == 0, f"{usage:.1%} of the pages stay taken")
    return f"12 ways, gone after {slowest:.2f} s at most; 96 at once after {queued:.2f} s"


def _wait_running(server: Server, count: int) -> None:
    deadline = time.monotonic() + 60
    while True:
        text = server.metrics()
        if server.metric(RUNNING, text) + server.metric(WAITING, text) >= count:
            return
        must(time.monotonic() < deadline, f"the gauges never show {count} open requests")
        time.sleep(0.02)


def aborts_are_counted(server: Server) -> str:
    """request_success with finished_reason abort + 1 for a client that left; its tokens count."""
    server.rests()
    before = server.metrics()
    connection = server.open(CHAT, STORY, max_tokens=2000, ignore_eos=True, stream=True)
    _wait_running(server, 1)
    connection.recv(1)
    time.sleep(0.5)
    connection.close()
    server.rests()
    time.sleep(0.5)
    after = server.metrics()
    name = "vllm:request_success_total"
    counts = [server.metric(name, text, finished_reason="abort") for text in (before, after)]
    must(counts[1] - counts[0] == 1, f"abort + {counts[1] - counts[0]:g}")
    tokens = [server.metric("vllm:generation_tokens_total", text) for text in (before, after)]
    must(tokens[1] > tokens[0], "its tokens are not counted")
    return f"abort + 1, {tokens[1] - tokens[0]:g} tokens"


def keys(server: Server) -> str:
    """Every route but alive, ready and metrics refuses without the key: 401, an error body."""
    if server.key is None:
        raise UntriedError("the server has no key")
    described = server.call("GET", "/openapi.json").json["paths"]
    paths = [path for path in described if not any(word in path for word in _POWERFUL)]
    stranger = Server(name=server.name, url=server.url, model=server.model)
    wrong = Server(name=server.name, url=server.url, model=server.model, key="wrong")
    open_, tried = set(), 0
    for path in [*paths, "/openapi.json", "/v1/no/such"]:
        if path in OPEN:
            continue
        methods = [m.upper() for m in described.get(path, {"get": 0}) if m in ("get", "post")]
        for method in methods:
            for caller in (stranger, wrong):
                body = {} if method == "POST" else None
                answer = caller.call(method, re.sub(r"\{.*?\}", "x", path), body)
                tried += 1
                if answer.status != 401:
                    open_.add(path)
                else:
                    must(b"error" in answer.body, f"{path}: 401 without an error body")
    shown = ", ".join(sorted(open_)[:8]) + (" ..." if len(open_) > 8 else "")
    must(not open_, f"{len(open_)} of {len(paths)} paths answer: {shown}")
    return f"{tried} requests without a key or with a wrong one"


def first_token_times(server: Server) -> str:
    """With a queue, the sum of TTFT is the clients' within 15 % + 50 ms each; queue time in it."""
    server.rests()
    count = 96
    before = server.metrics()
    jobs = [
        lambda i=i: server.stream(
            COMPLETIONS, f"{i} {STORY} " * 8, max_tokens=24, ignore_eos=True, temperature=0
        ).whole()
        for i in range(count)
    ]
    streams = together(jobs)
    client = sum(stream.content_times[0] - stream.sent for stream in streams)
    server.rests()
    after = server.metrics()

    def added(name: str) -> float:
        return server.metric(name, after) - server.metric(name, before)

    ours = added("vllm:time_to_first_token_seconds_sum")
    queue = added("vllm:request_queue_time_seconds_sum")
    num = added("vllm:time_to_first_token_seconds_count")
    seen = (
        f"clients {client:.1f} s, server {ours:.1f} s, {queue:.1f} s of it queue, {count} requests"
    )
    must(num == count, f"{num:g} observations for {count} requests")
    must(abs(ours - client) <= 0.15 * client + 0.05 * count, seen)
    must(0 < queue <= ours, seen)
    return seen


def one_requests_counts(server: Server) -> str:
    """Valid exposition text with the known names; one request moves each by its own amounts."""
    server.rests()
    before = server.metrics()
    usage = server.complete(STORY, max_tokens=7, ignore_eos=True).usage
    server.rests()
    time.sleep(0.5)
    after = server.metrics()
    bad = [
        line for line in after.splitlines() if line and line[0] != "#" and not _LINE.fullmatch(line)
    ]
    must(not bad, f"not exposition format: {bad[:1]}")
    wanted = {
        "vllm:prompt_tokens_total": usage["prompt_tokens"],
        "vllm:generation_tokens_total": usage["completion_tokens"],
        "vllm:request_success_total": 1,
        "vllm:time_to_first_token_seconds_count": 1,
        "vllm:e2e_request_latency_seconds_count": 1,
        "vllm:request_queue_time_seconds_count": 1,
    }
    for name, amount in wanted.items():
        added = server.metric(name, after) - server.metric(name, before)
        must(added == amount, f"{name} + {added:g}, not {amount}")
    missing = [
        name
        for name in NAMES
        if f"{name}{{" not in after
        and f"{name}_bucket" not in after
        and f"{name} " not in after
        and f"# TYPE {name} " not in after
        and f"# TYPE {name.removesuffix('_total')} " not in after
    ]
    must(not missing, f"missing: {', '.join(missing)}")
    lacking = [n for n in NAMES if not re.search(rf'^{n}\w*{{[^}}]*model_name="', after, re.M)]
    lacking = [n for n in lacking if re.search(rf"^{n}\w*[ {{]", after, re.M)]
    must(not lacking, f"no model_name: {', '.join(lacking)}")
    return f"{len(NAMES)} names; {len(wanted)} counters moved exactly"


CHECKS = (
    Behaviour("31", "a client that leaves frees its slot and pages", disconnects),
    Behaviour("32", "aborted requests are counted", aborts_are_counted),
    Behaviour("46", "no route answers without the key", keys),
    Behaviour("50", "server and clients agree on time to first token", first_token_times),
    Behaviour("metrics", "known names, valid format, exact counts", one_requests_counts),
)
