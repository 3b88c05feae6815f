"""A tokeniser that runs in the `sentencepiece` library (steps 2 and 8).

Built from a tokenizer.model file or by `gguf_sentencepiece`; knows no files. SentencePiece itself
never parses control tokens, so text is cut at them here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import sentencepiece

from jaxserve.errors import ModelFormatError
from jaxserve.tokenizer import sentencepiece_proto as proto
from jaxserve.tokenizer import token_bytes
from jaxserve.tokenizer.detokenizer import decode_all
from jaxserve.tokenizer.protocol import LeadingSpace
from jaxserve.tokenizer.special_tokens import SpecialTokens
from jaxserve.tokenizer.valid_text import check_text


class SentencePieceTokenizer:
    """`protocol.Tokenizer` over `sentencepiece.SentencePieceProcessor`.

    model: the serialised model. special: texts and ids of the special tokens; ids past the
        model's pieces are allowed.
    added: more tokens past the model's pieces that are always found in text, by text.
    prefix_every_part: whether text after a special token gets the dummy prefix too, or only the
        text's beginning.
    """

    def __init__(
        self,
        model: bytes,
        *,
        special: Mapping[str, int],
        added: Mapping[str, int],
        bos_id: int | None,
        eos_ids: tuple[int, ...],
        add_bos: bool,
        prefix_every_part: bool,
    ) -> None:
        self._first = load_processor(model)
        normalizer = read_normalizer(model)
        dummy_prefix = bool(normalizer.get(proto.ADD_DUMMY_PREFIX, 1))
        strip_all = bool(normalizer.get(proto.REMOVE_EXTRA_WHITESPACES, 1))
        self._later = self._first
        if dummy_prefix and not prefix_every_part:
            self._later = load_processor(without_dummy_prefix(model))
        self.leading_space = LeadingSpace.KEEP
        if strip_all:
            self.leading_space = LeadingSpace.STRIP_ALL
        elif dummy_prefix:
            self.leading_space = LeadingSpace.STRIP_ONE
        self._num_pieces: int = self._first.get_piece_size()
        self.vocab_size = max([self._num_pieces - 1, *special.values(), *added.values()]) + 1
        self.bos_id = bos_id
        self.eos_ids = eos_ids
        self.add_bos = add_bos and bos_id is not None
        self.special_ids = frozenset(special.values())
        self._special = SpecialTokens(special)
        self._added = SpecialTokens(added)
        self._own_text = {
            token: text for texts in (special, added) for text, token in texts.items()
        }

    def encode(
        self,
        text: str,
        *,
        parse_special: bool = False,
        add_bos: bool | None = None,
        literal: Sequence[tuple[int, int]] = (),
    ) -> list[int]:
        check_text(text)
        ids: list[int] = []
        last = 0
        for start, end, token in self._cuts(text, parse_special, literal):
            ids += self._encode_part(text[last:start], first=last == 0)
            ids.append(token)
            last = end
        ids += self._encode_part(text[last:], first=last == 0)
        wanted = self.add_bos if add_bos is None else add_bos
        if wanted and self.bos_id is not None and ids[:1] != [self.bos_id]:
            ids.insert(0, self.bos_id)
        return ids

    def _cuts(
        self, text: str, parse_special: bool, literal: Sequence[tuple[int, int]]
    ) -> list[tuple[int, int, int]]:
        """(start, end, id) of all tokens that SentencePiece must not see, in order."""
        special = self._special.parsed_spans(text, literal) if parse_special else []
        taken = [(start, end) for start, end, _ in special]
        return sorted([*special, *self._added.parsed_spans(text, taken)])

    def _encode_part(self, part: str, *, first: bool) -> list[int]:
        """SentencePiece's encode, which releases the interpreter lock."""
        if not part:
            return []
        ids: list[int] = (self._first if first else self._later).encode(part)
        return ids

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        return decode_all(self, ids, skip_special=skip_special)

    def token_bytes(self, token_id: int) -> bytes:
        own = self._own_text.get(token_id)
        if own is not None:
            return own.encode()
        if not 0 <= token_id < self._num_pieces:
            return b""
        if self._first.is_unknown(token_id):
            surface: str = self._first.decode([token_id])
            return surface.encode()
        piece: str = self._first.id_to_piece(token_id)
        if self._first.is_byte(token_id):
            return token_bytes.sentencepiece(piece)
        return token_bytes.sentencepiece_without_bytes(piece)

    def token_text(self, token_id: int) -> str:
        return self.token_bytes(token_id).decode(errors="replace")

    def id_of(self, text: str) -> int | None:
        for token, own in self._own_text.items():
            if own == text:
                return token
        names = [text.replace(" ", token_bytes.SPACE_SYMBOL)]
        if len(text) == 1 and text.isascii():
            names.append(f"<0x{ord(text):02X}>")
        for name in names:
            token = int(self._first.piece_to_id(name))
            if self.token_text(token) == text:
                return token
        return None

    def special_spans(self, text: str) -> list[tuple[int, int]]:
        return [(start, end) for start, end, _ in self._special.spans(text)]


def load_processor(model: bytes) -> sentencepiece.SentencePieceProcessor:
    """The library's processor; raises ModelFormatError if it cannot read the model."""
    processor = sentencepiece.SentencePieceProcessor()
    try:
        processor.load_from_serialized_proto(model)
    except Exception as error:  # which one differs between versions of the library
        raise ModelFormatError(f"the SentencePiece model cannot be read: {error}") from None
    return processor


def read_normalizer(model: bytes) -> dict[int, proto.Value]:
    """The fields of the model's NormalizerSpec that it sets."""
    try:
        for number, value in proto.read_fields(model):
            if number == proto.NORMALIZER and isinstance(value, bytes):
                return dict(proto.read_fields(value))
    except ValueError as error:
        raise ModelFormatError(f"the SentencePiece model is damaged: {error}") from None
    return {}


def without_dummy_prefix(model: bytes) -> bytes:
    """The same model without the dummy prefix.

    In protobuf a repeated occurrence of a message is merged into the first: appending is enough.
    """
    change = proto.int_field(proto.ADD_DUMMY_PREFIX, 0)
    return model + proto.bytes_field(proto.NORMALIZER, change)
