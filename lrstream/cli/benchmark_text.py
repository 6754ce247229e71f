"""What the benchmark commands share: options, comparison, plot, text forms."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol, TypeVar

import typer

from lrstream.cli.options import CommonOptions
from lrstream.cli.output import Answer, jsonable
from lrstream.cli.problems import ProblemLike
from lrstream.cli.progress import ProgressLine
from lrstream.cli.runner import run_command
from lrstream.cli.screen import Column, Screen
from lrstream.errors import LrstreamError

if TYPE_CHECKING:
    from lrstream.commands.benchmark_charts import Chart
    from lrstream.commands.benchmark_common import Limit
    from lrstream.commands.benchmark_compare import Comparison

__all__ = [
    "COMPARISON_HELP",
    "BudgetOption",
    "Check",
    "CompareOption",
    "ConnectionsOption",
    "EpisodesOption",
    "PlotOption",
    "PrefetchOption",
    "ProcessConnectionsOption",
    "Report",
    "ReservoirOption",
    "Strategy",
    "StrategyOption",
    "amount",
    "load",
    "milliseconds",
    "or_unknown",
    "rate",
    "run_benchmark",
    "show_limit",
]


class Strategy(StrEnum):
    """How anchors are drawn from the pool."""

    remaining = "remaining"
    round_robin = "round_robin"
    gop = "gop"


EpisodesOption = Annotated[
    str | None,
    typer.Option(
        "--episodes", metavar="SPEC", help="Only these episodes, such as 0-9,12,20- (ends included)."
    ),
]
ReservoirOption = Annotated[
    float,
    typer.Option(
        "--reservoir",
        metavar="GB",
        help="Decoded pictures that the rank keeps with strategy gop; 1 GB is 2**30 bytes.",
        show_default=True,
    ),
]
StrategyOption = Annotated[
    Strategy,
    typer.Option(
        "--strategy",
        metavar="|".join(Strategy),
        help="How frames are drawn from the pool of episodes.",
        show_default=True,
    ),
]
PrefetchOption = Annotated[
    int,
    typer.Option(
        "--prefetch",
        metavar="N",
        min=0,
        help="Episodes that each worker fetches ahead of its pool.",
        show_default=True,
    ),
]
BudgetOption = Annotated[
    float,
    typer.Option(
        "--budget", metavar="GB", help="Byte budget of the rank; 1 GB is 2**30 bytes.", show_default=True
    ),
]
ProcessConnectionsOption = Annotated[
    int | None,
    typer.Option("--connections", metavar="N", min=1, help="HTTP connections of each process (default: 32)."),
]
ConnectionsOption = Annotated[
    int | None,
    typer.Option("--connections", metavar="N", min=1, help="HTTP connections (default: 32)."),
]
CompareOption = Annotated[
    Path | None,
    typer.Option(
        "--compare", metavar="FILE", help="Compare with an earlier --json document of this command."
    ),
]
PlotOption = Annotated[
    Path | None,
    typer.Option("--plot", metavar="FILE", help="Draw the figures into a .html or .png file."),
]
COMPARISON_HELP = """\
With --compare the figures are put beside those of an earlier run. Other episodes or data are refused;
what else differs (settings, machine) is told. With --plot they are drawn: .html needs nothing, .png
needs matplotlib (pip install 'lrstream[plot]').
"""


class Report(Protocol):
    """What a benchmark has found out."""

    @property
    def problems(self) -> Sequence[ProblemLike]:
        """Findings."""

    def to_json(self) -> Mapping[str, Any]:
        """Everything for programs, with ``dataset``, ``settings`` and ``machine``."""

    def charts(self) -> Iterable[Chart | None]:
        """What a plot shows."""


R = TypeVar("R", bound=Report)
Check = Callable[[str], None] | None


def run_benchmark(
    command: str,
    options: CommonOptions,
    *,
    compare: Path | None,
    plot: Path | None,
    measure: Callable[[ProgressLine, Check], R],
    show: Callable[[Screen, R], None],
    key_figures: Sequence[str],
    exit_code: Callable[[R], int] = lambda report: 0,
) -> None:
    """Run a benchmark with its comparison and its plot, and leave with its exit status.

    Args:
        command: Name in the schema of the answer, such as ``benchmark.loader``.
        options: Common options.
        compare: File of an earlier result; read before anything is measured.
        plot: File to draw into; checked before anything is measured.
        measure: Measures; is given what refuses another dataset than the earlier one.
        show: Writes the report for people.
        key_figures: Figures that a comparison shows; ``--json`` has all.
        exit_code: Status of a report.
    """

    def work(progress: ProgressLine) -> Answer:
        from lrstream.commands.benchmark_charts import plot_target
        from lrstream.commands.benchmark_compare import read_earlier
        from lrstream.sidecar.problems import Problem

        earlier = None if compare is None else read_earlier(compare, command)
        target = plot_target(plot)
        report = measure(progress, None if earlier is None else earlier.require_dataset)
        result = jsonable(report.to_json())
        comparison = None if earlier is None else earlier.compare(result)
        problems: list[ProblemLike] = [*report.problems]
        code = exit_code(report)
        if comparison is not None:
            result["comparison"] = jsonable(comparison)
            problems += comparison.circumstances
        if target is not None:
            try:
                target.write(f"lrstream {command.replace('.', ' ')}", list(report.charts()))
            except LrstreamError as error:
                # What was measured is told all the same.
                problems.append(
                    Problem(error.code, "error", str(target.path), None, error.message, error.hint)
                )
                code = code or error.exit_code

        def show_all(screen: Screen) -> None:
            show(screen, report)
            if comparison is not None:
                _show_comparison(screen, comparison, key_figures)
            for problem in problems:
                if problem not in report.problems:
                    screen.problem(problem)
            if target is not None and not code:
                screen.line()
                screen.line(f"Drawn into {target.path}.")

        return Answer(result=result, show=show_all, problems=problems, exit_code=code)

    run_command(command, options, work)


def _show_comparison(screen: Screen, comparison: Comparison, key_figures: Sequence[str]) -> None:
    screen.line()
    screen.line(f"Compared with {comparison.path}:")
    rows = []
    for name in key_figures:
        change = comparison.figure(name)
        if change is not None:
            ratio = "" if change.ratio is None else f"{change.ratio:.2f} x"
            rows.append((name, amount(change.before), amount(change.now), ratio))
    columns = [Column("figure"), *(Column(name, is_number=True) for name in ("before", "now", "ratio"))]
    screen.table(columns, rows)


def amount(value: float) -> str:
    """A number with four digits, or all those of a whole one."""
    if isinstance(value, int) or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def rate(value: float | None) -> str:
    """Samples per second; a dash where there is no such stage."""
    return "-" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def milliseconds(seconds: float) -> str:
    """A short duration."""
    return f"{1000 * seconds:,.1f} ms"


def or_unknown(value: int | None, text: Callable[[int], str]) -> str:
    """A figure that not every system tells."""
    return "unknown" if value is None else text(value)


def show_limit(screen: Screen, limit: Limit) -> None:
    """Which stage limits, and what to change."""
    screen.line()
    screen.line(f"Limited by {limit.stage}: {limit.reason}.")
    for line in limit.advice:
        screen.line(f"  hint: {line}")


def load(average: float | None) -> str:
    """How busy the machine was."""
    return "unknown" if average is None else f"{average:.1f} before the run"
