"""Charts as one HTML file with SVG in it: no script, no style sheet, no other file."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape

from lrstream.commands.benchmark_charts import Bars, Chart, Histogram

__all__ = ["html"]

_WIDTH = 760
_LABELS = 210  # room for names on the left
_RIGHT = 110  # room for values on the right
_ROW = 26
_PLOT_HEIGHT = 170
_BLUE, _RED, _GREY = "#3b75af", "#b3261e", "#666"


def html(title: str, charts: Sequence[Chart]) -> str:
    """A complete HTML document with the charts one below the other."""
    parts = [
        "<!DOCTYPE html>",
        f'<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title></head>',
        '<body style="font-family: sans-serif; max-width: 800px; margin: 2em auto">',
        f"<h1>{escape(title)}</h1>",
    ]
    for chart in charts:
        parts.append(f"<h2>{escape(chart.title)}</h2>")
        parts += _bars(chart) if isinstance(chart, Bars) else _histogram(chart)
    return "\n".join([*parts, "</body></html>", ""])


def _bars(chart: Bars) -> Iterator[str]:
    largest = max((value for _, value in chart.bars), default=0.0) or 1.0
    yield _open(_ROW * len(chart.bars), f"{chart.title}, {chart.unit}")
    room = _WIDTH - _LABELS - _RIGHT
    for number, (name, value) in enumerate(chart.bars):
        top = _ROW * number
        width = room * max(value, 0.0) / largest
        yield _text(_LABELS - 8, top + 17, name, anchor="end")
        yield f'<rect x="{_LABELS}" y="{top + 3}" width="{width:.1f}" height="{_ROW - 6}" fill="{_BLUE}"/>'
        yield _text(_LABELS + width + 6, top + 17, f"{value:,.4g} {chart.unit}")
    yield "</svg>"


def _histogram(chart: Histogram) -> Iterator[str]:
    low, high = math.log(chart.edges_s[0]), math.log(chart.edges_s[-1])
    largest = int(chart.counts.max()) or 1

    def place(seconds: float) -> float:
        share = (math.log(max(seconds, 1e-12)) - low) / ((high - low) or 1.0)
        return 40 + (_WIDTH - 60) * min(max(share, 0.0), 1.0)

    yield _open(_PLOT_HEIGHT + 40, f"{chart.title}, milliseconds on a logarithmic axis")
    for number, count in enumerate(chart.counts.tolist()):
        left, right = place(chart.edges_s[number]), place(chart.edges_s[number + 1])
        height = (_PLOT_HEIGHT - 20) * count / largest
        yield (
            f'<rect x="{left:.1f}" y="{_PLOT_HEIGHT - height:.1f}" width="{right - left:.1f}" '
            f'height="{height:.1f}" fill="{_BLUE}"><title>{count}</title></rect>'
        )
    yield _text(36, 14, f"{largest}", anchor="end")
    for number, (name, seconds) in enumerate(chart.marks):
        at = place(seconds)
        yield (
            f'<line x1="{at:.1f}" y1="0" x2="{at:.1f}" y2="{_PLOT_HEIGHT}" stroke="{_RED}" '
            'stroke-dasharray="4 3"/>'
        )
        # Percentiles are often neighbours; each name has a line of its own.
        shift, anchor = (3, "start") if at < _WIDTH / 2 else (-3, "end")
        label = f"{name} {1000 * seconds:,.3g} ms"
        yield _text(at + shift, 12 + 14 * number, label, anchor=anchor, colour=_RED)
    ends = ((chart.edges_s[0], "start"), (chart.edges_s[-1], "end"))
    for seconds, anchor in ends:
        yield _text(place(seconds), _PLOT_HEIGHT + 18, f"{1000 * seconds:,.3g} ms", anchor=anchor)
    yield "</svg>"


def _open(height: int, label: str) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-label="{escape(label)}" '
        f'viewBox="0 0 {_WIDTH} {height}" width="100%" font-family="sans-serif" font-size="13">'
    )


def _text(x: float, y: float, text: str, *, anchor: str = "start", colour: str = _GREY) -> str:
    return f'<text x="{x:.1f}" y="{y}" text-anchor="{anchor}" fill="{colour}">{escape(text)}</text>'
