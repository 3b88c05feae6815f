"""What all backends promise, on small vocabularies that stand in the repository."""

from __future__ import annotations

import json
import pathlib
import threading
import time
from collections.abc import Callable

import pytest
import sentencepiece
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpoints.reader import TokenizerFiles
from jaxserve.errors import ModelFormatError, RequestError, UnsupportedModelError
from jaxserve.tokenizer.load import load_tokenizer
from jaxserve.tokenizer.pre_tokenizers import make_pre_tokenizer
from jaxserve.tokenizer.protocol import LeadingSpace, Tokenizer
from jaxserve.tokenizer.special_tokens import SpecialTokens, end_ids
from jaxserve.tokenizer.token_bytes import byte_level

DATA = pathlib.Path(__file__).resolve().parent.parent / "data" / "tokenizers"
JSON_TEXT = (DATA / "byte_level" / "tokenizer.json").read_text(encoding="utf-8")
JSON_CONFIG = json.loads((DATA / "byte_level" / "tokenizer_config.json").read_text())
MODEL = {name: (DATA / name / "tokenizer.model").read_bytes() for name in ("bpe", "bpe_noprefix")}


def _gguf_fields() -> dict[str, object]:
    """The byte-level vocabulary as a GGUF file would hold it, one token more: user-defined."""
    spec = json.loads(JSON_TEXT)
    ids: dict[str, int] = spec["model"]["vocab"]
    texts = sorted(ids, key=ids.__getitem__)
    special = {it["content"] for it in spec["added_tokens"]}
    return {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": [*texts, "<think>"],
        "token_type": [*(3 if text in special else 1 for text in texts), 4],
        "merges": [" ".join(it) if isinstance(it, list) else it for it in spec["model"]["merges"]],
        "bos_token_id": ids["<s>"],
        "eos_token_id": ids["</s>"],
        "add_bos_token": False,
    }


def _files(kind: str) -> TokenizerFiles:
    if kind == "json":
        return TokenizerFiles(tokenizer_json=JSON_TEXT, special=JSON_CONFIG)
    if kind == "gguf":
        return TokenizerFiles(gguf_vocab=_gguf_fields())
    return TokenizerFiles(sentencepiece_model=MODEL[kind])


#: "bpe" puts its dummy prefix after special tokens too, as the first models of its kind want.
KINDS = ["json", "gguf", "bpe", "bpe_noprefix"]
ALL = {kind: load_tokenizer(_files(kind)) for kind in KINDS}


@pytest.fixture(params=KINDS)
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return ALL[request.param]


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=80, deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=40))
def test_any_text_comes_back(kind: str, text: str) -> None:
    tokenizer = ALL[kind]
    ids = tokenizer.encode(text)
    expected = text if kind in ("json", "gguf") else text.replace("▁", " ")
    assert tokenizer.decode(ids) == expected
    assert all(0 <= token < tokenizer.vocab_size for token in ids)


