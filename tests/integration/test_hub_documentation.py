"""What the how-to guides about the Hub say, done as they say it, on a loopback Hub."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import huggingface_hub
import pytest

from lrstream.demo import WrittenDataset
from tests.cli.program import run_process
from tests.support.forked import run_script
from tests.support.hub import LoopbackHub
from tests.support.shared import PROJECT

pytest_plugins = ["tests.support.hub.plugin"]

CLIENT_VERSION = tuple(int(part) for part in huggingface_hub.__version__.split(".")[:2])
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(110),
    pytest.mark.skipif(CLIENT_VERSION < (1, 6), reason="this client knows no buckets"),
]


@pytest.fixture
def hub(loopback_hub: LoopbackHub, tiny_dataset: WrittenDataset, tmp_path: Path) -> LoopbackHub:
    """The repositories and buckets that the guides name."""
    loopback_hub.create_dataset("OWNER/NAME", tiny_dataset.root)
    loopback_hub.tag("OWNER/NAME", "v3.0")
    loopback_hub.create_bucket("OWNER/BUCKET", tiny_dataset.root)
    for path in (file for file in tiny_dataset.root.rglob("*") if file.is_file()):
        name = path.relative_to(tiny_dataset.root).as_posix()
        loopback_hub.put_bucket_file("OWNER/BUCKET", f"path/{name}", path.read_bytes())
    return loopback_hub


def blocks(name: str, language: str) -> list[str]:
    text = (PROJECT / "docs" / "how-to" / name).read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def test_publish_a_sidecar(hub: LoopbackHub, tmp_path: Path) -> None:
    lines = [line for block in blocks("publish-a-sidecar.md", "sh") for line in block.splitlines()]
    commands = [words for line in lines if (words := shlex.split(line, comments=True))[:1] == ["lrstream"]]
    assert len(commands) == 8
    for words in commands:
        outcome = run_process(*words[1:], env=hub.env(hub.write_token, home=tmp_path / "home"), cwd=tmp_path)
        assert outcome.code == 0, f"{words}\n{outcome.out}\n{outcome.err}"
    published = [path for path in hub.dataset_files("OWNER/NAME", "lerobot-sidecars") if "sidecars" in path]
    assert sorted(path.partition(".")[2] for path in published) == ["checksums.arrow", "npz"]
    assert len([path for path in hub.bucket_files("OWNER/BUCKET") if "mp4-sidecars" in path]) == 2


@pytest.mark.parametrize("name", ["train-from-hub.md", "train-from-bucket.md"])
def test_training(hub: LoopbackHub, tmp_path: Path, name: str) -> None:
    found = blocks(name, "py")
    assert found
    for text in found:
        script = text + "\nassert len(dataset) == 21\nnext(iter(dataset))\ndataset.close()\n"
        done = run_script(script, env=hub.env(home=tmp_path / "home"))
        assert done.returncode == 0, f"{text}\n{done.stdout}\n{done.stderr}"
