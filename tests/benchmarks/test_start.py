"""Starting costs next to nothing: importing the package, and the program's help."""

from __future__ import annotations

import statistics

from tests.benchmarks.start_figures import measure

RUNS = 5


def cpu_s(*arguments: str) -> float:
    """Median processor time of a Python process; time that others take does not count."""
    return statistics.median(measure(arguments)[1] for _ in range(RUNS)) / 1e3


def test_importing_the_package_takes_less_than_a_tenth_of_a_second() -> None:
    bare, imported = cpu_s("-c", "pass"), cpu_s("-c", "import lrstream")
    print(f"bare {bare:.3f} s, import lrstream {imported:.3f} s")
    assert imported - bare <= 0.1


def test_help_appears_within_four_tenths_of_a_second() -> None:
    """On a quiet machine; shared caches and cores may double what is counted."""
    taken = cpu_s("-m", "lrstream", "--help")
    print(f"lrstream --help {taken:.3f} s")
    assert taken <= 0.8
