"""Inputs that fuzzing has found, kept as tests of their own."""

from __future__ import annotations

import io
import json
import struct
import tracemalloc
import zipfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from lrstream.errors import SidecarError
from lrstream.index.open import MappedIndex, open_index
from lrstream.mp4.span import episode_span
from lrstream.mp4.synthesis import mini_mp4
from lrstream.sidecar.archive import ArchiveReader, write_archive
from tests.media.clips import H264
from tests.support.media import clip_bytes, demux, edit, find, index
from tests.support.tracks import identity_of, make_tracks


@pytest.mark.parametrize(
    "payload",
    [b"\x0f", b"", b"isom\0\0\2\0is", b"\xff\xfe\xfd\xfcisom" + b"iso2", b"isom\0\0\2\0\xff\xfe\xfd\xfc"],
)
def test_a_damaged_brand_does_not_reach_the_mini_mp4(payload: bytes) -> None:
    """FFmpeg refuses a file whose `ftyp` is cut short, and PyAV one whose brands are no text."""
    data = edit(clip_bytes(H264), lambda nodes: setattr(find(nodes, b"ftyp"), "payload", payload))
    track = index(data)
    span = episode_span(track.samples, 0.0, 0.5)
    content = mini_mp4(track, span, data[span.start_byte : span.stop_byte])
    assert demux(content).sizes == track.samples.sizes_bytes[: span.stop_sample].tolist()


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    tracks = make_tracks(2, num_samples=9)
    write_archive(tmp_path / "x.npz", identity_of(tracks), tracks)
    return tmp_path / "x.npz"


@pytest.mark.parametrize("key", ["repo_id", "revision", "data_root"])
def test_strings_that_are_no_unicode(archive: Path, key: str) -> None:
    """JSON can spell half a surrogate pair, which no file can hold."""
    with zipfile.ZipFile(archive) as old:
        members = {name: old.read(name) for name in old.namelist()}
    document = json.loads(np.load(io.BytesIO(members["manifest_json.npy"])).item())
    document["sidecar"][key] = "\ud800"
    buffer = io.BytesIO()
    np.save(buffer, np.array(json.dumps(document).encode()))
    members["manifest_json.npy"] = buffer.getvalue()
    with zipfile.ZipFile(archive, "w") as new:
        for name, content in members.items():
            new.writestr(name, content)
    with pytest.raises(SidecarError, match="Unicode"):
        ArchiveReader(archive)


def test_a_member_longer_than_the_file_is_not_allocated(archive: Path) -> None:
    """`zipfile` would allocate the compressed size that the directory claims."""
    data = bytearray(archive.read_bytes())
    entry = data.rindex(b"PK\x01\x02")
    data[entry + 20 : entry + 24] = struct.pack("<I", 1 << 30)
    archive.write_bytes(data)
    tracemalloc.start()
    with pytest.raises(SidecarError, match="compressed bytes"):
        ArchiveReader(archive).verify()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 16 << 20


@pytest.mark.parametrize("column", ["sizes_data", "sizes_base", "num_samples", "timescale", "stsd_body"])
def test_a_changed_cell_of_an_index_is_noticed(archive: Path, tmp_path: Path, column: str) -> None:
    """Most changed values would be as plausible as the right ones."""
    mapped = open_index(archive, home=tmp_path)
    assert isinstance(mapped, MappedIndex)
    with pa.ipc.open_file(pa.BufferReader(mapped.path.read_bytes())) as reader:
        table = reader.read_all()
    rows = table.to_pylist()
    old = rows[0][column]
    rows[0][column] = old + 1 if isinstance(old, int) else bytes([old[0] ^ 1]) + old[1:]
    path = tmp_path / "changed.arrow"
    with pa.ipc.new_file(str(path), table.schema) as writer:
        writer.write_table(pa.Table.from_pylist(rows, schema=table.schema))
    changed = MappedIndex(path)
    with pytest.raises(SidecarError, match="checksum"):
        changed.track(rows[0]["path"])
    assert changed.track(rows[1]["path"]).file_path == rows[1]["path"]


@pytest.mark.parametrize("key", ["repo_id", "data_root", "revision", "num_files", "key"])
def test_an_index_without_a_part_of_its_metadata(archive: Path, tmp_path: Path, key: str) -> None:
    mapped = open_index(archive, home=tmp_path)
    assert isinstance(mapped, MappedIndex)
    with pa.ipc.open_file(pa.BufferReader(mapped.path.read_bytes())) as reader:
        table = reader.read_all()
    for value in (None, b"\xff"):
        metadata = {**table.schema.metadata, f"lrstream.{key}".encode(): value}
        metadata = {name: content for name, content in metadata.items() if content is not None}
        path = tmp_path / "changed.arrow"
        changed = table.replace_schema_metadata(metadata)
        with pa.ipc.new_file(str(path), changed.schema) as writer:
            writer.write_table(changed)
        if value is None or key == "num_files":
            with pytest.raises(SidecarError, match="not a mapped index"):
                MappedIndex(path)
        elif key != "key":
            with pytest.raises(SidecarError, match="checksum"):
                MappedIndex(path).identity  # noqa: B018
