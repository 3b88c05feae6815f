"""What a request costs, by the prices that the server was started with. In no currency of ours."""

from __future__ import annotations

import dataclasses

from jaxserve.config import ServerConfig

_MILLION = 1e6
_HOUR = 3600.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """Prices add up; those of tokens are per million."""

    device_hour: float = 0.0
    prompt_tokens: float = 0.0
    cached_tokens: float = 0.0
    generated_tokens: float = 0.0

    @classmethod
    def of(cls, config: ServerConfig) -> Prices:
        """The server's. Without a word about cached tokens they cost what others do."""
        cached = config.price_per_million_cached_tokens
        prompt = config.price_per_million_prompt_tokens
        return cls(
            device_hour=config.price_per_device_hour,
            prompt_tokens=prompt,
            cached_tokens=prompt if cached is None else cached,
            generated_tokens=config.price_per_million_generated_tokens,
        )

    def cost(
        self, *, prompt: float, cached: float, generated: float, device_seconds: float
    ) -> float:
        """prompt: all tokens of prompts, those that were cached among them."""
        tokens = (
            (prompt - cached) * self.prompt_tokens
            + cached * self.cached_tokens
            + generated * self.generated_tokens
        )
        return tokens / _MILLION + device_seconds * self.device_hour / _HOUR
