"""Members by position against `zipfile`, which wrote or reads the same archives."""

from __future__ import annotations

import hashlib
import io
import os
import random
import threading
import zipfile
from pathlib import Path

import pytest

from lrstream.errors import SidecarError
from lrstream.sidecar.members import slot_name, slot_of, source_slots
from lrstream.sidecar.zip_directory import BadDirectoryError, ZipMembers

CONTENT = {slot: random.Random(slot).randbytes(slot * 37 % 5000) + bytes(slot * 11) for slot in range(25)}


def write(path: Path, method: int = zipfile.ZIP_DEFLATED, comment: bytes = b"") -> None:
    with zipfile.ZipFile(path, "w", method) as archive:
        archive.comment = comment
        for slot, data in CONTENT.items():
            archive.writestr(slot_name(slot), data)


def contents(path: Path) -> dict[int, bytes]:
    members = ZipMembers(path, slot_of)
    try:
        directory = members.directory
        return {
            slot: members.read(directory.member(row, slot_name(slot)))
            for row, slot in enumerate(directory.slots.tolist())
        }
    finally:
        members.close()


def test_names_and_numbers() -> None:
    for slot in (0, 1, 6, 7, 600_000):
        assert slot_of(slot_name(slot).encode()) == slot
    assert slot_name(source_slots(12)[0]) == "12/sample_pts.npy"
    others = (b"", b"x.npy", b"/sample_pts.npy", b"01/sample_pts.npy", b"-1/sample_pts.npy", b"1/x.npy")
    assert all(
        slot_of(name) == -1 for name in (*others, b"1/sample_pts.npy/", "\u0661/sample_pts.npy".encode())
    )


@pytest.mark.parametrize("comment", [b"", b"part of something", b"PK\x05\x06" + bytes(30)])
@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_every_member(tmp_path: Path, method: int, comment: bytes) -> None:
    path = tmp_path / "x.zip"
    write(path, method, comment)
    if comment.startswith(b"PK"):  # looks like the end of an archive itself: refused, not misread
        with pytest.raises(BadDirectoryError):
            ZipMembers(path, slot_of)
        return
    assert contents(path) == CONTENT
    members = ZipMembers(path, slot_of)
    assert members.directory.comment == comment
    members.close()


def test_wide_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if sizes and places were beyond 4 GiB: `zipfile` then writes them in 64 bits."""
    monkeypatch.setattr(zipfile, "ZIP64_LIMIT", 100)
    path = tmp_path / "x.zip"
    write(path)
    assert b"PK\x06\x06" in path.read_bytes()
    assert contents(path) == CONTENT


def test_the_digest_is_that_of_the_listing(tmp_path: Path) -> None:
    path = tmp_path / "x.zip"
    write(path)
    with zipfile.ZipFile(path) as archive:
        listing = "".join(
            f"{i.filename} {i.CRC} {i.file_size} {i.compress_size} {i.header_offset}\n"
            for i in archive.infolist()
        )
    members = ZipMembers(path, slot_of)
    assert members.digest(slot_name) == hashlib.sha256(listing.encode()).hexdigest()
    assert b"".join(members.listing(slot_name)).decode() == listing
    members.close()


def test_many_threads_read_at_once(tmp_path: Path) -> None:
    path = tmp_path / "x.zip"
    write(path)
    members = ZipMembers(path, slot_of)
    wrong = []

    def read() -> None:
        for row, slot in list(enumerate(members.directory.slots.tolist())) * 5:
            if members.read(members.directory.member(row, slot_name(slot))) != CONTENT[slot]:
                wrong.append(slot)

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    members.close()
    assert not wrong


def test_damage_is_refused_wherever_it_is(tmp_path: Path) -> None:
    """Each byte of a small archive changed in turn: the contents are the same, or it is refused."""
    path = tmp_path / "x.zip"
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for slot in (0, 1, 2):
            archive.writestr(slot_name(slot), CONTENT[slot + 3])
    whole = buffer.getvalue()
    path.write_bytes(whole)
    good = contents(path)
    num_refused = 0
    for at in range(0, len(whole), 3):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x55]) + whole[at + 1 :])
        try:
            found = contents(path)
        except SidecarError:
            num_refused += 1
        else:
            # A name that means nothing is for the caller to refuse.
            assert found == good or -1 in found or found.keys() != good.keys(), at
    assert num_refused > len(whole) / 6


def test_descriptors_are_released(tmp_path: Path) -> None:
    path = tmp_path / "x.zip"
    path.write_bytes(b"PK\x05\x06")
    before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    for _ in range(5):
        with pytest.raises(BadDirectoryError):
            ZipMembers(path, slot_of)
    after = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    assert after == before
