"""Some hundreds of the cases of ``python -m tests.fuzz`` (MP-3, K29): the same ones in every run.

Each asserts inside: only our errors, bounded CPU time and memory, a mini-MP4 that FFmpeg reads as the
index says, nothing damaged that passes for valid.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.fuzz.__main__ import run
from tests.fuzz.mp4_cases import prepare, run_mp4_case
from tests.fuzz.sidecar_cases import run_sidecar_case

SEED = 20_000


@pytest.fixture(scope="module")
def _encoded() -> None:
    prepare(av1=False)


@pytest.mark.usefixtures("_encoded")
@pytest.mark.parametrize("first", range(0, 400, 100))
def test_mutated_mp4s(first: int) -> None:
    results = Counter(run_mp4_case(number, SEED, av1=False).result for number in range(first, first + 100))
    # Not everything is refused at once: then nothing behind the parser would be tested.
    assert results["refused"] > 20
    assert results["decoded"] > 2


@pytest.mark.parametrize("first", range(0, 300, 100))
def test_mutated_sidecars(tmp_path: Path, first: int) -> None:
    results = Counter(run_sidecar_case(number, SEED, tmp_path).result for number in range(first, first + 100))
    assert results["refused"] > 50
    assert results["accepted"] > 2


@pytest.mark.usefixtures("_encoded")
def test_the_supervisor_reports_what_its_child_did() -> None:
    summary = run("mp4", 0, 20, SEED, av1=False)
    assert sum(summary.results.values()) == 20
    assert summary.failures == []
