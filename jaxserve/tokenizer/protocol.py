"""What every tokeniser offers, whatever file it came from (steps 2 and 8).

The rest of the program, and the fakes in its tests, know only this.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Protocol


class LeadingSpace(enum.StrEnum):
    """What `decode` does with spaces at the very start of a text.

    SentencePiece models may put a space before every text when encoding (the dummy prefix);
    decoding takes it away again.
    """

    KEEP = "keep"
    STRIP_ONE = "strip_one"
    STRIP_ALL = "strip_all"


class Tokenizer(Protocol):
    """Text to token ids and back. Thread-safe; immutable after loading.

    vocab_size: number of ids that have a text; ids are 0..vocab_size-1 (a model's embedding
        table may be larger: such ids decode to nothing).
    bos_id: the id put before a text when `add_bos` is true, None if the model has none.
    eos_ids: every id that ends an answer, the chat turn enders included.
    special_ids: control tokens; `decode` leaves them out unless told otherwise.
    leading_space: the rule of `decode` for the very start of a text.
    """

    @property
    def vocab_size(self) -> int: ...

    @property
    def bos_id(self) -> int | None: ...

    @property
    def eos_ids(self) -> tuple[int, ...]: ...

    @property
    def add_bos(self) -> bool: ...

    @property
    def special_ids(self) -> frozenset[int]: ...

    @property
    def leading_space(self) -> LeadingSpace: ...

    def encode(
        self,
        text: str,
        *,
        parse_special: bool = False,
        add_bos: bool | None = None,
        literal: Sequence[tuple[int, int]] = (),
    ) -> list[int]:
        """The ids of `text`.

        parse_special: the text of a special token becomes that token; otherwise it is ordinary
            text. literal: ranges [start, end) of characters in which special tokens are ordinary
            text all the same; sorted, not overlapping.
        add_bos: put `bos_id` first (None: as the model says). A BOS that the text itself begins
            with, once parsed, is not doubled.
        Raises RequestError if the text is not valid Unicode (a lone surrogate).
        """
        ...

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """The text of `ids`; bytes that are not valid UTF-8 become U+FFFD."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """UTF-8 bytes that the token adds to a text (a special token: its own text).

        Tokens may hold parts of characters. Ids without a text give b"".
        """
        ...

    def token_text(self, token_id: int) -> str:
        """The token for display, as beside log-probabilities; parts of characters are U+FFFD."""
        ...

    def id_of(self, text: str) -> int | None:
        """The id of the token whose displayed text is exactly `text`, special tokens included."""
        ...

    def special_spans(self, text: str) -> list[tuple[int, int]]:
        """Ranges [start, end) of `text` that `parse_special` would make special tokens."""
        ...
