"""What every kernel on CPUs needs, asked without importing Numba. Must not know any op."""

from __future__ import annotations

import importlib.util
import sys


def machine_refusals(platform: str) -> list[str]:
    """Why no kernel of ours can run on such a platform, here; empty when one can."""
    reasons = []
    if platform != "cpu":
        reasons.append(f"it runs on cpu, not on {platform}")
    for package in ("numba", "llvmlite"):
        if importlib.util.find_spec(package) is None:
            reasons.append(f"the package {package} is not installed")
    if sys.maxsize < 2**62 or sys.byteorder != "little":
        reasons.append("it needs a 64-bit little-endian machine")
    return reasons
