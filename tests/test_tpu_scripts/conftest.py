"""Clouds for the tests of tpu_scripts."""

from __future__ import annotations

import pathlib
import shutil
from collections.abc import Callable, Iterator

import pytest
from fake_cloud import FakeCloud, make_checkout

MakeCloud = Callable[..., FakeCloud]


@pytest.fixture(scope="session")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A checkout to be copied. Skips where the scripts cannot run."""
    missing = [tool for tool in ("bash", "git", "setsid", "tar") if shutil.which(tool) is None]
    if missing:
        pytest.skip(f"tpu_scripts are bash scripts for a Linux host: no {', '.join(missing)} here")
    return make_checkout(tmp_path_factory.mktemp("checkout") / "checkout")


@pytest.fixture
def make_cloud(checkout: pathlib.Path, tmp_path: pathlib.Path) -> Iterator[MakeCloud]:
    """Makes a cloud; see FakeCloud. What it started ends with the test."""
    made: list[FakeCloud] = []

    def make(*, hosts: int = 1, execute: bool = False) -> FakeCloud:
        folder = tmp_path / f"cloud{len(made)}"
        made.append(FakeCloud(folder, checkout, hosts=hosts, execute=execute))
        return made[-1]

    yield make
    for cloud in made:
        cloud.close()


@pytest.fixture
def cloud(make_cloud: MakeCloud) -> FakeCloud:
    """One host; commands on it are recorded, not run."""
    return make_cloud()


@pytest.fixture(scope="session")
def host_after_setup(
    checkout: pathlib.Path, tmp_path_factory: pytest.TempPathFactory
) -> pathlib.Path:
    """Home folder of a host that setup.sh has been through; to be copied."""
    cloud = FakeCloud(tmp_path_factory.mktemp("after_setup") / "cloud", checkout, execute=True)
    cloud.have_node()
    result = cloud.run("setup.sh")
    assert result.returncode == 0, result.stderr
    return cloud.host()


@pytest.fixture
def make_ready(make_cloud: MakeCloud, host_after_setup: pathlib.Path) -> MakeCloud:
    """Makes a cloud with that many hosts, READY and set up; commands run on them."""

    def make(hosts: int, accelerator: str) -> FakeCloud:
        cloud = make_cloud(hosts=hosts, execute=True)
        cloud.have_node(accelerator=accelerator)
        for worker in range(hosts):
            for folder in ("jaxserve-source", "jaxserve-venv"):
                shutil.copytree(host_after_setup / folder, cloud.host(worker) / folder)
        return cloud

    return make


@pytest.fixture
def ready(make_ready: MakeCloud) -> FakeCloud:
    """One host that is READY and set up."""
    return make_ready(1, "v6e-8")
