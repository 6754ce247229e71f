"""The JSON envelope, and failures of stdout itself."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from lrstream import __version__
from lrstream.cli.options import CommonOptions
from lrstream.cli.output import Answer, envelope, jsonable
from lrstream.cli.problems import CliProblem, Failure
from lrstream.cli.progress import ProgressLine
from lrstream.cli.runner import run_command
from lrstream.errors import DatasetFormatError, LrstreamError, NotFoundError
from lrstream.sidecar.build import SourceFailure
from tests.cli.program import Outcome


@dataclass
class Inner:
    path: Path
    rate: float


def test_values_become_plain_json() -> None:
    value = {
        "inner": Inner(Path("/a"), math.nan),
        "numbers": np.arange(3),
        "scalar": np.float32(0.5),
        "text": "token=abcdef",
        1: (True, None),
    }
    assert jsonable(value) == {
        "inner": {"path": "/a", "rate": None},
        "numbers": [0, 1, 2],
        "scalar": 0.5,
        "text": "token=***",
        "1": [True, None],
    }
    with pytest.raises(TypeError, match="object"):
        jsonable(object())


def test_the_envelope_is_ascii_and_complete() -> None:
    problem = CliProblem("mp4", "ä \udce9\n", source="x", episode_index=2, hint="h")
    text = envelope("build", ok=False, result={"path": "机" * 300}, problems=[problem])
    assert text.isascii()
    assert json.loads(text) == {
        "schema": "lrstream.build/1",
        "version": __version__,
        "ok": False,
        "result": {"path": "机" * 300},
        "problems": [
            {
                "code": "mp4",
                "severity": "error",
                "source": "x",
                "episode_index": 2,
                "message": "ä \udce9\n",
                "hint": "h",
            }
        ],
    }


def leave(options: CommonOptions, work: object, capsys: pytest.CaptureFixture[str]) -> Outcome:
    """Outcome of a command that does `work`: raises it, or answers it."""

    def do(progress: ProgressLine) -> Answer:
        if isinstance(work, BaseException):
            raise work
        assert isinstance(work, Answer)
        return work

    capsys.readouterr()
    with pytest.raises(Exception) as caught:  # noqa: PT011  (the class differs between Typer releases)
        run_command("test", options, do)
    out, err = capsys.readouterr()
    return Outcome(caught.value.exit_code, out, err)  # type: ignore[attr-defined]


@pytest.mark.parametrize("as_json", [False, True])
@pytest.mark.parametrize(
    ("error", "code", "name"),
    [
        (NotFoundError("x is not there.", hint="Look elsewhere."), 4, "not-found"),
        (DatasetFormatError("x is odd.", file_path="x"), 6, "dataset"),
        (LrstreamError("x."), 1, "internal"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (MemoryError(), 1, "out-of-memory"),
        (RuntimeError("two\nlines token=abcdef"), 1, "internal"),
        (OSError(28, "No space left on device"), 7, "disk-full"),
    ],
)
def test_every_failure_is_told_once(
    error: BaseException, code: int, name: str, as_json: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    outcome = leave(CommonOptions(as_json=as_json), error, capsys).without_traceback()
    assert outcome.code == code
    assert "abcdef" not in outcome.out + outcome.err
    if as_json:
        assert outcome.codes() == [name]
        assert outcome.err == ""
    else:
        assert outcome.out == ""
        assert outcome.err.startswith(f"error [{name}]: ")
        assert len(outcome.err.splitlines()) <= 2


def test_a_traceback_is_shown_when_asked_for_without_secrets(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_SENTINEL")
    outcome = leave(CommonOptions(debug=True), ValueError("hf_SENTINEL"), capsys)
    assert "Traceback" in outcome.err
    assert "SENTINEL" not in outcome.err


def test_an_error_that_sums_up_several_tells_each(capsys: pytest.CaptureFixture[str]) -> None:
    failures = (
        SourceFailure("a.mp4", "mp4-malformed", "It is empty.", None),
        SourceFailure("b.mp4", "transfer", "It broke off.", "Again."),
    )
    error = DatasetFormatError("2 files.", failures=failures)
    problems = leave(CommonOptions(as_json=True), error, capsys).document()["problems"]
    assert [(item["code"], item["source"], item["hint"]) for item in problems] == [
        ("mp4-malformed", "a.mp4", None),
        ("transfer", "b.mp4", "Again."),
    ]


def test_a_fault_while_showing_is_a_failure_too(capsys: pytest.CaptureFixture[str]) -> None:
    answer = Answer(result={"bad": object()}, show=lambda screen: None)
    outcome = leave(CommonOptions(as_json=True), answer, capsys).without_traceback()
    assert outcome.code == 1
    assert outcome.codes() == ["internal"]


def test_a_full_disk_under_stdout_is_a_limit(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("needs a device that is always full")
    answer = Answer(result={}, show=lambda screen: screen.line("x"))
    for as_json in (False, True):
        with open("/dev/full", "w") as full:
            monkeypatch.setattr(sys, "stdout", full)
            outcome = leave(CommonOptions(as_json=as_json), answer, capsys)
            monkeypatch.undo()
        assert outcome.code == 7
        assert outcome.err.startswith("error [disk-full]: Standard output cannot be written")


def test_warnings_go_to_stderr_and_stay_silent_when_quiet(capsys: pytest.CaptureFixture[str]) -> None:
    import logging
    import warnings

    def work(progress: ProgressLine) -> Answer:
        warnings.warn("slow\nstore", stacklevel=1)
        logging.getLogger("lrstream.sidecar").warning("waiting")
        logging.getLogger("lrstream.sidecar").info("detail")
        return Answer(result={}, show=lambda screen: screen.line("answer"))

    for options, expected in [
        (CommonOptions(), ["warning: slow store", "warning: waiting"]),
        (CommonOptions(verbose=True), ["warning: slow store", "warning: waiting", "info: detail"]),
        (CommonOptions(quiet=True), []),
    ]:
        with pytest.raises(Exception) as caught:  # noqa: PT011
            run_command("test", options, work)
        out, err = capsys.readouterr()
        assert caught.value.exit_code == 0  # type: ignore[attr-defined]
        assert out == "answer\n"
        assert err.splitlines() == expected


def test_the_cache_directory_holds_for_one_command(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    from lrstream.storage.home import lerobot_home

    before = lerobot_home()
    seen = []

    def work(progress: ProgressLine) -> Answer:
        seen.append(lerobot_home())
        return Answer(result={}, show=lambda screen: None)

    with pytest.raises(Exception):  # noqa: B017, PT011
        run_command("test", CommonOptions(cache_dir=tmp_path), work)
    assert seen == [tmp_path]
    assert lerobot_home() == before


def test_usage_failures_have_their_own_status() -> None:
    assert Failure.usage("x", None).exit_code == 2
