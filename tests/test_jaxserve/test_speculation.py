"""Guessers and what decides about guesses: no engine, no clock."""

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.config import EngineConfig
from jaxserve.errors import UsageError
from jaxserve.speculative.ngram import NgramProposer
from jaxserve.speculative.speculation import Candidate, Speculation

SIZES = (1, 2, 4, 8, 16, 24, 32)
#: Seconds of a step by size: reading the weights, then arithmetic.
CHEAP = {size: 0.93 + 0.07 * size for size in SIZES}
DEAR = {size: 0.2 + 0.8 * size for size in SIZES}


def latest_match(tokens, lengths=(4, 3, 2)):
    """By definition: the place after the latest earlier occurrence of the longest suffix."""
    for length in lengths:
        suffix = tokens[len(tokens) - length :]
        for start in range(len(tokens) - length - 1, -1, -1):
            if len(suffix) == length and tokens[start : start + length] == suffix:
                return start + length
    return None


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=60), st.integers(1, 9))
def test_a_guess_follows_the_longest_suffix_that_was_there_before(tokens, count):
    proposer = NgramProposer()
    proposer.begin("a", tokens)
    draft = proposer.propose([("a", count)])[0]
    place = latest_match(tokens)
    if place is None:
        assert draft.tokens == []
    else:
        text = list(tokens)
        for i in range(count):
            text.append(text[place + i])
        assert draft.tokens == text[len(tokens) :]
        assert len(draft.trust) == count


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 2), min_size=2, max_size=80), st.data())
def test_growing_by_steps_finds_at_least_what_all_at_once_finds(tokens, data):
    grown, proposer = [tokens[0]], NgramProposer()
    proposer.begin("a", grown)
    while len(grown) < len(tokens):
        before = proposer.propose([("a", 1)])[0]
        more = data.draw(st.integers(1, 30))
        grown += tokens[len(grown) : len(grown) + more]
        after = proposer.propose([("a", 1)])[0]
        assert bool(after.tokens) >= (latest_match(grown) is not None)
        if before.tokens and len(grown) > more and before.tokens[0] == grown[-more]:
            assert after.tokens or more > 1


def test_trust_grows_with_the_match_and_a_wrong_guess_ends_it():
    tokens, proposer = [1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2], NgramProposer()
    proposer.begin("a", tokens)
    trust = []
    for token in (3, 4, 5, 6):
        draft = proposer.propose([("a", 1)])[0]
        assert draft.tokens == [token]
        trust += draft.trust
        tokens.append(token)
    assert trust == sorted(trust)
    assert trust[0] < trust[-1]
    tokens += [99]
    assert proposer.propose([("a", 3)])[0].tokens == []


def test_a_step_costs_the_same_however_long_the_context():
    class Counting(list):
        reads = 0

        def __getitem__(self, key):
            Counting.reads += 1
            return super().__getitem__(key)

    rng = random.Random(0)
    reads = []
    for length in (100, 10_000):
        tokens, proposer = Counting(rng.randrange(50) for _ in range(length)), NgramProposer()
        proposer.begin("a", tokens)
        proposer.propose([("a", 8)])[0]
        Counting.reads = 0
        for _ in range(20):
            tokens.append(rng.randrange(50))
            proposer.propose([("a", 8)])[0]
        reads.append(Counting.reads)
    assert reads[1] < 2 * reads[0]


