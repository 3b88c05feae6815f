"""What the parent tells the front-end workers: one JSON environment variable, read here only."""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Mapping

import msgspec

from jaxserve.config import EngineConfig, ServerConfig

VARIABLE = "JAXSERVE_FRONT"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FrontSettings:
    """address: the engine's ZeroMQ address. listen_fd: the bound socket that workers accept on.

    folder: private folder in which each worker leaves a file once it can answer.
    """

    address: str
    listen_fd: int
    folder: str
    engine: EngineConfig
    server: ServerConfig

    def to_environment(self) -> dict[str, str]:
        """The environment variable that carries these settings."""
        return {VARIABLE: msgspec.json.encode(self).decode()}

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> FrontSettings:
        """The settings that `to_environment` wrote."""
        return msgspec.json.decode(environment[VARIABLE], type=cls)

    def ready_file(self, pid: int) -> pathlib.Path:
        """Exists once the worker with this process id can answer."""
        return pathlib.Path(self.folder) / f"ready-{pid}"

    def num_ready(self) -> int:
        """How many workers can answer."""
        return len(list(pathlib.Path(self.folder).glob("ready-*")))
