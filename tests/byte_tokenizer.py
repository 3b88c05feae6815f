"""A tokenizer for tests whose ids can be read by eye: 256 bytes, then four special tokens."""

from __future__ import annotations

import re
from collections.abc import Sequence

from jaxserve.tokenizer.protocol import LeadingSpace

SPECIAL = ("<bos>", "<eos>", "<turn>", "<end>")
BOS, EOS, TURN, END = range(256, 260)


class ByteTokenizer:
    """One id per UTF-8 byte. Follows `jaxserve.tokenizer.protocol.Tokenizer`."""

    vocab_size = 260
    bos_id: int | None = BOS
    eos_ids = (EOS, END)
    add_bos = True
    special_ids = frozenset(range(256, 260))
    leading_space = LeadingSpace.KEEP

    def encode(
        self,
        text: str,
        *,
        parse_special: bool = False,
        add_bos: bool | None = None,
        literal: Sequence[tuple[int, int]] = (),
    ) -> list[int]:
        ids: list[int] = []
        done = 0
        for start, end in self.special_spans(text) if parse_special else []:
            if not any(low <= start < high for low, high in literal):
                ids += [*text[done:start].encode(), 256 + SPECIAL.index(text[start:end])]
                done = end
        ids += text[done:].encode()
        if add_bos in (True, None) and ids[:1] != [BOS]:
            ids.insert(0, BOS)
        return ids

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        kept = [i for i in ids if not (skip_special and i in self.special_ids)]
        return b"".join(self.token_bytes(i) for i in kept).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id]) if token_id < 256 else SPECIAL[token_id - 256].encode()

    def token_text(self, token_id: int) -> str:
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def special_spans(self, text: str) -> list[tuple[int, int]]:
        return [match.span() for match in re.finditer("|".join(SPECIAL), text)]

    def id_of(self, text: str) -> int | None:
        if text in SPECIAL:
            return 256 + SPECIAL.index(text)
        data = text.encode()
        return data[0] if len(data) == 1 else None