@pytest.mark.parametrize(
    "text", ["\0", "a\0b", " " * 5000, "e\u0301\u0302" * 50, "\u2028\u200d\ufeff"]
)
def test_odd_texts_come_back(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("text", ["\ud800", "ok \udfff", "\ud83d" * 3])
def test_lone_surrogate_is_a_request_error(tokenizer: Tokenizer, text: str) -> None:
    with pytest.raises(RequestError, match="lone surrogate U\\+D") as caught:
        tokenizer.encode(text)
    assert "\n" not in str(caught.value)


def test_special_tokens_only_when_asked(tokenizer: Tokenizer) -> None:
    bos, end = tokenizer.bos_id, tokenizer.eos_ids[0]
    assert bos is not None
    text = "a</s> b"
    parsed = tokenizer.encode(text, parse_special=True, add_bos=False)
    plain = tokenizer.encode(text, add_bos=False)
    assert parsed.count(end) == 1
    assert end not in plain
    assert tokenizer.decode(plain) == text
    more = " " if tokenizer is ALL["bpe"] else ""
    assert tokenizer.decode(parsed, skip_special=False) == f"a</s>{more} b"
    assert tokenizer.decode(parsed) == f"a{more} b"
    assert tokenizer.special_spans(text) == [(1, 5)]
    assert tokenizer.encode("<s>a", parse_special=True, add_bos=True).count(bos) == 1
    assert tokenizer.encode("a", add_bos=True)[0] == bos
    assert tokenizer.encode("<s>a", add_bos=True)[0] == bos
    assert tokenizer.encode("", add_bos=True) == [bos]


def test_literal_ranges_keep_special_text_ordinary(tokenizer: Tokenizer) -> None:
    end = tokenizer.eos_ids[0]
    text = "x</s>y</s>z"
    ids = tokenizer.encode(text, parse_special=True, add_bos=False, literal=[(6, 10)])
    assert ids.count(end) == 1
    more = " " if tokenizer is ALL["bpe"] else ""
    assert tokenizer.decode(ids, skip_special=False) == f"x</s>{more}y</s>z"
    first = tokenizer.encode("x</s>", parse_special=True, add_bos=False)
    assert ids[: len(first)] == first
    touching = tokenizer.encode(text, parse_special=True, add_bos=False, literal=[(2, 3), (9, 10)])
    assert touching == tokenizer.encode(text, add_bos=False)


@settings(max_examples=60, deadline=None)
@given(parts=st.lists(st.sampled_from(["</s>", "<s>", "a", " b", "<", "s>", "é"]), max_size=12))
@pytest.mark.parametrize("kind", KINDS)
def test_no_literal_range_is_the_same_as_none(kind: str, parts: list[str]) -> None:
    """The way for look-alikes gives what the ordinary way gives where both apply."""
    tokenizer, text = ALL[kind], "".join(parts)
    ordinary = tokenizer.encode(text, parse_special=True)
    beyond = [(len(text) + 1, len(text) + 2)]
    assert tokenizer.encode(text, parse_special=True, literal=beyond) == ordinary


def test_ids_and_texts_of_tokens(tokenizer: Tokenizer) -> None:
    for token in range(tokenizer.vocab_size):
        text = tokenizer.token_text(token)
        if "\ufffd" not in text and text:
            found = tokenizer.id_of(text)
            assert found is not None
            assert tokenizer.token_text(found) == text
    assert tokenizer.id_of("</s>") == tokenizer.eos_ids[0]
    assert tokenizer.id_of("no such token") is None
    assert tokenizer.token_bytes(tokenizer.vocab_size) == b""
    assert tokenizer.token_bytes(-1) == b""


def test_user_defined_tokens_are_found_but_not_special() -> None:
    tokenizer = ALL["gguf"]
    think = tokenizer.id_of("<think>")
    assert tokenizer.encode("a<think>b").count(think or -1) == 1
    assert tokenizer.decode(tokenizer.encode("a<think>b")) == "a<think>b"
    assert think not in tokenizer.special_ids


def test_decode_equals_the_libraries() -> None:
    library = tokenizers.Tokenizer.from_str(JSON_TEXT)
    tokenizer = ALL["json"]
    for start in range(0, tokenizer.vocab_size - 9, 7):
        ids = list(range(start, start + 9))
        assert tokenizer.decode(ids) == library.decode(ids, skip_special_tokens=True)
    for name, model in MODEL.items():
        processor = sentencepiece.SentencePieceProcessor()
        processor.load_from_serialized_proto(model)
        for start in range(260, processor.get_piece_size() - 3):
            ids = list(range(start, start + 3))
            assert ALL[name].decode(ids) == processor.decode(ids)


def test_dummy_prefix_belongs_to_the_beginning_only() -> None:
    tokenizer = ALL["bpe"]
    assert tokenizer.leading_space is LeadingSpace.STRIP_ONE
    assert ALL["bpe_noprefix"].leading_space is LeadingSpace.KEEP
    text = "a</s>b"
    modern = load_tokenizer(
        TokenizerFiles(sentencepiece_model=MODEL["bpe"], special={"legacy": False})
    )
    every = tokenizer.encode(text, parse_special=True, add_bos=False)
    first = modern.encode(text, parse_special=True, add_bos=False)
    assert tokenizer.decode(every) == "a b"
    assert modern.decode(first) == "ab"


def test_added_tokens_past_a_sentencepiece_model() -> None:
    added = {
        "512": {"content": "<|im_end|>", "special": True},
        "513": {"content": "<tool>", "special": False},
    }
    tokenizer = load_tokenizer(
        TokenizerFiles(sentencepiece_model=MODEL["bpe"], special={"added_tokens_decoder": added})
    )
    assert tokenizer.vocab_size == 514
    assert 512 in tokenizer.eos_ids
    ids = tokenizer.encode("a<tool>b<|im_end|>", parse_special=True)
    assert 513 in ids
    assert ids[-1] == 512
    assert 512 not in tokenizer.encode("a<tool>b<|im_end|>")
    assert tokenizer.decode(ids, skip_special=False).endswith("<|im_end|>")


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"pre": "from the future"}, UnsupportedModelError),
        ({"model": "rwkv"}, UnsupportedModelError),
        ({"tokens": []}, ModelFormatError),
        ({"token_type": [1]}, ModelFormatError),
        ({"merges": ["no-space"]}, ModelFormatError),
        ({"merges": ["never heard"]}, ModelFormatError),
        ({"bos_token_id": 10**6}, ModelFormatError),
        ({"model": "llama"}, ModelFormatError),
        ({"tokens": 3}, ModelFormatError),
    ],
)
def test_broken_gguf_vocabularies(change: dict[str, object], error: type[Exception]) -> None:
    with pytest.raises(error) as caught:
        load_tokenizer(TokenizerFiles(gguf_vocab={**_gguf_fields(), **change}))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "files",
    [
        TokenizerFiles(tokenizer_json="{"),
        TokenizerFiles(tokenizer_json="{}"),
        TokenizerFiles(sentencepiece_model=b"\x08"),
        TokenizerFiles(sentencepiece_model=MODEL["bpe"][:-3]),
    ],
)
def test_broken_files(files: TokenizerFiles) -> None:
    with pytest.raises(ModelFormatError):
        load_tokenizer(files)
    with pytest.raises(UnsupportedModelError):
        load_tokenizer(TokenizerFiles())


