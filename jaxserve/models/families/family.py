"""What a family file provides."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from checkpoints.reader import CheckpointReader
from jaxserve.config import ModelConfig
from jaxserve.models.sources import Adapt, NameTable, keep


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """How one architecture's files are understood.

    read_config: from the open checkpoint; raises ModelFormatError or UnsupportedModelError.
    names: the checkpoint's names of the parameters. adapt: what is stored unusually.
    """

    read_config: Callable[[CheckpointReader], ModelConfig]
    names: NameTable
    adapt: Adapt = keep
