"""Finding stop strings in a text that arrives in pieces (part of step 8).

An Aho-Corasick automaton: after any text, the depth of its state is the length of the longest
suffix that begins a stop string, which is exactly what must not be shown yet. Knows no tokens.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Sequence


@dataclasses.dataclass(slots=True)
class _Node:
    """One state: a prefix of a stop string. `found` is the longest stop string that ends here."""

    depth: int
    next: dict[str, _Node] = dataclasses.field(default_factory=dict)
    fallback: _Node | None = None
    found: str | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """A stop string and the position in the fed piece right after it (0 = before the piece)."""

    stop: str
    end: int


class StopMatcher:
    """Follows a text through the automaton of its stop strings.

    The match that ends first wins, and among those that end together the longest: this is what a
    reader sees who gets the text character by character, so it does not depend on the pieces.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """Raises ValueError for an empty stop string."""
        self._root = _build(stops)
        self._node = self._root

    @property
    def pending(self) -> int:
        """Length in characters of the longest suffix so far that begins a stop string."""
        return self._node.depth

    def feed(self, piece: str) -> Match | None:
        """Continues the text with `piece`; the first match in it, after which feed no more."""
        node, root = self._node, self._root
        for position, character in enumerate(piece):
            while character not in node.next and node.fallback is not None:
                node = node.fallback
            node = node.next.get(character, root)
            if node.found is not None:
                self._node = node
                return Match(stop=node.found, end=position + 1)
        self._node = node
        return None


def _build(stops: Sequence[str]) -> _Node:
    root = _Node(depth=0)
    for stop in stops:
        if not stop:
            raise ValueError("a stop string must not be empty")
        node = root
        for character in stop:
            node = node.next.setdefault(character, _Node(depth=node.depth + 1))
        node.found = stop
    waiting = deque([root])
    while waiting:  # breadth first: a fallback is shorter, hence finished earlier
        node = waiting.popleft()
        for character, child in node.next.items():
            waiting.append(child)
            back = node.fallback
            while back is not None and character not in back.next:
                back = back.fallback
            child.fallback = root if back is None else back.next[character]
            if child.found is None:
                child.found = child.fallback.found
    return root