def test_unknown_decoder_is_refused() -> None:
    spec = json.loads(JSON_TEXT)
    spec["decoder"] = {"type": "WordPiece", "prefix": "##", "cleanup": True}
    with pytest.raises(UnsupportedModelError, match="WordPiece"):
        load_tokenizer(TokenizerFiles(tokenizer_json=json.dumps(spec)))


def test_post_processor_decides_about_bos_unless_the_config_does() -> None:
    spec = json.loads(JSON_TEXT)
    spec["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": "<s>", "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
        ],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
    }
    text = json.dumps(spec)
    assert load_tokenizer(TokenizerFiles(tokenizer_json=text)).encode("a")[0] == 1
    off = TokenizerFiles(tokenizer_json=text, special={"add_bos_token": False, "bos_token": "<s>"})
    assert load_tokenizer(off).encode("a")[0] != 1


@pytest.mark.parametrize(
    ("name", "text", "pieces"),
    [
        ("gpt-2", "it's 123  x", ["it", "'s", "Ġ123", "Ġ", "Ġx"]),
        ("default", "IT'S 12", ["IT", "'", "S", "Ġ12"]),
        ("smollm", "a 123", ["a", "Ġ", "1", "2", "3"]),
        ("llama-bpe", "IT'S 12345\n\n x", ["IT", "'S", "Ġ", "123", "45", "ĊĊ", "Ġx"]),
        ("qwen2", "it's 123", ["it", "'s", "Ġ", "1", "2", "3"]),
        ("qwen35", "e\u0301a", ["eÌģa"]),
        ("tekken", "helloWorld 12", ["hello", "World", "Ġ", "1", "2"]),
        ("gpt-4o", "helloWorld's 1234", ["hello", "World's", "Ġ", "123", "4"]),
        ("deepseek-v3", "a1234中x", ["a", "123", "4", "ä¸Ń", "x"]),
    ],
)
def test_pre_tokenisers_cut_as_the_models_do(name: str, text: str, pieces: list[str]) -> None:
    assert [piece for piece, _ in make_pre_tokenizer(name).pre_tokenize_str(text)] == pieces


