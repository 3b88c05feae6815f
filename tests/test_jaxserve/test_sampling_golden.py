"""Final distributions against independent float64 values (golden folder f), through the step's code."""

from __future__ import annotations

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.request import SamplingParams
from jaxserve.sampling.adjust import adjust_logits
from jaxserve.sampling.arrays import RowEntry, row_arrays, row_template
from jaxserve.sampling.sampler import final_logits
from jaxserve.sampling.state import make_state, reset_slot, slot_reset
from pallas_kernels.sample import api, reference

final = jax.jit(final_logits)


@jax.jit
def defined(logits, state, rows):
    return reference.filtered_logits(
        adjust_logits(logits, state, rows),
        rows.temperature,
        rows.top_k,
        rows.top_p,
        rows.min_p,
    )


def to_params(values: dict) -> SamplingParams:
    bias = {int(token): value for token, value in values.get("logit_bias", {}).items()}
    return SamplingParams(**{**values, "logit_bias": bias})


def check(path: pathlib.Path) -> None:
    """All cases as one batch: each row must come out as if it were alone."""
    table = json.loads(path.read_text())
    vocab, cases = table["vocab"], table["cases"]
    state = make_state(len(cases), vocab)
    entries = []
    for slot, case in enumerate(cases):
        params = to_params(case["params"])
        reset = slot_reset(
            slot,
            params,
            prompt_ids=table["prompt_ids"],
            output_ids=table["output_ids"],
            stop_ids=[],
            vocab_size=vocab,
        )
        state = jax.jit(reset_slot, donate_argnums=0)(state, reset)
        entries.append(RowEntry(row_template(params, 1), slot, 27, 13))
    rows = row_arrays(entries, len(cases) + 3, len(cases))
    logits = jnp.tile(jnp.asarray(table["logits"], jnp.float32), (len(cases) + 3, 1))
    for form in (final, defined):
        kept = form(logits, state, rows)
        got = api.probabilities(kept)
        for row, case in enumerate(cases):
            expected = np.zeros(vocab)
            expected[case["ids"]] = case["probs"]
            np.testing.assert_allclose(got[row], expected, atol=1e-6, err_msg=str(case["params"]))
            support = np.flatnonzero(np.isfinite(kept[row]))
            assert support.tolist() == sorted(case["ids"]), case["params"]
            assert kept[row].argmax() == case["argmax"], case["params"]


@pytest.mark.slow  # those that ship are of every kind
def test_all_golden_distributions(golden):
    check(golden / "f" / "sampling.json")


def test_the_distributions_that_ship(data):
    check(data / "sampling.json")
