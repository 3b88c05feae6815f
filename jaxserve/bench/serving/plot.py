"""The distributions of a run as a picture; needs matplotlib, the extra `bench`."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from jaxserve.bench.serving.report import TITLES
from jaxserve.errors import ResourceError, UsageError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_BINS = 40


def check_can_plot() -> None:
    """Raises UsageError where matplotlib is missing: before the run, not after it."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise UsageError(
            "--png needs matplotlib: pip install 'jaxserve[bench]', or leave --png out"
        ) from None


def write_png(
    path: pathlib.Path,
    title: str,
    values: Mapping[str, Sequence[float]],
    objectives: Mapping[str, float],
) -> None:
    """One histogram per quantity, with p50, p90 and p99; values in milliseconds.

    Raises ResourceError where the file cannot be written.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 7.5), layout="constrained")
    figure.suptitle(title)
    places = figure.subplots(2, 2).flat
    for axes, (name, text) in zip(places, TITLES.items(), strict=True):
        _draw(axes, text, values[name], objectives.get(name))
    try:
        figure.savefig(path, dpi=120)
    except OSError as error:
        raise ResourceError(f"{path} cannot be written: {error}") from None


def _draw(axes: Axes, title: str, values: Sequence[float], objective: float | None) -> None:
    axes.set_title(title)
    axes.grid(visible=True, alpha=0.3)
    if not values:
        axes.text(0.5, 0.5, "none", ha="center", va="center", transform=axes.transAxes)
        return
    axes.hist(values, bins=_BINS, color="#4878a8")
    axes.set_ylabel("count")
    for percentile, style in ((50, "-"), (90, "--"), (99, ":")):
        at = float(np.percentile(values, percentile))
        axes.axvline(at, color="#222222", linestyle=style, label=f"p{percentile}: {at:.1f}")
    if objective is not None and objective <= 1.5 * max(values):
        axes.axvline(objective, color="#c03030", label=f"objective: {objective:g}")
    axes.legend()
