"""What the routes are given: the line to the engine, the tokeniser, and the settings."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from jaxserve.client import EngineClient
from jaxserve.config import ServerConfig
from jaxserve.errors import EngineGoneError, NotFoundError
from jaxserve.messages import EngineInfo
from jaxserve.routing.engines import choose_engine
from jaxserve.tokenizer.protocol import Tokenizer
from server.drain import SHUTTING_DOWN, Drain
from server.prompts import Prompts
from server.storage import Storage

if TYPE_CHECKING:
    from server.usage.meter import Meter


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    """One worker's parts. `model_name` is what /v1/models shows before the engine is ready."""

    engines: tuple[EngineClient, ...]
    tokenizer: Tokenizer
    prompts: Prompts
    config: ServerConfig
    model_name: str
    started: int
    drain: Drain
    storage: Storage
    meter: Meter

    def engine(self) -> tuple[EngineClient, EngineInfo]:
        """The engine for the next request and what it said of itself. Raises EngineGoneError."""
        reason = self.not_ready_reason()
        if reason is not None:
            raise EngineGoneError(f"{reason}; try again in a moment")
        client = choose_engine(self.engines)
        assert client.info is not None, "an engine is ready only once its info is there"
        return client, client.info

    def not_ready_reason(self) -> str | None:
        """Why a request would not be taken now; None if it would."""
        if self.drain.started:
            return SHUTTING_DOWN
        reasons = [engine.not_ready_reason() for engine in self.engines]
        return None if None in reasons else reasons[0]

    def served_name(self) -> str:
        """The model's name in this API."""
        for engine in self.engines:
            if engine.info is not None:
                return engine.info.model_name
        return self.model_name

    def check_model(self, model: str | None) -> str:
        """The served model's name, which `model` must be if it is given. Raises NotFoundError."""
        name = self.served_name()
        if model is not None and model != name:
            raise NotFoundError(
                f"the model {model[:200]!r} does not exist; this server has {name!r}",
                param="model",
                code="model_not_found",
            )
        return name
