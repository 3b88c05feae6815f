"""A cloud of files for the tests of tpu_scripts: a checkout, a gcloud that records, fake hosts."""

from __future__ import annotations

import ast
import contextlib
import json
import marshal
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time
from typing import Any

import host_stubs

HERE = pathlib.Path(__file__).resolve().parent
#: Not through the virtual environment, which takes longer to start.
PYTHON = os.path.realpath(sys.executable)
#: Imported, so that Python compiles it once.
START = "import sys; sys.path.insert(0, sys.argv.pop(1)); import gcloud_stand_in"
SCRIPTS = HERE.parent.parent / "tpu_scripts"
VARIABLES = {
    "TPU_NAME": "my-tpu",
    "ZONE": "us-east5-b",
    "PROJECT": "my-project",
    "ACCELERATOR_TYPE": "v6e-8",
}
PLACE = ["--zone=us-east5-b", "--project=my-project"]


def make_checkout(folder: pathlib.Path) -> pathlib.Path:
    """A small git repository with the scripts in it."""
    (folder / "benchmarks").mkdir(parents=True)
    shutil.copytree(SCRIPTS, folder / "tpu_scripts")
    (folder / "setup.cfg").write_text("[metadata]\n")
    (folder / "pyproject.toml").write_text("[build-system]\n")
    (folder / "benchmarks" / "kernels.py").write_text(
        "import sys\nprint('| op | time |', *sys.argv[1:])\n"
        "print('noise', file=sys.stderr)\nsys.exit('--bad' in sys.argv)\n"
    )
    for words in (["init", "-q"], ["add", "."]):
        subprocess.run(["git", *words], cwd=folder, check=True, capture_output=True)
    return folder


class FakeCloud:
    """Runs the scripts of a checkout against the stand-in for gcloud."""

    def __init__(
        self,
        folder: pathlib.Path,
        checkout: pathlib.Path,
        *,
        hosts: int = 1,
        execute: bool = False,
    ) -> None:
        self.folder = folder
        self.checkout = folder / "check out's"  # a blank and a quote, on purpose
        shutil.copytree(checkout, self.checkout)
        self.state = folder / "cloud"
        self.state.mkdir()
        self.configure(
            nodes={},
            queued={},
            failures=[],
            hosts=hosts,
            execute=execute,
            queue_states=["WAITING_FOR_RESOURCES", "PROVISIONING", "ACTIVE"],
        )
        for worker in range(hosts if execute else 0):
            host_stubs.install(self.host(worker))
        self.bin = folder / "bin"
        self.bin.mkdir()
        self.path = f"{self.bin}:{os.environ['PATH']}"
        wrapper = self.bin / "gcloud"
        wrapper.write_text(f"#!/bin/sh\nexec '{PYTHON}' -I -S -c '{START}' '{HERE}' \"$@\"\n")
        wrapper.chmod(0o755)

    def configure(self, **values: Any) -> None:
        """Changes what the file `cloud` says."""
        before = self.cloud() if (self.state / "cloud").exists() else {}
        (self.state / "cloud").write_bytes(marshal.dumps(before | values))

    def have_node(self, state: str = "READY", accelerator: str = "v6e-8") -> None:
        """A TPU VM that is there already."""
        self.configure(nodes={"my-tpu": {"type": accelerator, "states": [state]}})

    def fail(self, command: str, status: int = 1, stderr: str = "PERMISSION", **more: Any) -> None:
        """Makes calls of a command fail; see gcloud_stand_in.Cloud.fail."""
        self.configure(failures=[{"command": command, "status": status, "stderr": stderr} | more])

    def cloud(self) -> dict[str, Any]:
        """What the file `cloud` says now."""
        return dict(marshal.loads((self.state / "cloud").read_bytes()))

    def host(self, worker: int = 0) -> pathlib.Path:
        """Home folder of a worker."""
        return self.state / "hosts" / str(worker)

    def run(
        self, script: str, *words: str, stdin: str = "", **variables: str | None
    ) -> subprocess.CompletedProcess[str]:
        """Runs a script to its end. A variable of None is not set."""
        given = VARIABLES | {"POLL_SECONDS": "0.01", "GRACE_SECONDS": "5"} | variables
        environment = {name: value for name, value in given.items() if value is not None}
        environment |= {
            "PATH": self.path,
            "HOME": str(self.folder),
            "FAKE_GCLOUD": str(self.state),
            "TMPDIR": str(self.folder),
        }
        return subprocess.run(
            ["bash", str(self.checkout / "tpu_scripts" / script), *words],
            env=environment,
            input=stdin,
            text=True,
            capture_output=True,
            timeout=60,
            check=False,
        )

    def calls(self, *verbs: str) -> list[list[str]]:
        """gcloud's words, without "compute tpus"; with verbs only those calls, as in "tpu-vm ssh"."""
        path = self.state / "calls"
        lines = path.read_text().splitlines() if path.exists() else []
        every = [ast.literal_eval(line)[2:] for line in lines]
        return [call for call in every if not verbs or " ".join(call[:2]) in verbs]

    def forget_calls(self) -> None:
        """Starts counting anew."""
        (self.state / "calls").unlink(missing_ok=True)

    def jaxserve_calls(self, worker: int = 0) -> list[Any]:
        """What the stub of jaxserve wrote down: [words, environment, pid] for each call.

        Waits for the first: what was started may not have come so far.
        """
        path = self.host(worker) / "jaxserve.calls"
        deadline = time.monotonic() + 20
        while not (path.exists() and path.read_text().endswith("\n")):
            assert time.monotonic() < deadline, "jaxserve was not started"
            time.sleep(0.01)
        return [json.loads(line) for line in path.read_text().splitlines()]

    def close(self) -> None:
        """Ends what still runs on the hosts."""
        for path in self.state.glob("hosts/*/jaxserve-jobs/*/pid"):
            with contextlib.suppress(OSError, ValueError):
                os.killpg(int(path.read_text()), signal.SIGKILL)
