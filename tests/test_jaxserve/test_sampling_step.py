"""The sampler's step: what each request field does, what the state keeps, and what may not happen."""

from __future__ import annotations

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.errors import RequestError
from jaxserve.request import SamplingParams
from jaxserve.sampling.arrays import RowEntry, row_arrays, row_template
from jaxserve.sampling.limits import SamplingLimits, check_limits
from jaxserve.sampling.sampler import sample_step
from jaxserve.sampling.state import (
    make_state,
    needs_reset,
    pack_bits,
    reset_slot,
    slot_reset,
    unpack_bits,
)

VOCAB, SLOTS, ROWS = 101, 6, 8
step = jax.jit(sample_step, donate_argnums=1)
reset = jax.jit(reset_slot, donate_argnums=0)
RANDOM = np.random.default_rng(4)
LOGITS = RANDOM.normal(size=(ROWS, VOCAB)).astype(np.float32) * 2
GREEDY = SamplingParams(temperature=0)


def greedy(**fields) -> SamplingParams:
    return SamplingParams(temperature=0, **fields)


def place(state, slot, params, prompt=(1, 2, 3), output=(), stops=()):
    if not needs_reset(params):
        return state
    row = slot_reset(
        slot, params, prompt_ids=prompt, output_ids=output, stop_ids=stops, vocab_size=VOCAB
    )
    return reset(state, row)


def run(state, logits, rows):
    """rows: (params, slot, keyword arguments of RowEntry). Returns tokens, result, state."""
    entries = []
    for params, slot, extra in rows:
        fields = {"position": 3, "num_generated": 0, **extra}
        template = row_template(params, params.seed or 0)
        entries.append(RowEntry(template=template, slot=slot, **fields))
    result, state = step(jnp.asarray(logits), state, row_arrays(entries, ROWS, SLOTS))
    return np.asarray(result.tokens)[: len(rows)].tolist(), result, state


def first(params, logits=LOGITS, *, generated=0, **placing) -> int:
    """The token that a fresh sequence with params gets from the first row of logits."""
    state = place(make_state(SLOTS, VOCAB), 2, params, **placing)
    return run(state, logits, [(params, 2, {"num_generated": generated})])[0][0]


BEST = np.argsort(-LOGITS[0]).tolist()


@pytest.mark.parametrize(
    ("params", "placing", "expected"),
    [
        (greedy(), {}, 0),
        (greedy(logit_bias={BEST[0]: -100.0}), {}, 1),
        (greedy(logit_bias={BEST[50]: 100.0}), {}, 50),
        (greedy(allowed_token_ids=BEST[40:60]), {}, 40),
        (greedy(allowed_token_ids=BEST[40:60], bad_words=[[BEST[40]]]), {}, 41),
        (greedy(bad_words=[[BEST[0]], [BEST[1]]]), {}, 2),
        (greedy(bad_words=[[7, 8, BEST[0]]]), {"prompt": [7], "output": [8]}, 1),
        (greedy(bad_words=[[7, 8, BEST[0]]]), {"prompt": [7], "output": [8, 9]}, 0),
        (greedy(bad_words=[[7, 8, BEST[0]]]), {"prompt": [8]}, 0),
        (greedy(bad_words=[[*range(7), BEST[0]]]), {"prompt": range(7)}, 1),
        (greedy(min_tokens=1), {"stops": BEST[:3]}, 3),
        (greedy(min_tokens=1), {"stops": BEST[:3], "generated": 1}, 0),
        (greedy(repetition_penalty=1e300), {"prompt": [BEST[0]]}, 1),
        (greedy(repetition_penalty=1e-300), {"prompt": [BEST[9]]}, 9),
        (greedy(repetition_penalty=1e300), {"output": [BEST[0]]}, 1),
        (greedy(presence_penalty=2.0), {"prompt": [BEST[0]]}, 0),
        (greedy(frequency_penalty=2.0), {"prompt": [BEST[0]] * 9}, 0),
        (greedy(frequency_penalty=2.0), {"output": [BEST[0]] * 9}, 1),
        (greedy(frequency_penalty=-2.0), {"output": [BEST[60]] * 9}, 60),
    ],
)
def test_each_field_has_its_effect(params, placing, expected):
    assert first(params, **placing) == BEST[expected]


