"""The accelerators that a plan can be made for: `chips.json` as values (before step 1). No jax.

What is published of a chip, and where; a plan's numbers are worth what these are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import msgspec

from jaxserve.errors import UsageError

TABLE = Path(__file__).parent / "chips.json"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chip:
    """One kind of chip; all numbers are those of a whole chip, rates per second.

    platform: as `jax.Device.platform` has it. compiler_name: what its compiler calls it.
    devices_per_chip: how many devices jax sees of one. usable_hbm_bytes: what a program may take.
    operations_per_second: dense, by dtype. link_bytes_per_second: what a chip can send to others
    of its slice. reduces_in_network: the links can sum what several chips send.
    topologies: name to number of chips. sources: field to where its number comes from.
    """

    platform: str
    compiler_name: str
    devices_per_chip: int
    hbm_bytes: int
    usable_hbm_bytes: int
    hbm_bytes_per_second: float
    operations_per_second: Mapping[str, float]
    link_bytes_per_second: float
    reduces_in_network: bool
    topologies: Mapping[str, int]
    sources: Mapping[str, str]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """Chips that are joined: "v6e:2x4" is kind "v6e", topology "2x4"."""

    kind: str
    topology: str

    def __str__(self) -> str:
        return f"{self.kind}:{self.topology}"

    @property
    def chip(self) -> Chip:
        """What the slice is made of."""
        return known_chips()[self.kind]

    @property
    def num_chips(self) -> int:
        """How many chips it has."""
        return self.chip.topologies[self.topology]

    @property
    def num_devices(self) -> int:
        """How many devices jax sees."""
        return self.num_chips * self.chip.devices_per_chip


@cache
def known_chips() -> Mapping[str, Chip]:
    """All chips of the table by name."""
    return msgspec.json.decode(TABLE.read_bytes(), type=dict[str, Chip])


def parse_topology(text: str) -> Slice:
    """A slice by its name, "v6e:2x4" or "h100:8". Raises UsageError that lists what there is."""
    kind, _, topology = text.partition(":")
    chips = known_chips()
    if kind not in chips:
        raise UsageError(
            f"--topology is {text!r}; the chips are {', '.join(chips)}, as in v6e:2x4 or h100:8"
        )
    names = chips[kind].topologies
    if topology not in names:
        every = ", ".join(f"{kind}:{name}" for name in names)
        raise UsageError(f"--topology is {text!r}; there are {every}")
    return Slice(kind=kind, topology=topology)


def slices_of(kind: str) -> tuple[Slice, ...]:
    """All slices of one kind of chip, smallest first."""
    return tuple(Slice(kind=kind, topology=name) for name in known_chips()[kind].topologies)
