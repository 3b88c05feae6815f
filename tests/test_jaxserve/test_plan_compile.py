"""`jaxserve plan` from end to end: a small model compiled for TPUs that are not here.

`pytest -m compile`; needs libtpu, and no TPU.
"""

from __future__ import annotations

import json
import pathlib
from typing import Any

import pytest

from jaxserve.cli.main import main
from pallas_kernels import gpu_targets, tpu_targets

pytestmark = [pytest.mark.compile, pytest.mark.timeout(900)]

MEBIBYTE = 2**20
NUM_LAYERS, WIDTH, FFN, HEADS, HEAD_SIZE, VOCABULARY = 10, 512, 1024, 8, 128, 2048
MODEL = {
    "model_type": "llama",
    "hidden_size": WIDTH,
    "intermediate_size": FFN,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "head_dim": HEAD_SIZE,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
#: Elements of all matrices.
ELEMENTS = NUM_LAYERS * (4 * WIDTH * HEADS * HEAD_SIZE + 3 * WIDTH * FFN) + 2 * VOCABULARY * WIDTH


@pytest.fixture
def model(tmp_path: pathlib.Path) -> pathlib.Path:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(MODEL))
    return file


def plan(
    capsys: pytest.CaptureFixture[str], model: pathlib.Path, topology: str, *arguments: str
) -> dict[str, Any]:
    settings = ["--max-seqs", "16", "--context", "1024", "--max-num-batched-tokens", "32"]
    command = ["plan", str(model), "--topology", topology, *settings, "--json", *arguments]
    assert main(command) == 0, capsys.readouterr().err
    made: dict[str, Any] = json.loads(capsys.readouterr().out)
    return made


@pytest.mark.skipif(not tpu_targets.is_installed(), reason=f"no libtpu: {tpu_targets.PIP_COMMAND}")
@pytest.mark.parametrize(("topology", "devices"), [("v5e:1x1", 1), ("v5e:2x2", 4), ("v6e:2x4", 8)])
def test_a_small_model_on_tpus(
    capsys: pytest.CaptureFixture[str], model: pathlib.Path, topology: str, devices: int
) -> None:
    made = plan(capsys, model, topology)
    assert "tpu" in made["kernels"]["paged_attention"]
    assert made["compiled"]["depths"] == [4, 8]
    assert made["compiled"]["in_place"]
    assert made["num_devices"] == devices
    memory = made["memory"]
    share = 2 * ELEMENTS / devices  # norms, inputs and what tiles round up come on top
    assert share < memory["weights"] < 1.02 * share + 0.5 * MEBIBYTE
    assert 0 < memory["programs"] < 300 * MEBIBYTE
    assert 0 < memory["temporaries"] < 32 * MEBIBYTE
    assert memory["state"] >= 16 * VOCABULARY * 4  # how often each sequence had each token
    parts = sum(size for name, size in memory.items() if name != "usable")
    page_slack = memory["usable"] / 50  # pages come in lots of 128
    assert memory["usable"] - page_slack < parts <= memory["usable"]
    # A page of 16 tokens: keys and values of every layer, of this device's heads.
    page = NUM_LAYERS * 2 * 16 * (HEADS // devices) * HEAD_SIZE * 2
    assert made["capacity"]["page_bytes"] == page
    assert memory["pool"] == made["capacity"]["num_pages"] * page
    sums = made["collectives"].get("all-reduce", {"count": 0})["count"]
    assert sums == (0 if devices == 1 else 2 * NUM_LAYERS + 1)
    assert made["bound"]["seconds"] > 0
    assert made["bound"]["limited_by"] == "memory"


@pytest.mark.skipif(not tpu_targets.is_installed(), reason=f"no libtpu: {tpu_targets.PIP_COMMAND}")
def test_two_depths_say_what_all_layers_do(
    capsys: pytest.CaptureFixture[str], model: pathlib.Path
) -> None:
    guessed = plan(capsys, model, "v6e:2x4")
    exact = plan(capsys, model, "v6e:2x4", "--exact")
    assert exact["compiled"]["depths"] == [NUM_LAYERS]
    assert guessed["memory"]["weights"] == exact["memory"]["weights"]
    assert guessed["collectives"] == exact["collectives"]
    assert guessed["bound"] == exact["bound"]
    assert guessed["memory"]["programs"] == pytest.approx(exact["memory"]["programs"], rel=0.25)
    assert guessed["memory"]["pool"] == pytest.approx(exact["memory"]["pool"], rel=0.01)


@pytest.mark.skipif(not gpu_targets.is_installed(), reason=f"no plugin: {gpu_targets.PIP_COMMAND}")
def test_a_small_model_on_gpus(capsys: pytest.CaptureFixture[str], model: pathlib.Path) -> None:
    made = plan(capsys, model, "h100:8")
    assert made["num_devices"] == 8
    assert made["memory"]["weights"] > 2 * ELEMENTS / 8
    assert made["capacity"]["page_bytes"] == NUM_LAYERS * 2 * 16 * HEAD_SIZE * 2
    assert made["collectives"]["all-reduce"]["count"] >= 2 * NUM_LAYERS
