"""Sidecars of very many sources, written through the real writer without compressing each of them.

A few different sample tables are compressed once. Every source takes one of them, under its own path and
size, so an archive of 100,000 sources of 6,000 pictures costs what copying its bytes costs.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from lrstream.mp4.track import SampleTable, TrackIndex
from lrstream.sidecar.identity import SidecarIdentity, SourceFile
from lrstream.sidecar.manifest import source_entry
from lrstream.sidecar.writer import ArchiveWriter, EncodedSource, encode_source
from tests.support.shared import import_path
from tests.support.tracks import make_track

__all__ = ["large_path", "large_track", "run_on_archive", "write_large_archive"]

_NUM_TABLES = 16
_FIRST_BYTE = 64 * 1024
# An AV1 sample entry with the boxes that FFmpeg writes takes about this much.
_STSD_PADDING = 120


def large_path(number: int) -> str:
    """Path of source `number`; ascending."""
    return f"videos/observation.images.top/chunk-{number // 1000:03d}/file-{number % 1000:03d}.mp4"


def large_track(number: int, num_samples: int, tables: list[SampleTable]) -> TrackIndex:
    """The record of source `number`: one of the tables, and a size of its own."""
    samples = tables[number % len(tables)]
    stop = int(samples.offsets_bytes[-1] + samples.sizes_bytes[-1])
    base = make_track(large_path(number), num_samples=1)
    return dataclasses.replace(
        base,
        file_size=stop + number,
        mdat_offset=_FIRST_BYTE - 8,
        mdat_payload_offset=_FIRST_BYTE,
        mdat_payload_size=stop - _FIRST_BYTE,
        duration_ticks=512 * num_samples,
        stsd_body=base.stsd_body + bytes(_STSD_PADDING),
        samples=samples,
    )


def sample_tables(num_samples: int) -> list[SampleTable]:
    """Tables like those of LeRobot's default encoding: 30 fps, a keyframe every second picture."""
    tables = []
    for seed in range(_NUM_TABLES):
        rng = np.random.default_rng(seed)
        sizes = rng.integers(300, 12_000, num_samples)
        sizes[::2] *= 4
        durations = np.full(num_samples, 512, np.int64)
        tables.append(
            SampleTable(
                pts_s=(np.arange(num_samples) * 512) / np.float64(15360),
                durations_ticks=durations,
                composition_offsets_ticks=np.zeros(num_samples, np.int64),
                sizes_bytes=sizes,
                offsets_bytes=_FIRST_BYTE + np.cumsum(sizes) - sizes,
                sync_samples=np.arange(0, num_samples, 2, dtype=np.int64),
            )
        )
    return tables


def write_large_archive(path: Path, num_files: int, num_samples: int) -> SidecarIdentity:
    """Write the archive of `num_files` sources of `num_samples` pictures each."""
    tables = sample_tables(num_samples)
    last = [int(table.offsets_bytes[-1] + table.sizes_bytes[-1]) for table in tables]
    identity = SidecarIdentity(
        repo_id="someone/very-large",
        revision="v3.0",
        data_root="/data/very-large",
        source_files=tuple(
            SourceFile(large_path(number), last[number % len(last)] + number) for number in range(num_files)
        ),
        source_fingerprints={
            large_path(number): f"17{number:017d}:17{number:017d}" for number in range(num_files)
        },
    )
    with ArchiveWriter(path, identity) as writer:
        for source in _encoded(num_files, num_samples, tables):
            writer.add(source)
        return writer.install()


def _encoded(num_files: int, num_samples: int, tables: list[SampleTable]) -> Iterator[EncodedSource]:
    members = [
        encode_source(number, large_track(number, num_samples, tables)).members
        for number in range(len(tables))
    ]
    for number in range(num_files):
        track = large_track(number, num_samples, tables)
        yield EncodedSource(
            number,
            track.file_path,
            track.file_size,
            num_samples,
            source_entry(track),
            tuple(
                dataclasses.replace(member, name=f"{number}/{member.name.partition('/')[2]}")
                for member in members[number % len(members)]
            ),
        )


_PRELUDE = """
    import json, random, sys, time
    from pathlib import Path
    import numpy, pyarrow
    from lrstream.index.open import open_index
    from tests.support.large_archive import large_path

    def memory(name):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(name + ":"):
                return int(line.split()[1]) * 1024

    archive, home, num_files = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
"""


def run_on_archive(script: str, directory: Path, num_files: int) -> dict[str, Any]:
    """Run a script in a process of its own; what it prints as JSON.

    Args:
        script: Finds `archive` (``x.npz`` of the directory), `home`, `num_files`, `open_index`, `large_path`
            and `memory`, which gives a size of the process by its name in ``/proc/self/status``.
        directory: Where the archive is, and the script's home.
        num_files: Sources in the archive.
    """
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            textwrap.dedent(_PRELUDE) + textwrap.dedent(script),
            str(directory / "x.npz"),
            str(directory / "home"),
            str(num_files),
        ],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": import_path(), "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    result: dict[str, Any] = json.loads(done.stdout)
    return result
