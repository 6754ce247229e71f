"""Identity of a sidecar and the names derived from it (SC-6, SC-7; formats, section 2)."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from lrstream.errors import SidecarError, UsageError
from lrstream.sidecar.identity import (
    SidecarIdentity,
    SourceFile,
    cache_path,
    identity_from_json,
    repo_slug,
    revision_slug,
)

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def hub(revision: str, root: str = f"hf://datasets/a/b@{COMMIT}", size: int | None = None) -> SidecarIdentity:
    return SidecarIdentity("a/b", revision, root, (SourceFile("v/0.mp4", size),))


def test_digest_is_sha256_of_the_sorted_compact_json_without_the_source_files() -> None:
    text = '{"data_root":"/d/x","repo_id":"a/b","revision":"v3.0","schema_version":3}'
    plain = SidecarIdentity("a/b", "v3.0", "/d/x", (SourceFile("v/0.mp4", 5),))
    assert plain.digest == hashlib.sha256(text.encode()).hexdigest()[:16]

    text = (
        '{"data_root":"/d/x","repo_id":"a/b","revision":"v3.0","schema_version":3,'
        '"source_fingerprints":{"v/0.mp4":"1:2"}}'
    )
    marked = SidecarIdentity("a/b", "v3.0", "/d/x", (SourceFile("v/0.mp4", 5),), {"v/0.mp4": "1:2"})
    assert marked.digest == hashlib.sha256(text.encode()).hexdigest()[:16]


@pytest.mark.parametrize(
    ("repo_id", "slug"),
    [
        ("lerobot/pusht", "lerobot--pusht"),
        ("a b//c", "a--b--c"),
        ("/x/", "x"),
        ("日本", "dataset"),
        ("-a-", "a"),
        ("a.b_c-d", "a.b_c-d"),
    ],
)
def test_repo_slug(repo_id: str, slug: str) -> None:
    assert repo_slug(repo_id) == slug


@pytest.mark.parametrize("repo_id", ["..", ".", "/../"])
def test_a_repo_id_never_leaves_the_cache(repo_id: str) -> None:
    with pytest.raises(UsageError):
        repo_slug(repo_id)


@pytest.mark.parametrize(
    ("revision", "slug"),
    [("v3.0", "v3.0"), ("refs/pr/7", "refs-pr-7"), ("///", "revision"), (COMMIT, COMMIT[:32]), ("-x-", "x")],
)
def test_revision_slug(revision: str, slug: str) -> None:
    assert revision_slug(revision) == slug


def test_cache_path(tmp_path: Path) -> None:
    identity = hub("refs/pr/7")
    expected = tmp_path / "streaming-sidecars" / "a--b" / f"mp4-v3-refs-pr-7-{identity.digest}.npz"
    assert cache_path(identity, tmp_path) == expected


def test_sizes_unknown_to_the_request_are_not_compared() -> None:
    assert hub("main", size=10).matches(hub("main"))
    assert hub("main", size=10).matches(hub("main", size=10))
    assert not hub("main", size=10).matches(hub("main", size=11))


def test_revisions_may_differ_only_under_one_commit() -> None:
    assert hub("v3.0").matches(hub("main"))
    assert not hub("v3.0", "/d").matches(hub("main", "/d"))
    other = f"hf://datasets/a/b@{COMMIT[::-1]}"
    assert not hub("v3.0").matches(hub("v3.0", other))


def test_every_difference_is_named() -> None:
    found = SidecarIdentity(
        "a/b", "v1", "/d", (SourceFile("x.mp4", 1), SourceFile("y.mp4", 2)), {"x.mp4": "1", "y.mp4": "2"}
    )
    wanted = SidecarIdentity(
        "a/c", "v2", "/e", (SourceFile("x.mp4", 9), SourceFile("z.mp4", 2)), {"x.mp4": "0", "z.mp4": "2"}
    )
    text = "; ".join(found.mismatches(wanted))
    for part in ("repo_id", "data_root", "revision", "not indexed: z.mp4", "not part of the dataset: y.mp4"):
        assert part in text
    assert "x.mp4 (1 bytes indexed, 9 bytes now)" in text
    assert "1 source files changed since they were indexed: x.mp4" in text


def test_same_size_other_fingerprint_does_not_match() -> None:
    before = SidecarIdentity("a/b", "v3.0", "/d", (SourceFile("x.mp4", 1),), {"x.mp4": "1:1"})
    after = SidecarIdentity("a/b", "v3.0", "/d", (SourceFile("x.mp4", 1),), {"x.mp4": "2:2"})
    assert not before.matches(after)
    assert before.digest != after.digest


def test_sources_must_be_sorted_unique_and_fingerprinted_together() -> None:
    with pytest.raises(SidecarError, match="sorted"):
        SidecarIdentity("a", "b", "c", (SourceFile("b"), SourceFile("a")))
    with pytest.raises(SidecarError, match="unique"):
        SidecarIdentity("a", "b", "c", (SourceFile("a"), SourceFile("a")))
    with pytest.raises(SidecarError, match="every source file or for none"):
        SidecarIdentity("a", "b", "c", (SourceFile("a"), SourceFile("b")), {"a": "1"})


def test_json_round_trip_and_refusals() -> None:
    identity = SidecarIdentity("a/b", "v3.0", "/d", (SourceFile("x.mp4", 1),), {"x.mp4": "1:1"})
    document = identity.to_json()
    assert identity_from_json(document) == identity
    refused: list[tuple[str, object]] = [
        ("schema_version", 2),
        ("repo_id", 3),
        ("source_files", {}),
        ("source_files", [{"path": "x.mp4"}]),
        ("source_files", [{"path": "x.mp4", "size": True}]),
        ("source_files", [{"path": "x.mp4", "size": -1}]),
        ("source_fingerprints", {"x.mp4": 1}),
        ("source_fingerprints", {"y.mp4": "1"}),
    ]
    for key, value in refused:
        with pytest.raises(SidecarError):
            identity_from_json({**document, key: value})
