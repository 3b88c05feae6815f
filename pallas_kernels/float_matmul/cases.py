"""Named products of real models, for tests and benchmarks alike."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A weight [out_size, in_size] and how many rows meet it."""

    name: str
    out_size: int
    in_size: int
    rows: int


def _model(name: str, width: int, ffn: int, keys: int, vocabulary: int) -> tuple[Case, ...]:
    """The products of a decoder; keys: K * H."""
    sizes = {
        "q": (width, width),
        "k": (keys, width),
        "up": (ffn, width),
        "down": (width, ffn),
        "head": (vocabulary, width),
    }
    return tuple(
        Case(name=f"{name}-{part}-{rows}", out_size=out_size, in_size=in_size, rows=rows)
        for part, (out_size, in_size) in sizes.items()
        for rows in (1, 2, 4, 8, 16)
    )


#: Full sizes, for benchmarks.
FULL: tuple[Case, ...] = _model("smollm2-135m", 576, 1536, 192, 49152)
#: Small ones and odd ends, for tests.
SMALL: tuple[Case, ...] = tuple(
    Case(name=f"{out_size}x{in_size}-{rows}", out_size=out_size, in_size=in_size, rows=rows)
    for out_size, in_size in ((16, 16), (192, 576), (576, 1536), (2064, 48))
    for rows in (1, 2, 3, 5, 8, 13, 16, 17)
)
