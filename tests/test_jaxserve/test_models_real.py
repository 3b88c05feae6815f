"""Real models in float32 against log-probabilities from another implementation."""

from __future__ import annotations

import functools
import json
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from model_steps import COMPILER_OPTIONS

from checkpoints.open import open_checkpoint
from jaxserve.layers.attention import DenseAttend
from jaxserve.models.loading import load_model
from jaxserve.parallel.mesh import make_mesh

TOLERANCE = 2e-3
#: Hidden rows whose logits are made at a time.
LOGIT_ROWS = 64
#: Rows of the short prompts with their continuations; one program for all.
SHORT_ROWS = 160
SHORT = [
    "short_en",
    "code_py",
    "multilingual_cjk",
    "emoji",
    "digits",
    "chat_default_system",
    "chat_multi_turn",
]
SMOLLM2 = [*SHORT[:3], *(pytest.param(name, marks=pytest.mark.slow) for name in SHORT[3:])]
GEMMA3 = [*(pytest.param(name, marks=pytest.mark.slow) for name in SHORT[:5])]
LONG_MARKS = [pytest.mark.slow, pytest.mark.timeout(1500)]
LONG = [pytest.param(name, marks=LONG_MARKS) for name in ("over_window_700", "long_4000")]

Score = Callable[[list[int]], np.ndarray]


def make_score(path: pathlib.Path) -> Score:
    """A function from token ids to log-probabilities, float32 [T, V]."""
    _, decoder = load_model(open_checkpoint(path), make_mesh(1), dtype=jnp.float32)
    graph, state = nnx.split(decoder)

    def run(state: Any, tokens: jax.Array) -> jax.Array:
        decoder = nnx.merge(graph, state)
        out: jax.Array = decoder(tokens, jnp.arange(tokens.shape[0]), DenseAttend())
        return out

    run_short = jax.jit(run, compiler_options=COMPILER_OPTIONS)
    run_long = jax.jit(run)

    @functools.partial(jax.jit, compiler_options=COMPILER_OPTIONS)
    def log_probabilities(state: Any, hidden: jax.Array) -> jax.Array:
        return jax.nn.log_softmax(nnx.merge(graph, state).logits(hidden))

    def score(ids: list[int]) -> np.ndarray:
        short = len(ids) <= SHORT_ROWS
        rows = SHORT_ROWS if short else -(-len(ids) // LOGIT_ROWS) * LOGIT_ROWS
        hidden = (run_short if short else run_long)(
            state, jnp.array(ids + [0] * (rows - len(ids)), jnp.int32)
        )
        hidden = jnp.pad(hidden, ((0, -rows % LOGIT_ROWS), (0, 0)))
        return np.concatenate(
            [
                np.asarray(log_probabilities(state, hidden[row : row + LOGIT_ROWS]))
                for row in range(0, len(ids), LOGIT_ROWS)
            ]
        )[: len(ids)]

    return score


@pytest.fixture(scope="module")
def smollm2(smollm2_gguf: pathlib.Path) -> Score:
    return make_score(smollm2_gguf)


@pytest.fixture(scope="module")
def gemma3(gemma3_gguf: pathlib.Path) -> Score:
    return make_score(gemma3_gguf)


def check(score: Score, golden: pathlib.Path, file: str, name: str) -> None:
    prompts = json.loads((golden / "a" / file).read_text())["prompts"]
    prompt = next(prompt for prompt in prompts if prompt["name"] == name)
    ids, greedy = prompt["ids"], prompt["greedy"]
    found = score(ids + greedy["ids"])
    for position in prompt["positions"]:
        row = found[position["pos"]]
        error = np.abs(row[position["top10_ids"]] - np.array(position["top10_logprobs"])).max()
        assert error < TOLERANCE, position["pos"]
    if "prompt_logprob_sum" in prompt:
        total = float(found[np.arange(len(ids) - 1), ids[1:]].astype(np.float64).sum())
        assert abs(total - prompt["prompt_logprob_sum"]) < 1e-3 * len(ids)
    for step, token in enumerate(greedy["ids"]):
        if step not in greedy["near_tie_steps"]:
            assert found[len(ids) - 1 + step].argmax() == token, step


@pytest.mark.parametrize("name", [*SMOLLM2, *LONG])
def test_smollm2(smollm2: Score, golden: pathlib.Path, name: str) -> None:
    check(smollm2, golden, "smollm2_gguf_f32.json", name)


@pytest.mark.parametrize("name", [*GEMMA3, *LONG])
def test_gemma3(gemma3: Score, golden: pathlib.Path, name: str) -> None:
    check(gemma3, golden, "gemma3_gguf_f32.json", name)
