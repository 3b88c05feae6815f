"""Filtering and sampling against their definition."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.sample import api, reference

ROWS = 3
#: 9001 has more blocks than are searched first.
VOCABULARIES = (1, 199, 9001)
SLACK = 2e-6  # float32 sums of up to 10^5 probabilities


class Filters(NamedTuple):
    temperature: np.ndarray
    top_k: np.ndarray
    top_p: np.ndarray
    min_p: np.ndarray


def filters(rows: int, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0) -> Filters:
    full = functools.partial(np.full, rows)
    return Filters(
        full(np.float32(temperature)),
        full(np.int32(top_k)),
        full(np.float32(top_p)),
        full(np.float32(min_p)),
    )


fast = jax.jit(api.filtered_logits)
defined = jax.jit(
    reference.filtered_logits,
    compiler_options={
        "xla_backend_optimization_level": 0,
        "xla_llvm_disable_expensive_passes": True,
    },
)
draw = jax.jit(api.sample)


def make_logits(kind: str, vocab: int, seed: int) -> np.ndarray:
    random = np.random.default_rng(seed)
    logits = random.normal(size=(ROWS, vocab)).astype(np.float32) * 4
    if kind == "ties":
        logits = np.round(logits * 2) / 2
    elif kind == "equal":
        logits = np.full_like(logits, random.normal())
    elif kind == "masked":
        hidden = random.random(logits.shape) < 0.7
        hidden[np.arange(ROWS), random.integers(0, vocab, ROWS)] = False
        logits[hidden] = -np.inf
    elif kind == "huge":
        logits *= np.float32(5e36)
    elif kind == "peaked":
        logits[np.arange(ROWS), random.integers(0, vocab, ROWS)] += 12
    elif kind == "flat":
        logits *= np.float32(1e-3)
    return logits


def allowed_range(
    scaled: np.ndarray, top_k: int, top_p: float, min_p: float
) -> tuple[np.ndarray, np.ndarray]:
    """In float64, for one row: what surely stays and what may stay, given SLACK."""
    scaled = scaled.astype(np.float64)
    result = []
    for sign in (1, -1):
        keep = np.exp(scaled) >= min_p * (1 + sign * SLACK)
        keep &= np.isfinite(scaled)
        keep |= scaled == 0
        if 0 < top_k < len(scaled):
            keep &= scaled >= np.sort(scaled)[-top_k]
        if top_p < 1:
            ids = np.flatnonzero(keep)
            tie = np.where(scaled[ids] == 0, -ids, ids)
            ids = ids[np.lexsort((tie, scaled[ids]))]
            mass = np.exp(scaled[ids])
            drop = np.cumsum(mass) / mass.sum() <= 1 - np.float64(top_p) + sign * SLACK
            drop[-1] = False
            keep[ids[drop]] = False
        result.append(keep)
    return result[0], result[1]


@settings(max_examples=60, deadline=None)
@given(
    kind=st.sampled_from(["normal", "ties", "equal", "masked", "huge", "peaked", "flat"]),
    vocab=st.sampled_from(VOCABULARIES),
    seed=st.integers(0, 2**20),
    temperature=st.sampled_from([0.0, 1e-4, 0.3, 1.0, 2.5, 1e6]),
    top_k=st.sampled_from([0, 1, 2, 7, 60, 5000, 10**9]),
    top_p=st.one_of(st.sampled_from([1.0, 0.5, 0.9, 1e-6, 0.9999]), st.floats(0.01, 0.99)),
    min_p=st.sampled_from([0.0, 0.0, 0.02, 0.5, 1.0]),
)
def test_fast_form_and_definition_agree(kind, vocab, seed, temperature, top_k, top_p, min_p):
    logits = make_logits(kind, vocab, seed)
    # The three rows differ, so that a mix of rows with and without filters is covered.
    args = Filters(
        np.array([temperature, 1.0, temperature], np.float32),
        np.array([top_k, 0, top_k], np.int32),
        np.array([top_p, top_p, 1.0], np.float32),
        np.array([min_p, 0.0, 0.0], np.float32),
    )
    greedy = np.asarray(reference.is_greedy(args.temperature, args.top_k, args.min_p))
    for form in (fast, defined):
        kept = np.asarray(form(logits, *args))
        assert not np.isnan(kept).any()
        assert (kept.max(1) == 0).all()
        for row in range(ROWS):
            support = np.isfinite(kept[row])
            if greedy[row]:
                assert np.flatnonzero(support).tolist() == [logits[row].argmax()]
                continue
            with np.errstate(over="ignore"):
                scaled = (logits[row] - logits[row].max()) / args.temperature[row]
            np.testing.assert_allclose(kept[row][support], scaled[support], rtol=1e-6)
            sure, maybe = allowed_range(scaled, args.top_k[row], args.top_p[row], args.min_p[row])
            assert (support | ~sure).all()
            assert (maybe | ~support).all()


@pytest.mark.parametrize(
    ("kind", "top_k", "top_p"),
    [
        ("flat", 0, 0.95),  # the nucleus is nearly everything: the whole vocabulary is searched
        ("flat", 100_000, 1.0),
        ("normal", 0, 0.9),
        ("peaked", 50, 0.9),
        ("ties", 40, 0.7),
    ],
)
def test_a_large_vocabulary(kind, top_k, top_p):
    logits = make_logits(kind, 262_144, 7)
    args = filters(ROWS, top_k=top_k, top_p=top_p)
    got = np.isfinite(np.asarray(fast(logits, *args)))
    for row in range(ROWS):
        sure, maybe = allowed_range(logits[row] - logits[row].max(), top_k, top_p, 0.0)
        assert (got[row] | ~sure).all()
        assert (maybe | ~got[row]).all()
        assert maybe.sum() - sure.sum() < 20 or kind == "flat"


@pytest.mark.parametrize("form", [fast, defined], ids=["fast", "defined"])
@pytest.mark.parametrize(
    ("logits", "top_k", "top_p", "stay"),
    [
        ([3.0, 2, 2, 2, 1], 2, 1.0, [0, 1, 2, 3]),  # what equals the k-th stays
        ([3.0, 2, 2, 2, 1], 4, 1.0, [0, 1, 2, 3]),
        ([0.0, 0, 0, 0], 0, 0.5, [0, 1]),  # two sums are <= 1/2: among the largest low ids stay
        ([0.0, 0, 0, 0], 0, 0.25, [0]),
        ([0.0, 0, 0, 0], 0, 0.26, [0, 1]),
        ([5.0, 5, -50], 0, 1e-6, [0]),
        ([float(np.log(4)), 0, 0, 0, 0], 0, 0.625, [0, 4]),  # below the top high ids stay
        ([1.0, -np.inf, 0, -np.inf], 3, 1.0, [0, 2]),
    ],
)
def test_ties_by_hand(form, logits, top_k, top_p, stay):
    row = np.array([logits + [-np.inf] * (5 - len(logits))], np.float32)
    kept = np.asarray(form(row, *filters(1, 1.0, top_k, top_p)))
    assert np.flatnonzero(np.isfinite(kept[0])).tolist() == stay


@pytest.mark.parametrize(
    "setting",
    [{"temperature": 0}, {"top_k": 1}, {"min_p": 1.0}, {"top_p": 1e-6}],
    ids=lambda setting: next(iter(setting)),
)
@pytest.mark.parametrize("kind", ["normal", "ties", "equal"])
def test_settings_that_mean_greedy(setting, kind):
    logits = make_logits(kind, 199, 3)
    args = filters(ROWS, **{"temperature": 5.0, **setting})
    if setting == {"top_p": 1e-6}:
        args = args._replace(temperature=np.full(ROWS, 3.0, np.float32))
    for position in range(5):
        seed = np.full((ROWS, 2), position, np.uint32)
        tokens, ok = draw(logits, *args, seed, np.full(ROWS, position, np.int32))
        assert tokens.tolist() == logits.argmax(1).tolist()
        assert ok.all()


def test_a_broken_row_harms_no_other():
    logits = make_logits("normal", 9001, 5)
    rows = np.concatenate([logits, logits])
    args = filters(6, 0.8, 50, 0.9)
    seed = np.arange(12, dtype=np.uint32).reshape(6, 2)
    position = np.arange(6, dtype=np.int32)
    expected, ok = draw(rows, *args, seed, position)
    assert ok.all()
    for row, value in ((0, np.nan), (2, np.inf)):
        rows[row, 77] = value
    rows[4] = -np.inf
    tokens, ok = draw(rows, *args, seed, position)
    assert ok.tolist() == [False, True, False, True, False, True]
    assert tokens[1::2].tolist() == expected[1::2].tolist()
    assert ((tokens >= 0) & (tokens < 9001)).all()
    tokens, ok = draw(rows, *filters(6, 0.0), seed, position)
    assert ok.tolist() == [False, True, False, True, False, True]
    assert tokens[1::2].tolist() == rows[1::2].argmax(1).tolist()


@pytest.mark.parametrize(("vocab", "kind"), [(7, "normal"), (199, "ties"), (9001, "ties")])
def test_top_logprobs(vocab, kind):
    logits = make_logits(kind, vocab, 11)
    tokens = np.array([0, vocab // 2, vocab - 1], np.int32)
    got = jax.jit(api.top_logprobs, static_argnums=2)(logits, tokens, 20)
    want = reference.top_logprobs(jnp.asarray(logits), jnp.asarray(tokens), 20)
    exact = logits.astype(np.float64)
    exact -= np.log(np.exp(exact - exact.max(1, keepdims=True)).sum(1, keepdims=True))
    exact -= logits.max(1, keepdims=True)
    np.testing.assert_allclose(got[0], exact[np.arange(ROWS), tokens], atol=2e-6)
    np.testing.assert_array_equal(got[1], want[1])
    for values in (got[2], want[2]):
        expected = -np.sort(-exact, axis=1)[:, :20]
        np.testing.assert_allclose(values[:, : expected.shape[1]], expected, atol=2e-6)
        assert np.isneginf(values[:, expected.shape[1] :]).all()
