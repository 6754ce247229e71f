"""Blocks of the guides that need more than a directory: a queue and a Hub, a home, what plays a GPU."""

from __future__ import annotations

import io
import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from lrstream.demo import WrittenDataset, read_identity
from tests.cli.program import Program, run_process
from tests.integration.test_torchcodec import StandIn
from tests.support.hub import LoopbackHub
from tests.support.shared import PROJECT, import_path

pytest_plugins = ["tests.support.hub.plugin"]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(110)]


def blocks(name: str, language: str) -> list[str]:
    text = (PROJECT / "docs" / "how-to" / name).read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


@pytest.fixture
def lrstream(capsys: pytest.CaptureFixture[str]) -> Program:
    return Program(capsys)


@pytest.fixture
def program(tmp_path: Path) -> str:
    """PATH in which `lrstream` is the one under test."""
    directory = tmp_path / "bin"
    directory.mkdir()
    script = directory / "lrstream"
    script.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m lrstream "$@"\n', encoding="utf-8")
    script.chmod(0o755)
    return f"{directory}{os.pathsep}{os.environ['PATH']}"


def test_a_job_array(
    loopback_hub: LoopbackHub, tiny_dataset: WrittenDataset, tmp_path: Path, program: str
) -> None:
    """The script and the submission, with a queue that runs jobs in turn, each in its own process."""
    commit = loopback_hub.create_dataset("OWNER/NAME", tiny_dataset.root)
    index, submit = (
        text.replace("/shared", str(tmp_path / "shared"))
        .replace("1-32", "1-2")
        .replace("SHARDS=32", "SHARDS=2")
        for text in blocks("index-on-a-cluster.md", "sh")[:2]
    )
    (tmp_path / "index.sh").write_text(index, encoding="utf-8")
    sbatch = Path(program.split(os.pathsep)[0]) / "sbatch"
    sbatch.write_text(
        "#!/bin/bash\nset -e\n"
        'for word; do case $word in --export=ALL,*) export "${word#--export=ALL,}";; esac; done\n'
        'case "$*" in\n'
        '  *--dependency=afterok:7*--wrap*) eval "${!#}";;\n'
        '  *index.sh) for i in 1 2; do SLURM_ARRAY_TASK_ID=$i bash "${!#}" >&2; done; echo 7;;\n'
        "  *) exit 9;;\n"
        "esac\n",
        encoding="utf-8",
    )
    sbatch.chmod(0o755)
    submit = re.sub(r"REVISION=[0-9a-f]{40}", f"REVISION={commit}", submit)
    home = tmp_path / "home"
    environment = os.environ | loopback_hub.env(loopback_hub.read_token, home=home) | {"PATH": program}
    environment["HF_LEROBOT_HOME"] = str(tmp_path / "shared/lerobot")
    path = import_path()
    done = subprocess.run(
        ["bash", "-ec", submit],
        cwd=tmp_path,
        env=environment | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(file.name for file in (tmp_path / "shared/shards").glob("*.npz")) == ["1.npz", "2.npz"]
    whole = run_process("build", "OWNER/NAME", "--revision", commit, "--json", env=environment).document()
    assert whole["result"]["origin"] == "cache"


def test_an_episode_beyond_the_budget(
    demo_dataset: WrittenDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lrstream: Program
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "demo").symlink_to(demo_dataset.root)
    (command,) = blocks("fit-a-byte-budget.md", "sh")
    outcome = lrstream(*shlex.split(command)[1:])
    assert outcome.code == 7
    assert re.search(r"episode \d+", outcome.out + outcome.err)


def test_completions_are_written(tmp_path: Path, program: str) -> None:
    """But for PowerShell's, whose shell is not there."""
    (text,) = blocks("scripts.md", "sh")
    lines = [line for line in text.splitlines() if "$PROFILE" not in line]
    places = [Path(re.findall(r"> ~/(\S+)", line)[0]) for line in lines]
    assert len(places) == 3
    for place in places:
        (tmp_path / place).parent.mkdir(parents=True)
    path = import_path()
    environment = os.environ | {"HOME": str(tmp_path), "PATH": program, "PYTHONPATH": path}
    subprocess.run(["bash", "-ec", "\n".join(lines)], env=environment, timeout=100, check=True)
    for place, name in zip(places, ("lrstream.bash", "_lrstream", "lrstream.fish"), strict=True):
        committed = (PROJECT / "completions" / name).read_text(encoding="utf-8")
        assert (tmp_path / place).read_text(encoding="utf-8") == committed


def test_pictures_decoded_by_the_training_process(
    tiny_dataset: WrittenDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The block for an accelerator as it stands. TorchCodec on a GPU is played by FFmpeg on the processor."""

    class OnDevice:
        """By its interface, which has pictures first and channels before height."""

        def __init__(self, source: bytes, *, custom_frame_mappings: str, device: str) -> None:
            assert device == "cuda"
            self.decoder = StandIn(
                io.BytesIO(source),
                custom_frame_mappings=custom_frame_mappings,
                dimension_order="NHWC",
                num_ffmpeg_threads=1,
                device="cpu",
            )

        def get_frames_at(self, indices: list[int]) -> Any:
            frames = self.decoder.get_frames_at(indices)
            frames.data = frames.data.permute(0, 3, 1, 2)
            return frames

    package, module = ModuleType("torchcodec"), ModuleType("torchcodec.decoders")
    module.VideoDecoder = OnDevice  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torchcodec", package)
    monkeypatch.setitem(sys.modules, "torchcodec.decoders", module)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "demo").symlink_to(tiny_dataset.root)
    block = next(text for text in blocks("choose-a-decoder.md", "py") if 'device="cuda"' in text)
    script = tmp_path / "train.py"
    check = "    seen.append((pictures, batch))\n"
    script.write_text(block.replace("dataset = ", "seen = []\ndataset = ", 1) + check, encoding="utf-8")
    result = runpy.run_path(str(script))
    frames = 0
    for pictures, batch in result["seen"]:
        assert pictures.dtype == torch.uint8
        assert pictures.shape[1:3] == (1, 3)
        for row, picture in enumerate(pictures[:, 0].numpy()):
            found = read_identity(np.ascontiguousarray(picture))
            assert found[1:] == (int(batch["episode_index"][row]), int(batch["frame_index"][row]))
            frames += 1
    assert frames == tiny_dataset.num_frames
