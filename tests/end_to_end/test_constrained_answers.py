"""Real steps under grammars: every answer valid, free answers beside them unchanged."""

from __future__ import annotations

import dataclasses
import json
import zlib
from typing import Any

import numpy as np
import pytest
from byte_tokenizer import ByteTokenizer
from tiny_model import VOCAB, write_tiny_llama

from checkpoints.assets import read_tokenizer_files
from checkpoints.resolve import resolve_model
from jaxserve.config import EngineConfig, cache_folder
from jaxserve.engine.build import make_engine
from jaxserve.engine.engine import Engine
from jaxserve.engine.report import EngineReport
from jaxserve.request import FinishReason, GenerationRequest, SamplingParams, TokenOutput
from jaxserve.structured import grammars
from jaxserve.structured.matcher import Grammars
from jaxserve.structured.vocabulary import make_vocabulary
from jaxserve.tokenizer.load import load_tokenizer
from jaxserve.tokenizer.protocol import Tokenizer

SCHEMA = {
    "type": "object",
    "properties": {
        "word": {"type": "string", "minLength": 1, "maxLength": 12},
        "count": {"type": "integer", "minimum": 1, "maximum": 99},
        "kind": {"enum": ["big", "small"]},
        "list": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    },
    "required": ["word", "count", "kind", "list"],
    "additionalProperties": False,
}
GRAMMAR = grammars.schema_grammar(SCHEMA, "response_format")


@pytest.fixture(scope="module", params=["tiny", pytest.param("small", marks=pytest.mark.slow)])
def built(request: Any, tmp_path_factory: Any) -> tuple[Engine, EngineReport, Tokenizer]:
    """An engine and its tokeniser: random weights and bytes, or the checkpoint that ships with us."""
    config = EngineConfig(
        model="small",
        quantization="none",
        max_num_seqs=8,
        max_num_batched_tokens=8,
        max_model_len=512,
        page_size=16,
    )
    if request.param == "small":
        files = read_tokenizer_files(resolve_model("small", cache_folder()))
        return *make_engine(config), load_tokenizer(files)
    tokenizer = ByteTokenizer()
    engine, report = make_engine(config, write_tiny_llama(tmp_path_factory.mktemp("tiny")))
    engine.grammars = Grammars(lambda: make_vocabulary(tokenizer, VOCAB, tokenizer.eos_ids), VOCAB)
    return engine, report, tokenizer


@pytest.fixture
def engine(built: tuple[Engine, EngineReport, Tokenizer]) -> Engine:
    return built[0]


@pytest.fixture
def tokenizer(built: tuple[Engine, EngineReport, Tokenizer]) -> Tokenizer:
    return built[2]


def request(name: str, tokenizer: Tokenizer, **fields: Any) -> GenerationRequest:
    made = GenerationRequest(
        request_id=name,
        prompt_ids=tokenizer.encode("Once upon a time"),
        sampling=SamplingParams(temperature=1.0, seed=zlib.crc32(name.encode()), max_tokens=450),
        eos_ids=tokenizer.eos_ids,
    )
    return dataclasses.replace(made, **fields)


def run(engine: Engine, requests: list[GenerationRequest]) -> dict[str, list[TokenOutput]]:
    outputs: dict[str, list[TokenOutput]] = {item.request_id: [] for item in requests}
    for item in requests:
        engine.add(item)
    while engine.has_work:
        for output in engine.step():
            outputs[output.request_id].append(output)
        engine.check_integrity()
    return outputs


def ids_of(pieces: list[TokenOutput]) -> list[int]:
    return [token for piece in pieces for token in piece.token_ids]


def text_of(tokenizer: Tokenizer, pieces: list[TokenOutput]) -> str:
    return tokenizer.decode([token for token in ids_of(pieces) if token not in tokenizer.eos_ids])


