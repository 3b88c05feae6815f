"""schemathesis asks a running server whatever /openapi.json allows, and much that it does not."""

from __future__ import annotations

import pathlib
import subprocess
import sys

import pytest
from running_server import RunningServer

from jaxserve.config import EngineConfig, ServerConfig

#: Checks that are wrong here, each with its reason.
_NOT_CHECKED = (
    # Not all that a body must fulfil can be said in a schema: ids of files, a last message of the
    # user, fields that exclude each other. Such bodies are refused, and shall be.
    "positive_data_acceptance",
    # GET and DELETE of /v1/responses/input_tokens are those of a response with that id.
    "allow_header_conformance",
)
#: Enough to reach every operation in all phases within half a minute on two cores.
_MAX_EXAMPLES, _SEED = 15, 1
_MAX_SECONDS = 60


@pytest.mark.slow
def test_nothing_breaks_the_server(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("schemathesis", reason="the extra `fuzz` is not installed")
    engine = EngineConfig(model="fake", max_model_len=600, embeddings="mean", prompt_logprobs=True)
    config = ServerConfig(port=0, data_dir=str(tmp_path / "data"))
    server = RunningServer(tmp_path, engine=engine, server=config)
    try:
        url = server.wait_ready().url
        command = [sys.executable, "-m", "schemathesis.cli", "run", f"{url}/openapi.json"]
        command += ["--max-examples", str(_MAX_EXAMPLES), "--seed", str(_SEED)]
        # One worker: with two, which requests are made depends on their turns, and takes as long.
        command += ["--workers", "1", "--request-timeout", "20", "--generation-database", "none"]
        command += ["--exclude-checks", ",".join(_NOT_CHECKED)]
        command += ["--suppress-health-check", "all", "--no-color"]
        found = subprocess.run(
            command, capture_output=True, text=True, timeout=_MAX_SECONDS, cwd=tmp_path, check=False
        )
        assert found.returncode == 0, found.stdout[-6000:] + found.stderr[-2000:]
        paths = server.call("GET", "/openapi.json").json["paths"]
        operations = sum(map(len, paths.values())) - 1  # the document itself is only read
        assert f"{operations} selected / {operations} total" in found.stdout
        assert found.stdout.count(f"{operations} passed") == 2, (
            "coverage and fuzzing reach them all"
        )
        assert server.chat("@say:still there@").json["choices"][0]["finish_reason"] == "stop"
        assert "Traceback" not in server.errors.read_text()
    finally:
        server.stop()
