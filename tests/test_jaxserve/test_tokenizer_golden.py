"""Every backend against the reference values: ids, pieces, decoded texts, and streams."""

from __future__ import annotations

import json
import pathlib
import struct
from typing import Any

import pytest

from checkpoints.gguf_reader import GgufReader
from checkpoints.reader import TokenizerFiles
from jaxserve.tokenizer import sentencepiece_proto as proto
from jaxserve.tokenizer.detokenizer import IncrementalDetokenizer
from jaxserve.tokenizer.load import load_tokenizer
from jaxserve.tokenizer.protocol import Tokenizer


def _gguf_tokenizer(path: pathlib.Path) -> Tokenizer:
    return load_tokenizer(GgufReader(path).tokenizer_files())


@pytest.fixture(scope="module", params=["smollm2", "gemma3"])
def real(request: pytest.FixtureRequest) -> tuple[str, Tokenizer]:
    """A vocabulary out of a GGUF file: byte-level BPE, and SentencePiece style."""
    return request.param, _gguf_tokenizer(request.getfixturevalue(f"{request.param}_gguf"))


def _read(path: pathlib.Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def _accepted(case: dict[str, Any], field: str) -> list[list[int]]:
    """The reference, and the other tokenisations that its README accepts (Gemma, i = 59 and 63)."""
    ids = [case[field]]
    if case["i"] in (59, 63):
        ids += [case[key] for key in case if key.endswith("_differs")]
    return ids


def test_real_vocabularies_are_exact(real: tuple[str, Tokenizer], golden: pathlib.Path) -> None:
    name, tokenizer = real
    cases = _read(golden / "c" / f"{name}.json")["cases"]
    assert len(cases) > 50
    for case in cases:
        text = case["text"]
        plain = tokenizer.encode(text, add_bos=False)
        parsed = tokenizer.encode(text, parse_special=True, add_bos=False)
        assert plain in _accepted(case, "ids_plain"), text
        assert parsed in _accepted(case, "ids_special"), text
        everywhere = [(0, len(text))]
        literal = tokenizer.encode(text, parse_special=True, add_bos=False, literal=everywhere)
        assert literal == plain, text
        assert tokenizer.decode(case["ids_plain"]) == case["decoded_plain"]
        kept = tokenizer.decode(case["ids_special"], skip_special=False)
        assert kept == case["decoded_special_keep"]
        assert tokenizer.decode(case["ids_special"]) == case["decoded_special_skip"]


def test_streams_show_whole_characters_as_soon_as_they_are_there(
    real: tuple[str, Tokenizer], golden: pathlib.Path
) -> None:
    name, tokenizer = real
    for case in _read(golden / "c" / f"{name}_stream.json")["cases"]:
        detokenizer = IncrementalDetokenizer(tokenizer, skip_special=False)
        text, shown = "", []
        for token in case["ids"]:
            text += detokenizer.push([token])
            shown.append(text)
        assert shown == case["cumulative"]
        final = text + detokenizer.finish()
        assert final == case["final"]
        assert final.count("\ufffd") <= 1 + max(text.count("\ufffd") for text in case["cumulative"])


def test_prompts_of_the_models(real: tuple[str, Tokenizer], golden: pathlib.Path) -> None:
    name, tokenizer = real
    for prompt in _read(golden / "a" / f"{name}_gguf_f32.json")["prompts"]:
        assert tokenizer.encode(prompt["text"], parse_special=True) == prompt["ids"]


def test_bos_comes_first_once(gemma3_gguf: pathlib.Path) -> None:
    tokenizer = _gguf_tokenizer(gemma3_gguf)
    assert (tokenizer.bos_id, tokenizer.add_bos, tokenizer.vocab_size) == (2, True, 262_144)
    assert tokenizer.eos_ids == (1, 106)
    hello = tokenizer.encode("Hello", add_bos=False)
    assert tokenizer.encode("Hello") == [2, *hello]
    assert tokenizer.encode("<bos>Hello", parse_special=True) == [2, *hello]
    assert tokenizer.encode("<bos>Hello")[:2] != [2, 2]
    assert len(tokenizer.encode("<bos>Hello")) > len(hello) + 2


def _sentencepiece_files(folder: pathlib.Path) -> list[TokenizerFiles]:
    """The same vocabulary as a tokenizer.model and as the fields of a GGUF file."""
    model = (folder / "tokenizer.model").read_bytes()
    texts, scores, types = [], [], []
    normalizer: dict[int, proto.Value] = {}
    unigram = True
    for number, value in proto.read_fields(model):
        assert isinstance(value, bytes)
        fields = dict(proto.read_fields(value))
        if number == proto.PIECES:
            text, score = fields[proto.PIECE_TEXT], fields.get(proto.PIECE_SCORE, bytes(4))
            assert isinstance(text, bytes)
            assert isinstance(score, bytes)
            texts.append(text.decode())
            scores.append(struct.unpack("<f", score)[0])
            types.append(fields.get(proto.PIECE_TYPE, 1))
        elif number == proto.NORMALIZER:
            normalizer = fields
        elif number == proto.TRAINER:
            unigram = fields.get(proto.MODEL_TYPE, proto.UNIGRAM) == proto.UNIGRAM
    vocabulary = {
        "model": "t5" if unigram else "llama",
        "tokens": texts,
        "scores": scores,
        "token_type": types,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
        "add_space_prefix": bool(normalizer.get(proto.ADD_DUMMY_PREFIX, 1)),
        "remove_extra_whitespaces": bool(normalizer.get(proto.REMOVE_EXTRA_WHITESPACES, 1)),
        "precompiled_charsmap": list(bytes(normalizer.get(proto.CHARSMAP, b""))),
    }
    return [TokenizerFiles(sentencepiece_model=model), TokenizerFiles(gguf_vocab=vocabulary)]


def _check_sentencepiece(folder: pathlib.Path) -> None:
    cases = _read(folder / "expected.json")["cases"]
    assert cases
    for files in _sentencepiece_files(folder):
        tokenizer = load_tokenizer(files)
        assert (tokenizer.bos_id, tokenizer.eos_ids) == (1, (2,))
        for case in cases:
            assert tokenizer.encode(case["text"], add_bos=False) == case["ids"], case["text"]
            assert tokenizer.decode(case["ids"]) == case["decoded"], case["text"]


@pytest.mark.parametrize("name", ["bpe", "bpe_noprefix"])
def test_sentencepiece(name: str, data: pathlib.Path) -> None:
    _check_sentencepiece(data / "tokenizers" / name)


@pytest.mark.parametrize("name", ["unigram", "bpe", "bpe_noprefix"])
def test_sentencepiece_golden(name: str, golden: pathlib.Path) -> None:
    _check_sentencepiece(golden / "d" / name)
