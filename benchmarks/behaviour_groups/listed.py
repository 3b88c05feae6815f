"""A behaviour as it stands in the table."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from behaviour_groups.client import Server


@dataclasses.dataclass(frozen=True, slots=True)
class Behaviour:
    """number: in the list of behaviours, or a word for those without; check: see the package."""

    number: str
    title: str
    check: Callable[[Server], str]
