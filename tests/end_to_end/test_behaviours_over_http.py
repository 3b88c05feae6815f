"""A real server with a tiny model and too few pages for all of its slots: what clients see of
batches, the prefix cache, preemption, metrics and departures (12, 16, 20, 31, 32, 36, 50)."""

from __future__ import annotations

import concurrent.futures
import http.client
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
from running_server import RunningServer, wait_until
from tiny_chat_model import write_tiny_chat_model

COMPLETIONS = "/v1/completions"
SLOTS = 4
STORY = "Once upon a time there was a small stone in a river. "


class Real(RunningServer):
    """The helpers of `RunningServer` before a server that was started otherwise."""

    def __init__(self, url: str) -> None:
        self.url = url


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("behaviours")
    model = folder / "model"
    model.mkdir()
    command = [sys.executable, "-m", "jaxserve.cli.main", "serve"]
    command += ["--model", str(write_tiny_chat_model(model)), "--served-name", "tiny"]
    command += ["--port", "0", "--max-num-seqs", str(SLOTS), "--max-num-batched-tokens", "32"]
    command += ["--max-model-len", "512", "--num-pages", "70", "--quantization", "none"]
    command += ["--data-dir", str(folder / "data")]
    errors = folder / "errors.txt"
    with errors.open("wb") as file:
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=file,
            text=True,
            env={**os.environ, "XLA_FLAGS": "", "PYTHONUNBUFFERED": "1"},
        )
    assert process.stdout is not None
    try:
        line = process.stdout.readline().strip()
        assert line.startswith("ready: "), (line, errors.read_text())
        yield Real(line.removeprefix("ready: "))
    finally:
        process.terminate()
        process.wait(60)
        process.stdout.close()


def answer(server: RunningServer, prompt: str, **fields: Any) -> tuple[str, list[float], Any]:
    """Text, log-probabilities and usage."""
    fields = {"max_tokens": 24, "ignore_eos": True, "temperature": 0, "logprobs": 1} | fields
    whole = server.complete(prompt, **fields)
    assert whole.status == 200, whole.body
    choice = whole.json["choices"][0]
    return choice["text"], choice["logprobs"]["token_logprobs"], whole.json["usage"]


def check_equal(left: tuple[str, list[float], Any], right: tuple[str, list[float], Any]) -> None:
    assert left[0] == right[0]
    assert left[1] == pytest.approx(right[1], abs=1e-5, rel=1e-5)


def at_once(server: RunningServer, asked: list[dict[str, Any]]) -> list[Any]:
    with concurrent.futures.ThreadPoolExecutor(len(asked)) as pool:
        return list(pool.map(lambda fields: answer(server, **fields), asked))


def at_rest(server: RunningServer) -> bool:
    names = ("vllm:num_requests_running", "vllm:num_requests_waiting")
    return not any(server.gauge(name) for name in names)


def test_cold_cached_and_half_cached_answers_are_equal(server: RunningServer) -> None:  # 12
    prompt = STORY * 5

    def ask(suffix: str, salt: str) -> dict[str, Any]:
        return {"prompt": prompt + suffix, "cache_salt": salt}

    cold, other = (answer(server, **ask(end, f"cold{end}")) for end in ("so", "but"))
    assert cold[2]["prompt_tokens_details"]["cached_tokens"] == 0
    again = answer(server, **ask("so", "coldso"))
    check_equal(cold, again)
    assert 0 < again[2]["prompt_tokens_details"]["cached_tokens"] < again[2]["prompt_tokens"]
    check_equal(other, answer(server, **ask("but", "coldso")))
    hit, miss = at_once(server, [ask("so", "coldso"), ask("but", "fresh")])
    assert miss[2]["prompt_tokens_details"]["cached_tokens"] == 0
    check_equal(cold, hit)
    check_equal(other, miss)


@pytest.mark.parametrize("fields", [{}, {"temperature": 0.9}], ids=["greedy", "seeded"])
def test_preempted_answers_of_a_burst_equal_their_solo_runs(
    server: RunningServer, fields: dict[str, Any]
) -> None:  # 16, 20
    asked = [
        {"prompt": f"{number} {STORY}", "max_tokens": 280 + number, "seed": number, **fields}
        for number in range(6)
    ]
    alone = [answer(server, **one) for one in asked]
    before = server.gauge("vllm:num_preemptions_total")
    for left, right in zip(alone, at_once(server, asked), strict=True):
        check_equal(left, right)
        assert right[2]["completion_tokens"] == left[2]["completion_tokens"]
    assert server.gauge("vllm:num_preemptions_total") > before


@pytest.mark.parametrize("more", [{"stream": True}, {}, {"stream": True, "n": 3}], ids=str)
def test_who_leaves_frees_slots_and_pages_and_is_counted(
    server: RunningServer, more: dict[str, Any]
) -> None:  # 31, 32
    wait_until(lambda: at_rest(server))
    count = 'vllm:request_success_total{finished_reason="abort"'
    aborts, tokens = server.gauge(count), server.gauge("vllm:generation_tokens_total")
    body = {"prompt": STORY, "max_tokens": 440, "ignore_eos": True, **more}
    left = [server.send_only(COMPLETIONS, body) for _ in range(SLOTS + 2)]  # two of them queued
    wait_until(lambda: server.gauge("vllm:num_requests_running") == SLOTS)
    wait_until(lambda: server.gauge("vllm:generation_tokens_total") > tokens)
    for connection in left:
        connection.close()
    assert wait_until(lambda: at_rest(server)) < 2.0
    assert server.gauge("vllm:kv_cache_usage_perc") == 0
    assert server.gauge(count) == aborts + len(left) * more.get("n", 1)


