"""Text survives pipes, narrow terminals, odd names and poor encodings (K32, K33)."""

from __future__ import annotations

import io

import pytest

from lrstream.cli.problems import CliProblem
from lrstream.cli.screen import Column, Screen, make_encodable, printable


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def table_on(stream: io.StringIO, name: str = "a.mp4") -> str:
    columns = [Column("file"), Column("bytes", is_number=True), Column("samples/s", is_number=True)]
    Screen(stream).table(columns, [[name, "1234567890", "1234.5"], ["b.mp4", "7", "0.1"]])
    return stream.getvalue()


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain ü →", "plain ü →"),
        ("two\nlines\tand a tab", "two\nlines\tand a tab"),
        ("\x1b[31mred\x07", "\\x1b[31mred\\x07"),
        ("undecodable \udce9", "undecodable \\udce9"),
        ("c1 \x9b", "c1 \\x9b"),
    ],
)
def test_control_characters_are_shown_not_sent(text: str, shown: str) -> None:
    assert printable(text) == shown


def test_markup_is_text() -> None:
    stream = io.StringIO()
    Screen(stream).line("[red]x[/red] :smile:")
    Screen(stream).problem(CliProblem("code", "[bold]m", hint="[link]h"))
    assert "[red]x[/red] :smile:" in stream.getvalue()
    assert "[bold]m" in stream.getvalue()
    assert "[red]n[/]" in table_on(io.StringIO(), name="[red]n[/]")


def test_piped_tables_are_never_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    name = "videos/" + "x" * 300 + ".mp4"
    lines = table_on(io.StringIO(), name).splitlines()
    assert any(name in line and "1234567890" in line for line in lines)


def test_terminal_tables_fit_and_keep_numbers_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")
    text = table_on(Terminal(), "videos/" + "x" * 300 + ".mp4")
    assert max(map(len, text.splitlines())) <= 80
    assert "1234567890" in text
    assert "1234.5" in text
    assert text.count("x") == 300, "a long name is folded, not cut"


@pytest.mark.parametrize(("name", "value"), [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_no_escape_sequences_where_they_are_unwanted(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv(name, value)
    assert "\x1b" not in table_on(Terminal())


@pytest.mark.parametrize("encoding", ["ascii", "cp1252", "utf-8"])
def test_any_text_can_be_written_in_any_encoding(encoding: str) -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding=encoding)
    make_encodable(stream)
    screen = Screen(stream)
    screen.line("Ünïcode → 机器人 \udce9")
    screen.table([Column("→ 名"), Column("n", is_number=True)], [["机器人", "1"]])
    stream.flush()
    text = raw.getvalue().decode(encoding)
    assert ("机器人" in text) == (encoding == "utf-8")
    if encoding == "ascii":
        assert "\\u673a" in text
        assert "---" in text


def test_facts_are_aligned() -> None:
    stream = io.StringIO()
    Screen(stream).facts([("path", "/x"), ("episodes", "12")])
    assert stream.getvalue() == "path      /x\nepisodes  12\n"


def test_a_problem_names_its_place_once() -> None:
    stream = io.StringIO()
    screen = Screen(stream)
    screen.problem(CliProblem("mp4", "It is cut.", source="a.mp4", episode_index=3, hint="Copy it."))
    screen.problem(CliProblem("mp4", "a.mp4: Episode 3 is cut.", source="a.mp4", episode_index=3))
    assert stream.getvalue().splitlines() == [
        "error [mp4]: a.mp4, episode 3: It is cut.",
        "  hint: Copy it.",
        "error [mp4]: a.mp4: Episode 3 is cut.",
    ]


def test_too_narrow_terminals_get_lines_in_place_of_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    monkeypatch.setenv("NO_COLOR", "1")
    assert table_on(Terminal()).splitlines() == [
        "file: a.mp4",
        "bytes: 1234567890",
        "samples/s: 1234.5",
        "file: b.mp4",
        "bytes: 7",
        "samples/s: 0.1",
    ]
