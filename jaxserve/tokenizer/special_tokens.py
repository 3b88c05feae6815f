"""Finding special tokens in text, and knowing which of them end an answer (part of step 2)."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence

#: Tokens that end an answer or a chat turn wherever a vocabulary has them as special tokens.
_ENDS = (
    "</s>",
    "<eos>",
    "<end_of_turn>",
    "<turn|>",
    "<end_of_utterance>",
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|eot|>",
    "<|eom|>",
    "<|end_of_text|>",
    "<|endoftext|>",
    "<|endofturn|>",
    "<|end_of_turn|>",
    "<|END_OF_TURN_TOKEN|>",
    "<｜end▁of▁sentence｜>",
    "[EOT]",
    "<EOT>",
    "_<EOT>",
)
#: Ends of an answer in the "harmony" format, where `<|end|>` only ends one of its messages.
_HARMONY_ENDS = ("<|return|>", "<|call|>")


def end_ids(special: Mapping[str, int], declared: Sequence[int]) -> tuple[int, ...]:
    """Ids that end an answer: those the files declare, then well-known ones among `special`."""
    names = list(_ENDS)
    if all(name in special for name in _HARMONY_ENDS):
        names.extend(_HARMONY_ENDS)
    else:
        names.append("<|end|>")
    known = [special[name] for name in names if name in special]
    return tuple(dict.fromkeys([*declared, *known]))


class SpecialTokens:
    """The special tokens of a vocabulary, by text. Empty texts are ignored."""

    def __init__(self, ids: Mapping[str, int]) -> None:
        self._ids = {text: token for text, token in ids.items() if text}
        self._lengths: dict[str, list[int]] = {}
        for text in self._ids:
            self._lengths.setdefault(text[0], []).append(len(text))
        for first, lengths in self._lengths.items():
            self._lengths[first] = sorted(set(lengths), reverse=True)
        starts = "".join(re.escape(first) for first in self._lengths)
        self._start = re.compile(f"[{starts}]") if starts else None

    def spans(self, text: str) -> Iterator[tuple[int, int, int]]:
        """(start, end, id) of the special tokens in `text`: leftmost first, longest first.

        Time: characters of `text`, plus for each that may begin a token the number of lengths.
        """
        position = 0
        while self._start is not None and (found := self._start.search(text, position)):
            start = position = found.start()
            for length in self._lengths[text[start]]:
                end = start + length
                token = self._ids.get(text[start:end]) if end <= len(text) else None
                if token is not None:
                    position = end
                    yield start, end, token
                    break
            else:
                position = start + 1

    def parsed_spans(
        self, text: str, literal: Sequence[tuple[int, int]]
    ) -> list[tuple[int, int, int]]:
        """`spans` without those that touch a range of `literal` (sorted, not overlapping)."""
        kept, at = [], 0
        for start, end, token in self.spans(text):
            while at < len(literal) and literal[at][1] <= start:
                at += 1
            if at == len(literal) or literal[at][0] >= end:
                kept.append((start, end, token))
        return kept


def ids_of_texts(
    special: Mapping[str, object], keys: Collection[str], ids: Mapping[str, int]
) -> list[int]:
    """The ids that `special`'s entries at `keys` name, as text or as a list of texts."""
    found = []
    for key in keys:
        value = special.get(key)
        for text in value if isinstance(value, list) else [value]:
            if isinstance(text, str) and text in ids:
                found.append(ids[text])
    return found
