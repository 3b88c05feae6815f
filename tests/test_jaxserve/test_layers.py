"""The layers against plain numpy, and what training needs of them."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from model_steps import COMPILER_OPTIONS, make_config

from jaxserve.config import RopeConfig
from jaxserve.layers.attention import DenseAttend
from jaxserve.layers.linear import Embedding, linear
from jaxserve.layers.norm import RMSNorm
from jaxserve.layers.rope import apply_rope, inverse_frequencies, make_rotation, make_rotations
from jaxserve.models.loading import make_random_model
from jaxserve.parallel.mesh import make_mesh


def draw(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def test_linear_sums_in_float32_and_returns_what_was_asked() -> None:
    x, weight, bias = draw(3, 5), draw(4, 5, seed=1), draw(4, seed=2)
    out = linear(jnp.array(x), jnp.array(weight), jnp.array(bias))
    np.testing.assert_allclose(out, x @ weight.T + bias, rtol=1e-6, atol=1e-6)
    ones = jnp.ones((1, 1024), jnp.bfloat16)
    low = linear(ones, ones * 1.0078125)
    assert low.dtype == jnp.bfloat16
    wide = linear(ones, jnp.full((1, 1024), 1.0078125, jnp.bfloat16), out_dtype=jnp.float32)
    assert wide.dtype == jnp.float32
    assert float(wide[0, 0]) == 1032.0  # a bfloat16 sum would stop growing at 256


def test_norm_in_both_conventions() -> None:
    x = draw(2, 6)
    plain = RMSNorm(6, eps=1e-5, offset=0.0, axis="embed", rngs=nnx.Rngs(0))
    shifted = RMSNorm(6, eps=1e-5, offset=1.0, axis="embed", rngs=nnx.Rngs(0))
    wanted = x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5)
    np.testing.assert_allclose(plain(jnp.array(x)), wanted, rtol=1e-5)
    np.testing.assert_allclose(shifted(jnp.array(x)), wanted, rtol=1e-5)
    assert plain(jnp.array(x, jnp.bfloat16)).dtype == jnp.bfloat16


@pytest.mark.parametrize("size", [64, 576, 4096])
def test_a_row_is_normalised_alike_in_any_company(size: int) -> None:
    """Bit for bit: keys and values are rounded after this, and what was rounded may differ a lot."""
    norm = RMSNorm(size, eps=1e-5, offset=0.0, axis="embed", rngs=nnx.Rngs(0))
    x = jnp.array(draw(512, size))
    wanted = np.asarray(jax.jit(norm)(x))
    reference = x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5)
    np.testing.assert_allclose(wanted, reference, rtol=1e-5)
    for rows in (1, 2, 8, 32):
        np.testing.assert_array_equal(jax.jit(norm)(x[:rows]), wanted[:rows])


def test_embedding_reads_rows_and_scores_them() -> None:
    embedding = Embedding(7, 3, dtype=jnp.float32, rngs=nnx.Rngs(0))
    table = np.asarray(embedding.weight[...])
    np.testing.assert_array_equal(embedding(jnp.array([6, 0])), table[[6, 0]])
    np.testing.assert_allclose(embedding.logits(jnp.eye(3)), table.T, rtol=1e-6)


@pytest.mark.parametrize("theta", [10_000.0, 1e6, 5e5])
def test_rotation_is_exact_at_far_positions(theta: float) -> None:
    rope = RopeConfig(theta=theta, rotary_dim=64)
    positions = np.array([0, 1, 2, 255, 257, 4095, 65_537, 131_071, 1_000_003, 2**31 - 1])
    cos, sin = jax.jit(functools.partial(make_rotation, rope))(jnp.array(positions, jnp.int32))
    # Exact angles: integers below 2**53 times float64 frequencies, in extended precision.
    angles = positions.astype(np.longdouble)[:, None] * theta ** (
        -np.arange(0, 64, 2).astype(np.longdouble) / 64
    )
    far = positions > 10**6  # 48-bit frequencies: 2e-8 rad at 10**6, 3e-5 at 2**31
    for found, wanted in ((cos, np.cos(angles)), (sin, np.sin(angles))):
        error = np.abs(np.asarray(found) - wanted.astype(np.float64))
        assert error[~far].max() < 5e-7
        assert error[far].max() < 1e-4


def test_linear_and_yarn_limits() -> None:
    plain = RopeConfig(theta=1e4, rotary_dim=64)
    base, _ = inverse_frequencies(plain)
    stretched = RopeConfig(theta=1e4, rotary_dim=64, scaling_type="linear", scaling={"factor": 4.0})
    np.testing.assert_allclose(inverse_frequencies(stretched)[0], base / 4)
    yarn = RopeConfig(
        theta=1e4,
        rotary_dim=64,
        scaling_type="yarn",
        scaling={"factor": 4.0, "original_max_position_embeddings": 4096},
    )
    frequencies, magnitude = inverse_frequencies(yarn)
    assert magnitude == pytest.approx(0.1 * math.log(4) + 1)
    assert frequencies[0] == base[0]  # fast ones stay
    assert frequencies[-1] == pytest.approx(base[-1] / 4)  # slow ones are stretched
    own = RopeConfig(
        theta=1e4, rotary_dim=64, scaling_type="factors", scaling={"factors": [2.0] * 32}
    )
    np.testing.assert_allclose(inverse_frequencies(own)[0], base / 2)


def test_layers_with_equal_ropes_share_their_tables() -> None:
    local, full = RopeConfig(theta=1e4, rotary_dim=8), RopeConfig(theta=1e6, rotary_dim=8)
    again = RopeConfig(theta=1e4, rotary_dim=8)
    first, second, third, none = make_rotations([local, full, again, None], jnp.arange(3))
    assert first is third
    assert first is not second
    assert none is None


@pytest.mark.parametrize("interleaved", [False, True])
def test_apply_rope_turns_pairs_and_leaves_the_rest(interleaved: bool) -> None:
    rope = RopeConfig(theta=100.0, rotary_dim=4, interleaved=interleaved)
    x = draw(3, 2, 6)
    found = np.asarray(
        apply_rope(jnp.array(x), make_rotation(rope, jnp.arange(3)), interleaved=rope.interleaved)
    )
    for position in range(3):
        for head in range(2):
            wanted = x[position, head].copy()
            for number in range(2):
                a, b = (2 * number, 2 * number + 1) if interleaved else (number, number + 2)
                angle = position * 100.0 ** (-number / 2)
                pair = complex(*x[position, head, [a, b]]) * complex(
                    math.cos(angle), math.sin(angle)
                )
                wanted[a], wanted[b] = pair.real, pair.imag
            np.testing.assert_allclose(found[position, head], wanted, atol=1e-6)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("soft_cap", [None, 2.0])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_dense_attend(window: int | None, soft_cap: float | None, with_sinks: bool) -> None:
    q, k, v = draw(7, 4, 5), draw(7, 2, 5, seed=1), draw(7, 2, 5, seed=2)
    sinks = draw(4, seed=3) if with_sinks else None
    found = DenseAttend()(
        0,
        jnp.array(q),
        jnp.array(k),
        jnp.array(v),
        scale=0.7,
        window=window,
        soft_cap=soft_cap,
        sinks=None if sinks is None else jnp.array(sinks),
    )
    for row in range(7):
        first = 0 if window is None else max(0, row - window + 1)
        for head in range(4):
            logits = 0.7 * k[first : row + 1, head // 2] @ q[row, head]
            if soft_cap is not None:
                logits = soft_cap * np.tanh(logits / soft_cap)
            weights = np.exp(logits)
            total = weights.sum() + (0.0 if sinks is None else np.exp(sinks[head]))
            wanted = weights / total @ v[first : row + 1, head // 2]
            np.testing.assert_allclose(found[row, head], wanted, atol=1e-5)


def test_decoder_is_differentiable_and_maps_over_a_batch() -> None:
    config = make_config(num_layers=1)
    model = make_random_model(config, make_mesh(1), dtype=jnp.float32, seed=0)
    graph, state = nnx.split(model)
    tokens = jnp.arange(24, dtype=jnp.int32).reshape(2, 12)

    def loss(state: Any) -> jax.Array:
        decoder = nnx.merge(graph, state)

        def score(row: jax.Array) -> jax.Array:
            hidden = decoder(row, jnp.arange(12), DenseAttend())
            logs = jax.nn.log_softmax(decoder.logits(hidden[:-1]))
            return -jnp.take_along_axis(logs, row[1:, None], 1).mean()

        return jax.vmap(score)(tokens).mean()

    step = jax.jit(jax.value_and_grad(loss), compiler_options=COMPILER_OPTIONS)
    value, grads = step(state)
    assert abs(float(value) - np.log(config.vocab_size)) < 0.1
    for path, grad in nnx.to_flat_state(grads):
        leaf = np.asarray(grad.get_value())
        assert np.isfinite(leaf).all(), path
        assert np.abs(leaf).max() > 0, path
