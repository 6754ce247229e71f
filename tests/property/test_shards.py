"""How sources are divided into shards: all of them, each once, evenly, whatever the sizes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lrstream.errors import UsageError
from lrstream.sidecar.identity import SourceFile
from lrstream.sidecar.shards import MAX_SHARDS, Shard, ShardNote, parse_shard, shard_sources

sizes = st.lists(st.integers(0, 2**40), max_size=60)


def files_of(values: list[int] | list[None]) -> list[SourceFile]:
    return [SourceFile(f"videos/{number:05}.mp4", size) for number, size in enumerate(values)]


@given(sizes, st.integers(1, 12))
def test_every_source_is_in_one_shard(values: list[int], count: int) -> None:
    files = files_of(values)
    shards = [shard_sources(files, Shard(number, count)) for number in range(1, count + 1)]
    assert sorted(path for shard in shards for path in shard) == [file.path for file in files]
    assert all(shard == sorted(shard) for shard in shards)
    lengths = [len(shard) for shard in shards]
    assert max(lengths) - min(lengths) <= 1


@given(sizes.filter(bool), st.integers(1, 12))
def test_no_shard_has_more_than_the_average_and_one_largest_file(values: list[int], count: int) -> None:
    files = files_of(values)
    by_path = {file.path: file.size or 0 for file in files}
    loads = [
        sum(by_path[path] for path in shard_sources(files, Shard(number, count)))
        for number in range(1, count + 1)
    ]
    assert max(loads) - min(loads) <= max(values)


@given(st.integers(0, 40), st.integers(1, 12))
def test_without_sizes_every_nth_source(num_files: int, count: int) -> None:
    files = files_of([None] * num_files)
    for number in range(1, count + 1):
        expected = [file.path for place, file in enumerate(files) if place % count == number - 1]
        assert shard_sources(files, Shard(number, count)) == expected


@pytest.mark.parametrize("text", ["1/1", "1/8", "8/8", " 3/4 ", f"{MAX_SHARDS}/{MAX_SHARDS}"])
def test_shards_that_are_understood(text: str) -> None:
    number, count = text.split("/")
    assert parse_shard(text) == Shard(int(number), int(count))


@pytest.mark.parametrize(
    "text", ["", "1", "0/4", "5/4", "1/0", "-1/4", "1/4/2", "a/b", "1/999999", "9999999999/1", "1.0/4", "١/٢"]
)
def test_shards_that_are_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_shard(text)


@given(st.binary(max_size=200))
def test_any_comment_is_a_note_or_none(comment: bytes) -> None:
    note = ShardNote.decode(comment)
    assert note is None or ShardNote.decode(note.encode()) == note


def test_a_note_is_read_as_it_was_written() -> None:
    note = ShardNote(Shard(2, 3), "mp4-v3-main-0123456789abcdef.npz", 17, ("OWNER/NÄME", "--repo-id", "x y"))
    assert ShardNote.decode(note.encode()) == note
    assert ShardNote.decode(note.encode().replace(b'"number": 2', b'"number": 4')) is None
    assert ShardNote.decode(note.encode().replace(b'"number": 2', b'"number": "2"')) is None