def test_nothing_but_values_changes_between_requests():
    """Every feature at once, in one compiled program."""
    before = step._cache_size(), reset._cache_size()
    everything = SamplingParams(
        temperature=0.9, top_k=5, top_p=0.8, min_p=0.01, repetition_penalty=1.2,
        presence_penalty=0.1, frequency_penalty=0.1, logit_bias={4: 1.0}, bad_words=[[1, 2]],
        allowed_token_ids=list(range(90)), min_tokens=3, seed=-5, logprobs=20,
    )  # fmt: skip
    first(everything, output=[1, 5], stops=[3])
    first(GREEDY)
    assert (step._cache_size(), reset._cache_size()) in (before, (1, 1))


def test_the_state_is_updated_in_place_and_only_for_valid_rows():
    state = make_state(SLOTS, VOCAB)
    pointers = [leaf.unsafe_buffer_pointer() for leaf in state]
    tokens, _, state = run(
        state, LOGITS, [(GREEDY, 0, {}), (GREEDY, 3, {}), (GREEDY, 4, {"valid": False})]
    )
    state = place(state, 5, greedy(min_tokens=1))
    assert [leaf.unsafe_buffer_pointer() for leaf in state] == pointers
    last = np.asarray(state.last_token)
    assert last[[0, 3]].tolist() == tokens[:2]
    assert last[[1, 2, 4, 5]].tolist() == [0] * 4
    counts = np.asarray(state.output_counts)
    assert counts[:SLOTS].sum(1).tolist() == [1, 0, 0, 1, 0, 0]
    assert counts[0, tokens[0]] == counts[3, tokens[1]] == 1
    assert np.asarray(state.tail)[[0, 4], -1].tolist() == [tokens[0], -1]


def test_memory_of_the_state_is_aliased():
    state = make_state(SLOTS, VOCAB)
    rows = row_arrays([], ROWS, SLOTS)
    analysis = step.lower(jnp.asarray(LOGITS), state, rows).compile().memory_analysis()
    assert analysis.alias_size_in_bytes >= sum(leaf.nbytes for leaf in state)


def test_generated_tokens_count_as_the_next_steps_see_them():
    """A step-by-step answer equals one whose history was given to the slot at once (preemption)."""
    params = greedy(frequency_penalty=1.0, repetition_penalty=1.3, bad_words=[[BEST[0], BEST[1]]])
    state = place(make_state(SLOTS, VOCAB), 1, params)
    output = []
    for length in range(12):
        resumed = place(make_state(SLOTS, VOCAB), 4, params, output=output)
        again = run(resumed, LOGITS, [(params, 4, {"num_generated": length})])[0]
        tokens, _, state = run(state, LOGITS, [(params, 1, {"num_generated": length})])
        assert tokens == again
        output += tokens
    assert len(set(output)) > 3


def test_a_row_does_not_depend_on_its_company():
    """Every kind of request: alone, in any order, in any slot, beside a broken row."""
    kinds = [
        SamplingParams(seed=2**63 - 1),
        SamplingParams(seed=-1, top_k=9),
        SamplingParams(seed=3, top_p=0.7, temperature=1.7),
        SamplingParams(seed=4, presence_penalty=2.0, repetition_penalty=3.0),
        SamplingParams(seed=5, logit_bias={11: 5.0}, min_tokens=4),
        SamplingParams(seed=6, min_p=0.2, allowed_token_ids=[3, 4, 5, 6]),
    ]
    answers = collections.defaultdict(set)
    order = list(range(6))
    for trial in range(8):
        state, used = make_state(SLOTS, VOCAB), []
        group = order[:1] if trial < 1 else order
        for row, kind in enumerate(group):
            slot = (row + trial) % SLOTS
            state = place(state, slot, kinds[kind], output=[11, 12], stops=[11])
            used.append((kinds[kind], slot, {"position": 7}))
        logits = np.array(LOGITS)
        logits[: len(group)] = LOGITS[group]
        logits[len(group) :] = np.nan if trial % 2 else 1.0
        tokens, result, _ = run(state, logits, used)
        assert np.asarray(result.ok)[: len(group)].all()
        for kind, token in zip(group, tokens, strict=True):
            answers[kind].add(token)
        RANDOM.shuffle(order)
    assert [len(answers[kind]) for kind in range(6)] == [1] * 6


def test_what_a_slot_held_before_is_never_read():
    busy = greedy(
        repetition_penalty=9.0, logit_bias={BEST[0]: -100}, allowed_token_ids=[1],
        bad_words=[[BEST[0]]], min_tokens=9,
    )  # fmt: skip
    state = place(make_state(SLOTS, VOCAB), 2, busy, output=[BEST[0]] * 3, stops=[BEST[0]])
    assert not needs_reset(GREEDY)
    # A neighbour that uses everything makes the step compute all parts.
    state = place(state, 3, busy)
    assert run(state, LOGITS, [(GREEDY, 2, {}), (busy, 3, {})])[0][0] == BEST[0]


