"""A comparison in words and numbers: as a table, or as JSON (before step 1)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from jaxserve.quality.measure import LARGEST_RMS, PromptQuality, Quality
from jaxserve.quality.reference import Reference


def to_text(model: str, reference: Reference, found: Sequence[Quality]) -> str:
    """One line per scheme, then one table per scheme with a line per prompt."""
    summary = [["stored as", "MB", "RMS nat", "worst nat", "steps equal", "continuations", ""]]
    for each in found:
        equal = sum(prompt.continues_equally for prompt in each.prompts)
        summary.append(
            [
                each.weights,
                f"{each.weight_bytes / 1e6:.1f}",
                f"{each.rms:.4f}",
                f"{each.worst:.4f}",
                _share(each.prompts),
                f"{equal}/{len(each.prompts)}",
                "good" if each.is_within else "too coarse",
            ]
        )
    lines = [
        f"{model}, against {reference.origin}",
        "",
        *_table(summary),
        "",
        f"good: RMS of the likeliest tokens' log-probabilities at most {LARGEST_RMS} nat, and every "
        "greedy",
        "continuation that of float32 up to its first near-tie",
    ]
    for each in found:
        rows = [["prompt", "RMS nat", "worst nat", "steps equal", "continuation"]]
        rows += [
            [
                prompt.name,
                f"{prompt.rms:.4f}",
                f"{prompt.worst:.4f}",
                _share([prompt]),
                _continuation(prompt),
            ]
            for prompt in each.prompts
        ]
        lines += ["", f"{each.weights} (--quantization {each.asked})", *_table(rows)]
    return "\n".join(lines)


def to_json(model: str, reference: Reference, found: Sequence[Quality]) -> dict[str, Any]:
    """The same for programs."""
    return {
        "model": model,
        "reference": reference.origin,
        "largest_rms": LARGEST_RMS,
        "schemes": [
            dataclasses.asdict(each)
            | {
                "good": each.is_within,
                "prompts": [
                    dataclasses.asdict(prompt) | {"continues_equally": prompt.continues_equally}
                    for prompt in each.prompts
                ],
            }
            for each in found
        ],
    }


def _share(prompts: Sequence[PromptQuality]) -> str:
    return f"{sum(each.steps_equal for each in prompts)}/{sum(each.steps for each in prompts)}"


def _continuation(prompt: PromptQuality) -> str:
    if prompt.first_difference is None:
        return "equal"
    if prompt.continues_equally:
        return f"equal up to the near-tie at step {prompt.first_near_tie}"
    return f"differs from step {prompt.first_difference} on"


def _table(rows: list[list[str]]) -> list[str]:
    """Columns as wide as they must be; the first and the last to the left."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    last = len(widths) - 1
    return [
        "  ".join(
            cell.ljust(width) if column in (0, last) else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
