"""sync.sh and setup.sh: what is copied, what is installed where, twice, and what goes wrong."""

from __future__ import annotations

import pathlib
import subprocess
from collections.abc import Callable

import pytest
from fake_cloud import PLACE, FakeCloud

COPY = ["my-tpu:jaxserve-source.tar.gz", *PLACE, "--worker=all"]
ON_HOST = "bash jaxserve-source/tpu_scripts/on_host.sh"


def _files(folder: pathlib.Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir()}


def test_sync_copies_what_git_tracks(make_cloud: Callable[..., FakeCloud]) -> None:
    cloud = make_cloud(hosts=2, execute=True)
    cloud.have_node(accelerator="v5p-16")
    tree = cloud.checkout
    (tree / ".gitignore").write_text("build/\n")
    odd = tree / "a 'quoted' näme\nof two lines"
    odd.write_text("kept")
    (tree / "gone.py").write_text("")
    subprocess.run(["git", "add", "."], cwd=tree, check=True)
    (tree / "gone.py").unlink()
    (tree / "setup.cfg").write_text("changed, not committed")
    (tree / ".env").write_text("SECRET")
    (tree / "build").mkdir()
    (tree / "build" / "lib.py").write_text("")

    result = cloud.run("sync.sh")
    assert result.returncode == 0, result.stderr
    (call,) = cloud.calls("tpu-vm scp")
    assert call[3:] == COPY
    for worker in range(2):
        copy = cloud.host(worker) / "jaxserve-source"
        assert _files(copy) == (
            {"setup.cfg", "pyproject.toml", ".gitignore", odd.name, "benchmarks/kernels.py"}
            | {f"tpu_scripts/{path.name}" for path in (tree / "tpu_scripts").iterdir()}
        )
        assert (copy / "setup.cfg").read_text() == "changed, not committed"
        assert not list(cloud.host(worker).glob("jaxserve-source.*"))
    assert "1 file(s) that git does not track are not copied" in result.stderr
    assert "files to 2 host(s) of my-tpu" in result.stderr


def test_sync_again_removes_what_is_no_longer_there(ready: FakeCloud) -> None:
    (ready.host() / "jaxserve-source" / "old.py").write_text("")
    assert ready.run("sync.sh").returncode == 0
    assert not (ready.host() / "jaxserve-source" / "old.py").exists()


def test_sync_needs_a_git_checkout(cloud: FakeCloud) -> None:
    cloud.have_node()
    (cloud.checkout / ".git").rename(cloud.folder / "elsewhere")
    result = cloud.run("sync.sh")
    assert result.returncode == 1
    assert "is no git checkout" in result.stderr
    assert not cloud.calls()


@pytest.mark.parametrize(("state", "words"), [("", "there is no TPU VM"), ("CREATING", "CREATING")])
def test_setup_needs_a_tpu_vm_that_is_ready(cloud: FakeCloud, state: str, words: str) -> None:
    if state:
        cloud.have_node(state)
    result = cloud.run("setup.sh")
    assert result.returncode == 1
    assert words in result.stderr
    assert "tpu_scripts/" in result.stderr  # the way out
    assert not cloud.calls("tpu-vm scp", "tpu-vm ssh")


def test_setup_installs_on_every_host_once(make_cloud: Callable[..., FakeCloud]) -> None:
    cloud = make_cloud(hosts=2, execute=True)
    cloud.have_node(accelerator="v5p-16")
    result = cloud.run("setup.sh")
    assert result.returncode == 0, result.stderr
    assert cloud.calls("tpu-vm ssh")[-1] == [
        *["tpu-vm", "ssh", "my-tpu", *PLACE],
        *["--worker=all", f"--command={ON_HOST} setup"],
    ]
    for worker in range(2):
        home = cloud.host(worker)
        source = home / "jaxserve-source"
        assert (home / "venv.log").read_text().count("-m venv") == 1
        assert (home / "pip.log").read_text() == (
            f"-m pip install --quiet --upgrade -e {source}[tpu]\n"
        )

    again = cloud.run("setup.sh")
    assert again.returncode == 0
    assert again.stderr.count("set up already, and no dependency changed: nothing to install") == 2
    (cloud.checkout / "setup.cfg").write_text("[metadata]\nname = other\n")
    changed = cloud.run("setup.sh")
    assert changed.returncode == 0
    log = (cloud.host(1) / "pip.log").read_text()
    assert log.count("\n") == 2
    assert (cloud.host(1) / "venv.log").read_text().count("-m venv") == 1  # the same environment


def test_setup_brings_python_where_it_is_too_old(make_cloud: Callable[..., FakeCloud]) -> None:
    cloud = make_cloud(execute=True)
    cloud.have_node()
    (cloud.host() / "bin" / "python3.12").unlink()
    (cloud.host() / "python").write_text("old")
    result = cloud.run("setup.sh")
    assert result.returncode == 0, result.stderr
    log = (cloud.host() / "venv.log").read_text()
    assert log == f"uv venv --quiet --seed --python 3.12 {cloud.host()}/jaxserve-venv\n"
    assert (cloud.host() / "jaxserve-venv" / "bin" / "jaxserve").exists()


def test_setup_installs_ubuntus_venv(make_cloud: Callable[..., FakeCloud]) -> None:
    cloud = make_cloud(execute=True)
    cloud.have_node()
    (cloud.host() / "python").write_text("bare")
    result = cloud.run("setup.sh")
    assert result.returncode == 0, result.stderr
    assert "apt-get install -q -y python3-venv" in (cloud.host() / "sudo.log").read_text()


def test_a_failed_installation_is_tried_again(make_cloud: Callable[..., FakeCloud]) -> None:
    cloud = make_cloud(hosts=2, execute=True)
    cloud.have_node(accelerator="v5p-16")
    (cloud.host(1) / "pip-fails").touch()
    result = cloud.run("setup.sh")
    assert result.returncode == 1
    assert "no matching distribution" in result.stderr
    assert "are set up" not in result.stderr
    (cloud.host(1) / "pip-fails").unlink()
    assert cloud.run("setup.sh", "--no-sync").returncode == 0
    assert (cloud.host(0) / "pip.log").read_text().count("\n") == 1
    assert (cloud.host(1) / "pip.log").read_text().count("\n") == 2
