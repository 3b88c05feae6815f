"""batch.sh and bench.sh: files there and back, resuming, one job at a time."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable

import pytest
from fake_cloud import FakeCloud


@pytest.fixture
def requests(tmp_path: pathlib.Path) -> pathlib.Path:
    """Three requests, in a file whose name needs care."""
    path = tmp_path / "in put:1's.jsonl"
    path.write_text("".join(json.dumps({"custom_id": f"r{i}"}) + "\n" for i in range(3)))
    return path


@pytest.fixture
def answers(tmp_path: pathlib.Path) -> pathlib.Path:
    """Where they are to go."""
    return tmp_path / "out put:1's.jsonl"


def _ids(path: pathlib.Path) -> list[str]:
    return [json.loads(line)["custom_id"] for line in path.read_text().splitlines()]


def test_batch_there_and_back(
    ready: FakeCloud, requests: pathlib.Path, answers: pathlib.Path
) -> None:
    flags = ["--max-model-len", "2 000"]
    result = ready.run("batch.sh", "a model", str(requests), str(answers), *flags)
    assert result.returncode == 0, result.stderr
    assert _ids(answers) == ["r0", "r1", "r2"]
    given = ready.jaxserve_calls()[0][0]
    assert given[0] == "batch"
    assert given[3:] == ["--model", "a model", *flags]
    assert "3 answers to 3 requests" in result.stderr


def test_batch_that_runs_is_found_again_and_answers_so_far_come_back(
    ready: FakeCloud, requests: pathlib.Path, answers: pathlib.Path
) -> None:
    words = ["batch.sh", "m", str(requests), str(answers)]
    (ready.host() / "behaviour").write_text("stop after 2")
    # The connection is lost once the answers so far have come back: five looks in a row fail.
    ready.fail("tpu-vm ssh", 255, match="status batch", when_exists=str(answers))
    first = ready.run(*words, SAVE_SECONDS="0")
    assert first.returncode == 1
    assert "do not answer, though it is READY; what was started there goes on" in first.stderr
    assert _ids(answers) == ["r0", "r1"]
    ready.configure(failures=[])

    # The second command ends with the run, which is stopped from a third.
    assert "stopped the batch" in ready.run("batch.sh", "--stop").stderr
    (ready.host() / "behaviour").write_text("")
    second = ready.run(*words)
    assert second.returncode == 0, second.stderr
    assert _ids(answers) == ["r0", "r1", "r2"]


def test_batch_that_runs_is_not_started_twice(
    ready: FakeCloud, requests: pathlib.Path, answers: pathlib.Path
) -> None:
    words = ["batch.sh", "m", str(requests), str(answers)]
    (ready.host() / "behaviour").write_text("stop after 2")
    ready.fail("tpu-vm ssh", 255, match="status batch", after=1)
    assert ready.run(*words).returncode == 1
    ready.forget_calls()
    ready.fail("tpu-vm ssh", 255, match="status batch", after=1)
    again = ready.run(*words)
    assert "this batch runs there already" in again.stderr
    assert not ready.calls("tpu-vm scp")
    ready.configure(failures=[])
    other = ready.run("batch.sh", "another", str(requests), str(answers))
    assert other.returncode == 1
    assert "another batch runs here: tpu_scripts/batch.sh --stop ends it" in other.stderr
    assert len(ready.jaxserve_calls()) == 1


def test_batch_goes_on_after_a_failure(
    ready: FakeCloud, requests: pathlib.Path, answers: pathlib.Path
) -> None:
    words = ["batch.sh", "m", str(requests), str(answers)]
    (ready.host() / "behaviour").write_text("fail after 2")
    result = ready.run(*words)
    assert result.returncode == 1
    assert "out of memory" in result.stderr
    assert "the batch ended with 1 after 2 of 3 answers" in result.stderr
    assert _ids(answers) == ["r0", "r1"]
    before = answers.read_text()

    (ready.host() / "behaviour").write_text("")
    again = ready.run(*words)
    assert again.returncode == 0, again.stderr
    assert _ids(answers) == ["r0", "r1", "r2"]
    assert answers.read_text().startswith(before)  # not answered twice


def test_batch_goes_on_with_answers_of_a_tpu_vm_that_is_gone(
    ready: FakeCloud, requests: pathlib.Path, answers: pathlib.Path
) -> None:
    before = json.dumps({"custom_id": "r0", "by": "another machine"}) + "\n"
    answers.write_text(before)
    result = ready.run("batch.sh", "m", str(requests), str(answers))
    assert result.returncode == 0, result.stderr
    assert "going on after the 1 answers in" in result.stderr
    assert answers.read_text().startswith(before)
    assert _ids(answers) == ["r0", "r1", "r2"]


def test_batch_on_a_slice(
    make_ready: Callable[..., FakeCloud], requests: pathlib.Path, answers: pathlib.Path
) -> None:
    cloud = make_ready(2, "v5p-16")
    words = ["batch.sh", "m", str(requests), str(answers)]
    without = cloud.run(*words)
    assert without.returncode == 2
    assert "say --tensor-parallel 8" in without.stderr
    (cloud.host(1) / "behaviour").write_text("follow")
    result = cloud.run(*words, "--tensor-parallel", "8")
    assert result.returncode == 0, result.stderr
    assert _ids(answers) == ["r0", "r1", "r2"]  # of the leader; the follower writes none
    for worker in range(2):
        given, environment, _ = cloud.jaxserve_calls(worker)[0]
        assert given[3:] == ["--model", "m", "--tensor-parallel", "8", "--distributed", "auto"]
        assert environment["JAXSERVE_HOSTS_TOKEN"]


def test_bad_files_are_refused_before_anything_runs(
    cloud: FakeCloud, requests: pathlib.Path, answers: pathlib.Path
) -> None:
    for words, message in [
        (["m", "nowhere.jsonl", str(answers)], "nowhere.jsonl is no file that can be read"),
        (["m", str(requests), str(requests)], "is the input, too"),
        (["m", str(requests), "no/such/folder"], "its folder is not there"),
        (["m", str(requests)], "batch.sh MODEL IN.jsonl OUT.jsonl"),
        (["--what"], "what is '--what'?"),
    ]:
        result = cloud.run("batch.sh", *words)
        assert result.returncode == 2
        assert message in result.stderr
    assert not cloud.calls()


def test_bench_brings_the_table_back(ready: FakeCloud) -> None:
    result = ready.run("bench.sh", "--filter", "a b")
    assert result.returncode == 0, result.stderr
    assert result.stdout == "| op | time | --filter a b\n"
    assert (ready.host() / "jaxserve-jobs/bench/log").read_text() == "noise\n"
    bad = ready.run("bench.sh", "--bad")
    assert bad.returncode == 1
    assert bad.stdout == ""
    assert "the benchmark ended with 1, log above" in bad.stderr


def test_bench_on_a_slice_runs_on_all_hosts(make_ready: Callable[..., FakeCloud]) -> None:
    cloud = make_ready(2, "v5p-16")
    result = cloud.run("bench.sh")
    assert result.returncode == 0, result.stderr
    assert result.stdout == "| op | time |\n"
    assert all((cloud.host(worker) / "jaxserve-jobs/bench/table").exists() for worker in range(2))


def test_bench_needs_the_benchmark(cloud: FakeCloud) -> None:
    (cloud.checkout / "benchmarks/kernels.py").unlink()
    result = cloud.run("bench.sh")
    assert result.returncode == 1
    assert "there is no benchmarks/kernels.py" in result.stderr


def test_one_job_at_a_time(ready: FakeCloud, requests: pathlib.Path, answers: pathlib.Path) -> None:
    (ready.host() / "behaviour").write_text("hang")
    ready.run("serve.sh", "--timeout", "0", "m")
    for words in (["batch.sh", "m", str(requests), str(answers)], ["bench.sh"]):
        result = ready.run(*words)
        assert result.returncode == 1
        assert "a server has the TPU: tpu_scripts/serve.sh --stop ends it" in result.stderr
    assert len(ready.jaxserve_calls()) == 1
