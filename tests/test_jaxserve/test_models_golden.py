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
from jaxserve.models.registry import read_model_config
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
#: Those whose attention differs; the others repeat one of them and are marked slow.
PAGED = {"llama", "mistral", "gemma3_text", "gemma2"}
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


@pytest.mark.parametrize("name", NAMES)
def test_dense_logits(golden: pathlib.Path, name: str) -> None:
    folder = golden / "b" / name
    _, decoder = load_model(open_golden(folder), make_mesh(1), dtype=jnp.float32)
    prompts, arrays = read_expected(folder)
    sequences = [prompt["prompt_ids"] + prompt["greedy_ids"] for prompt in prompts]
    found = dense_logits(decoder, sequences)
    for number, (prompt, logits) in enumerate(zip(prompts, found, strict=True)):
        check(logits, number, prompt, arrays)


@pytest.mark.parametrize("name", NAMES)
def test_both_spellings_mean_the_same(golden: pathlib.Path, name: str) -> None:
    folder = golden / "b" / name
    current = read_model_config(open_golden(folder, "config.json"))
    legacy = read_model_config(open_golden(folder, "config.legacy.json"))
    assert current == legacy


@pytest.mark.parametrize(
    "name",
    [name if name in PAGED else pytest.param(name, marks=pytest.mark.slow) for name in NAMES],
)
def test_paged_logits(golden: pathlib.Path, name: str) -> None:
    folder = golden / "b" / name
    mesh = make_mesh(1)
    _, decoder = load_model(open_golden(folder), mesh, dtype=jnp.float32)
    prompts, arrays = read_expected(folder)
    sequences = [prompt["prompt_ids"] + prompt["greedy_ids"] for prompt in prompts]
    found = paged_logits(decoder, mesh, sequences, [5, 1, 7, 3, 11])
    for number, (prompt, logits) in enumerate(zip(prompts, found, strict=True)):
        check(logits, number, prompt, arrays)