def test_byte_alphabet_is_complete() -> None:
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    assert sorted(byte_level(character) for character in alphabet) == [
        bytes([byte]) for byte in range(256)
    ]
    assert byte_level("a b") == b"a b"


def test_special_spans_are_leftmost_then_longest() -> None:
    special = SpecialTokens({"<a>": 1, "<a><b>": 2, "b>c": 3, "": 4})
    assert list(special.spans("x<a><b>c<a>")) == [(1, 7, 2), (8, 11, 1)]
    assert special.parsed_spans("<a>|<a>|<a>", [(4, 5)]) == [(0, 3, 1), (8, 11, 1)]
    assert list(SpecialTokens({}).spans("<a>")) == []


def test_harmony_messages_do_not_end_the_answer() -> None:
    special = {"<|end|>": 1, "<|return|>": 2, "<|call|>": 3}
    assert end_ids(special, [2]) == (2, 3)
    assert end_ids({"<|end|>": 1}, []) == (1,)
    assert end_ids({"<|eot_id|>": 9, "<|x|>": 5}, [7, 7]) == (7, 9)


@pytest.mark.parametrize("kind", ["json", "bpe"])
def test_long_texts_do_not_stop_other_threads(kind: str) -> None:
    encode: Callable[[str], list[int]] = ALL[kind].encode
    text, ticks, done = "hello world, it is late. " * 40_000, 0, threading.Event()

    def tick() -> None:
        nonlocal ticks
        while not done.is_set():
            ticks += 1
            time.sleep(0.001)

    thread = threading.Thread(target=tick)
    thread.start()
    try:
        before, start = ticks, time.monotonic()
        encode(text)
        elapsed, passed = time.monotonic() - start, ticks - before
    finally:
        done.set()
        thread.join()
    assert passed > 20 * elapsed, f"{passed} ticks in {elapsed:.2f} s"


def _sentencepiece_style_json(*, modern: bool) -> str:
    """A tokenizer.json as those of Llama 2 (prefix by normaliser) or Mistral (by Metaspace)."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", "a", "b", "▁a", "▁▁", "É"]
    library = tokenizers.Tokenizer(
        tokenizers.models.BPE(
            vocab={piece: token for token, piece in enumerate(pieces)},
            merges=[("▁", "a"), ("▁", "▁")],
            unk_token="<unk>",
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    if modern:
        library.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(
            prepend_scheme="first", split=False
        )
    else:
        library.normalizer = tokenizers.normalizers.Sequence(
            [tokenizers.normalizers.Prepend("▁"), tokenizers.normalizers.Replace(" ", "▁")]
        )
    steps = [
        tokenizers.decoders.Replace("▁", " "),
        tokenizers.decoders.ByteFallback(),
        tokenizers.decoders.Fuse(),
        tokenizers.decoders.Strip(" ", 1, 0),
    ]
    library.decoder = tokenizers.decoders.Sequence(steps)
    library.add_special_tokens(["<unk>", "<s>", "</s>"])
    text: str = library.to_str()
    return text


@pytest.mark.parametrize("modern", [True, False])
def test_sentencepiece_style_tokenizer_json(modern: bool) -> None:
    text = _sentencepiece_style_json(modern=modern)
    library = tokenizers.Tokenizer.from_str(text)
    config = {"bos_token": "<s>", "eos_token": "</s>"}
    tokenizer = load_tokenizer(TokenizerFiles(tokenizer_json=text, special=config))
    assert tokenizer.leading_space is LeadingSpace.STRIP_ONE
    for sample in ["a b", "  a", "É世a", "a</s>b</s> a", "", "</s>a", "\n"]:
        ids = tokenizer.encode(sample, parse_special=True)
        assert ids == library.encode(sample, add_special_tokens=False).ids
        assert tokenizer.decode(ids) == library.decode(ids)
        beyond = [(len(sample) + 1, len(sample) + 2)]
        assert tokenizer.encode(sample, parse_special=True, literal=beyond) == ids
        plain = tokenizer.encode(sample)
        assert tokenizer.decode(plain) == library.decode(plain)
        assert not tokenizer.special_ids & set(plain)
