"""The noise: uniform, independent, and a function of (seed, position, token) alone."""

from __future__ import annotations

import jax
import numpy as np
import pytest
import scipy.stats
from jax.sharding import AxisType, Mesh

from pallas_kernels.sample import api, noise, reference

bits = jax.jit(noise.random_bits, static_argnums=2)
draw = jax.jit(api.sample)


def repeat(value: float, rows: int, dtype: type) -> np.ndarray:
    return np.full(rows, value, dtype)


def keys(rows: int, seed: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """One seed, positions 0 to rows - 1."""
    words = np.tile(np.array([seed & 0xFFFFFFFF, seed >> 32], np.uint32), (rows, 1))
    return words, np.arange(rows, dtype=np.int32)


def test_bits_are_balanced_and_uncorrelated():
    words = np.asarray(bits(*keys(512), 2048))
    planes = np.unpackbits(words.view(np.uint8).reshape(512, 2048, 4), axis=2, bitorder="little")
    size = words.size
    deviation = 5 * 0.5 / np.sqrt(size)
    assert abs(planes.mean((0, 1)) - 0.5).max() < deviation
    for other in (np.roll(planes, 1, axis=0), np.roll(planes, 1, axis=1)):
        same = (planes == other).mean((0, 1))  # neighbours in position and in token
        assert abs(same - 0.5).max() < deviation
    counts = np.bincount(words.ravel() >> 24, minlength=256)
    assert scipy.stats.chisquare(counts).pvalue > 1e-4
    assert len(np.unique(words[0])) > 2048 - 3


@pytest.mark.parametrize("axis", ["position", "low word", "high word"])
def test_neighbouring_keys_are_unrelated(axis):
    seed, position = keys(256)
    if axis != "position":
        position = np.zeros_like(position)
        seed[:, 0 if axis == "low word" else 1] = np.arange(256)
    uniform = np.asarray(bits(seed, position, 4096)) / 2.0**32
    correlation = np.corrcoef(uniform)
    off = correlation[~np.eye(256, dtype=bool)]
    assert abs(off).max() < 6 / np.sqrt(4096)


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    [(1.0, 0, 1.0, 0.0), (0.7, 0, 0.9, 0.0), (1.5, 6, 1.0, 0.0), (1.0, 0, 1.0, 0.05)],
)
def test_draws_follow_the_exact_distribution(temperature, top_k, top_p, min_p):
    rows = 40_000
    logits = np.random.default_rng(0).normal(size=16).astype(np.float32) * 2
    args = (
        repeat(temperature, rows, np.float32),
        repeat(top_k, rows, np.int32),
        repeat(top_p, rows, np.float32),
        repeat(min_p, rows, np.float32),
    )
    tokens, _ = draw(np.tile(logits, (rows, 1)), *args, *keys(rows))
    counts = np.bincount(tokens, minlength=16)
    kept = reference.filtered_logits(logits[None], *(arg[:1] for arg in args))
    expected = api.probabilities(kept)[0] * rows
    assert (counts[expected == 0] == 0).all()
    support = expected > 0
    assert scipy.stats.chisquare(counts[support], expected[support]).pvalue > 1e-4


def test_a_crowd_of_unlikely_tokens_gets_its_share():
    """20,000 tokens of 1/40,000 each against one of 1/2: only the noise's far tail decides."""
    rows, vocab = 400, 20_001
    logits = np.zeros((rows, vocab), np.float32)
    logits[:, 17] = np.log(vocab - 1)
    args = (
        repeat(1.0, rows, np.float32),
        repeat(0, rows, np.int32),
        repeat(1.0, rows, np.float32),
        repeat(0.0, rows, np.float32),
    )
    hits, others = 0, []
    for seed in range(2):
        tokens = np.asarray(draw(logits, *args, *keys(rows, seed))[0])
        hits += int((tokens == 17).sum())
        others.extend(tokens[tokens != 17])
    assert scipy.stats.binomtest(hits, 2 * rows, 0.5).pvalue > 1e-4
    assert scipy.stats.kstest(np.array(others) / vocab, "uniform").pvalue > 1e-4


def test_a_draw_depends_on_nothing_but_its_row():
    rows, vocab = 8, 10_240
    random = np.random.default_rng(2)
    logits = random.normal(size=(rows, vocab)).astype(np.float32) * 3
    args = (
        repeat(0.9, rows, np.float32),
        np.array([0, 50, 0, 9, 0, 0, 3, 0], np.int32),
        np.array([1, 1, 0.9, 0.8, 1, 0.5, 1, 1], np.float32),
        np.array([0, 0, 0, 0, 0.1, 0, 0, 0], np.float32),
        random.integers(0, 2**32, (rows, 2), dtype=np.uint32),
        random.integers(0, 4096, rows, dtype=np.int32),
    )
    expected = np.asarray(draw(logits, *args)[0])
    alone = [int(draw(logits[r : r + 1], *(a[r : r + 1] for a in args))[0][0]) for r in range(rows)]
    assert alone == expected.tolist()
    order = np.array([5, 2, 7, 0, 1, 4, 3, 6])
    assert np.asarray(draw(logits[order], *(a[order] for a in args))[0]).tolist() == (
        expected[order].tolist()
    )
    if len(jax.devices()) < 4:
        pytest.skip("needs four devices")
    mesh = Mesh(np.array(jax.devices()[:4]), ("x",), axis_types=(AxisType.Auto,))
    spread = jax.device_put(logits, jax.NamedSharding(mesh, jax.P(None, "x")))
    assert np.asarray(draw(spread, *args)[0]).tolist() == expected.tolist()


def test_exponential_draws_are_positive_and_finite():
    values = np.asarray(noise.exponential(*keys(16), 4096))
    assert (values > 0).all()
    assert np.isfinite(values).all()
    assert scipy.stats.kstest(values.ravel(), "expon").pvalue > 1e-4
