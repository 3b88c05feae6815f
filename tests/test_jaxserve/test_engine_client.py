"""The worker's end of the line, against the fake engine as a process."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import gevent
import pytest

from jaxserve.client import EngineClient, HungUpError, Submission
from jaxserve.errors import EngineError, EngineGoneError, RefusedError, RequestError
from jaxserve.messages import Output
from jaxserve.request import GenerationRequest, SamplingParams

TESTS = pathlib.Path(__file__).parent.parent
Engine = Callable[..., "subprocess.Popen[bytes]"]


def request(prompt: str = "hi", *, max_tokens: int = 5) -> GenerationRequest:
    sampling = SamplingParams(max_tokens=max_tokens, seed=1)
    return GenerationRequest(request_id="r", prompt_ids=[*prompt.encode()], sampling=sampling)


@pytest.fixture
def address(tmp_path: pathlib.Path) -> str:
    return f"ipc://{tmp_path}/engine"


@pytest.fixture
def engine(address: str) -> Iterator[Engine]:
    processes: list[subprocess.Popen[bytes]] = []

    def start(config: str = '{"model": "fake"}') -> subprocess.Popen[bytes]:
        command = [sys.executable, str(TESTS / "fake_engine.py"), "--address", address]
        path = os.pathsep.join([str(TESTS.parent), str(TESTS)])
        processes.append(
            subprocess.Popen([*command, "--config", config], env={**os.environ, "PYTHONPATH": path})
        )
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.wait()


@pytest.fixture
def client(address: str) -> Iterator[EngineClient]:
    client = EngineClient(address, dead_after=1.5)
    yield client
    client.close()


def wait_for(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        gevent.sleep(0.02)


def tokens(submission: Submission, count: int) -> dict[int, list[int]]:
    """The ids of all `count` answers, by number."""
    made: dict[int, list[int]] = {index: [] for index in range(count)}
    ended = 0
    while ended < count:
        for index, output in submission.get():
            made[index] += output.token_ids
            ended += output.finish_reason is not None
    return made


def test_life_of_a_line(engine: Engine, client: EngineClient) -> None:
    assert "not running" in (client.not_ready_reason() or "")
    with pytest.raises(EngineGoneError):
        client.submit([request()])
    process = engine()
    assert client.wait_ready(20)
    assert client.ready
    assert client.info is not None
    assert client.info.vocab_size == 260

    submission = client.submit([request("a"), request("b", max_tokens=3)])
    submission.accept()
    made = tokens(submission, 2)
    assert [len(ids) for ids in made.values()] == [5, 3]
    assert "generation_tokens_total" in client.metrics()

    slow = client.submit([request("@pause:50@", max_tokens=1000)])
    slow.accept()
    process.send_signal(signal.SIGKILL)  # noticed at once, not by silence
    started = time.monotonic()
    with pytest.raises(EngineGoneError, match="died"):
        tokens(slow, 1)
    assert time.monotonic() - started < 1.0
    with pytest.raises(EngineGoneError):
        client.metrics()

    process.wait()
    engine()
    wait_for(lambda: client.ready)
    again = client.submit([request("a")])
    again.accept()
    assert tokens(again, 1)[0] == made[0]


def test_silence_counts_as_gone(engine: Engine, client: EngineClient) -> None:
    process = engine()
    assert client.wait_ready(20)
    slow = client.submit([request("@pause:50@", max_tokens=1000)])
    slow.accept()
    process.send_signal(signal.SIGSTOP)
    with pytest.raises(EngineGoneError):
        tokens(slow, 1)
    assert not client.ready
    process.send_signal(signal.SIGCONT)
    wait_for(lambda: client.ready)


def test_refusals_come_before_the_first_token(engine: Engine, client: EngineClient) -> None:
    engine('{"model": "fake", "max_num_seqs": 1, "max_queue_len": 1}')
    assert client.wait_ready(20)
    first = client.submit([request("@pause:50@", max_tokens=1000)])
    first.accept()
    wait_for(lambda: client.num_running == 1)
    both = client.submit([request(), request()])
    with pytest.raises(RefusedError) as caught:
        both.accept()
    assert (caught.value.reason, caught.value.status) == ("queue_full", 429)
    both.close()
    first.close()
    wait_for(lambda: client.num_running + client.num_waiting == 0)


def submission(sent: list[object]) -> Submission:
    made = Submission(sent.append, lambda rid: None)
    made.track(7)
    made.track(8)
    return made


def test_hang_up_wakes_the_reader_and_aborts_once() -> None:
    sent: list[object] = []
    made = submission(sent)
    made.hang_up()
    with pytest.raises(HungUpError):
        made.get()
    made.close()
    assert [message.rids for message in sent] == [[7, 8]]  # type: ignore[attr-defined]


def test_stop_ends_one_request_only() -> None:
    sent: list[object] = []
    made = submission(sent)
    made.stop(1)
    made.deliver(8, Output(8, [1]))
    made.deliver(7, Output(7, [2], "length"))
    assert made.get() == [(0, Output(7, [2], "length"))]
    made.close()
    assert [(message.rids, message.reason) for message in sent] == [([8], "stop")]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("output", "kind", "status"),
    [
        (Output(7, [], "error", error="no", refused="queue_full", status=429), RefusedError, 429),
        (Output(7, [], "error", error="no", refused="draining", status=503), RefusedError, 503),
        (Output(7, [], "error", error="no", refused="too_long", status=400), RequestError, 400),
        (Output(7, [], "error", error="no", status=503), EngineGoneError, 503),
        (Output(7, [], "error", error="no"), EngineError, 500),
    ],
)
def test_failures(output: Output, kind: type[Exception], status: int) -> None:
    made = submission([])
    made.deliver(7, output)
    with pytest.raises(kind, match="no") as caught:
        made.accept()
    assert caught.value.status == status  # type: ignore[attr-defined]


def test_outputs_before_all_are_accepted_are_kept() -> None:
    made = submission([])
    made.deliver(7, Output(7, []))
    made.deliver(7, Output(7, [5]))
    made.deliver(8, Output(8, []))
    made.accept()
    assert made.get() == [(0, Output(7, [5]))]


def test_a_busy_worker_does_not_take_its_own_silence_for_the_engines(
    engine: Engine, client: EngineClient
) -> None:
    engine()
    assert client.wait_ready(20)
    slow = client.submit([request("@pause:50@", max_tokens=60)])
    slow.accept()
    for _ in range(2):
        time.sleep(2.0)  # the whole loop stands still, for longer than the engine may be silent
        gevent.sleep(0)
    assert len(tokens(slow, 1)[0]) == 60
