"""Step 8: an answer's token ids become text as they arrive, and stop strings end it.

Bytes of tokens go through an incremental UTF-8 decoder and then through the stop strings'
automaton; both keep a few bytes of state, so a token costs the same however long the text is.
Knows tokenisers only by `protocol.Tokenizer`.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from jaxserve.tokenizer.protocol import LeadingSpace, Tokenizer
from jaxserve.tokenizer.stop_strings import StopMatcher


class IncrementalDetokenizer:
    """The text of one answer, in pieces that never have to be taken back.

    Joined, the pieces equal `tokenizer.decode(all ids, skip_special=skip_special)`, cut at the
    first stop string. The text after n tokens is a prefix of the text after n + 1; half a
    character is never shown, nor the beginning of what may still become a stop string.

    skip_special: leave special tokens out of the text (stop strings are not found in them then).
    stop: the stop strings; the one that is complete first wins, then the longest.
    include_stop: show the stop string itself too.
    continues: the ids continue a text that was shown before, so that a leading space stays.
    shown: special tokens that are shown all the same.
    stop_after: tokens in which no stop string begins, nor ends one.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special: bool,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        continues: bool = False,
        shown: frozenset[int] = frozenset(),
        stop_after: int = 0,
    ) -> None:
        self.stopped: str | None = None
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids - shown if skip_special else frozenset()
        self._leading = LeadingSpace.KEEP if continues else tokenizer.leading_space
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._matcher = StopMatcher(stop) if stop else None
        self._include_stop = include_stop
        self._stop_after = stop_after if stop else 0
        self._held = ""

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that may be shown now that `token_ids` have come; ids after a stop are ignored."""
        if self.stopped is not None:
            return ""
        if not self._stop_after:
            return self._show(self._decode(token_ids))
        free, token_ids = token_ids[: self._stop_after], token_ids[self._stop_after :]
        self._stop_after -= len(free)
        return self._strip_start(self._decode(free)) + self._show(self._decode(token_ids))

    def _decode(self, token_ids: Sequence[int]) -> str:
        """The characters that these tokens complete."""
        to_bytes, skipped = self._tokenizer.token_bytes, self._skipped
        data = b"".join(to_bytes(token) for token in token_ids if token not in skipped)
        return self._utf8.decode(data)

    def finish(self) -> str:
        """What was held back; an incomplete character becomes one U+FFFD. Call once, at the end."""
        if self.stopped is not None:
            return ""
        shown = self._show(self._utf8.decode(b"", final=True))
        if self.stopped is None:
            shown, self._held = shown + self._held, ""
        return shown

    def _show(self, text: str) -> str:
        text = self._strip_start(text)
        if self._matcher is None:
            return text
        match = self._matcher.feed(text)
        if match is None:
            text = self._held + text
            cut = len(text) - self._matcher.pending
            self._held = text[cut:]
            return text[:cut]
        text = self._held + text[: match.end]
        self.stopped, self._held = match.stop, ""
        return text if self._include_stop else text[: len(text) - len(match.stop)]

    def _strip_start(self, text: str) -> str:
        if self._leading is LeadingSpace.KEEP or not text:
            return text
        if self._leading is LeadingSpace.STRIP_ONE:
            self._leading = LeadingSpace.KEEP
            return text.removeprefix(" ")
        text = text.lstrip(" ")
        if text:
            self._leading = LeadingSpace.KEEP
        return text


def decode_all(tokenizer: Tokenizer, ids: Sequence[int], *, skip_special: bool) -> str:
    """The whole text of `ids` at once: the definition of every tokeniser's `decode`."""
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special=skip_special)
    return detokenizer.push(ids) + detokenizer.finish()
