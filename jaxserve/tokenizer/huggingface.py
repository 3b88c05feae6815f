"""A tokeniser that runs in the `tokenizers` library (steps 2 and 8).

Two instances share one model: one parses special tokens, the other takes them as text. Built by
`tokenizer_json` and `gguf_byte_level`; knows no files.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence

import tokenizers

from jaxserve.errors import UnsupportedModelError
from jaxserve.tokenizer.detokenizer import decode_all
from jaxserve.tokenizer.protocol import LeadingSpace
from jaxserve.tokenizer.special_tokens import SpecialTokens
from jaxserve.tokenizer.token_bytes import PieceToBytes
from jaxserve.tokenizer.valid_text import check_text

#: From this length on, encoding releases the interpreter lock; below, that costs more than it gains.
_LONG_TEXT = 2_000


class HuggingFaceTokenizer:
    """`protocol.Tokenizer` over `tokenizers.Tokenizer`.

    parsing: the library's tokeniser with every added token in place.
    to_bytes: the bytes of an ordinary piece; added tokens stand for their own text.
    """

    def __init__(
        self,
        parsing: tokenizers.Tokenizer,
        *,
        to_bytes: PieceToBytes,
        leading_space: LeadingSpace,
        bos_id: int | None,
        eos_ids: tuple[int, ...],
        add_bos: bool,
    ) -> None:
        parsing.no_truncation()
        parsing.no_padding()
        added = parsing.get_added_tokens_decoder()
        self.vocab_size = parsing.get_vocab_size(with_added_tokens=True)
        if added:
            self.vocab_size = max(self.vocab_size, max(added) + 1)
        self.leading_space = leading_space
        self.bos_id = bos_id
        self.eos_ids = eos_ids
        self.add_bos = add_bos and bos_id is not None
        self.special_ids = frozenset(token for token, it in added.items() if it.special)
        self._to_bytes = to_bytes
        self._added = {token: it.content for token, it in added.items()}
        self._special = SpecialTokens({it.content: t for t, it in added.items() if it.special})
        self._parsing = parsing
        self._aliases = {
            token: f"\ue000{secrets.token_hex(8)}:{token}\ue001" for token in self.special_ids
        }
        self._literal, self._real_id = _literal_twin(parsing, added, self._aliases)

    def encode(
        self,
        text: str,
        *,
        parse_special: bool = False,
        add_bos: bool | None = None,
        literal: Sequence[tuple[int, int]] = (),
    ) -> list[int]:
        check_text(text)
        if not parse_special:
            ids = self._encode_literal(text)
        elif not literal:
            ids = _encode(self._parsing, text)
        else:
            ids = self._encode_with_literals(text, literal)
        wanted = self.add_bos if add_bos is None else add_bos
        if wanted and self.bos_id is not None and ids[:1] != [self.bos_id]:
            ids.insert(0, self.bos_id)
        return ids

    def _encode_with_literals(self, text: str, literal: Sequence[tuple[int, int]]) -> list[int]:
        """Special tokens outside `literal` take a secret name that the literal twin knows."""
        pieces, last = [], 0
        for start, end, token in self._special.parsed_spans(text, literal):
            pieces += [text[last:start], self._aliases[token]]
            last = end
        return self._encode_literal("".join([*pieces, text[last:]]))

    def _encode_literal(self, text: str) -> list[int]:
        return [self._real_id.get(token, token) for token in _encode(self._literal, text)]

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        return decode_all(self, ids, skip_special=skip_special)

    def token_bytes(self, token_id: int) -> bytes:
        added = self._added.get(token_id)
        if added is not None:
            return added.encode()
        piece = self._parsing.id_to_token(token_id) if 0 <= token_id < self.vocab_size else None
        return b"" if piece is None else self._to_bytes(piece)

    def token_text(self, token_id: int) -> str:
        return self.token_bytes(token_id).decode(errors="replace")

    def id_of(self, text: str) -> int | None:
        token: int | None = self._parsing.token_to_id(text)
        if token is not None and self.token_text(token) == text:
            return token
        ids = self.encode(text, parse_special=True, add_bos=False)
        return ids[0] if len(ids) == 1 and self.token_text(ids[0]) == text else None

    def special_spans(self, text: str) -> list[tuple[int, int]]:
        return [(start, end) for start, end, _ in self._special.spans(text)]


def _encode(tokenizer: tokenizers.Tokenizer, text: str) -> list[int]:
    if len(text) < _LONG_TEXT:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
        return ids
    batch = tokenizer.encode_batch_fast([text], add_special_tokens=False)
    return list(batch[0].ids)


def _literal_twin(
    parsing: tokenizers.Tokenizer,
    added: Mapping[int, tokenizers.AddedToken],
    aliases: Mapping[int, str],
) -> tuple[tokenizers.Tokenizer, dict[int, int]]:
    """A tokeniser of the same model to which special tokens are text, but their aliases tokens.

    Also the real id for each id that the twin gives to an alias or to an ordinary added token.
    """
    twin = tokenizers.Tokenizer(parsing.model)
    for part in ("normalizer", "pre_tokenizer"):
        if getattr(parsing, part) is not None:
            setattr(twin, part, getattr(parsing, part))
    names = {token: aliases.get(token, added[token].content) for token in sorted(added)}
    twin.add_tokens(
        [
            tokenizers.AddedToken(
                name,
                single_word=added[token].single_word,
                lstrip=added[token].lstrip,
                rstrip=added[token].rstrip,
                normalized=added[token].normalized and token not in aliases,
            )
            for token, name in names.items()
        ]
    )
    real = {}
    for token, name in names.items():
        own = twin.token_to_id(name)
        assert own is not None, "add_tokens gives every name an id"
        real[own] = token
        taken = parsing.model.id_to_token(own)
        if taken is not None and taken != added[token].content:
            raise UnsupportedModelError(
                f"the tokeniser's ids have gaps: the id after the last piece belongs to {taken!r}"
            )
    return twin, real
