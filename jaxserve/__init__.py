"""jaxserve: an inference runtime in JAX, from prompt to token.

`LLM` is imported when it is first used, so that the front end, which never needs jax, starts fast.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jaxserve.request import RequestOutput, SamplingParams

if TYPE_CHECKING:
    from jaxserve.llm import LLM

__all__ = ["LLM", "RequestOutput", "SamplingParams"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name == "LLM":
        from jaxserve.llm import LLM

        return LLM
    raise AttributeError(f"module 'jaxserve' has no attribute {name!r}")
