"""A tokeniser's vocabulary in the form in which llguidance looks for tokens (part of step 7)."""

from __future__ import annotations

import pathlib
from collections.abc import Iterable

from llguidance import LLTokenizer

from checkpoints.assets import read_tokenizer_files
from checkpoints.errors import CheckpointError
from jaxserve.errors import ModelError, RequestError
from jaxserve.tokenizer.load import load_tokenizer
from jaxserve.tokenizer.protocol import Tokenizer


class _Words:
    """What `LLTokenizer` asks for: see `llguidance.TokenizerWrapper`."""

    is_tokenizer_wrapper = True

    def __init__(self, tokenizer: Tokenizer, tokens: list[bytes], eos_id: int) -> None:
        self.tokens = tokens
        self.eos_token_id = eos_id
        self.bos_token_id = tokenizer.bos_id
        self.special_token_ids = sorted(id for id in tokenizer.special_ids if id < len(tokens))
        self._tokenizer = tokenizer

    def __call__(self, text: str | bytes) -> list[int]:
        """Ids of a forced text as the model would write it in the middle of an answer."""
        data = text.encode() if isinstance(text, str) else text
        string = data.decode()
        for lead in ("", "\n"):  # SentencePiece puts a space before the start of a text
            ids = self._tokenizer.encode(lead + string, add_bos=False)
            while ids and self._bytes(ids) != data and self._bytes(ids).endswith(data):
                ids = ids[1:]
            if self._bytes(ids) == data:
                return ids
        return []

    def _bytes(self, ids: list[int]) -> bytes:
        return b"".join(self._tokenizer.token_bytes(token) for token in ids)


def make_vocabulary(tokenizer: Tokenizer, vocab_size: int, eos_ids: Iterable[int]) -> LLTokenizer:
    """Every token. vocab_size: the model's, which may exceed the tokeniser's.

    Takes seconds and some hundred bytes a token for the largest vocabularies.
    """
    known = min(tokenizer.vocab_size, vocab_size)
    tokens = [tokenizer.token_bytes(token) for token in range(known)]
    tokens += [b""] * (vocab_size - known)
    return _make(tokenizer, tokens, eos_ids)


def load_vocabulary(path: pathlib.Path, vocab_size: int, eos_ids: Iterable[int]) -> LLTokenizer:
    """`make_vocabulary` of the model at `path`. Raises RequestError where its files have none."""
    try:
        tokenizer = load_tokenizer(read_tokenizer_files(path))
    except (CheckpointError, ModelError) as error:
        raise RequestError(f"answers of a given form need a tokeniser: {error}") from None
    return make_vocabulary(tokenizer, vocab_size, {*eos_ids, *tokenizer.eos_ids})


def make_byte_vocabulary(tokenizer: Tokenizer) -> LLTokenizer:
    """Single bytes and the special tokens under their ids: enough to try a grammar, and small."""
    special = tokenizer.special_ids
    ordinary = [token for token in range(tokenizer.vocab_size) if token not in special][:256]
    tokens = [b""] * tokenizer.vocab_size
    for byte, token in enumerate(ordinary):
        tokens[token] = bytes([byte])
    for token in special:
        tokens[token] = tokenizer.token_bytes(token)
    return _make(tokenizer, tokens, tokenizer.eos_ids)


def _make(tokenizer: Tokenizer, tokens: list[bytes], eos_ids: Iterable[int]) -> LLTokenizer:
    ends = sorted({token for token in eos_ids if token < len(tokens)})
    assert ends, "a model has an end token"
    words = _Words(tokenizer, tokens, ends[0])
    return LLTokenizer(words, n_vocab=len(tokens), eos_token=ends)  # type: ignore[arg-type]
