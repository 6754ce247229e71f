"""Plots: what is in them, and refusals before anything is measured."""

from __future__ import annotations

import io
import re
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from lrstream.commands.benchmark_charts import Bars, Histogram, plot_target
from lrstream.errors import AccessError, NotFoundError, UsageError

BARS = Bars("Rates <&>", "samples/s", (("whole", 100.0), ("half of it", 50.0), ("none", 0.0)))
NAMESPACE = "{http://www.w3.org/2000/svg}"


def waits(count: int = 500) -> np.ndarray:
    return np.random.Generator(np.random.PCG64(3)).lognormal(-5, 1, count)


def drawings(path: Path) -> list[ElementTree.Element]:
    return [
        ElementTree.fromstring(text)
        for text in re.findall(r"<svg.*?</svg>", path.read_text(encoding="utf-8"), re.DOTALL)
    ]


def test_bars_are_as_long_as_their_values(tmp_path: Path) -> None:
    target = plot_target(tmp_path / "plot.html")
    assert target is not None
    target.write("Title <1>", [BARS, None])
    (drawing,) = drawings(target.path)
    widths = [float(bar.attrib["width"]) for bar in drawing.iter(f"{NAMESPACE}rect")]
    assert widths[0] == pytest.approx(2 * widths[1], abs=0.1)
    assert widths[2] == 0
    words = [text.text for text in drawing.iter(f"{NAMESPACE}text")]
    assert words == ["whole", "100 samples/s", "half of it", "50 samples/s", "none", "0 samples/s"]
    page = target.path.read_text(encoding="utf-8")
    assert "Title &lt;1&gt;" in page
    assert "<script" not in page
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "")


def test_a_histogram_counts_every_wait_once() -> None:
    values = waits()
    chart = Histogram.of("waits", values)
    assert chart is not None
    assert chart.counts.sum() == len(values)
    for low, high, count in zip(chart.edges_s[:-1], chart.edges_s[1:], chart.counts, strict=True):
        inside = sum(low <= value < high or (value == high == chart.edges_s[-1]) for value in values)
        assert inside == count
    ordered = sorted(values)
    for (_, value), percent in zip(chart.marks, (50, 95, 99), strict=True):
        below = sum(other <= value for other in ordered)
        assert abs(below - percent / 100 * len(values)) <= 1


@pytest.mark.parametrize("values", [[0.0], [0.0, 0.0], [1e-9, 5.0], [2.0, 2.0, 2.0]])
def test_odd_distributions(values: list[float], tmp_path: Path) -> None:
    chart = Histogram.of("waits", np.array(values))
    assert chart is not None
    assert chart.counts.sum() == len(values)
    target = plot_target(tmp_path / "plot.html")
    assert target is not None
    target.write("x", [chart])
    (drawing,) = drawings(target.path)
    for element in drawing.iter():
        assert "nan" not in " ".join(element.attrib.values())


def test_without_waits_there_is_no_histogram() -> None:
    assert Histogram.of("waits", np.empty(0)) is None


def test_png(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    target = plot_target(tmp_path / "plot.PNG")
    assert target is not None
    # Names are text, not formulas.
    target.write("a $\\frac b$ title", [Bars("x", "s", (("$\\bad{", 1.0),)), Histogram.of("w", waits())])
    picture = Image.open(io.BytesIO(target.path.read_bytes()))
    assert picture.format == "PNG"
    assert min(picture.size) > 100
    assert len(set(picture.convert("L").tobytes())) > 10, "something is drawn"


def test_refusals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert plot_target(None) is None
    for name in ("plot", "plot.svg", "plot.pdf"):
        with pytest.raises(UsageError, match=r"\.html"):
            plot_target(tmp_path / name)
    with pytest.raises(NotFoundError, match="does not exist"):
        plot_target(tmp_path / "absent" / "plot.html")
    (tmp_path / "taken.html").mkdir()
    with pytest.raises(UsageError, match="directory"):
        plot_target(tmp_path / "taken.html")
    monkeypatch.setattr("os.access", lambda path, mode: False)
    with pytest.raises(AccessError, match="not yours"):
        plot_target(tmp_path / "plot.html")


def test_png_without_matplotlib_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UsageError, match=r"matplotlib.*lrstream\[plot\]"):
        plot_target(tmp_path / "plot.png")
