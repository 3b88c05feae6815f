"""How weights are stored by default, against another implementation's float32 values."""

from __future__ import annotations

import json
import pathlib

import pytest

from jaxserve.cli.main import main

pytestmark = pytest.mark.slow  # every program of the engine is compiled where none is kept


@pytest.mark.parametrize("model", ["smollm2_gguf", "gemma3_gguf"])
def test_the_default_is_as_good_as_float32(
    model: str,
    golden: pathlib.Path,
    request: pytest.FixtureRequest,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = request.getfixturevalue(model)
    assert main(["quality", str(path), "--golden", str(golden / "a"), "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["schemes"]
    assert found["weights"] != "float32"
    assert found["rms"] <= 0.1
    assert all(prompt["continues_equally"] for prompt in found["prompts"])
    assert found["good"]