def valid(text: str) -> bool:
    try:
        value = json.loads(text)
    except ValueError:
        return False
    return (
        isinstance(value, dict)
        and list(value) == ["word", "count", "kind", "list"]
        and isinstance(value["word"], str)
        and 1 <= len(value["word"]) <= 12
        and type(value["count"]) is int
        and 1 <= value["count"] <= 99
        and value["kind"] in ("big", "small")
        and len(value["list"]) <= 3
        and all(type(item) is bool for item in value["list"])
    )


def test_fifty_samples_are_valid_beside_free_answers(engine: Engine, tokenizer: Tokenizer) -> None:
    short = SamplingParams(temperature=1.0, seed=5, max_tokens=40)
    free = [request(f"free{number}", tokenizer, sampling=short) for number in range(10)]
    alone = run(engine, free)
    bound = [request(f"bound{number}", tokenizer, grammar=GRAMMAR) for number in range(50)]
    mixed = [item for pair in zip(bound[:10], free, strict=True) for item in pair] + bound[10:]
    outputs = run(engine, mixed)
    texts = set()
    for item in bound:
        pieces = outputs[item.request_id]
        text = text_of(tokenizer, pieces)
        assert pieces[-1].finish_reason is FinishReason.STOP, pieces[-1].error or text
        assert valid(text), text
        texts.add(text)
    assert len(texts) > 10, "random answers differ"
    for item in free:
        together, before = outputs[item.request_id], alone[item.request_id]
        assert ids_of(together) == ids_of(before), "company changes nothing"


def test_the_same_answer_without_overlap(engine: Engine, tokenizer: Tokenizer) -> None:
    bound = [request(f"again{number}", tokenizer, grammar=GRAMMAR) for number in range(4)]
    overlapped = run(engine, bound)
    engine._asynchronous = False
    try:
        whole = run(engine, bound)
    finally:
        engine._asynchronous = True
    for item in bound:
        left, right = overlapped[item.request_id], whole[item.request_id]
        assert text_of(tokenizer, left) == text_of(tokenizer, right)


def test_a_cut_answer_says_length(engine: Engine, tokenizer: Tokenizer) -> None:
    sampling = SamplingParams(temperature=1.0, seed=1, max_tokens=5)
    cut = request("cut", tokenizer, grammar=GRAMMAR, sampling=sampling)
    pieces = run(engine, [cut])["cut"]
    assert pieces[-1].finish_reason is FinishReason.LENGTH
    assert not valid(text_of(tokenizer, pieces))


def test_without_the_mask_the_answers_are_caught(
    engine: Engine, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The planted failure: masks that allow everything never become an answer that counts as good."""

    def allow_all(slots: np.ndarray, masks: np.ndarray) -> None:
        place(slots, np.full_like(masks, 0xFFFFFFFF))

    device = engine._runner._device  # type: ignore[attr-defined]
    place = device.allow_tokens
    monkeypatch.setattr(device, "allow_tokens", allow_all)
    bound = [request(f"open{number}", tokenizer, grammar=GRAMMAR) for number in range(5)]
    for pieces in run(engine, bound).values():
        assert pieces[-1].finish_reason is FinishReason.ERROR
        assert "grammar" in (pieces[-1].error or "")


def test_one_bad_matcher_ends_its_own_answer_only(engine: Engine, tokenizer: Tokenizer) -> None:
    endless = grammars.text_grammar('start: s\ns: s s s | s s | "a"', "structured_outputs")
    requests = [
        request("bad", tokenizer, grammar=endless, sampling=SamplingParams(max_tokens=400)),
        request("good", tokenizer, grammar=GRAMMAR),
        request("free", tokenizer),
    ]
    outputs = run(engine, requests)
    assert outputs["bad"][-1].finish_reason in (FinishReason.ERROR, FinishReason.STOP)
    assert valid(text_of(tokenizer, outputs["good"]))
    assert outputs["free"][-1].finish_reason in (FinishReason.STOP, FinishReason.LENGTH)


def test_nothing_is_compiled_after_ready(
    engine: Engine, built: tuple[Engine, EngineReport, Tokenizer]
) -> None:
    assert built[1].compilation.after_ready == 0
