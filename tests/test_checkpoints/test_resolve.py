"""What a model argument may be, and what is said when it is none of them."""

from __future__ import annotations

import pathlib

import huggingface_hub
import numpy as np
import pytest
from huggingface_hub import constants, errors, utils
from safetensors.numpy import save_file

from checkpoints import resolve
from checkpoints.errors import CheckpointNotFoundError, DownloadFailedError
from checkpoints.open import open_checkpoint
from checkpoints.resolve import resolve_model


@pytest.fixture
def hub(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """The hub's cache in a temporary folder, and no network."""
    folder = tmp_path / "hub"
    folder.mkdir()
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return folder


def add_snapshot(hub: pathlib.Path, repo: str) -> pathlib.Path:
    base = hub / f"models--{repo.replace('/', '--')}"
    commit = "0123456789012345678901234567890123456789"
    snapshot = base / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (base / "refs").mkdir()
    (base / "refs" / "main").write_text(commit)
    save_file({"w": np.ones(2, np.float32)}, snapshot / "model.safetensors")
    (snapshot / "config.json").write_text("{}")
    (snapshot / "tokenizer.json").write_text("{}")
    return snapshot


def test_paths(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "org" / "name").mkdir(parents=True)
    assert resolve_model(str(tmp_path), tmp_path) == tmp_path
    monkeypatch.chdir(tmp_path)
    assert resolve_model("org/name", tmp_path) == pathlib.Path("org/name")  # not a hub id then
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve_model("~/org", tmp_path) == tmp_path / "org"


def test_small_ships_with_the_project(tmp_path: pathlib.Path) -> None:
    folder = resolve_model("small", tmp_path)
    assert folder == pathlib.Path(resolve.__file__).parent / "small"


@pytest.mark.parametrize("argument", ["./x.gguf", "models/x.gguf", "x.gguf", "/no/such/folder"])
def test_missing_path(argument: str, tmp_path: pathlib.Path) -> None:
    with pytest.raises(CheckpointNotFoundError, match="does not exist"):
        resolve_model(argument, tmp_path)


def test_unknown_name(tmp_path: pathlib.Path) -> None:
    with pytest.raises(CheckpointNotFoundError) as caught:
        resolve_model("smollm2-135m-instuct", tmp_path)
    assert "did you mean smollm2-135m-instruct?" in str(caught.value)
    assert "gemma-3-270m, small" in str(caught.value)
    with pytest.raises(CheckpointNotFoundError, match="no model is called ''; known are"):
        resolve_model("", tmp_path)


def test_pulled_and_not_pulled(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CheckpointNotFoundError, match="pull it first"):
        resolve_model("gemma-3-270m", tmp_path, pull_missing=False)
    calls: list[tuple[str, pathlib.Path, bool]] = []

    def pull(name: str, cache: pathlib.Path, *, progress: bool) -> pathlib.Path:
        calls.append((name, cache, progress))
        return cache / "file"

    monkeypatch.setattr(resolve, "pull", pull)
    assert resolve_model("gemma-3-270m", tmp_path, progress=False) == tmp_path / "file"
    assert calls == [("gemma-3-270m", tmp_path, False)]


@pytest.mark.parametrize("pull_missing", [True, False])
def test_cached_hub_snapshot_works_offline(
    hub: pathlib.Path, tmp_path: pathlib.Path, pull_missing: bool
) -> None:
    snapshot = add_snapshot(hub, "org/name")
    found = resolve_model("org/name", tmp_path, pull_missing=pull_missing)
    assert found == snapshot
    assert list(open_checkpoint(found).tensors) == ["w"]


@pytest.mark.usefixtures("hub")
def test_hub_without_network(tmp_path: pathlib.Path) -> None:
    with pytest.raises(DownloadFailedError) as caught:
        resolve_model("org/name", tmp_path)
    assert "org/name is no path here and could not be fetched from the hub" in str(caught.value)
    assert "`small`" in str(caught.value)
    assert "\n" not in str(caught.value)
    with pytest.raises(CheckpointNotFoundError, match="pull it first"):
        resolve_model("org/name", tmp_path, pull_missing=False)


def test_an_interrupted_snapshot_is_completed(
    hub: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = add_snapshot(hub, "org/name")
    (snapshot / "tokenizer.json").unlink()
    fetched: list[str] = []

    def snapshot_download(repo: str, *, local_files_only: bool = False, **rest: object) -> str:
        if not local_files_only:
            fetched.append(repo)
            assert rest["revision"] == "v2"
            assert "*.safetensors" in rest["allow_patterns"]
            assert "*.bin" not in rest["allow_patterns"]
        return str(snapshot)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert resolve_model("org/name@v2", tmp_path, progress=False) == snapshot
    assert fetched == ["org/name"]
    assert not utils.are_progress_bars_disabled()


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        ("GatedRepoError", DownloadFailedError, "hf auth login"),
        ("RepositoryNotFoundError", CheckpointNotFoundError, "neither a path here nor a hub"),
        ("RevisionNotFoundError", DownloadFailedError, "no revision 'v2'"),
    ],
)
@pytest.mark.usefixtures("hub")
def test_what_the_hub_may_answer(
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    error: str,
    kind: type[Exception],
    message: str,
) -> None:
    def snapshot_download(repo: str, *, local_files_only: bool = False, **rest: object) -> str:
        if local_files_only:
            raise errors.LocalEntryNotFoundError("not here")
        answer = getattr(errors, error)
        raise answer.__new__(answer)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    with pytest.raises(kind, match=message):
        resolve_model("org/name@v2", tmp_path)
