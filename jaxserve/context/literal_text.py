"""Keeping special tokens that a user wrote apart from the template's own (step 1).

A user may write `<|im_end|>`. Rendered into a prompt and parsed there, it would end the user's
turn. Before rendering, such look-alikes in the user's strings give way to secret names; after
rendering they come back, and their places are known. Strings without look-alikes, and so almost
all prompts, are not touched.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Mapping
from typing import Any

FindSpecial = Callable[[str], list[tuple[int, int]]]


class LiteralText:
    """The look-alikes of one prompt. find: the ranges of special tokens in a text."""

    def __init__(self, find: FindSpecial) -> None:
        self._find = find
        self._secret = f"literal{secrets.token_hex(16)}n"
        self._texts: list[str] = []

    def hide(self, value: Any) -> Any:
        """A copy of `value` (texts in lists and mappings) with names in place of look-alikes."""
        if isinstance(value, str):
            return self._hide_in(value)
        if isinstance(value, Mapping):
            return {self.hide(key): self.hide(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.hide(item) for item in value]
        return value

    def _hide_in(self, text: str) -> str:
        pieces, last = [], 0
        for start, end in self._find(text):
            pieces += [text[last:start], f"{self._secret}{len(self._texts)}x"]
            self._texts.append(text[start:end])
            last = end
        return "".join([*pieces, text[last:]]) if pieces else text

    def reveal(self, rendered: str) -> tuple[str, list[tuple[int, int]]]:
        """`rendered` with the look-alikes back, and their ranges in it."""
        if not self._texts:
            return rendered, []
        parts = re.split(rf"{self._secret}(\d+)x", rendered)
        ranges, at = [], 0
        for index, part in enumerate(parts):
            if index % 2:
                part = parts[index] = self._texts[int(part)]
                ranges.append((at, at + len(part)))
            at += len(part)
        return "".join(parts), ranges
