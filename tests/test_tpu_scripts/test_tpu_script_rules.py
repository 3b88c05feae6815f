"""What holds for every script: --help, --dry-run, unset variables, shellcheck, its entry in the README."""

from __future__ import annotations

import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest
from fake_cloud import SCRIPTS, VARIABLES, FakeCloud

#: Words that make each script do its work.
VERBS = {
    "create.sh": [],
    "setup.sh": [],
    "sync.sh": [],
    "serve.sh": ["m"],
    "batch.sh": ["m", "in.jsonl", "out.jsonl"],
    "bench.sh": [],
    "delete.sh": [],
}
TABLE = SCRIPTS / "accelerator_types.tsv"


def test_every_script_is_known_here() -> None:
    assert {path.name for path in SCRIPTS.glob("*.sh") if os.access(path, os.X_OK)} == (
        set(VERBS) | {"on_host.sh"}
    )


def test_shellcheck_finds_nothing() -> None:
    beside = pathlib.Path(sys.executable).with_name("shellcheck")
    found = str(beside) if beside.exists() else shutil.which("shellcheck")
    if found is None:
        pytest.skip("no shellcheck here: pip install '.[test]' brings it")
    scripts = sorted(str(path) for path in SCRIPTS.glob("*.sh"))
    result = subprocess.run(
        [found, "--external-sources", "--extended-analysis=false", *scripts],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize("script", VERBS)
def test_help_names_the_options(cloud: FakeCloud, script: str) -> None:
    nothing = dict.fromkeys(VARIABLES)
    result = cloud.run(script, "--help", **nothing)
    assert result.returncode == 0
    assert result.stdout.startswith(script)
    assert "--dry-run" in result.stdout
    assert "shellcheck" not in result.stdout
    assert result.stderr == ""
    reads_options = (SCRIPTS / script).read_text().partition("\nrequire ")[0]
    options = re.findall(r"^    (--[a-z-]+)(?: \| -[a-z])?\)", reads_options, re.MULTILINE)
    assert {"--help", "--dry-run"} <= set(options)
    for option in options:
        assert option == "--help" or option in re.split(r"[\s\[\]]+", result.stdout), option


@pytest.mark.parametrize("script", VERBS)
def test_an_unset_variable_is_named(cloud: FakeCloud, script: str) -> None:
    (cloud.folder / "in.jsonl").write_text("{}\n")
    words = [str(cloud.folder / word) if "." in word else word for word in VERBS[script]]
    needed = set(VARIABLES) - ({"ACCELERATOR_TYPE"} if script != "create.sh" else set())
    for name in needed:
        result = cloud.run(script, *words, **{name: None})
        assert result.returncode == 2
        assert f"{script}: {name} is not set: export {name}=" in result.stderr
    assert cloud.run(script, *words, ZONE="").returncode == 2  # empty is not set
    assert not cloud.calls()


def test_all_unset_variables_are_named_at_once(cloud: FakeCloud) -> None:
    result = cloud.run("create.sh", **dict.fromkeys(VARIABLES))
    assert [line.split()[1] for line in result.stderr.splitlines()] == list(VARIABLES)


@pytest.mark.parametrize("name", ["My TPU", "-x", "tpu-", "1tpu", "a;b"])
def test_a_name_that_google_would_refuse(cloud: FakeCloud, name: str) -> None:
    result = cloud.run("create.sh", TPU_NAME=name)
    assert result.returncode == 2
    assert f"TPU_NAME is '{name}': lower-case letters" in result.stderr


def test_without_gcloud(cloud: FakeCloud) -> None:
    (cloud.bin / "gcloud").unlink()
    for tool in ("bash", "dirname", "mktemp", "rm"):
        (cloud.bin / tool).symlink_to(shutil.which(tool) or "")
    cloud.path = str(cloud.bin)
    result = cloud.run("create.sh")
    assert result.returncode == 2
    assert "gcloud is not installed: https://" in result.stderr


@pytest.mark.parametrize("script", VERBS)
def test_dry_run_prints_calls_and_makes_none(cloud: FakeCloud, script: str) -> None:
    (cloud.folder / "in.jsonl").write_text("{}\n")
    words = [str(cloud.folder / word) if "." in word else word for word in VERBS[script]]
    result = cloud.run(script, "--dry-run", *words, ACCELERATOR_TYPE="v6e-1")
    assert result.returncode == 0, result.stderr
    assert not cloud.calls()
    calls = [line for line in result.stdout.splitlines() if line.startswith("gcloud ")]
    assert calls[0].startswith("gcloud compute tpus tpu-vm describe my-tpu --zone=us-east5-b")
    # What was printed is what would be run: bash reads it back, and the stand-in takes it.
    cloud.have_node()
    environment = {"PATH": cloud.path, "FAKE_GCLOUD": str(cloud.state)}
    for call in calls:
        done = subprocess.run(
            ["bash", "-c", call], env=environment, capture_output=True, text=True, check=False
        )
        assert "unrecognized" not in done.stderr
        assert "Invalid" not in done.stderr
    assert len(cloud.calls()) == len(calls) >= 2


@pytest.mark.parametrize("script", sorted(set(VERBS) - {"bench.sh"}))  # which hands them on
def test_an_unknown_option_is_refused(cloud: FakeCloud, script: str) -> None:
    result = cloud.run(script, "--colour")
    assert result.returncode == 2
    assert "what is '--colour'?" in result.stderr


def test_more_words_for_ssh(cloud: FakeCloud) -> None:
    cloud.have_node()
    cloud.run("setup.sh", TPU_SSH_FLAGS="--internal-ip --ssh-key-file=key")
    for call in cloud.calls("tpu-vm ssh", "tpu-vm scp"):
        assert {"--internal-ip", "--ssh-key-file=key"} <= set(call)


def test_the_table_of_types_is_sound() -> None:
    lines = [line.split() for line in TABLE.read_text().splitlines() if line[:1] not in ("#", "")]
    cores_per_chip = {"v4": 2, "v5p": 2, "v5litepod": 1, "v6e": 1}
    for name, chips, hosts, runtime in lines:
        family, size = name.split("-")
        assert int(chips) * cores_per_chip[family] == int(size)
        assert int(hosts) == max(1, int(chips) // 4) or (int(chips), int(hosts)) == (8, 1)
        assert runtime.startswith(("v2-alpha-tpu", "tpu-ubuntu"))
    assert len({line[0] for line in lines}) == len(lines)


def test_the_readme_has_every_script_and_variable() -> None:
    text = (SCRIPTS / "README.md").read_text()
    for word in (*VERBS, *VARIABLES, "RUNTIME_VERSION", "TPU_SSH_FLAGS"):
        assert f"`{word}" in text or f"export {word}=" in text, word
    assert "never on a real TPU" in text
