"""Every family against independent logits: dense, and through pages in odd chunks."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from model_steps import dense_logits, open_golden, paged_logits

from jaxserve.models.loading import load_model
from jaxserve.parallel.mesh import make_mesh

NAMES = [
    "llama",
    "llama3_rope",
    "llama_linear_rope",
    "llama_yarn_rope",
    "mistral",
    "gemma3_text",
    "gemma2",
    "qwen2",
    "qwen3",
    "smollm3",
    "phi3",
]
TOLERANCE = 2e-4
#: A step whose two best logits are closer may go either way, and everything after it.
NEAR_TIE = 1e-3


def read_expected(folder: pathlib.Path) -> tuple[list[dict[str, Any]], Any]:
    return json.loads((folder / "expected.json").read_text())["prompts"], np.load(
        folder / "logits.npz"
    )


def check(logits: np.ndarray, number: int, prompt: dict[str, Any], arrays: Any) -> None:
    """Logits of prompt + greedy continuation: values at the stored positions, and the choices."""
    wanted = arrays[f"logits_{number}"]
    error = np.abs(logits[arrays[f"pos_{number}"]] - wanted).max()
    assert error < TOLERANCE, f"prompt {number}: {error}"
    first = len(prompt["prompt_ids"]) - 1
    for step, (token, gap) in enumerate(
        zip(prompt["greedy_ids"], prompt["greedy_top2_logit_gap"], strict=True)
    ):
        if gap < NEAR_TIE:
            break
        assert logits[first + step].argmax() == token, f"prompt {number}, step {step}"


@pytest.mark.parametrize("config_name", ["config.json", "config.legacy.json"])
@pytest.mark.parametrize("name", NAMES)
def test_dense_logits(golden: pathlib.Path, name: str, config_name: str) -> None:
    folder = golden / "b" / name
    reader = open_golden(folder, config_name)
    if config_name == "config.legacy.json":
        # Same shape under both spellings; then the logits are those of the other case.
        mesh = make_mesh(1)
        legacy, _ = load_model(reader, mesh, dtype=jnp.float32)
        current, _ = load_model(open_golden(folder), mesh, dtype=jnp.float32)
        assert legacy == current
        return
    _, decoder = load_model(reader, make_mesh(1), dtype=jnp.float32)
    prompts, arrays = read_expected(folder)
    for number, prompt in enumerate(prompts):
        logits = dense_logits(decoder, prompt["prompt_ids"] + prompt["greedy_ids"])
        check(logits, number, prompt, arrays)


@pytest.mark.parametrize("name", NAMES)
def test_paged_logits(golden: pathlib.Path, name: str) -> None:
    folder = golden / "b" / name
    mesh = make_mesh(1)
    _, decoder = load_model(open_golden(folder), mesh, dtype=jnp.float32)
    prompts, arrays = read_expected(folder)
    sequences = [prompt["prompt_ids"] + prompt["greedy_ids"] for prompt in prompts]
    found = paged_logits(decoder, mesh, sequences, [5, 1, 7, 3, 11])
    for number, (prompt, logits) in enumerate(zip(prompts, found, strict=True)):
        check(logits, number, prompt, arrays)
