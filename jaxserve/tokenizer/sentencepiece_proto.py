"""Reading and writing the few fields of a SentencePiece model file that we need (start-up).

The file is a protobuf message; its format is written down in the SentencePiece project's
sentencepiece_model.proto. Only the wire format is needed here, not a protobuf library.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence

#: ModelProto.
PIECES, TRAINER, NORMALIZER = 1, 2, 3
#: ModelProto.SentencePiece.
PIECE_TEXT, PIECE_SCORE, PIECE_TYPE = 1, 2, 3
#: TrainerSpec.
MODEL_TYPE, BYTE_FALLBACK = 3, 35
UNIGRAM, BPE = 1, 2
#: NormalizerSpec.
NORMALIZER_NAME, CHARSMAP, ADD_DUMMY_PREFIX, REMOVE_EXTRA_WHITESPACES = 1, 2, 3, 4
ESCAPE_WHITESPACES = 5

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5

Value = int | bytes


def read_fields(message: bytes) -> Iterator[tuple[int, Value]]:
    """(field number, value) of a message, in order; raises ValueError if it is damaged."""
    at = 0
    while at < len(message):
        key, at = _read_varint(message, at)
        number, wire = key >> 3, key & 7
        if wire == _VARINT:
            value: Value
            value, at = _read_varint(message, at)
        else:
            size = {_FIXED64: 8, _FIXED32: 4}.get(wire, -1)
            if wire == _BYTES:
                size, at = _read_varint(message, at)
            if size < 0 or at + size > len(message):
                raise ValueError(f"field {number} is cut off or of an unknown kind")
            value, at = message[at : at + size], at + size
        yield number, value


def _read_varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if at >= len(message) or shift > 63:
            raise ValueError("a number is cut off")
        byte = message[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7


def _varint(value: int) -> bytes:
    parts = bytearray()
    while value >= 0x80:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    parts.append(value)
    return bytes(parts)


def int_field(number: int, value: int) -> bytes:
    """A number (or truth value) as a field."""
    return _key(number, _VARINT) + _varint(value)


def bytes_field(number: int, value: bytes) -> bytes:
    """Bytes, a text or a message as a field."""
    return _key(number, _BYTES) + _varint(len(value)) + value


def piece_fields(texts: Sequence[str], scores: Sequence[float], types: Sequence[int]) -> bytes:
    """The vocabulary as fields of a ModelProto. Fast enough for a quarter of a million pieces."""
    packed = struct.pack(f"<{len(scores)}f", *scores)
    score_key = bytes([PIECE_SCORE << 3 | _FIXED32])
    tails = {kind: int_field(PIECE_TYPE, kind) for kind in set(types)}
    heads: dict[tuple[int, int], bytes] = {}
    parts: list[bytes] = []
    for index, (text, kind) in enumerate(zip(texts, types, strict=True)):
        raw, tail = text.encode(), tails[kind]
        size = len(raw)
        head = heads.get((size, kind))
        if head is None:  # everything before the text depends on lengths alone
            inner = _key(PIECE_TEXT, _BYTES) + _varint(size)
            body = len(inner) + size + 5 + len(tail)
            head = heads[size, kind] = _key(PIECES, _BYTES) + _varint(body) + inner
        parts += (head, raw, score_key, packed[4 * index : 4 * index + 4], tail)
    return b"".join(parts)


def _key(number: int, wire: int) -> bytes:
    return _varint(number << 3 | wire)
