"""Starts the process that compiles, with the environment it needs, and waits for its plan. No jax.

jax and the compilers read their environment when they are loaded, so that a user would have to set
half a dozen variables; the child gets them instead.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from typing import IO

import msgspec

from jaxserve.errors import ResourceError, UsageError
from jaxserve.plan.chips import Slice
from jaxserve.plan.messages import Failed, Message, Plan, Planned, PlanRequest, Progress
from pallas_kernels import gpu_targets, tpu_targets

COMMAND = (sys.executable, "-m", "jaxserve.plan.child")


def compiler_environment(where: Slice) -> dict[str, str]:
    """This process's environment with what compiling for such chips needs.

    Raises ResourceError, with the command that installs it, where the compiler is missing.
    """
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
    target = tpu_targets if where.chip.platform == "tpu" else gpu_targets
    extra = "tpu" if where.chip.platform == "tpu" else "gpu-compile"
    if not target.is_installed():
        raise ResourceError(
            f"compiling for {where} needs {'libtpu' if extra == 'tpu' else 'the CUDA plugin of jax'}"
            f" (but no such device): {target.PIP_COMMAND}, or pip install 'jaxserve[{extra}]'"
        )
    target.prepare_environment(environment)
    return environment


def run_plan(
    request: PlanRequest,
    where: Slice,
    say: Callable[[str], None],
    *,
    command: Sequence[str] = COMMAND,
    debug: bool = False,
) -> Plan:
    """The plan, made by a child. say: gets its progress. debug: what the child logs is shown.

    command: another child than ours, for tests. Raises UsageError or ResourceError.
    """
    with (
        tempfile.TemporaryFile() as log,
        subprocess.Popen(
            command,
            env=compiler_environment(where),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=None if debug else log,
        ) as child,
    ):
        try:
            assert child.stdin is not None
            assert child.stdout is not None
            child.stdin.write(msgspec.json.encode(request))
            child.stdin.close()
            plan = _listen(child.stdout, say)
        finally:
            child.kill()  # all has been said, or nobody listens any more
        if plan is None:
            raise ResourceError(f"the process that compiles ended without a plan: {_end_of(log)}")
        return plan


def _listen(lines: IO[bytes], say: Callable[[str], None]) -> Plan | None:
    for line in lines:
        match msgspec.json.decode(line, type=Message):
            case Progress(text=text):
                say(text)
            case Failed(text=text, is_usage=is_usage):
                raise UsageError(text) if is_usage else ResourceError(text)
            case Planned(plan=plan):
                return plan
    return None


def _end_of(log: IO[bytes]) -> str:
    log.seek(0)
    lines = log.read().decode(errors="replace").strip().splitlines()
    return lines[-1][:300] if lines else "it said nothing; try again with --debug"
