"""Whose turn it is among tenants (step 4): start-time fair queueing by tokens, pure arithmetic.

Goyal, Vin and Cheng, "Start-time fair queuing" (1996). Each tenant's requests stand on a line of
virtual time, one after the other, each as long as its tokens divided by the tenant's weight; the
queue serves what starts earliest. Virtual time is the start of what was admitted last, and nobody
begins before it: who comes anew is next, however many requests another tenant has waiting, and who
was away has saved nothing up. With one tenant this is the order of arrival.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

#: Tokens of an answer that are reckoned with before it ends.
EXPECTED_ANSWER = 256
#: Tenants beyond which those that are owed nothing are forgotten.
_MAX_TENANTS = 1024

Item = TypeVar("Item")


@dataclasses.dataclass(slots=True)
class _Line:
    """A tenant's end on the line of virtual time, and where its newest request starts."""

    end: float = 0.0
    newest: float = 0.0


class FairQueue:
    """Gives every request its start on the line."""

    def __init__(self) -> None:
        self._now = 0.0
        self._lines: dict[str, _Line] = {}

    def start(self, tenant: str, tokens: float, weight: float) -> float:
        """Where a new request starts, never before an earlier one of its tenant."""
        if len(self._lines) > _MAX_TENANTS:
            self._lines = {name: line for name, line in self._lines.items() if line.end > self._now}
        line = self._lines.setdefault(tenant, _Line())
        line.newest = max(self._now, line.end, line.newest)
        line.end = line.newest + tokens / weight
        return line.newest

    def admitted(self, start: float) -> None:
        """A request that starts there is being served."""
        self._now = max(self._now, start)

    def settle(self, tenant: str, tokens: float, weight: float) -> None:
        """A request has ended and took so many tokens more than was reckoned with (or fewer)."""
        line = self._lines.get(tenant)
        if line is not None:
            line.end += tokens / weight


def keep_turns(
    turns: Iterable[Item], preferred: Iterable[Item], tenant: Callable[[Item], str]
) -> Iterator[Item]:
    """The items of `preferred`, each place given to the tenant that has it in `turns`.

    So what is served early for its cached prefix passes requests of its own tenant only.
    """
    lines: dict[str, collections.deque[Item]] = collections.defaultdict(collections.deque)
    for item in preferred:
        lines[tenant(item)].append(item)
    for item in turns:
        yield lines[tenant(item)].popleft()
