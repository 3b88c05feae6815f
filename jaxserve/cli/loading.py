"""Loading a model for a verb that runs it in this process: what is said meanwhile, and to whom."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from jaxserve.config import EngineConfig

if TYPE_CHECKING:
    from jaxserve.llm import LLM


def load_llm(config: EngineConfig, *, debug: bool) -> LLM:
    """The model, ready. Raises JaxserveError or CheckpointError."""
    with announce_loading(config, debug=debug):
        from jaxserve.llm import LLM

        settings = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
        return LLM(**settings)


@contextlib.contextmanager
def announce_loading(config: EngineConfig, *, debug: bool) -> Iterator[None]:
    """On a terminal, one line that goes away when all is ready; with debug, the engine's log."""
    logging.basicConfig(
        level=logging.INFO if debug else logging.WARNING, format="%(message)s", stream=sys.stderr
    )
    logging.getLogger("jax").setLevel(logging.ERROR)
    line = f"loading {config.model} ... (the first time on a machine compiles for a while)"
    shown = sys.stderr.isatty() and not debug
    if shown:
        print(line, end="\r", file=sys.stderr, flush=True)
    try:
        yield
    finally:
        if shown:
            print(" " * len(line), end="\r", file=sys.stderr, flush=True)