def converse(texts, seconds, *, steps=300, room=200):
    """Steps of sequences that go on as `texts`; returns guesses, tokens and seconds, in all.

    texts: iterators of tokens. Steps are read late until reading first is worth it.
    """
    speculation = Speculation(NgramProposer(), sizes=SIZES, max_guesses=15, max_sampled=32)
    known = [list(itertools.islice(text, 40)) for text in texts]
    coming = [list(itertools.islice(text, 16 * steps)) for text in texts]
    rows = [Candidate(str(i), tokens, room) for i, tokens in enumerate(known)]
    guessed = found = 0
    spent, first = 0.0, False
    for _ in range(steps):
        chosen = speculation.choose(rows, len(rows)) if first else {}
        total = len(rows) + sum(map(len, chosen.values()))
        size = next(size for size in SIZES if size >= total)
        took = seconds[size] * (1.01 if first else 1.0)
        speculation.count_step(size, first, took)
        spent += took
        for candidate, tokens, text in zip(rows, known, coming, strict=True):
            count = 1
            for guess in chosen.get(candidate.key, []):
                if guess != text[count - 1]:
                    break
                count += 1
            speculation.learn(candidate.key, len(tokens), text[:count])
            tokens += text[:count]
            del text[:count]
            found += count
        guessed += sum(map(len, chosen.values()))
        first = bool(chosen) or speculation.worth_reading(rows, len(rows))
    return guessed, found, spent


def noise(seed, vocab=50_000):
    rng = random.Random(seed)
    return (rng.randrange(vocab) for _ in itertools.count())


def repeated(seed, period=37, wrong_in=30):
    rng = random.Random(seed)
    phrase = [rng.randrange(50_000) for _ in range(period)]
    for token in itertools.cycle(phrase):
        yield rng.randrange(50_000) if rng.randrange(wrong_in) == 0 else token


@pytest.mark.parametrize(("batch", "times"), [(1, 3.5), (8, 1.2)])
def test_a_text_that_repeats_itself_gets_faster(batch, times):
    _, found, spent = converse([repeated(i) for i in range(batch)], CHEAP)
    alone = batch / (CHEAP[1] if batch == 1 else CHEAP[8])
    assert found / spent > times * alone


@pytest.mark.parametrize("batch", [1, 8])
def test_random_text_gets_no_guesses_at_all(batch):
    guessed, found, _ = converse([noise(i) for i in range(batch)], CHEAP)
    assert guessed == 0
    assert found == 300 * batch


def test_matches_that_do_not_hold_turn_it_off_and_cost_next_to_nothing():
    def dice():
        return noise(1, vocab=12)  # every pair of tokens was there before

    guessed, found, spent = converse([dice()], DEAR, steps=600)
    assert guessed < 60
    assert found / spent > 0.9


def test_where_a_larger_step_costs_too_much_it_turns_itself_off_and_tries_again():
    guessed, found, spent = converse([repeated(1, wrong_in=3)], DEAR, steps=900)
    assert guessed > 0  # it tried
    assert found / spent > 0.9  # against 1.0 with no guesses
    fast_guessed, _, _ = converse([repeated(1, wrong_in=3)], CHEAP, steps=900)
    assert fast_guessed > 5 * guessed


def test_a_large_batch_that_fills_its_step_gets_no_guesses():
    guessed, _, _ = converse([repeated(i) for i in range(32)], CHEAP, steps=60)
    assert guessed == 0


def test_guesses_go_where_they_are_likeliest():
    speculation = Speculation(NgramProposer(), sizes=SIZES, max_guesses=15, max_sampled=32)
    for size, seconds in CHEAP.items():
        for first in (False, True):
            for _ in range(3):
                speculation.count_step(size, first, seconds)
    copies, blind = repeated(1, wrong_in=10**9), noise(2)
    rows = [
        Candidate("copies", list(itertools.islice(copies, 90)), 100),
        Candidate("blind", list(itertools.islice(blind, 90)), 100),
    ]
    chosen = speculation.choose(rows, 7)
    assert set(chosen) == {"copies"}
    assert 7 + len(chosen["copies"]) in SIZES or len(chosen["copies"]) == 15
    assert speculation.choose([rows[0]._replace(room=0)], 1) == {}


def test_settings():
    config = EngineConfig(max_num_seqs=4, num_speculative_tokens=7)
    assert config.max_step_rows == 8
    assert EngineConfig(max_num_seqs=4, speculative="off").max_step_rows == 4
    for wrong in ({"speculative": "magic"}, {"num_speculative_tokens": 0}):
        with pytest.raises(UsageError, match=r"--\w.*speculative|--speculative"):
            EngineConfig(**wrong).validate()
