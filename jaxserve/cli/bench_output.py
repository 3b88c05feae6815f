"""Results of a benchmark in a file."""

from __future__ import annotations

import json
import pathlib
from typing import Any

from jaxserve.errors import ResourceError


def write_json(path: pathlib.Path | None, value: Any) -> None:
    """Writes `value`, if there is a path. Raises ResourceError where that fails."""
    if path is None:
        return
    try:
        path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise ResourceError(f"{path} cannot be written: {error}") from None
