"""serve.sh: really starts stub servers on fake hosts, waits, and tells how to reach them."""

from __future__ import annotations

import os
import pathlib
import shlex
import socket
import subprocess
import time
import urllib.request
from collections.abc import Callable

import pytest
from fake_cloud import PLACE, FakeCloud


@pytest.fixture
def port() -> str:
    """A port that is free on this machine."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return str(listener.getsockname()[1])


@pytest.fixture
def slice_of_two(make_ready: Callable[..., FakeCloud]) -> FakeCloud:
    """Two hosts that are READY and set up."""
    return make_ready(2, "v5p-16")


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (OSError, FileNotFoundError):
        return False


def test_serve_starts_waits_and_tells_how_to_reach_it(ready: FakeCloud, port: str) -> None:
    words = ["a model's $(name)", "--port", port, "--served-name", 'two  blanks "and" \\']
    result = ready.run("serve.sh", *words)
    assert result.returncode == 0, result.stderr
    ((given, environment, pid),) = ready.jaxserve_calls()
    assert given == ["serve", *words]
    assert environment["JAX_PLATFORMS"] == "tpu,cpu"  # never the processor instead, unnoticed
    assert _alive(pid)  # though the ssh connection has ended
    url = f"http://127.0.0.1:{port}"
    with urllib.request.urlopen(f"{url}/ready", timeout=5) as answer:
        assert answer.status == 200
    tunnel = shlex.split(next(line for line in result.stdout.splitlines() if " -N " in line))
    assert tunnel == [
        *["gcloud", "compute", "tpus", "tpu-vm", "ssh", "my-tpu", *PLACE, "--worker=0"],
        *["--", "-N", "-L", f"{port}:127.0.0.1:{port}"],
    ]
    assert f"curl -N {url}/v1/chat/completions" in result.stdout
    assert '"stream": true' in result.stdout
    assert "using 1 of 8 chips; --tensor-parallel 8" in result.stderr
    assert (ready.host() / "jaxserve-jobs/server/log").read_text().startswith("words of the log")


def test_serve_again_replaces_the_server_and_stop_is_idempotent(
    ready: FakeCloud, port: str
) -> None:
    for _ in range(2):
        result = ready.run("serve.sh", "m", "--port", port)
        assert result.returncode == 0, result.stderr
    assert "stopped the server" in result.stderr
    first, second = (call[2] for call in ready.jaxserve_calls())
    assert not _alive(first)
    assert _alive(second)
    assert (ready.host() / "jaxserve-jobs/server/log.before").exists()

    assert "stopped the server" in ready.run("serve.sh", "--stop").stderr
    assert not _alive(second)
    again = ready.run("serve.sh", "--stop")
    assert again.returncode == 0
    assert "no server runs here" in again.stderr


def test_a_server_that_ends_shows_its_log(ready: FakeCloud, port: str) -> None:
    (ready.host() / "behaviour").write_text("die")
    result = ready.run("serve.sh", "m", "--port", port)
    assert result.returncode == 1
    assert "the model does not fit" in result.stderr
    assert "the server ended with 3, log above" in result.stderr
    assert result.stdout == ""


def test_a_server_that_is_not_ready_in_time_shows_its_log(ready: FakeCloud, port: str) -> None:
    (ready.host() / "behaviour").write_text("hang")
    result = ready.run("serve.sh", "--timeout", "0", "m", "--port", port)
    assert result.returncode == 1
    assert "jaxserve-jobs/server/log:" in result.stderr
    assert "not ready after 0 s, log above; it goes on: serve.sh --stop ends it" in result.stderr


def test_a_slice_runs_the_same_command_on_all_hosts(slice_of_two: FakeCloud, port: str) -> None:
    words = ["m", "--tensor-parallel", "8", "--port", port]
    result = slice_of_two.run("serve.sh", *words)
    assert result.returncode == 0, result.stderr
    calls = [slice_of_two.jaxserve_calls(worker)[0] for worker in range(2)]
    for given, environment, pid in calls:
        assert given == ["serve", *words, "--distributed", "auto"]
        assert len(environment["JAXSERVE_HOSTS_TOKEN"]) == 32
        assert _alive(pid)
    assert calls[0][1] == calls[1][1]  # one token, on no command line
    token = calls[0][1]["JAXSERVE_HOSTS_TOKEN"]
    assert not any(token in word for call in slice_of_two.calls() for word in call)
    assert all("--worker=all" in call for call in slice_of_two.calls("tpu-vm ssh", "tpu-vm scp"))
    assert "--worker=0 -- -N" in result.stdout


def test_a_follower_that_dies_ends_the_start(slice_of_two: FakeCloud, port: str) -> None:
    (slice_of_two.host(0) / "behaviour").write_text("hang")
    (slice_of_two.host(1) / "behaviour").write_text("die")
    result = slice_of_two.run("serve.sh", "m", "--tensor-parallel", "8", "--port", port)
    assert result.returncode == 1
    assert "host-1: the last lines of" in result.stderr
    assert "the server ended with 3" in result.stderr
    leader = (slice_of_two.host(0) / "jaxserve-jobs/server/pid").read_text()
    assert not _alive(int(leader))  # it does not wait for ever


def test_a_slice_needs_tensor_parallel(cloud: FakeCloud) -> None:
    cloud.configure(hosts=4)
    cloud.have_node(accelerator="v6e-16")
    result = cloud.run("serve.sh", "m")
    assert result.returncode == 2
    assert "my-tpu has 4 hosts and 16 chips: say --tensor-parallel 16" in result.stderr
    assert not cloud.calls("tpu-vm ssh")


def test_flags_of_the_user_are_not_given_twice(cloud: FakeCloud) -> None:
    cloud.configure(hosts=2)
    cloud.have_node(accelerator="v5p-16")
    flags = ["--tensor-parallel=4", "--distributed=off", "--dry-run-not"]
    result = cloud.run("serve.sh", "--dry-run", "m", *flags, ACCELERATOR_TYPE="v5p-16")
    assert "on_host.sh\\ start\\ server\\ -\\ m\\ --tensor-parallel=4" in result.stdout
    assert "auto" not in result.stdout


def test_serve_before_setup_tells_so(make_cloud: Callable[..., FakeCloud]) -> None:
    cloud = make_cloud(execute=True)
    cloud.have_node()
    assert cloud.run("sync.sh").returncode == 0
    result = cloud.run("serve.sh", "m")
    assert result.returncode == 1
    assert "jaxserve is not installed here: tpu_scripts/setup.sh first" in result.stderr


def test_hosts_that_vanish_while_waiting(ready: FakeCloud, port: str) -> None:
    (ready.host() / "behaviour").write_text("hang")
    failure = {"match": "status server", "before_node_state": "PREEMPTED"}
    ready.fail("tpu-vm ssh", 255, "no route to host", **failure)
    result = ready.run("serve.sh", "m", "--port", port)
    assert result.returncode == 1
    assert "no route to host" in result.stderr
    assert "TPU VM 'my-tpu' is PREEMPTED: tpu_scripts/delete.sh, create.sh" in result.stderr


def test_a_moment_without_connection_is_survived(ready: FakeCloud, port: str) -> None:
    ready.fail("tpu-vm ssh", 255, match="status server", times=2)
    result = ready.run("serve.sh", "m", "--port", port)
    assert result.returncode == 0, result.stderr
    assert "do not answer (try 2 of 5)" in result.stderr


def test_a_stale_pid_file_is_no_server(ready: FakeCloud, port: str) -> None:
    jobs = ready.host() / "jaxserve-jobs" / "server"
    jobs.mkdir(parents=True)
    with subprocess.Popen(["sleep", "60"]) as other:
        (jobs / "pid").write_text(f"{other.pid}\n")  # belongs to another program now
        result = ready.run("serve.sh", "--stop")
        (jobs / "pid").unlink()
        assert other.poll() is None
        other.kill()
    assert "no server runs here" in result.stderr


def test_a_server_that_does_not_end_is_killed(ready: FakeCloud) -> None:
    (ready.host() / "behaviour").write_text("hang")
    stub = ready.host() / "jaxserve-venv/bin/jaxserve"
    text = stub.read_text().replace("import json", "import signal, json", 1)
    text = text.replace(
        "home =", "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nhome =", 1
    ).replace("time.sleep(60)", "time.sleep(20)")
    stub.write_text(text)
    # The grace is read on the host; a short one through its environment.
    on_host = ready.host() / "jaxserve-source/tpu_scripts/on_host.sh"
    on_host.write_text(on_host.read_text().replace("GRACE_SECONDS:-45", "GRACE_SECONDS:-0"))
    ready.run("serve.sh", "--timeout", "0", "m")
    pid = ready.jaxserve_calls()[0][2]
    result = ready.run("serve.sh", "--stop")
    assert "did not end within 0 s and was killed" in result.stderr
    deadline = time.monotonic() + 5
    while _alive(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not _alive(pid)