def test_seeds_and_positions_decide_the_draw():
    flat = np.zeros((ROWS, VOCAB), np.float32)

    def answer(seed):
        return [
            run(make_state(SLOTS, VOCAB), flat, [(SamplingParams(seed=seed), 0, {"position": p})])[
                0
            ][0]
            for p in range(12)
        ]

    answers = {seed: answer(seed) for seed in (1, 2, 1 + 2**32, -1, 2**63 - 1)}
    assert len({tuple(found) for found in answers.values()}) == 5
    assert answers[1] == answer(1)
    assert len(set(answers[1])) > 8


def test_logprobs_are_the_models_own():
    params = SamplingParams(temperature=0.1, top_k=1, logit_bias={50: 100.0}, logprobs=3)
    state = place(make_state(SLOTS, VOCAB), 0, params)
    tokens, result, state = run(state, LOGITS, [(params, 0, {})])
    assert tokens == [50]
    exact = LOGITS[0].astype(np.float64)
    exact -= np.log(np.exp(exact).sum())
    assert result.logprob[0] == pytest.approx(exact[50], abs=2e-6)
    assert result.top_ids[0].tolist() == BEST[:20]
    np.testing.assert_allclose(result.top_logprobs[0], exact[BEST[:20]], atol=2e-6)
    _, quiet, _ = run(state, LOGITS, [(GREEDY, 0, {})])
    assert not np.asarray(quiet.top_logprobs).any()


def test_a_row_without_any_allowed_token_is_reported():
    params = greedy(allowed_token_ids=[5], min_tokens=1)
    state = place(make_state(SLOTS, VOCAB), 0, params, stops=[5])
    tokens, result, _ = run(state, LOGITS, [(params, 0, {}), (GREEDY, 1, {})])
    assert result.ok[:2].tolist() == [False, True]
    assert tokens[1] == LOGITS[1].argmax()


def test_a_nan_is_reported_even_where_a_mask_hides_it():
    params = greedy(allowed_token_ids=[5])
    state = place(make_state(SLOTS, VOCAB), 0, params)
    logits = np.array(LOGITS)
    logits[0, 70] = np.nan
    assert run(state, logits, [(params, 0, {}), (GREEDY, 1, {})])[1].ok[:2].tolist() == [0, 1]


@pytest.mark.parametrize(
    ("params", "field"),
    [
        (SamplingParams(logit_bias=dict.fromkeys(range(5), 1.0)), "logit_bias"),
        (SamplingParams(bad_words=[[1]] * 4), "bad_words"),
    ],
)
def test_more_than_the_limits_is_refused_by_name(params, field):
    with pytest.raises(RequestError, match="at most") as caught:
        check_limits(params, SamplingLimits(bias_tokens=4, bad_words=3))
    assert caught.value.param == field
    check_limits(params, SamplingLimits(bias_tokens=5, bad_words=4))


@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 101])
def test_bits_survive_packing(vocab):
    chosen = RANDOM.random(vocab) < 0.5
    words = pack_bits(np.flatnonzero(chosen).tolist(), vocab)
    assert words.shape == (-(-vocab // 32),)
    assert np.asarray(unpack_bits(jnp.asarray(words)[None], vocab))[0].tolist() == chosen.tolist()


def test_of_guessed_rows_only_those_before_the_first_wrong_guess_are_recorded():
    best = np.argmax(LOGITS, axis=1).tolist()
    wrong = (best[3] + 1) % VOCAB
    state = make_state(SLOTS, VOCAB)
    rows = [
        (GREEDY, 1, {}),
        (GREEDY, 1, {"guess": best[0]}),  # right
        (GREEDY, 2, {}),
        (GREEDY, 2, {"guess": best[2]}),  # right
        (GREEDY, 2, {"guess": wrong}),
        (GREEDY, 2, {"guess": best[4]}),  # right, but after a wrong one
        (GREEDY, 3, {"valid": False}),
        (GREEDY, 4, {}),
    ]
    tokens, _, state = run(state, LOGITS, rows)
    assert tokens == best
    assert state.last_token[1:5].tolist() == [best[1], best[3], 0, best[7]]
    counts = np.asarray(state.output_counts)
    for slot, written in {1: best[:2], 2: best[2:4], 3: [], 4: best[7:]}.items():
        assert counts[slot].tolist() == np.bincount(written, minlength=VOCAB).tolist()
        assert state.tail[slot][-1] == (written[-1] if written else -1)
