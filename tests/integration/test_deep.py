"""`validate --deep`: pictures through the sidecar against a decode of the whole file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest

from lrstream.commands.deep import DeepReport, compare_pictures, validate_pictures
from lrstream.commands.inspect_source import SourceOptions, open_indexed, parse_sample
from lrstream.commands.validate import validate_target
from lrstream.demo import WrittenDataset
from lrstream.errors import UsageError
from lrstream.streaming import decode as decode_module
from tests.cli.program import Program
from tests.support.datasets import DatasetCache, copy_dataset
from tests.support.faults import replace_mp4
from tests.support.shared import DATASETS, requires_shared, shared_dataset

FRONT = "observation.images.front"


@pytest.fixture
def lrstream(capsys: pytest.CaptureFixture[str]) -> Program:
    """The command line, run inside the test process."""
    return Program(capsys)


def deep(root: Path, sample: int | None = None) -> DeepReport:
    with open_indexed(SourceOptions(str(root))) as opened:
        return validate_pictures(opened, np.arange(len(opened.layout.episodes)), sample=sample)


@pytest.mark.parametrize("name", ["standard", "h264_open", "hevc_open", "vp9", "av1", "depth"])
def test_good_datasets_are_equal_both_ways(dataset_cache: DatasetCache, name: str) -> None:
    dataset = dataset_cache.get(name)
    report = deep(dataset.root)
    assert report.problems == ()
    assert report.num_different == 0
    assert report.num_pictures == dataset.num_frames * len(dataset.spec.cameras)
    assert report.episodes == tuple(range(dataset.spec.num_episodes))
    codecs = {"hevc" if camera.codec == "depth" else camera.codec for camera in dataset.spec.cameras}
    assert {decoder.codec for decoder in report.decoders} == codecs
    assert all(decoder.decoder for decoder in report.decoders)
    assert report.pyav == av.__version__


@requires_shared
@pytest.mark.parametrize("name", DATASETS)
def test_real_datasets_are_equal_both_ways(name: str) -> None:
    report = deep(shared_dataset(name), sample=3)
    assert report.problems == ()
    assert report.num_different == 0
    assert (report.num_pictures > 0) == (name != "images_only")


def test_a_sample_is_spread_over_the_dataset(demo_dataset: WrittenDataset) -> None:
    assert deep(demo_dataset.root, sample=2).episodes == (0, 11)
    assert deep(demo_dataset.root, sample=1).episodes == (0,)


def flip_bytes(path: Path, start: int, stop: int) -> None:
    data = bytearray(path.read_bytes())
    for at in range(start, stop):
        data[at] ^= 0x5A
    path.write_bytes(data)


def test_damaged_pictures_are_found(standard_dataset: WrittenDataset, tmp_path: Path) -> None:
    root = copy_dataset(standard_dataset, tmp_path / "damaged")
    with open_indexed(SourceOptions(str(root))) as opened:
        path = opened.layout.episodes.cameras[FRONT].path(1)
        span = opened.spans.span(1, FRONT)
        middle = (span.start_byte + span.stop_byte) // 2
    flip_bytes(root / path, middle, middle + 200)
    report = deep(root)
    assert report.problems
    assert {problem.source for problem in report.problems} == {path}
    assert {problem.code for problem in report.problems} <= {"decode", "pixels-differ", "picture-missing"}


def test_a_picture_that_differs_is_named(
    standard_dataset: WrittenDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As if the index pointed at the neighbour: one decoder is handed the wrong picture.
    from lrstream.streaming.pictures import PictureConverter

    original = PictureConverter.write_rgb
    count = 0

    def shifted(self: PictureConverter, picture: av.VideoFrame, out: Any) -> None:
        nonlocal count
        original(self, picture, out)
        count += 1
        if count == 5:
            out[0, 0, 0] ^= 1

    monkeypatch.setattr(PictureConverter, "write_rgb", shifted)
    report = deep(standard_dataset.root, sample=1)
    assert report.num_different == 1
    [problem] = report.problems
    assert (problem.code, problem.episode_index) == ("pixels-differ", 0)
    assert "1 of 23 pictures" in problem.message
    assert "frame 4" in problem.message


def test_a_missing_decoder_is_told_before_training(
    av1_dataset: WrittenDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(decode_module._DECODERS, "av1", ("no-such-decoder",))
    report = deep(av1_dataset.root)
    assert [decoder.decoder for decoder in report.decoders] == [None]
    [problem] = report.problems
    assert problem.code == "decode"
    assert "no usable AV1 decoder" in problem.message
    assert report.episodes == tuple(range(5))
    assert "libdav1d" in (problem.hint or "")
    assert report.num_pictures == 0


def test_a_decoder_that_cannot_decode_is_told_too(
    av1_dataset: WrittenDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    # FFmpeg's own "av1" decoder opens, but only drives hardware.
    monkeypatch.setitem(decode_module._DECODERS, "av1", ("av1",))
    report = deep(av1_dataset.root, sample=1)
    assert {problem.code for problem in report.problems} == {"decode"}
    assert "install the PyAV wheels" in (report.problems[0].hint or "")


def test_a_replaced_video_fails_a_stale_sidecar(
    standard_dataset: WrittenDataset, tmp_path: Path, lrstream: Program
) -> None:
    root = copy_dataset(standard_dataset, tmp_path / "replaced")
    sidecar = tmp_path / "stale.npz"
    assert lrstream("build", root, "-o", sidecar).code == 0
    replace_mp4(root / standard_dataset.video_files[FRONT][0])
    outcome = lrstream("validate", sidecar, "--source", root, "--deep", "--sample", "all", "--json")
    assert outcome.code == 3
    assert "source-changed" in outcome.codes()
    # The pictures themselves are not even looked at: the file is not the one that was indexed.
    transfers = [item for item in outcome.document()["problems"] if item["code"] == "transfer"]
    assert transfers
    assert all("was changed after it was indexed" in item["message"] for item in transfers)
    result = outcome.document()["result"]
    assert result["num_errors"] == len(outcome.codes())


def test_without_a_sidecar_nothing_is_kept(
    standard_dataset: WrittenDataset, isolated_home: Path, lrstream: Program
) -> None:
    outcome = lrstream("validate", standard_dataset.root, "--deep", "--sample", "2", "--json")
    assert outcome.code == 0
    pictures = outcome.document()["result"]["pictures"]
    assert pictures["episodes"] == [0, 6]
    assert pictures["num_pictures"] == 2 * (23 + 27)
    assert [decoder["decoder"] for decoder in pictures["decoders"]] == ["h264"]
    assert not list(isolated_home.rglob("*.npz"))
    text = lrstream("validate", standard_dataset.root, "--deep", "--sample", "1")
    assert text.code == 0
    assert "46 of 1 episodes compared, 0 differ" in text.out


def test_nothing_is_told_twice(standard_dataset: WrittenDataset, tmp_path: Path) -> None:
    root = copy_dataset(standard_dataset, tmp_path / "missing")
    (root / standard_dataset.video_files[FRONT][0]).unlink()
    first = validate_target(str(root))
    result, report = compare_pictures(first, SourceOptions(str(root)), sample=None)
    keys = [(item.code, item.source, item.episode_index) for item in result.problems]
    assert len(keys) == len(set(keys))
    assert result.num_errors + result.num_warnings == len(result.problems)
    assert result.problems == first.problems
    others = (12 + 18 + 5 + 27) + standard_dataset.num_frames
    assert report.num_pictures == others, "other files are compared"


@pytest.mark.parametrize("text", ["0", "-1", "some", "", "1.5", "²"])
def test_samples_that_make_no_sense_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--sample"):
        parse_sample(text)


def test_samples_are_numbers_or_all() -> None:
    assert parse_sample("12") == 12
    assert parse_sample("all") is None
