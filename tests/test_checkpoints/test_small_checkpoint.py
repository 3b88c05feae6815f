"""The small checkpoint that ships: its size, its files, and that it says what samples.json says."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import numpy as np
import pytest
import sentencepiece as spm

from checkpoints.open import open_checkpoint
from checkpoints.reader import CheckpointReader
from checkpoints.resolve import resolve_model
from checkpoints.small_data import EOS_ID, ROLES, load_tokenizer
from checkpoints.small_model import SmallConfig, SmallModel, set_tensors, to_tensors
from checkpoints.small_samples import encode_prompt, greedy, logits_of, read_prompts

FOLDER = resolve_model("small", pathlib.Path("no-cache-is-needed"))
SAMPLES: list[dict[str, Any]] = json.loads((FOLDER / "samples.json").read_text(encoding="utf-8"))
MAX_BYTES = 4 * 2**20


@pytest.fixture(scope="module")
def reader() -> CheckpointReader:
    return open_checkpoint(FOLDER)


@pytest.fixture(scope="module")
def tokenizer(reader: CheckpointReader) -> spm.SentencePieceProcessor:
    model = reader.tokenizer_files().sentencepiece_model
    assert model is not None
    return load_tokenizer(model)


@pytest.fixture(scope="module")
def model(reader: CheckpointReader) -> SmallModel:
    model = SmallModel(SmallConfig(), seed=0)
    set_tensors(model, {name: reader.read(name) for name in reader.tensors})
    return model


def test_folder_is_small_and_has_no_hidden_files() -> None:
    """Hidden files would be left out of the wheel."""
    files = [path for path in FOLDER.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= MAX_BYTES
    assert not [path for path in FOLDER.rglob("*") if path.name.startswith(".")]


def test_config_is_that_of_the_trained_model(reader: CheckpointReader) -> None:
    config, sizes = reader.config, SmallConfig()
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["num_hidden_layers"] == sizes.num_layers
    assert config["max_position_embeddings"] == sizes.max_position
    assert config["generation_config"]["eos_token_id"] == EOS_ID
    for name in ("num_attention_heads", "num_key_value_heads", "vocab_size"):
        assert config[name] % 4 == 0, "tensor parallelism 4"


def test_tensors_are_those_of_the_model(reader: CheckpointReader) -> None:
    expected = to_tensors(SmallModel(SmallConfig(), seed=0))
    assert {n: i.shape for n, i in reader.tensors.items()} == {
        n: v.shape for n, v in expected.items()
    }
    assert {info.dtype for info in reader.tensors.values()} == {"bfloat16"}


def test_tokenizer_has_the_markers_and_the_template(
    reader: CheckpointReader, tokenizer: spm.SentencePieceProcessor
) -> None:
    files = reader.tokenizer_files()
    assert files.chat_template is not None
    assert tokenizer.get_piece_size() == reader.config["vocab_size"]
    for role in ROLES:
        assert tokenizer.is_control(tokenizer.piece_to_id(role))
        assert role in files.special["additional_special_tokens"]
    ids = tokenizer.encode("日本 naïve")
    assert any(tokenizer.is_byte(token) for token in ids)
    assert tokenizer.decode(ids) == "日本 naïve"


def test_samples_belong_to_the_prompts(tokenizer: spm.SentencePieceProcessor) -> None:
    prompts = read_prompts()
    assert [sample["name"] for sample in SAMPLES] == [prompt["name"] for prompt in prompts]
    for prompt, sample in zip(prompts, SAMPLES, strict=True):
        assert encode_prompt(tokenizer, prompt) == sample["prompt_ids"]
    assert max(len(sample["prompt_ids"]) for sample in SAMPLES) > 400


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: str(sample["name"]))
def test_samples_are_what_the_weights_say(sample: dict[str, Any], model: SmallModel) -> None:
    """One pass over prompt and answer; each answer token must be the best one at its place."""
    prompt, answer = sample["prompt_ids"], sample["greedy_ids"]
    logits = logits_of(model, [*prompt, *answer])[len(prompt) - 1 : -1]
    unsure = [step for step, gap in enumerate(sample["gaps"]) if gap < 1e-3]
    for step, token in enumerate(answer):
        assert step in unsure or logits[step].argmax() == token
    top = np.sort(logits, axis=-1)
    np.testing.assert_allclose(top[:, -1] - top[:, -2], sample["gaps"], atol=2e-3)
    assert (sample["finish_reason"] == "stop") == (answer[-1] == EOS_ID)


def test_chat_answers_end_by_themselves() -> None:
    chats = [sample for sample in SAMPLES if "messages" in sample]
    assert len(chats) >= 6
    assert all(s["finish_reason"] == "stop" for s in chats if s["name"] != "story")


def test_questions_get_their_answers() -> None:
    texts = {sample["name"]: sample["greedy_text"] for sample in SAMPLES}
    assert texts["hello"] == "Hello! How can I help you?"
    assert texts["page"].startswith("A page is a small block of memory.")
    assert texts["japanese"].startswith("こんにちは")
    assert texts["night_train"].startswith(" the town is going to bed.")


def test_greedy_equals_the_stored_answer(model: SmallModel) -> None:
    sample = next(sample for sample in SAMPLES if sample["name"] == "hello")
    assert greedy(model, sample["prompt_ids"]) == sample["greedy_ids"]


def test_the_served_tokenizer_and_template_make_the_same_ids(reader: CheckpointReader) -> None:
    jinja2 = pytest.importorskip("jinja2.sandbox")
    from jaxserve.tokenizer.tokenizer_model import from_tokenizer_model

    files = reader.tokenizer_files()
    assert files.sentencepiece_model is not None
    assert files.chat_template is not None
    served = from_tokenizer_model(files.sentencepiece_model, files.special)
    template = jinja2.ImmutableSandboxedEnvironment().from_string(files.chat_template)
    for sample in SAMPLES:
        text = sample.get("text")
        if text is None:
            text = template.render(
                messages=sample["messages"],
                add_generation_prompt=True,
                bos_token="<s>",
                eos_token="</s>",
            )
        assert served.encode(text, parse_special="messages" in sample) == sample["prompt_ids"]
