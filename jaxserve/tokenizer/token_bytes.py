"""What bytes a vocabulary's piece stands for (part of step 8): byte-level BPE and SentencePiece."""

from __future__ import annotations

import re
from collections.abc import Callable

#: SentencePiece writes a space as this character.
SPACE_SYMBOL = "\N{LOWER ONE EIGHTH BLOCK}"
_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")

PieceToBytes = Callable[[str], bytes]


def _byte_alphabet() -> dict[int, str]:
    """GPT-2's table: printable Latin-1 bytes stand for themselves, the others for U+0100 and on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {byte: chr(byte) for byte in printable}
    for byte in range(256):
        if byte not in table:
            table[byte] = chr(256 + len(table) - len(printable))
    return table


_BYTE_OF = {character: byte for byte, character in _byte_alphabet().items()}


def byte_level(piece: str) -> bytes:
    """A byte-level piece: one character per byte; a piece with any other character is plain text."""
    try:
        return bytes([_BYTE_OF[character] for character in piece])
    except KeyError:
        return piece.encode()


def sentencepiece(piece: str) -> bytes:
    """A SentencePiece piece: U+2581 is a space, `<0xE2>` is that byte."""
    found = _BYTE_PIECE.fullmatch(piece)
    if found is not None:
        return bytes([int(found[1], 16)])
    return piece.replace(SPACE_SYMBOL, " ").encode()


def sentencepiece_without_bytes(piece: str) -> bytes:
    """As `sentencepiece` for models without byte fallback, in which `<0xE2>` is plain text."""
    return piece.replace(SPACE_SYMBOL, " ").encode()


def plain(piece: str) -> bytes:
    """A piece that is its own text."""
    return piece.encode()
