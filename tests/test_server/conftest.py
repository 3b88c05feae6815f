"""One running server for most tests, others by `start_server`, and the application alone."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from running_server import RunningServer

from jaxserve.config import EngineConfig, ServerConfig


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server that tests share; they must leave it as they found it."""
    config = ServerConfig(port=0, max_body_bytes=2**20, max_prompt_bytes=2**19)
    engine = EngineConfig(model="fake", max_model_len=600)
    running = RunningServer(tmp_path_factory.mktemp("server"), engine=engine, server=config)
    try:
        yield running.wait_ready()
    finally:
        running.stop()


@pytest.fixture
def start_server(tmp_path: pathlib.Path) -> Iterator[Callable[..., RunningServer]]:
    """Starts a server of one's own; it is stopped at the end."""
    started: list[RunningServer] = []

    def start(**settings: Any) -> RunningServer:
        folder = tmp_path / str(len(started))
        folder.mkdir()
        started.append(RunningServer(folder, **settings))
        return started[-1]

    yield start
    for running in started:
        running.stop()