def test_server_and_clients_agree_on_the_time_to_the_first_token(
    server: RunningServer,
) -> None:  # 50
    wait_until(lambda: at_rest(server))
    name = "vllm:time_to_first_token_seconds"
    before = {part: server.gauge(f"{name}_{part}") for part in ("sum", "count")}
    queued = server.gauge("vllm:request_queue_time_seconds_sum")

    def ask(number: int) -> float:
        body = {"prompt": f"{number} {STORY}", "max_tokens": 80, "ignore_eos": True}
        connection = http.client.HTTPConnection(*server.address, timeout=60)
        start = time.monotonic()
        head = {"Content-Type": "application/json"}
        connection.request("POST", COMPLETIONS, json.dumps({**body, "stream": True}), head)
        response = connection.getresponse()
        response.readline()
        seconds = time.monotonic() - start
        response.read()
        connection.close()
        return seconds

    count = 6 * SLOTS
    with concurrent.futures.ThreadPoolExecutor(count) as pool:
        theirs = sum(pool.map(ask, range(count)))
    ours = server.gauge(f"{name}_sum") - before["sum"]
    assert server.gauge(f"{name}_count") - before["count"] == count
    assert ours == pytest.approx(theirs, abs=0.15 * theirs + 0.05 * count)
    queue = server.gauge("vllm:request_queue_time_seconds_sum") - queued
    assert ours / 2 < queue <= ours, "most of the time is spent in the queue, and counted"


def test_one_request_moves_each_counter_by_its_own_amounts(server: RunningServer) -> None:
    wait_until(lambda: at_rest(server))
    names = {
        "vllm:prompt_tokens_total": 0,
        "vllm:generation_tokens_total": 9,
        "vllm:request_success_total": 1,
        "vllm:time_to_first_token_seconds_count": 1,
        "vllm:inter_token_latency_seconds_count": 8,
        "vllm:e2e_request_latency_seconds_count": 1,
        "vllm:request_queue_time_seconds_count": 1,
        "vllm:request_prefill_time_seconds_count": 1,
        "vllm:request_decode_time_seconds_count": 1,
        "vllm:request_params_n_sum": 1,
        "vllm:request_params_n_count": 1,
        "vllm:request_params_max_tokens_sum": 9,
        "vllm:admission_rejections_total": 0,
        "vllm:num_preemptions_total": 0,
        "jaxserve:compilations_after_ready": 0,
    }
    before = {name: server.gauge(name) for name in names}
    usage = answer(server, "A question of its own", max_tokens=9)[2]
    names["vllm:prompt_tokens_total"] = usage["prompt_tokens"]
    wait_until(lambda: at_rest(server))
    assert {name: server.gauge(name) - before[name] for name in names} == names
    line = re.compile(r'[a-zA-Z_:][\w:]*(\{(\w+="[^"]*",?)*\})? [-+\d.eE]+|# (HELP|TYPE) .+')
    text = server.call("GET", "/metrics").body.decode()
    assert all(line.fullmatch(each) for each in text.splitlines() if each != "# EOF")
    assert text.count('model_name="tiny"') > 50


def test_a_long_request_is_whole_and_its_second_time_starts_from_the_cache(
    server: RunningServer,
) -> None:
    """The everyday long request, scaled to the tiny model's context."""
    body = {"prompt": STORY * 7, "max_tokens": 100, "ignore_eos": True, "temperature": 0}
    found = []
    for _ in range(2):
        events = server.complete(**body, stream=True, stream_options={"include_usage": True}).events
        usage = events[-1]["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(STORY) * 7 + 1, 100)
        text = "".join(choice["text"] for event in events for choice in event["choices"])
        found.append((text, usage["prompt_tokens_details"]["cached_tokens"]))
    assert found[0][0] == found[1][0]
    assert found[1][1] > 0.9 * len(STORY) * 7


def test_others_are_served_while_huge_prompts_arrive(server: RunningServer) -> None:  # 36
    """One is within all limits of bytes, so that it is tokenised for seconds before it is refused."""
    long, huge = (json.dumps({"prompt": "many different words " * n}) for n in (190_000, 600_000))
    assert len(huge) > 12_000_000
    slowest_health = slowest_token = 0.0
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        calls = [
            pool.submit(server.call, "POST", COMPLETIONS, body.encode()) for body in (long, huge)
        ]
        while not all(call.done() for call in calls):
            start = time.monotonic()
            assert server.call("GET", "/health").status == 200
            slowest_health = max(slowest_health, time.monotonic() - start)
            start = time.monotonic()
            assert server.complete("hi", max_tokens=2, ignore_eos=True, stream=True).events
            slowest_token = max(slowest_token, time.monotonic() - start)
    assert slowest_health < 1.0
    assert slowest_token < 3.0
    assert [call.result().status for call in calls] == [400, 413]
    assert "512" in calls[0].result().json["error"]["message"], "the context is named"
