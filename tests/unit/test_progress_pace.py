"""Rate and time left of a long run, from when so much of it was done."""

from __future__ import annotations

from lrstream.cli.progress import Pace


def test_a_steady_run() -> None:
    pace = Pace()
    for second in range(11):
        pace.note(100.0 + second, 50 * second, "files")
    assert pace.text(500, 2000) == ", 50/s, 0:30 left"
    assert pace.text(500, None) == ", 50/s"
    assert pace.text(500, 500) == ", 50/s"
    assert pace.text(500, 500_500) == ", 50/s, 2:46:40 left"


def test_nothing_is_said_too_early_or_about_nothing() -> None:
    pace = Pace()
    assert pace.text(0, 10) == ""
    for tenth in range(15):
        pace.note(tenth / 10, tenth, "files")
    assert pace.text(14, 100) == ""
    idle = Pace()
    for second in range(10):
        idle.note(float(second), 3, "files")
    assert idle.text(3, 100) == ""


def test_another_part_begins_anew() -> None:
    pace = Pace()
    for second in range(10):
        pace.note(float(second), 1000 * second, "rows")
    pace.note(10.0, 0, "files")
    assert pace.text(0, 100) == ""
    for second in range(11, 15):
        pace.note(float(second), 2 * (second - 10), "files")
    assert pace.text(8, 100) == ", 2.0/s, 0:46 left"


def test_the_rate_is_that_of_the_last_minute() -> None:
    """However often it is told; a slow beginning is forgotten."""
    pace = Pace()
    done = 0
    for step in range(3000):
        now_s = step / 10
        done += 1 if now_s < 150 else 10
        pace.note(now_s, done, "files")
    assert pace.text(done, done + 6000) == ", 100/s, 1:00 left"
    assert len(pace._seen) < 200
