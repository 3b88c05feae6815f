"""The small checkpoint's text, tokeniser, data order and training loop."""

from __future__ import annotations

import itertools
import json
import pathlib
import random

import ml_dtypes
import numpy as np
import pytest

from checkpoints import small_data, train_small
from checkpoints.open import open_checkpoint
from checkpoints.small_data import (
    BOS_ID,
    CHAT_MARK,
    EOS_ID,
    batch_shape,
    batches,
    encode_chat,
    encode_document,
    load_tokenizer,
    split_turns,
    train_tokenizer,
)
from checkpoints.small_model import SmallConfig, SmallModel, set_tensors, to_tensors
from checkpoints.small_samples import greedy, logits_of
from checkpoints.small_text.generate import (
    GENERATED_FILE,
    GRAMMAR_FILE,
    PLAN,
    Document,
    GrammarError,
    generate,
    parse_grammar,
    read_documents,
)

TINY = SmallConfig(
    vocab_size=600,
    hidden_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_size=8,
    ffn_size=48,
)


@pytest.fixture(scope="module")
def texts() -> list[str]:
    return read_documents()


@pytest.fixture(scope="module")
def tiny_tokenizer(texts: list[str]) -> bytes:
    return train_tokenizer(texts[:120], vocab_size=TINY.vocab_size)


@pytest.fixture(scope="module")
def tiny_documents(texts: list[str], tiny_tokenizer: bytes) -> list[list[int]]:
    tokenizer = load_tokenizer(tiny_tokenizer)
    return [encode_document(tokenizer, text) for text in texts[:120]]


def lively_model() -> SmallModel:
    """An untrained model whose projections into the stream are not zero, as they are at first."""
    model = SmallModel(TINY, seed=0)
    rng = np.random.default_rng(0)
    set_tensors(
        model,
        {
            name: rng.normal(0, 0.2, value.shape) if value.ndim == 2 else value
            for name, value in to_tensors(model).items()
        },
    )
    return model


def test_generated_text_follows_from_the_grammar() -> None:
    made = generate(GRAMMAR_FILE.read_text(encoding="utf-8"))
    assert made == GENERATED_FILE.read_text(encoding="utf-8")


def test_every_rule_of_the_grammar_is_used() -> None:
    grammar = GRAMMAR_FILE.read_text(encoding="utf-8")
    starts = {rule for rule, _ in PLAN}
    for rule in parse_grammar(grammar):
        assert rule in starts or any(f"{sign}{rule}}}" in grammar for sign in "{:!"), rule


def test_names_are_remembered_and_distinct() -> None:
    rules = parse_grammar("[a]\n{X:n} {Y:n} {X} {!b}\n\n[b]\n{X:n}\n\n[n]\none\ntwo\n")
    for seed in range(20):
        first, second, again, _ = Document(rules=rules, rng=random.Random(seed)).expand("a").split()
        assert first == again != second


def test_a_name_that_was_never_bound_is_an_error() -> None:
    rules = parse_grammar("[a]\n{X}\n")
    with pytest.raises(GrammarError, match="X"):
        Document(rules=rules, rng=random.Random(0)).expand("a")


def test_text_stays_small_and_has_other_scripts(texts: list[str]) -> None:
    joined = "\n".join(texts)
    assert len(joined.encode()) < 500_000
    for sign in "éü日🌊":
        assert sign in joined


def test_tokenizer_is_reproducible_and_loses_nothing(
    texts: list[str], tiny_tokenizer: bytes
) -> None:
    assert train_tokenizer(texts[:120], vocab_size=TINY.vocab_size) == tiny_tokenizer
    tokenizer = load_tokenizer(tiny_tokenizer)
    for text in [*texts[::40], "  two  spaces\n\n\nÅ ∑ 🧶\ttab", ""]:
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_chat_documents_become_control_tokens(tiny_tokenizer: bytes) -> None:
    tokenizer = load_tokenizer(tiny_tokenizer)
    text = (
        "System: Be kind.\nUser: Two\n\nlines\nAssistant: Yes.\nUser: <|user|></s>\nAssistant: No."
    )
    turns = split_turns(text)
    assert turns[1] == ("user", "Two\n\nlines")
    ids = encode_document(tokenizer, CHAT_MARK + text)
    assert ids == encode_chat(tokenizer, turns)
    assert ids[0] == BOS_ID
    assert ids.count(EOS_ID) == 2  # after each answer, and none from the user's text
    assert ids.count(tokenizer.piece_to_id("<|user|>")) == 2
    asked = encode_chat(tokenizer, turns[:2], ask=True)
    assert asked[-1] == tokenizer.piece_to_id("<|assistant|>")
    assert ids[: len(asked)] == asked


def test_data_order_depends_on_the_seed_only(tiny_documents: list[list[int]]) -> None:
    first = list(batches(lambda epoch: tiny_documents, steps=30, seed=1))
    again = list(batches(lambda epoch: tiny_documents, steps=30, seed=1))
    other = list(batches(lambda epoch: tiny_documents, steps=30, seed=2))
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert not np.array_equal(first[0], other[0])
    for step, windows in enumerate(first):
        rows, window = batch_shape(step)
        assert windows.shape == (rows, window + 1)
    assert max(batch_shape(step)[1] for step in range(30)) == SmallConfig().max_position


