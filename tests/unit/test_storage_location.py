"""Every form in which a user may say where a dataset is (DS-1)."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from lrstream.errors import NotFoundError, UsageError
from lrstream.storage.location import Location, RepoType, parse_location


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("lerobot/pusht", Location("hub", "hf://datasets/lerobot/pusht", "lerobot/pusht")),
        ("hf://datasets/lerobot/pusht", Location("hub", "hf://datasets/lerobot/pusht", "lerobot/pusht")),
        (
            "hf://datasets/lerobot/pusht@v3.0/sub/set/",
            Location("hub", "hf://datasets/lerobot/pusht@v3.0/sub/set", "lerobot/pusht", "sub/set", "v3.0"),
        ),
        (
            "hf://datasets/a/b@feature%2Fx/set",
            Location("hub", "hf://datasets/a/b@feature%2Fx/set", "a/b", "set", "feature/x"),
        ),
        (
            "hf://datasets/a/b@refs/pr/12/set",
            Location("hub", "hf://datasets/a/b@refs/pr/12/set", "a/b", "set", "refs/pr/12"),
        ),
        (
            "hf://datasets/a/b@refs/convert/parquet",
            Location("hub", "hf://datasets/a/b@refs/convert/parquet", "a/b", "", "refs/convert/parquet"),
        ),
        # An '@' inside the path is part of a name, not a revision.
        ("hf://datasets/a/b/run@2", Location("hub", "hf://datasets/a/b/run@2", "a/b", "run@2")),
        ("hf://buckets/org/raw", Location("bucket", "hf://buckets/org/raw", "org/raw")),
        ("hf://buckets/org/raw/x/y/", Location("bucket", "hf://buckets/org/raw/x/y", "org/raw", "x/y")),
        ("s3://bucket/sets/one/", Location("fsspec", "s3://bucket/sets/one")),
        ("memory://one", Location("fsspec", "memory://one")),
        ("gs://bucket", Location("fsspec", "gs://bucket")),
        ("https://example.org/sets/one", Location("fsspec", "https://example.org/sets/one")),
    ],
)
def test_remote_forms(source: str, expected: Location) -> None:
    assert parse_location(source) == expected


def test_revision_argument_becomes_part_of_a_hub_root() -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    location = parse_location("a/b", revision=commit)
    assert location == Location("hub", f"hf://datasets/a/b@{commit}", "a/b", "", commit)
    assert parse_location(f"hf://datasets/a/b@{commit}", revision=commit) == location


def test_bucket_by_repo_type_is_never_a_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "org/raw").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert parse_location("org/raw", repo_type="bucket").kind == "bucket"


def test_owner_name_is_local_if_such_a_directory_exists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert parse_location("org/set").kind == "hub"
    (tmp_path / "org/set").mkdir(parents=True)
    assert parse_location("org/set") == Location("local", "org/set")


def test_local_forms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a set").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    absolute = Location("local", f"{tmp_path}/a set")
    assert parse_location(f"{tmp_path}/a set/") == absolute
    assert parse_location(Path(tmp_path, "a set")) == absolute
    assert parse_location("~/a set") == absolute
    assert parse_location(f"file://{tmp_path}/a%20set") == absolute
    assert parse_location(f"file://localhost{tmp_path}/a%20set/") == absolute
    # As given, so that it equals what other tools record; only '~' is expanded.
    assert parse_location("a set") == Location("local", "a set")
    assert parse_location("./a set", revision="v3.0") == Location("local", "a set", revision="v3.0")


@pytest.mark.parametrize(
    "source", ["/no/such/set", "./org/set", "../org/set", "~/no such set", "nothing", "a/b/c", "/x" * 3000]
)
def test_absent_local_directory(source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(NotFoundError):
        parse_location(source)


def test_a_file_is_no_root(tmp_path: Path) -> None:
    file = tmp_path / "info.json"
    file.touch()
    with pytest.raises(NotFoundError, match="is not a directory"):
        parse_location(file)


@pytest.mark.parametrize(
    ("source", "repo_type", "revision", "message"),
    [
        ("", "dataset", None, "empty"),
        ("a/b", "dataset", " ", "revision is empty"),
        ("a/b", "model", None, "expected 'dataset' or 'bucket'"),
        ("hf://a/b", "dataset", None, "names no dataset"),
        ("hf://models/a/b", "dataset", None, "names no dataset"),
        ("hf://datasets/a", "dataset", None, "OWNER/NAME"),
        ("hf://datasets/a/b@", "dataset", None, "no revision after it"),
        ("hf://datasets/a/b@/x", "dataset", None, "no revision after it"),
        ("hf://datasets/a/b/../c", "dataset", None, "'..'"),
        ("hf://datasets/a/b//c", "dataset", None, "empty"),
        ("hf://datasets/a/b@v3.0", "dataset", "main", "'v3.0'.*'main'"),
        ("hf://buckets/a/b@v3.0", "dataset", None, "buckets have none"),
        ("hf://buckets/a/b", "dataset", "main", "buckets have none"),
        ("a/b", "bucket", "main", "buckets have none"),
        ("file://relative/set", "dataset", None, "no absolute path"),
        ("nosuchprotocol://x", "dataset", None, "no protocol"),
        ("https://huggingface.co/datasets/a/b", "dataset", None, "page of the Hub"),
    ],
)
def test_refused_forms(source: str, repo_type: RepoType, revision: str | None, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse_location(source, repo_type=repo_type, revision=revision)


@pytest.mark.parametrize(
    "source",
    ["s3://user:SENTINEL@bucket/set", "https://user:SENTINEL@example.org/s", "http://h/s?sig=SENTINEL"],
)
def test_urls_with_credentials_are_refused_without_showing_them(source: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_location(source)
    assert "SENTINEL" not in str(caught.value)


def test_location_is_picklable() -> None:
    location = parse_location("hf://datasets/a/b@v3.0/x")
    assert pickle.loads(pickle.dumps(location)) == location
