"""What is drawn of a benchmark, and where to: charts as data, a file checked before the run."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lrstream.errors import AccessError, NotFoundError, UsageError
from lrstream.sidecar.install import write_atomically

__all__ = ["Bars", "Chart", "Histogram", "PlotTarget", "plot_target"]

_NUM_BINS = 40


@dataclass(frozen=True, slots=True)
class Bars:
    """Some figures of one unit side by side.

    Attributes:
        title: Heading.
        unit: Unit of the values.
        bars: Names and values.
    """

    title: str
    unit: str
    bars: tuple[tuple[str, float], ...]


@dataclass(frozen=True, slots=True)
class Histogram:
    """How some durations are distributed, over a logarithmic axis.

    Attributes:
        title: Heading.
        edges_s: Bounds of the bins, float64 seconds ``(n + 1,)``, ascending.
        counts: Durations in each bin, int64 ``(n,)``; those below the first bound count in the first.
        marks: Names and values, seconds, of percentiles to be marked.
    """

    title: str
    edges_s: NDArray[np.float64]
    counts: NDArray[np.int64]
    marks: tuple[tuple[str, float], ...]

    @classmethod
    def of(cls, title: str, seconds: NDArray[np.float64]) -> Histogram | None:
        """Of measured durations, with their percentiles; None without any."""
        if len(seconds) == 0:
            return None
        # What is below a microsecond was no wait; it would only stretch the axis.
        values = np.maximum(seconds, 1e-6)
        low, high = values.min(), max(values.max(), values.min() * 1.01)
        edges = np.geomspace(low, high, _NUM_BINS + 1)
        edges[0], edges[-1] = low, high  # rounding must not leave out an end
        counts, _ = np.histogram(values, bins=edges)
        p50, p95, p99 = (float(value) for value in np.percentile(seconds, [50, 95, 99]))
        return cls(title, edges, counts.astype(np.int64), (("p50", p50), ("p95", p95), ("p99", p99)))


Chart = Bars | Histogram


@dataclass(frozen=True, slots=True)
class PlotTarget:
    """A file that charts are written to.

    Attributes:
        path: The file.
    """

    path: Path

    def write(self, title: str, charts: Sequence[Chart | None]) -> None:
        """Draw charts, one below the other; the file appears complete or not at all.

        Args:
            title: Heading of all.
            charts: What to draw; None is left out.

        Raises:
            AccessError, DiskFullError: The file cannot be written.
        """
        drawn = [chart for chart in charts if chart is not None]
        if self.path.suffix.lower() == ".png":
            from lrstream.commands.benchmark_png import png

            data = png(title, drawn)
        else:
            from lrstream.commands.benchmark_svg import html

            data = html(title, drawn).encode()
        write_atomically(self.path, data, durable=False)


def plot_target(path: Path | None) -> PlotTarget | None:
    """Check where a plot is to go, before any long work; None stays None.

    Raises:
        UsageError: The suffix says no known format, or what draws it is not installed.
        NotFoundError: The directory does not exist.
        AccessError: The file may not be written there.
    """
    if path is None:
        return None
    if path.suffix.lower() not in (".png", ".html"):
        raise UsageError(
            f"--plot is {str(path)!r}, which says no format that can be drawn.",
            hint="End it in .html (needs nothing) or .png (needs matplotlib).",
        )
    if path.suffix.lower() == ".png" and importlib.util.find_spec("matplotlib") is None:
        raise UsageError(
            "matplotlib, which draws PNG files, is not installed.",
            hint="Install lrstream[plot], or write an .html file instead.",
        )
    parent = path.absolute().parent
    if path.is_dir():
        raise UsageError(f"{path} is a directory, expected the path of a file.")
    if not parent.is_dir():
        raise NotFoundError(f"The directory {parent} does not exist.", path=str(path))
    if not os.access(parent, os.W_OK | os.X_OK):
        raise AccessError(
            f"{path} cannot be written: its directory is not yours to write to.",
            hint="Choose another place for --plot.",
            path=str(path),
        )
    return PlotTarget(path)
