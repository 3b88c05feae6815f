"""Exit codes, one-line errors, and a start that does not wait for jax."""

from __future__ import annotations

import argparse
import os
import pathlib
import subprocess
import sys
import time

import pytest

import jaxserve
from jaxserve.cli import generate
from jaxserve.cli.main import main
from jaxserve.errors import ResourceError, UsageError

ROOT = pathlib.Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "jaxserve.cli.main"]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}


def run_with(monkeypatch: pytest.MonkeyPatch, error: BaseException, *arguments: str) -> int:
    """`generate x`, whose work raises `error`."""

    def run(options: argparse.Namespace) -> int:
        raise error

    monkeypatch.setattr(generate, "run", run)
    return main([*arguments, "generate", "x"])


def test_help_needs_neither_jax_nor_a_server() -> None:
    program = (
        "import sys\n"
        "from jaxserve.cli.main import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "heavy = {'jax', 'flax', 'numpy', 'flask', 'gevent', 'zmq', 'server'} & sys.modules.keys()\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], env=ENVIRONMENT, capture_output=True, text=True, check=True
    )
    assert "serve" in done.stdout


def test_serve_keeps_jax_out_of_the_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    program = (
        "import sys\n"
        "import server.launch\n"
        "seen = []\n"
        "server.launch.serve = lambda engine, http, hosts: seen.append((engine, http)) or 7\n"
        "from jaxserve.cli.main import main\n"
        "assert main(['serve', 'm', '--port', '0', '--max-num-seqs', '3']) == 7\n"
        "(engine, http), = seen\n"
        "assert (engine.model, engine.max_num_seqs, http.port) == ('m', 3, 0)\n"
        "assert not {'jax', 'flax', 'gevent'} & sys.modules.keys()\n"
    )
    subprocess.run([sys.executable, "-c", program], env=ENVIRONMENT, check=True)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"jaxserve {jaxserve.__version__}\n"


def test_no_verb_shows_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "doctor" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (ResourceError("port 1 is in use;\n use another"), 1, "port 1 is in use; use another"),
        (UsageError("--x is wrong"), 2, "--x is wrong"),
        (ValueError("odd"), 1, "ValueError: odd; run it again with --debug for the traceback"),
    ],
)
def test_an_error_is_one_line(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: Exception,
    code: int,
    words: str,
) -> None:
    assert run_with(monkeypatch, error) == code
    assert capsys.readouterr().err == f"error: {words}\n"


@pytest.mark.parametrize("arguments", [["--debug", "generate", "x"], ["generate", "x", "--debug"]])
def test_debug_lets_the_traceback_through(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    def run(options: argparse.Namespace) -> int:
        raise ResourceError("no")

    monkeypatch.setattr(generate, "run", run)
    with pytest.raises(ResourceError):
        main(arguments)


def test_ctrl_c_is_130_and_says_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_with(monkeypatch, KeyboardInterrupt()) == 130
    assert capsys.readouterr().err == ""


def test_a_reader_that_leaves_is_no_traceback() -> None:
    program = (
        "import sys\n"
        "from jaxserve.cli import main as cli, pull\n"
        "def run(options):\n"
        "    for n in range(100000): print('x' * 100)\n"
        "    return 0\n"
        "pull.run = run\n"
        "sys.exit(cli.main(['pull']))\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait() == 141


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["generate", "x", "--model", "/no/such/model.gguf"], 1, "/no/such/model.gguf"),
        (["generate", "x", "--model", "smollm3"], 1, "no model is called 'smollm3'"),
        (["convert", "/no/such", "/tmp/x"], 1, "/no/such"),
        (["pull", "nothing-like-it"], 1, "no model is called 'nothing-like-it'"),
        (["pull"], 2, "--list"),
        (["serve", "--page-size", "3"], 2, "--page-size is 3"),
        (["batch", "/no/such/in.jsonl", "/tmp/out.jsonl"], 1, "cannot read /no/such/in.jsonl"),
    ],
)
def test_what_a_user_can_get_wrong(
    capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, words: str
) -> None:
    assert main(arguments) == code
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert words in error


def test_pull_lists_the_table(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    monkeypatch.setenv("JAXSERVE_CACHE", str(tmp_path))
    assert main(["pull", "--list"]) == 0
    out = capsys.readouterr().out
    assert "smollm2-135m-instruct" in out
    assert "gemma-3-270m" in out
    assert "pulled" not in out


def test_pull_prints_where_the_model_is(
    capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path
) -> None:
    assert main(["pull", str(tmp_path)]) == 0  # a path needs no network
    assert capsys.readouterr().out == f"{tmp_path}\n"


def test_a_port_in_use_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    from server.launch import bind

    with bind("127.0.0.1", 0) as taken:
        port = str(taken.getsockname()[1])
        start = time.monotonic()
        assert main(["serve", "--port", port]) == 1
    assert time.monotonic() - start < 5
    assert f"cannot listen on 127.0.0.1:{port}" in capsys.readouterr().err
