"""The load generator against a scripted server: what it sends, and what it measures."""

from __future__ import annotations

import json
import pathlib
import socket
import subprocess
import sys

import pytest
from bench_server import ScriptedServer

from jaxserve.cli.main import main


def bench(server: ScriptedServer, *arguments: str) -> int:
    return main(["bench", "serve", "--base-url", server.url, *arguments])


def measured(server: ScriptedServer, folder: pathlib.Path, *arguments: str) -> dict:
    path = folder / "result.json"
    assert bench(server, "--json", str(path), *arguments) == 0
    return json.loads(path.read_text())


def lines_file(folder: pathlib.Path, *values: dict) -> str:
    path = folder / "in.jsonl"
    path.write_text("\n".join(map(json.dumps, values)))
    return str(path)


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_times_are_those_of_the_script(endpoint: str, tmp_path: pathlib.Path) -> None:
    file = lines_file(tmp_path, {"prompt": "@slow@"})
    with ScriptedServer() as server:
        flags = ["--workload", "jsonl", "--file", file, "--endpoint", endpoint]
        result = measured(server, tmp_path, *flags)
    assert (result["completed"], result["failed"]) == (1, 0)
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (7, 5)
    (request,) = result["requests"]
    assert request["ttft"] == pytest.approx(0.2, abs=0.08)  # a role is no token
    assert len(request["gaps"]) == 3  # and neither is the end
    assert request["gaps"] == pytest.approx([0.1] * 3, abs=0.06)
    assert request["latency"] == pytest.approx(0.5, abs=0.15)
    tpot = (request["latency"] - request["ttft"]) / 4  # five tokens, by the server's count
    assert result["mean_tpot_ms"] == pytest.approx(1000 * tpot)
    assert result["p50_itl_ms"] == pytest.approx(100, abs=60)


def test_failures_are_counted_by_their_reason(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = ["fine", "@refuse@", "@refuse@", "@cut@", "@broken@"]
    file = lines_file(tmp_path, *({"prompt": prompt} for prompt in prompts))
    with ScriptedServer() as server:
        flags = ["--workload", "jsonl", "--file", file, "--goodput", "ttft:5000"]
        result = measured(server, tmp_path, *flags)
    assert (result["completed"], result["failed"]) == (1, 4)
    assert result["good_share"] == 1 / 5
    assert result["errors"] == {
        "HTTP 429: too busy": 2,
        "HttpError: the connection ended in the middle of the answer": 1,
        "error in the stream: the engine is on fire": 1,
    }
    assert "1 of 5 completed, 4 failed" in capsys.readouterr().out


def test_nothing_but_failures_is_a_failure(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = lines_file(tmp_path, {"prompt": "@refuse@"})
    with ScriptedServer() as server:
        assert bench(server, "--workload", "jsonl", "--file", file) == 1
    assert capsys.readouterr().err == "error: all 1 requests failed\n"


def test_256_streams_are_open_at_once(tmp_path: pathlib.Path) -> None:
    file = lines_file(tmp_path, *[{"prompt": "@slow@"}] * 256)
    with ScriptedServer() as server:
        result = measured(server, tmp_path, "--workload", "jsonl", "--file", file)
        assert server.most_open == 256
    assert result["completed"] == 256


def test_concurrency_is_bounded_and_lengths_vary(tmp_path: pathlib.Path) -> None:
    lengths = ["--input-len", "20", "--output-len", "10", "--range-ratio", "0.5"]
    with ScriptedServer() as server:
        measured(server, tmp_path, "--num-prompts", "30", "--max-concurrency", "3", *lengths)
        assert server.most_open == 3
    (_, *bodies) = server.bodies  # the first one warmed the server up
    inputs = [len(body["prompt"]) for body in bodies]
    outputs = [body["max_tokens"] for body in bodies]
    assert 10 <= min(inputs) < max(inputs) <= 30
    assert 5 <= min(outputs) < max(outputs) <= 15
    assert all(body["ignore_eos"] and body["model"] == "scripted" for body in bodies)
    assert all(100 <= token < 32000 for body in bodies for token in body["prompt"])


def test_every_turn_holds_the_conversation(tmp_path: pathlib.Path) -> None:
    flags = ["--workload", "multi-turn", "--turns", "3", "--num-prompts", "1", "--input-len", "4"]
    with ScriptedServer() as server:
        measured(server, tmp_path, *flags, "--endpoint", "chat", "--num-warmups", "0")
    first, second, third = (body["messages"] for body in server.bodies)
    assert [message["role"] for message in third] == ["user", "assistant"] * 2 + ["user"]
    assert third[:3] == second
    assert second[:2] == [*first, {"role": "assistant", "content": "abc"}]


def test_prompts_share_a_prefix_and_nothing_else(tmp_path: pathlib.Path) -> None:
    flags = ["--workload", "shared-prefix", "--prefix-len", "40", "--num-prefixes", "2"]
    with ScriptedServer() as server:
        more = ["--input-len", "8", "--num-prompts", "4", "--max-concurrency", "1"]
        measured(server, tmp_path, *flags, *more, "--num-warmups", "0")
    one, two, three, four = (body["prompt"] for body in server.bodies)
    assert one[:40] == three[:40] != two[:40] == four[:40]
    assert one[40:] != three[40:]
    assert len(one) == 48


def test_a_server_without_usage_has_its_chunks_counted(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with ScriptedServer(usage=False) as server:
        result = measured(server, tmp_path, "--num-prompts", "2")
    assert result["total_output_tokens"] == 6
    assert "the server does not count tokens" in capsys.readouterr().out


def test_a_picture_is_drawn(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("matplotlib", reason="the extra `bench` is not installed")
    path = tmp_path / "result.png"
    with ScriptedServer() as server:
        assert bench(server, "--num-prompts", "5", "--png", str(path)) == 0
    assert path.read_bytes().startswith(b"\x89PNG")


def test_no_server_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and nobody listens
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        assert main(["bench", "serve", "--base-url", url]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: no server answers at 127.0.0.1:")
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--base-url", "localhost:8000"], "--base-url is 'localhost:8000'"),
        (["--request-rate", "0"], "--request-rate is 0.0; it must be above 0"),
        (["--range-ratio", "2"], "--range-ratio is 2.0"),
        (["--goodput", "ttft"], "--goodput is 'ttft'"),
        (["--goodput", "speed:3"], "--goodput is 'speed:3'"),
        (["--num-prompts", "0"], "--num-prompts is 0"),
    ],
)
def test_wrong_flags_are_named(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "serve", *arguments]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "line 1 is not JSON"),
        ('{"prompt": ""}', "line 1 has no prompt that"),
        ('{"prompt": "x", "max_tokens": 0}', "max_tokens is 0"),
        ("\n", "holds 0 requests"),
    ],
)
def test_a_wrong_file_is_named_with_its_line(
    line: str, words: str, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text(line)
    with ScriptedServer() as server:
        assert bench(server, "--workload", "jsonl", "--file", str(path)) == 2
    assert words in capsys.readouterr().err


def test_the_client_does_without_jax() -> None:
    code = (
        "import sys; from jaxserve.cli.main import main; "
        "main(['bench', 'serve', '--base-url', 'http://127.0.0.1:9']); "
        "sys.exit('jax' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "no server answers" in done.stderr
    assert done.returncode == 0, done.stderr