def test_each_epoch_has_other_names(texts: list[str]) -> None:
    second = read_documents(1)
    assert second == read_documents(1)
    assert len(second) == len(texts)
    same = sum(a == b for a, b in zip(texts, second, strict=True))
    assert 0 < same < len(texts) / 2  # what was written by hand, and answers without names


@pytest.mark.slow
def test_a_document_does_not_see_its_neighbours() -> None:
    model = lively_model()
    row = np.asarray([[1, 20, 30, 2, 1, 40, 50]])
    packed = np.asarray(model(row, np.cumsum(row == BOS_ID, axis=1)))
    np.testing.assert_allclose(packed[0, 4:], logits_of(model, [1, 40, 50]), atol=1e-5)
    assert np.abs(np.asarray(model(row))[0, 6] - packed[0, 6]).max() > 1e-3


def test_an_epoch_holds_every_token_once(tiny_documents: list[list[int]]) -> None:
    total = sum(map(len, tiny_documents))
    stream = np.concatenate(
        [w.ravel() for w in batches(lambda epoch: tiny_documents, steps=40, seed=3)]
    )[:total]
    expected = np.bincount(list(itertools.chain(*tiny_documents)), minlength=TINY.vocab_size)
    assert np.array_equal(np.bincount(stream, minlength=TINY.vocab_size), expected)


def test_twenty_steps_lower_the_loss(
    tiny_documents: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(small_data, "batch_shape", lambda step: (8, 32))  # compiles once, quickly
    _, losses = train_small.train(
        lambda epoch: tiny_documents, TINY, steps=20, seed=0, progress=False
    )
    assert losses[0] == pytest.approx(np.log(TINY.vocab_size), abs=0.3)
    assert np.mean(losses[-3:]) < losses[0] - 0.5


def test_the_schedule_warms_up_and_comes_down() -> None:
    schedule = train_small.make_schedule(200)
    rates = [float(schedule(step)) for step in range(201)]
    assert rates[0] == 0
    assert np.argmax(rates) == 10
    assert rates[10] == pytest.approx(train_small.PEAK_LEARNING_RATE)
    assert rates[200] == pytest.approx(train_small.PEAK_LEARNING_RATE / 50)


def test_position_does_not_see_what_follows() -> None:
    model = lively_model()
    whole = logits_of(model, [1, 20, 30, 40, 50])
    part = logits_of(model, [1, 20, 30])
    np.testing.assert_allclose(whole[:3], part, atol=1e-5)
    assert np.abs(logits_of(model, [1, 21, 30])[2] - part[2]).max() > 1e-4


def test_weights_go_out_and_come_back() -> None:
    model, other = SmallModel(TINY, seed=0), SmallModel(TINY, seed=1)
    tensors = to_tensors(model)
    assert tensors["model.layers.1.self_attn.k_proj.weight"].shape == (16, 32)
    assert tensors["model.layers.0.mlp.down_proj.weight"].shape == (32, 48)
    assert tensors["model.embed_tokens.weight"].shape == (600, 32)
    assert len(tensors) == 2 + 9 * TINY.num_layers
    ids = [1, 5, 9]
    assert not np.allclose(logits_of(model, ids), logits_of(other, ids))
    set_tensors(other, tensors)
    assert np.array_equal(logits_of(model, ids), logits_of(other, ids))


def test_greedy_stops_at_the_end_token_or_the_limit() -> None:
    model = SmallModel(TINY, seed=0)
    tensors = {name: value.copy() for name, value in to_tensors(model).items()}
    for name, value in tensors.items():
        if "o_proj" in name or "down_proj" in name:
            value[:] = 0  # so that the logits depend on the embeddings alone
    embeddings = tensors["model.embed_tokens.weight"]
    embeddings[:] = 0
    embeddings[:, 0] = 1
    embeddings[7, 0] = 2
    set_tensors(model, tensors)
    assert greedy(model, [1, 5], limit=4) == [7] * 4
    embeddings[EOS_ID, 0] = 3
    set_tensors(model, tensors)
    assert greedy(model, [1, 5], limit=4) == [EOS_ID]


def test_saved_folder_opens(tmp_path: pathlib.Path, tiny_tokenizer: bytes) -> None:
    folder = tmp_path / "model"
    tensors = {
        k: v.astype(ml_dtypes.bfloat16) for k, v in to_tensors(SmallModel(TINY, seed=0)).items()
    }
    train_small.save(folder, tensors, TINY, tiny_tokenizer)
    reader = open_checkpoint(folder)
    assert json.loads((folder / "config.json").read_text())["num_key_value_heads"] == 2
    for name, value in tensors.items():
        assert np.array_equal(reader.read(name), value)


def test_an_existing_folder_is_refused(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        train_small.main(["--out", str(tmp_path)])
    assert caught.value.code == 2
    assert "exists already" in capsys.readouterr().err
