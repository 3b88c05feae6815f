"""Clouds for the tests of tpu_scripts."""

from __future__ import annotations

import pathlib
import shutil
from collections.abc import Callable, Iterator

import pytest
from fake_cloud import FakeCloud


@pytest.fixture
def make_cloud(tmp_path: pathlib.Path) -> Iterator[Callable[..., FakeCloud]]:
    """Makes a cloud; see FakeCloud. What it started ends with the test."""
    missing = [tool for tool in ("bash", "git", "setsid", "tar") if shutil.which(tool) is None]
    if missing:
        pytest.skip(f"tpu_scripts are bash scripts for a Linux host: no {', '.join(missing)} here")
    made: list[FakeCloud] = []

    def make(**options: object) -> FakeCloud:
        made.append(FakeCloud(tmp_path / f"cloud{len(made)}", **options))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for cloud in made:
        cloud.close()


@pytest.fixture
def cloud(make_cloud: Callable[..., FakeCloud]) -> FakeCloud:
    """One host; commands on it are recorded, not run."""
    return make_cloud()


@pytest.fixture
def ready(make_cloud: Callable[..., FakeCloud]) -> FakeCloud:
    """One host that is READY and set up; commands run on it."""
    cloud = make_cloud(execute=True)
    cloud.have_node()
    assert cloud.run("setup.sh").returncode == 0
    cloud.forget_calls()
    return cloud
