"""Which collectives a compiled program has, and how much they move, read from its text. No jax."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
#: Of an asynchronous pair only the start counts; its result also names its operands and contexts.
_CALL = re.compile(rf"= (?P<type>.+?) (?P<kind>{'|'.join(KINDS)})(?P<start>-start)?\(")
_ARRAY = re.compile(r"(?P<dtype>pred|[a-z]+\d+\w*)\[(?P<sizes>[\d,]*)\]")
_BITS = re.compile(r"[a-z]+(\d+)")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Traffic:
    """Collectives of one kind. bytes: of the whole arrays that they sum or put together."""

    count: int
    bytes: int


def read_collectives(text: str, num_devices: int) -> dict[str, Traffic]:
    """Those of an optimised module's text (`Compiled.as_text()`), by kind.

    num_devices: that take part; of a reduce-scatter only a part's shape stands in the text.
    """
    found: dict[str, list[int]] = {}
    for call in _CALL.finditer(text):
        arrays = [_array_bytes(array) for array in _ARRAY.finditer(call["type"])]
        kind = call["kind"]
        if call["start"] and kind in ("all-gather", "collective-permute"):
            arrays = arrays[1:2]  # (operand, result, ...)
        size = sum(arrays) * (num_devices if kind == "reduce-scatter" else 1)
        found.setdefault(kind, []).append(size)
    return {kind: Traffic(count=len(sizes), bytes=sum(sizes)) for kind, sizes in found.items()}


def add_traffic(parts: Iterable[Mapping[str, Traffic]]) -> dict[str, Traffic]:
    """Several programs' together, by kind."""
    total: dict[str, Traffic] = {}
    for part in parts:
        for kind, more in part.items():
            have = total.get(kind, Traffic(count=0, bytes=0))
            total[kind] = Traffic(count=have.count + more.count, bytes=have.bytes + more.bytes)
    return total


def sent_bytes(
    collectives: Mapping[str, Traffic], num_chips: int, *, reduces_in_network: bool
) -> float:
    """The least that a chip must send, or receive, whatever the algorithm.

    A sum without help from the network sends every byte twice but for the chip's own share
    (Patarasuk and Yuan 2009); everything else moves all but the own share once.
    """
    others = (num_chips - 1) / num_chips
    twice = 1 if reduces_in_network else 2
    return sum(
        traffic.bytes * others * (twice if kind == "all-reduce" else 1)
        for kind, traffic in collectives.items()
    )


def _array_bytes(array: re.Match[str]) -> int:
    bits = _BITS.match(array["dtype"])
    itemsize = int(bits[1]) / 8 if bits else 1
    return math.ceil(math.prod(int(size) for size in array["sizes"].split(",") if size) * itemsize)
