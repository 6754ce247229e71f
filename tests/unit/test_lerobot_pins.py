"""lrstream can be installed beside LeRobot: for every package that both need there is a version for both.

The requirements of LeRobot's releases are data here, as in their metadata: no network is needed.
"""

from __future__ import annotations

import tomllib

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from tests.support.shared import PROJECT

RELEASES = {
    "0.4.4": (
        ">=3.10",
        [
            "datasets<5.0.0,>=4.0.0",
            "diffusers<0.36.0,>=0.27.2",
            "huggingface-hub[cli,hf-transfer]<0.36.0,>=0.34.2",
            "accelerate<2.0.0,>=1.10.0",
            "setuptools<81.0.0,>=71.0.0",
            "einops<0.9.0,>=0.8.0",
            "opencv-python-headless<4.13.0,>=4.9.0",
            "av<16.0.0,>=15.0.0",
            "packaging<26.0,>=24.2",
            "torch<2.11.0,>=2.2.1",
            "torchcodec<0.11.0,>=0.2.1",
            "torchvision<0.26.0,>=0.21.0",
            "rerun-sdk<0.27.0,>=0.24.0",
        ],
    ),
    "0.6.1": (
        ">=3.12",
        [
            "torch<2.12.0,>=2.7",
            "torchvision<0.27.0,>=0.22.0",
            "numpy<2.3.0,>=2.0.0",
            "Pillow<13.0.0,>=10.0.0",
            "huggingface-hub<2.0.0,>=1.6.0",
            "requests<3.0.0,>=2.32.0",
            "packaging<26.0,>=24.2",
            "datasets<5.0.0,>=4.8.0",
            "pandas<3.0.0,>=2.0.0",
            "pyarrow<30.0.0,>=21.0.0",
            "av<16.0.0,>=15.0.0",
            "torchcodec<0.12.0,>=0.3.0",
            "accelerate<2.0.0,>=1.14.0",
        ],
    ),
}
# What `datasets` 4.8.5, the newest below 5, needs in turn.
THROUGH_DATASETS = ["pyarrow>=21.0.0", "fsspec[http]<=2026.2.0,>=2023.1.0", "filelock", "numpy>=1.17"]


def project() -> dict[str, object]:
    return dict(tomllib.loads((PROJECT / "pyproject.toml").read_text(encoding="utf-8"))["project"])


def ours() -> dict[str, SpecifierSet]:
    texts = project()["dependencies"]
    assert isinstance(texts, list)
    requirements = [Requirement(text) for text in texts]
    return {canonical(requirement.name): requirement.specifier for requirement in requirements}


def canonical(name: str) -> str:
    return name.lower().replace("_", "-")


def common(one: SpecifierSet, other: SpecifierSet) -> list[Version]:
    """Versions named in either range that lie in both; with lower bounds in them, none means no overlap."""
    named = {Version(specifier.version) for specifier in (*one, *other)}
    return sorted(version for version in named if version in one and version in other)


@pytest.mark.parametrize("release", RELEASES)
def test_every_shared_package_has_a_version_for_both(release: str) -> None:
    python, texts = RELEASES[release]
    shared = []
    for text in [*texts, *THROUGH_DATASETS]:
        requirement = Requirement(text)
        specifier = ours().get(canonical(requirement.name))
        if specifier is not None:
            shared.append(canonical(requirement.name))
            assert not list(specifier) or common(specifier, requirement.specifier), (text, str(specifier))
    assert {"av", "huggingface-hub", "torch", "pyarrow", "fsspec"} <= set(shared)
    requires = project()["requires-python"]
    assert isinstance(requires, str)
    assert common(SpecifierSet(requires), SpecifierSet(python))


def test_the_check_notices_a_range_without_overlap() -> None:
    assert not common(SpecifierSet(">=16"), SpecifierSet("<16.0.0,>=15.0.0"))
    assert not common(SpecifierSet(">=1.6"), SpecifierSet("<0.36.0,>=0.34.2"))
    assert common(SpecifierSet(">=2.7"), SpecifierSet("<2.11.0,>=2.2.1")) == [Version("2.7")]
