"""schemathesis asks a running server whatever /openapi.json allows, and much that it does not."""

from __future__ import annotations

import pathlib
import subprocess
import sys

import pytest
from running_server import RunningServer

from jaxserve.config import EngineConfig, ServerConfig

#: Not checked: that every body of the schema is accepted (ranges are in words), and headers that
#: only come with keys. GET and DELETE /v1/responses/input_tokens are those of a response's id.
_CHECKS = "positive_data_acceptance,missing_required_header,allow_header_conformance"


@pytest.mark.slow
def test_nothing_breaks_the_server(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("schemathesis", reason="the extra `fuzz` is not installed")
    engine = EngineConfig(model="fake", max_model_len=600, embeddings="mean", prompt_logprobs=True)
    config = ServerConfig(port=0, data_dir=str(tmp_path / "data"))
    server = RunningServer(tmp_path, engine=engine, server=config)
    try:
        url = server.wait_ready().url
        command = [sys.executable, "-m", "schemathesis.cli", "run", f"{url}/openapi.json"]
        command += ["--max-examples", "25", "--workers", "2", "--request-timeout", "20"]
        command += ["--exclude-checks", _CHECKS, "--suppress-health-check", "all", "--no-color"]
        found = subprocess.run(
            command, capture_output=True, text=True, timeout=280, cwd=tmp_path, check=False
        )
        assert found.returncode == 0, found.stdout[-6000:] + found.stderr[-2000:]
        assert server.chat("@say:still there@").json["choices"][0]["finish_reason"] == "stop"
        assert "Traceback" not in server.errors.read_text()
    finally:
        server.stop()
