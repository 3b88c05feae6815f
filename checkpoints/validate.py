"""Compares what a model expects with what a checkpoint holds, and reports everything at once.

Called by the loader before any tensor is read (start of step 6). Knows names and shapes only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from checkpoints.errors import CheckpointFormatError
from checkpoints.reader import CheckpointReader

#: How many names of each sort an error lists before it only counts.
MOST_NAMES = 10


def check_tensors(
    expected: Mapping[str, tuple[int, ...]],
    reader: CheckpointReader,
    *,
    ignore: Callable[[str], bool] = lambda name: False,
) -> None:
    """Raises one CheckpointFormatError naming all missing, extra and wrongly shaped tensors.

    expected: the checkpoint's own names and shapes. ignore: tensors that may be there without use.
    """
    found = reader.tensors
    missing = [name for name in expected if name not in found]
    extra = [name for name in found if name not in expected and not ignore(name)]
    wrong = [
        f"{name} has {_shape(found[name].shape)}, not {_shape(shape)}"
        for name, shape in expected.items()
        if name in found and found[name].shape != tuple(shape)
    ]
    reports = [
        _report("missing", missing),
        _report("not expected", extra),
        _report("wrongly shaped", wrong),
    ]
    problems = "; ".join(report for report in reports if report)
    if problems:
        raise CheckpointFormatError(
            f"the checkpoint's tensors contradict its config: {problems}; fetch or convert it again"
        )


def _report(sort: str, names: list[str]) -> str:
    if not names:
        return ""
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return f"{len(names)} {sort} ({', '.join(names[:MOST_NAMES])}{more})"


def _shape(shape: tuple[int, ...]) -> str:
    return "x".join(str(size) for size in shape) or "scalar"
