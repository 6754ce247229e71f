"""Which published files are looked at for a snapshot, by their names."""

from __future__ import annotations

import hashlib
import io
import random
from collections.abc import Callable
from dataclasses import replace
from typing import cast

import pytest

from lrstream.errors import TransferError
from lrstream.sidecar.identity import SidecarIdentity, SourceFile
from lrstream.sidecar.publication import PublishedFile, published_name
from lrstream.sidecar.published import candidates_for
from lrstream.storage.byte_source import ByteSource

COMMIT, OTHER = "0123456789" * 4, "abcdef0123" * 4
HUB = SidecarIdentity(
    "robots/pick", "main", f"hf://datasets/robots/pick@{COMMIT}", (SourceFile("a.mp4"), SourceFile("b.mp4"))
)
BUCKET = SidecarIdentity(
    "robots/store", "v3.0", "hf://buckets/robots/store", (SourceFile("a.mp4", 5),), {"a.mp4": "1" * 64}
)


def not_opened() -> ByteSource:
    raise AssertionError("candidates are chosen without reading them")


def names(identity: SidecarIdentity, *published: str) -> list[str]:
    files = [
        PublishedFile(name, 9, None, None, float(number), not_opened) for number, name in enumerate(published)
    ]
    random.Random(1).shuffle(files)
    return [file.name for file in candidates_for(identity, files)]


def test_the_name_does_not_depend_on_how_the_commit_was_asked_for() -> None:
    name = published_name(HUB)
    assert name.startswith(f"mp4-v3-{COMMIT[:32]}-")
    for revision in ("v3.0", COMMIT, "main"):
        assert published_name(replace(HUB, revision=revision)) == name
    assert published_name(replace(HUB, data_root=f"hf://datasets/robots/pick@{OTHER}")) != name
    assert published_name(BUCKET) == BUCKET.file_name


@pytest.mark.parametrize("identity", [HUB, BUCKET])
def test_the_right_name_comes_first(identity: SidecarIdentity) -> None:
    exact = published_name(identity)
    assert names(identity, "z.npz", exact) == [exact, "z.npz"]
    assert names(identity) == []


def test_names_that_tell_of_another_snapshot_are_left_out() -> None:
    digest = "0" * 16
    others = [f"mp4-v3-{commit[:32]}-{digest}.npz" for commit in (COMMIT, OTHER)]
    assert names(HUB, *others, f"mp4-v3-main-{digest}.npz") == []
    # Another name of the commit that we asked for by "main".
    assert names(HUB, f"mp4-v3-v3.0-{digest}.npz") == [f"mp4-v3-v3.0-{digest}.npz"]
    # In a bucket, another digest is another content.
    assert names(BUCKET, f"mp4-v3-v3.0-{digest}.npz", f"mp4-v3-main-{digest}.npz") == []


def test_names_of_our_own_making_are_found_too() -> None:
    assert names(HUB, HUB.file_name, published_name(HUB)) == [published_name(HUB), HUB.file_name]


def test_few_are_tried() -> None:
    """Each try is a download, so the newest three of any other form must do."""
    assert names(BUCKET, *(f"x{number}.npz" for number in range(9))) == ["x8.npz", "x7.npz", "x6.npz"]


def test_damage_on_the_way_is_noticed() -> None:
    class Source:
        path = "a.npz"

        def read(self, start: int, stop: int) -> bytes:
            return b"content"[start:stop]

        def close(self) -> None:
            pass

    opened = cast("Callable[[], ByteSource]", Source)
    right = hashlib.sha256(b"content").hexdigest()
    oid = hashlib.sha1(b"blob 7\0content", usedforsecurity=False).hexdigest()
    for file in (
        PublishedFile("a.npz", 7, right, None, 0, opened),
        PublishedFile("a.npz", 7, None, oid, 0, opened),
        PublishedFile("a.npz", 7, None, None, 0, opened),
    ):
        copy = io.BytesIO()
        assert file.write_to(copy) == right
        assert copy.getvalue() == b"content"
    for wrong in (
        PublishedFile("a.npz", 7, "0" * 64, None, 0, opened),
        PublishedFile("a.npz", 7, None, "0" * 40, 0, opened),
    ):
        with pytest.raises(TransferError, match=r"a\.npz does not have the content"):
            wrong.write_to(io.BytesIO())
