"""One engine over two processes of this machine: the same tokens, and an end when one is gone."""

import contextlib
import http.client
import json
import signal
import time

import msgspec
import psutil
import pytest
from hosts_answers import ANSWERS, answer_all
from hosts_processes import START_SECONDS, two_hosts
from tiny_chat_model import write_tiny_chat_model

from jaxserve import LLM, SamplingParams
from jaxserve.config import EngineConfig

#: Few buckets, so that little is compiled; too few pages for all, so that some are preempted.
SETTINGS = {
    "quantization": "none",
    "dtype": "float32",
    "max_num_seqs": 4,
    "max_num_batched_tokens": 8,
    "max_model_len": 120,
    "page_size": 4,
    "num_pages": 31,
}
FLAGS = [
    word
    for name, value in (SETTINGS | {"tensor_parallel": 2}).items()
    for word in (f"--{name.replace('_', '-')}", str(value))
]
#: How long it may take until everybody knows that a process died.
PROMPT_SECONDS = 20.0


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_chat_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def alone(model):
    """One process and one device."""
    return LLM(str(model), **SETTINGS)


def test_two_processes_give_the_tokens_of_one_and_a_dead_leader_ends_its_follower(
    model, alone, tmp_path
):
    config = EngineConfig(model=str(model), tensor_parallel=2, **SETTINGS)
    command = ["-m", "hosts_answers", str(model), msgspec.json.encode(config).decode()]
    with two_hosts(tmp_path, command) as (leader, follower):
        expected = answer_all(alone._engine)
        line = leader.wait_text(ANSWERS)
        facts = json.loads(line.removeprefix(ANSWERS))
        assert facts["answers"] == expected
        assert facts["devices"] == 2
        assert facts["compiled"] == 0
        assert facts["preemptions"] > 0
        assert facts["prefix_hits"] > 0
        assert leader.wait() == -signal.SIGKILL
        assert follower.wait(PROMPT_SECONDS) not in (0, None)
        assert "process 1 of 2: follows process 0" in follower.text
        # Mostly both; jax notices the same thing by itself and may be quicker to abort.
        ours, its = "start the command again on all hosts", "distributed service detected fatal"
        assert ours in follower.text or its in follower.text


def test_a_follower_that_dies_ends_open_answers_with_an_error_and_the_server_says_why(
    model, tmp_path
):
    command = ["-m", "jaxserve.cli.main", "serve", str(model), "--port", "0", *FLAGS]
    with two_hosts(tmp_path, command) as (leader, follower):
        url = leader.wait_text("ready: http://").removeprefix("ready: http://")
        family = psutil.Process(leader.process.pid).children(recursive=True)
        events = stream(url, max_tokens=100)
        first = next(events)
        assert "error" not in first
        killed = time.monotonic()
        follower.kill()
        last = list(events)[-1]
        assert last["error"]["message"]
        assert leader.wait(PROMPT_SECONDS) == 1
        assert time.monotonic() - killed < PROMPT_SECONDS
        assert "process 1 (127.0.0.1)" in leader.text
        assert "start the command again on all hosts" in leader.text
        _, alive = psutil.wait_procs(family, timeout=5)
        assert not alive


@pytest.mark.slow
def test_a_batch_over_two_processes_is_that_of_one(model, alone, tmp_path):
    prompts = ["abc" * number for number in (1, 9, 2)]
    sampling = {"max_tokens": 6, "ignore_eos": True}
    lines = [
        {
            "custom_id": str(seed),
            "method": "POST",
            "url": "/v1/completions",
            "body": {"model": model.name, "prompt": prompt, "seed": seed, **sampling},
        }
        for seed, prompt in enumerate(prompts)
    ]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    files = [str(tmp_path / "in.jsonl"), str(tmp_path / "out.jsonl")]
    command = ["-m", "jaxserve.cli.main", "batch", *files, "--model", str(model), *FLAGS]
    with two_hosts(tmp_path, command) as hosts:
        assert [host.wait(START_SECONDS) for host in hosts] == [0, 0], [h.text for h in hosts]
        assert "process 0 has ended, and so does this" in hosts[1].text
    each = [SamplingParams(seed=seed, **sampling) for seed in range(3)]
    answers = alone.generate(prompts, each)
    assert texts(tmp_path / "out.jsonl") == {
        str(seed): answer.text for seed, answer in enumerate(answers)
    }


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_process_that_hangs_counts_as_dead(model, tmp_path, victim):
    command = ["-m", "jaxserve.cli.main", "serve", str(model), "--port", "0", *FLAGS]
    with two_hosts(tmp_path, command) as hosts:
        url = hosts[0].wait_text("ready: http://").removeprefix("ready: http://")
        events = stream(url, max_tokens=100)
        next(events)
        engine = hosts[1].process.pid if victim == 1 else engine_of(hosts[0])
        psutil.Process(engine).suspend()  # its sockets stay open: only beats tell
        assert hosts[1 - victim].wait(60) not in (0, None)
        assert "has been silent for 10 seconds" in hosts[1 - victim].text
        if victim == 1:
            assert list(events)[-1]["error"]["message"]


def engine_of(leader):
    for child in psutil.Process(leader.process.pid).children():
        if "jaxserve.engine.process" in child.cmdline():
            return child.pid
    raise AssertionError("no engine process")


def stream(url, **fields):
    """The events of one streamed completion."""
    body = {"prompt": "hello", "stream": True, "ignore_eos": True, "temperature": 0, **fields}
    connection = http.client.HTTPConnection(url, timeout=60)
    with contextlib.closing(connection):
        connection.request(
            "POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"}
        )
        response = connection.getresponse()
        assert response.status == 200, response.read()
        for line in response:
            if line.startswith(b"data: ") and not line.startswith(b"data: [DONE]"):
                yield json.loads(line[6:])


def texts(path):
    answers = [json.loads(line) for line in path.read_text().splitlines()]
    return {
        answer["custom_id"]: answer["response"]["body"]["choices"][0]["text"] for answer in answers
    }
