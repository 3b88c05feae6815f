"""The incremental detokeniser against a plain, slow reference: all ids, decoded from the start."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.tokenizer.detokenizer import IncrementalDetokenizer, decode_all
from jaxserve.tokenizer.protocol import LeadingSpace
from jaxserve.tokenizer.stop_strings import StopMatcher

#: Bytes, whole and half characters, spaces, and pieces from which stop strings can be made.
PIECES = [
    *(bytes([byte]) for byte in (0x61, 0x62, 0x20, 0x0A, 0xE2, 0x82, 0xAC, 0xF0, 0x9F, 0x98, 0x80)),
    *(text.encode() for text in ("ab", "aba", " a", "b a", "é", "€", "", "</end>", "\ufffd")),
]
SPECIAL = frozenset({len(PIECES) - 2})
ALPHABET = ["a", "b", " ", "é", "€", "\ufffd", "\U0001f600", "\n"]


@dataclasses.dataclass(frozen=True)
class ListTokenizer:
    """A tokeniser that only decodes: id to bytes by a list."""

    leading_space: LeadingSpace = LeadingSpace.KEEP
    vocab_size: int = len(PIECES)
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    add_bos: bool = False
    special_ids: frozenset[int] = SPECIAL

    def token_bytes(self, token_id: int) -> bytes:
        return PIECES[token_id]

    def token_text(self, token_id: int) -> str:
        return PIECES[token_id].decode(errors="replace")

    def id_of(self, text: str) -> int | None:
        raise NotImplementedError

    def encode(
        self,
        text: str,
        *,
        parse_special: bool = False,
        add_bos: bool | None = None,
        literal: Sequence[tuple[int, int]] = (),
    ) -> list[int]:
        raise NotImplementedError

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        return decode_all(self, ids, skip_special=skip_special)

    def special_spans(self, text: str) -> list[tuple[int, int]]:
        raise NotImplementedError


def reference_text(ids: Sequence[int], *, skip_special: bool, leading: LeadingSpace) -> str:
    """The whole text, without any state."""
    kept = [PIECES[token] for token in ids if not (skip_special and token in SPECIAL)]
    text = b"".join(kept).decode(errors="replace")
    if leading is LeadingSpace.STRIP_ONE:
        return text.removeprefix(" ")
    return text.lstrip(" ") if leading is LeadingSpace.STRIP_ALL else text


def reference_stop(text: str, stop: Sequence[str], include: bool) -> tuple[str, str | None]:
    """The text, ended by the stop string that is complete first, the longest of those."""
    for end in range(1, len(text) + 1):
        found = [it for it in stop if text[:end].endswith(it)]
        if found:
            longest = max(found, key=len)
            return text[: end if include else end - len(longest)], longest
    return text, None


def held_back(text: str, stop: Sequence[str]) -> int:
    """Length of the longest suffix of `text` that begins a stop string."""
    sizes = range(max(map(len, stop), default=0), 0, -1)
    return next(
        (n for n in sizes if n <= len(text) and any(it.startswith(text[-n:]) for it in stop)), 0
    )


@settings(max_examples=250, deadline=None)
@given(
    chunks=st.lists(st.lists(st.integers(0, len(PIECES) - 1), max_size=4), max_size=12),
    stop=st.lists(st.text(ALPHABET, min_size=1, max_size=4), max_size=3),
    skip_special=st.booleans(),
    include=st.booleans(),
    leading=st.sampled_from(LeadingSpace),
)
def test_equals_the_reference(
    chunks: list[list[int]],
    stop: list[str],
    skip_special: bool,
    include: bool,
    leading: LeadingSpace,
) -> None:
    detokenizer = IncrementalDetokenizer(
        ListTokenizer(leading), skip_special=skip_special, stop=stop, include_stop=include
    )
    ids = [token for chunk in chunks for token in chunk]
    whole = reference_text(ids, skip_special=skip_special, leading=leading)
    final, stopped = reference_stop(whole, stop, include)
    shown, so_far = "", []
    for chunk in chunks:
        so_far += chunk
        shown += detokenizer.push(chunk)
        assert final.startswith(shown)
        if detokenizer.stopped is None:
            complete = _complete_text(so_far, skip_special, leading)
            assert shown == complete[: len(complete) - held_back(complete, stop)]
    shown += detokenizer.finish()
    assert (shown, detokenizer.stopped) == (final, stopped)
    assert detokenizer.finish() == ""


def _complete_text(ids: Sequence[int], skip_special: bool, leading: LeadingSpace) -> str:
    """The text without a character at its end that more bytes could still complete."""
    kept = b"".join(PIECES[token] for token in ids if not (skip_special and token in SPECIAL))
    for cut in range(min(3, len(kept)) + 1):
        head, tail = kept[: len(kept) - cut], kept[len(kept) - cut :]
        if not tail or _may_become_a_character(tail):
            best = head
    text = best.decode(errors="replace")
    if leading is LeadingSpace.STRIP_ONE:
        return text.removeprefix(" ")
    return text.lstrip(" ") if leading is LeadingSpace.STRIP_ALL else text


def _may_become_a_character(tail: bytes) -> bool:
    try:
        tail.decode()
    except UnicodeDecodeError as error:
        return error.start == 0 and error.reason == "unexpected end of data"
    return False


@pytest.mark.parametrize(
    ("pieces", "stop", "expected"),
    [
        (["he", "llo ST", "OP more"], ["STOP"], ["he", "llo ", ""]),
        (["a", "b", "c"], ["abd"], ["", "", "abc"]),
        (["aab", "aac"], ["aac"], ["aab", ""]),
        (["abc", "d"], ["abcd", "bc"], ["a", ""]),
        (["xEND", "END"], ["END", "xEND"], ["", ""]),
    ],
)
def test_stop_strings(pieces: list[str], stop: list[str], expected: list[str]) -> None:
    @dataclasses.dataclass(frozen=True)
    class Texts(ListTokenizer):
        special_ids: frozenset[int] = frozenset()

        def token_bytes(self, token_id: int) -> bytes:
            return pieces[token_id].encode()

    detokenizer = IncrementalDetokenizer(Texts(), skip_special=False, stop=stop)
    assert [detokenizer.push([token]) for token in range(len(pieces))] == expected
    assert (detokenizer.stopped is not None) == (stop != ["abd"])


def test_half_a_character_at_the_end_is_one_replacement() -> None:
    detokenizer = IncrementalDetokenizer(ListTokenizer(), skip_special=True)
    ids = [PIECES.index(bytes([byte])) for byte in (0x61, 0xF0, 0x9F, 0x98)]
    assert detokenizer.push(ids) == "a"
    assert detokenizer.push([]) == ""
    assert detokenizer.finish() == "\ufffd"


def test_leading_space_stays_when_the_text_continues() -> None:
    space_a = PIECES.index(b" a")
    tokenizer = ListTokenizer(LeadingSpace.STRIP_ONE)
    new = IncrementalDetokenizer(tokenizer, skip_special=True)
    assert new.push([space_a]) + new.push([space_a]) == "a a"
    more = IncrementalDetokenizer(tokenizer, skip_special=True, continues=True)
    assert more.push([space_a]) == " a"


def test_a_token_costs_the_same_however_long_the_text_is() -> None:
    detokenizer = IncrementalDetokenizer(ListTokenizer(), skip_special=True, stop=["abab" * 9])
    ids = [11, 3, 12, 14, 16] * 40  # without the special token

    def seconds() -> float:
        start = time.perf_counter()
        for _ in range(25):
            detokenizer.push(ids)
        return time.perf_counter() - start

    early = min(seconds() for _ in range(4))
    for _ in range(40):
        seconds()
    late = min(seconds() for _ in range(4))
    assert late < 3 * early


def test_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopMatcher([""])
