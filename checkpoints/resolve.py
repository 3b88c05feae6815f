"""From a model argument to files on this machine.

An argument is one of: a name of `models.json`, `small` (the checkpoint that ships with the
project), a path, or a Hugging Face hub id. Used by everything that takes `--model`. No jax.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import re
from collections.abc import Iterator
from pathlib import Path

from checkpoints.errors import CheckpointError, CheckpointNotFoundError, DownloadFailedError
from checkpoints.folder_files import read_json_object
from checkpoints.kinds import find_model
from checkpoints.model_table import pullable_models
from checkpoints.pull import OTHER_WAYS, pull, pulled_file

SMALL = "small"
SMALL_FOLDER = Path(__file__).parent / "small"
HUB_ID = re.compile(r"(?P<id>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(@(?P<revision>[\w./-]+))?")
#: What is fetched from a hub repository: weights, configs and tokenisers that we can read.
HUB_FILES = ("*.safetensors", "*.json", "tokenizer.model", "*.jinja")


def resolve_model(
    argument: str, cache: Path, *, pull_missing: bool = True, progress: bool = True
) -> Path:
    """The file or folder that `argument` means; fetches it if need be and allowed.

    Raises CheckpointNotFoundError if nothing is meant or, with pull_missing off, if it is not here
    yet; DownloadFailedError if fetching fails.
    """
    if argument in pullable_models():
        if pull_missing:
            return pull(argument, cache, progress=progress)
        found = pulled_file(argument, cache)
        if found is None:
            raise CheckpointNotFoundError(f"{argument} is not in {cache}; pull it first")
        return found
    if argument == SMALL:
        return SMALL_FOLDER
    path = Path(argument).expanduser()
    if argument and path.exists():
        return path
    match = HUB_ID.fullmatch(argument)
    if match and path.suffix not in (".gguf", ".safetensors"):
        return _resolve_hub(match["id"], match["revision"], pull_missing, progress)
    if "/" in argument or path.suffix in (".gguf", ".safetensors"):
        raise CheckpointNotFoundError(f"{argument} does not exist")
    raise CheckpointNotFoundError(_unknown_name(argument))


def _unknown_name(argument: str) -> str:
    known = [*pullable_models(), SMALL]
    close = difflib.get_close_matches(argument.lower(), known, n=1)
    hint = f", did you mean {close[0]}?" if close else ""
    return (
        f"no model is called {argument!r}{hint}; known are {', '.join(known)}; "
        "a path or a Hugging Face hub id (org/name) also works"
    )


def _resolve_hub(repo: str, revision: str | None, pull_missing: bool, progress: bool) -> Path:
    """A snapshot of a hub repository: the one in the hub's own cache if it is whole."""
    # These imports take a quarter of a second, and most models are not hub ids.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    fetch = functools.partial(
        snapshot_download, repo, revision=revision, allow_patterns=list(HUB_FILES)
    )
    try:
        local = Path(fetch(local_files_only=True))
        if not pull_missing or _is_whole(local):
            return local
    except LocalEntryNotFoundError:
        if not pull_missing:
            raise CheckpointNotFoundError(
                f"{repo} is not in the hub's cache; pull it first"
            ) from None
    try:
        with _hub_progress_bars(progress):
            return Path(fetch())
    except GatedRepoError:
        raise DownloadFailedError(
            f"{repo} needs its terms accepted on the hub and a login (`hf auth login`)"
        ) from None
    except RevisionNotFoundError:
        raise DownloadFailedError(f"{repo} has no revision {revision!r} on the hub") from None
    except RepositoryNotFoundError:
        raise CheckpointNotFoundError(
            f"{repo} is neither a path here nor a hub repository that may be read without login; "
            f"known names are {', '.join([*pullable_models(), SMALL])}"
        ) from None
    except Exception as error:  # the hub's client lets several HTTP libraries' errors through
        first = (str(error).splitlines() or [""])[0][:200]
        raise DownloadFailedError(
            f"{repo} is no path here and could not be fetched from the hub "
            f"({type(error).__name__}: {first}); {OTHER_WAYS}"
        ) from None


@contextlib.contextmanager
def _hub_progress_bars(wanted: bool) -> Iterator[None]:
    """The hub's client has one switch for the whole process; it is put back afterwards."""
    from huggingface_hub.utils import (
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
    )

    if wanted or are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()


def _is_whole(folder: Path) -> bool:
    """True if a snapshot can be opened: an interrupted download may lack shards or configs."""
    try:
        weights = find_model(folder).weights
        if weights.name.endswith(".index.json"):
            shards = set(read_json_object(weights).get("weight_map", {}).values())
            if not all((folder / shard).is_file() for shard in shards):
                return False
    except CheckpointError:
        return False
    tokenizers = ("tokenizer.json", "tokenizer.model")
    return (folder / "config.json").is_file() and any((folder / n).is_file() for n in tokenizers)
