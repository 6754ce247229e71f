"""Charts as a PNG file, drawn by matplotlib (extra ``plot``)."""

from __future__ import annotations

import io
from collections.abc import Sequence

import numpy as np

from lrstream.commands.benchmark_charts import Bars, Chart, Histogram

__all__ = ["png"]


def png(title: str, charts: Sequence[Chart]) -> bytes:
    """The charts, one below the other, as the content of a PNG file."""
    # Neither pyplot nor a display: a figure of its own draws into memory and leaves no state behind.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    heights = [1.0 + 0.35 * len(chart.bars) if isinstance(chart, Bars) else 2.6 for chart in charts]
    figure = Figure(figsize=(9, 0.8 + sum(heights)), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, parse_math=False)
    if charts:
        axes = figure.subplots(len(charts), 1, squeeze=False, height_ratios=heights)[:, 0]
        for area, chart in zip(axes, charts, strict=True):
            area.set_title(chart.title, loc="left", fontsize=10, parse_math=False)
            if isinstance(chart, Bars):
                names = [name for name, _ in chart.bars]
                drawn = area.barh(np.arange(len(names)), [value for _, value in chart.bars])
                area.set_yticks(np.arange(len(names)), labels=names, parse_math=False)
                area.invert_yaxis()
                area.set_xlabel(chart.unit)
                area.bar_label(drawn, fmt="{:,.4g}", padding=3, fontsize=8)
                area.margins(x=0.15)
            else:
                _histogram(area, chart)
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=110, metadata={"Software": "lrstream"})
    return content.getvalue()


def _histogram(area: object, chart: Histogram) -> None:
    from matplotlib.axes import Axes

    assert isinstance(area, Axes)
    edges_ms = 1000 * chart.edges_s
    area.bar(edges_ms[:-1], chart.counts, width=np.diff(edges_ms), align="edge")
    area.set_xscale("log")
    area.set_xlabel("ms")
    area.set_ylabel("count")
    for name, seconds in chart.marks:
        place_ms = max(1000 * seconds, float(edges_ms[0]))
        area.axvline(place_ms, color="tab:red", linewidth=1)
        area.text(place_ms, area.get_ylim()[1], f" {name}", va="top", fontsize=8, color="tab:red")
