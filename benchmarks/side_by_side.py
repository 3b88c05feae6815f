"""What comparisons with other engines share: where those are, and what machine this is."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import platform
import subprocess
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
MODEL = "smollm2-135m-instruct"
_VLLM_COMMAND = """
import importlib.metadata as metadata
version = metadata.version
def version_of(name):
    try:
        return version(name)
    except metadata.PackageNotFoundError:
        return version(name + "-cpu") + "+cpu"
metadata.version = version_of
from vllm.entrypoints.cli.main import main
if __name__ == "__main__":
    main()
"""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Peers:
    """The folder with the peers' environments and models. Raises SystemExit for what is missing."""

    folder: pathlib.Path

    def path(self, *parts: str) -> str:
        """A file or folder in it."""
        found = self.folder.absolute().joinpath(*parts)
        if not found.exists():
            raise SystemExit(f"error: {found} is missing; the peers' setup makes it")
        return str(found)

    def gguf(self, kind: str) -> str:
        """The model as GGUF: q4_1, q8_0 or bf16."""
        return self.path("models", "gguf", f"{MODEL}-{kind}.gguf")

    @property
    def vllm(self) -> list[str]:
        """vLLM's command. Its build for CPUs has a name of its own, by which its command must look
        for its version."""
        return [self.path("vllm", "bin", "python"), "-c", _VLLM_COMMAND]

    @property
    def hugging_face(self) -> str:
        """The model as a folder in bfloat16."""
        return self.path("models", "hf", "SmolLM2-135M-Instruct")


def describe() -> dict[str, str]:
    """Date, machine and commit."""
    return {
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{_processor()}, {os.cpu_count()} logical cores, {_memory()}",
        "commit": _commit(),
    }


def _processor() -> str:
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    facts = dict(
        (part.strip() for part in line.split(":", 1)) for line in reversed(lines) if ":" in line
    )
    vector = "AVX-512" if "avx512f" in facts.get("flags", "") else "no AVX-512"
    return f"{facts.get('model name', platform.machine())} ({vector})"


def _memory() -> str:
    size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return f"{size / 2**30:.0f} GiB"


def _commit() -> str:
    def git(*arguments: str) -> str:
        done = subprocess.run(
            ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
        )
        return done.stdout.strip()

    changed = " and changes" if git("status", "--porcelain", "--untracked-files=no") else ""
    return f"{git('rev-parse', '--short', 'HEAD') or 'unknown'}{changed}"
