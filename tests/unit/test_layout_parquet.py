"""Parquet through ranges: only what is needed, and a message for each way a file can be wrong (K11, K35)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lrstream.errors import DatasetFormatError, LrstreamError, NotFoundError, TransferError
from lrstream.layout.parquet import ParquetSource, open_parquet
from lrstream.storage.local import LocalByteSource
from lrstream.storage.location import parse_location
from lrstream.storage.store import DatasetStore, open_store


def write(root: Path, table: pa.Table, **options: Any) -> tuple[DatasetStore, ParquetSource]:
    pq.write_table(table, root / "t.parquet", **options)
    store = open_store(parse_location(root))
    return store, open_parquet(store, "t.parquet")


NESTED = pa.table(
    {
        "a.b": pa.array([[1, 2], [3, 4], [5, 6]], pa.list_(pa.int64(), 2)),
        "a": pa.array([1, 2, 3]),
        "picture": pa.array(
            [{"bytes": b"x", "path": None}] * 3, pa.struct({"bytes": pa.binary(), "path": pa.string()})
        ),
        "map": pa.array([[("k", 1)], [], [("l", 2)]], pa.map_(pa.string(), pa.int64())),
        "matrix": pa.array([[[1.0]], [[2.0]], [[3.0]]], pa.list_(pa.list_(pa.float32()))),
        "word": pa.array(["p", "q", "p"]).dictionary_encode(),
        "last": pa.array([True, False, True]),
    }
)


@pytest.mark.parametrize("compression", ["snappy", "zstd", "none"])
@pytest.mark.parametrize("row_group_size", [1, 2, 10])
def test_columns_alone_equal_a_plain_read(tmp_path: Path, compression: str, row_group_size: int) -> None:
    """Names with dots, and names that are the beginning of others, are taken for what they are."""
    _, source = write(tmp_path, NESTED, compression=compression, row_group_size=row_group_size)
    for name in NESTED.column_names:
        assert source.read([name]).to_pydict() == NESTED.select([name]).to_pydict()
    assert source.read(["last", "a"]).column_names == ["last", "a"]
    assert source.read(["a"], [source.metadata.num_row_groups - 1]).column("a").to_pylist()[-1] == 3
    assert source.read(["a", "map"], []).to_pydict() == {"a": [], "map": []}


def test_only_the_wanted_chunks_are_fetched(tmp_path: Path) -> None:
    noise = np.random.default_rng(0)
    table = pa.table({f"c{number}": noise.random(40_000) for number in range(5)})
    store, source = write(tmp_path, table, row_group_size=10_000, use_dictionary=False)
    before, requests = store.counters.bytes_read, store.counters.requests
    read = source.read(["c3"], [1, 2])
    assert read.column("c3").to_pylist() == table.column("c3").to_pylist()[10_000:30_000]
    fetched = store.counters.bytes_read - before
    assert 160_000 <= fetched < 170_000
    assert store.counters.requests - requests == 2
    # Neighbours in the file come in one request.
    requests = store.counters.requests
    source.read(["c0", "c1", "c2"], [3])
    assert store.counters.requests - requests == 1


def test_a_small_file_is_one_request(tmp_path: Path) -> None:
    store, source = write(tmp_path, NESTED)
    source.read(NESTED.column_names)
    source.read(["a"])
    assert store.counters.requests == 1


def test_a_long_footer(tmp_path: Path) -> None:
    table = pa.table({f"column {number} {'x' * 200}": [number] for number in range(500)})
    _, source = write(tmp_path, table)
    assert source.metadata.serialized_size > 64 * 1024
    assert source.read(table.column_names[499:]).to_pydict() == {table.column_names[499]: [499]}


def test_large_reads_come_in_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lrstream.layout.parquet._BATCH_BYTES", 100_000)
    table = pa.table({"c": np.random.default_rng(0).random(60_000), "n": np.arange(60_000)})
    _, source = write(tmp_path, table, row_group_size=5_000, use_dictionary=False)
    read = source.read(["n", "c"])
    assert read.column("n").to_pylist() == list(range(60_000))
    assert read.column("c").equals(table.column("c"))


def test_bounds_come_from_statistics(tmp_path: Path) -> None:
    table = pa.table({"e": pa.array([3, 3, 4, None, None, 7, 7], pa.int64())})
    _, source = write(tmp_path, table, row_group_size=2)
    low, high = source.column_bounds("e")
    assert low.tolist()[:2] == [3, 4]
    assert high.tolist()[:2] == [3, 4]
    # The third group holds only one value, the null is not counted.
    assert (low[2], high[2], low[3], high[3]) == (7, 7, 7, 7)
    _, source = write(tmp_path, table, row_group_size=2, write_statistics=False)
    low, high = source.column_bounds("e")
    assert np.isneginf(low).all()
    assert np.isposinf(high).all()


def _damage(path: Path, how: str) -> None:
    data = path.read_bytes()
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
    footer = int.from_bytes(data[-8:-4], "little")
    path.write_bytes(
        {
            "empty": b"",
            "tiny": b"PAR1",
            "pointer": pointer,
            "no footer": data[: len(data) // 2],
            "other": b"\x89PNG\r\n\x1a\n" + bytes(100),
            "encrypted": b"PARE" + data[4:-4] + b"PARE",
            "claims": data[:-8] + (2**31).to_bytes(4, "little") + b"PAR1",
            "bad footer": data[: -8 - footer] + b"\xff" * footer + data[-8:],
            "bad pages": data[:4] + b"\xff" * (len(data) - footer - 12) + data[-footer - 8 :],
        }[how]
    )


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("empty", r"is empty \(0 bytes\)"),
        ("tiny", "has no Parquet footer"),
        ("pointer", "Git LFS pointer, .*git lfs pull"),
        ("no footer", r"has no Parquet footer: a recording or copy was interrupted at \d+ bytes"),
        ("other", "is not Parquet: it starts with"),
        ("encrypted", "encrypted Parquet"),
        ("claims", "footer claims 2147483648 bytes"),
        ("bad footer", "footer cannot be decoded"),
        ("bad pages", "row groups 0 cannot be decoded"),
    ],
)
def test_damaged_files(tmp_path: Path, how: str, message: str) -> None:
    store, source = write(tmp_path, NESTED)
    source.close()
    _damage(tmp_path / "t.parquet", how)
    with pytest.raises(DatasetFormatError, match=message) as caught:
        open_parquet(store, "t.parquet").read(["a"])
    assert str(tmp_path / "t.parquet") in str(caught.value)


def test_missing_file_and_columns(tmp_path: Path) -> None:
    store, source = write(tmp_path, NESTED)
    with pytest.raises(NotFoundError, match=r"none\.parquet does not exist"):
        open_parquet(store, "none.parquet")
    with pytest.raises(DatasetFormatError, match=r"lacks the columns b, c; it has a\.b, a, picture"):
        source.read(["a", "b", "c"])


def test_flipped_bytes_never_escape_the_error_tree(tmp_path: Path) -> None:
    store, _ = write(tmp_path, NESTED)
    data = (tmp_path / "t.parquet").read_bytes()
    failures = 0
    for position in range(0, len(data), 7):
        changed = bytearray(data)
        changed[position] ^= 0xFF
        (tmp_path / "t.parquet").write_bytes(changed)
        try:
            open_parquet(store, "t.parquet").read(["a", "a.b", "matrix"])
        except LrstreamError:
            failures += 1
    assert failures > 10


def test_a_failed_transfer_while_decoding_keeps_its_class(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = pa.table({"c": np.random.default_rng(0).random(40_000)})
    _, source = write(tmp_path, table)

    def fail(*_: object) -> bytes:
        raise TransferError("the network is down")

    monkeypatch.setattr(LocalByteSource, "read", fail)
    with pytest.raises(TransferError, match="network is down"):
        source.read(["c"])
    # Also where Arrow asks for a range that was not fetched ahead.
    monkeypatch.setattr(ParquetSource, "_merged_ranges", lambda *_: [])
    with pytest.raises(TransferError, match="network is down"):
        source.read(["c"])


def test_the_interpreter_exits_with_its_own_code(tmp_path: Path) -> None:
    """K35: decoding Python objects in pyarrow's threads aborted some processes at exit."""
    write(tmp_path, pa.table({f"c{number}": np.arange(20_000) for number in range(8)}), row_group_size=1000)
    script = (
        "import sys\n"
        "from lrstream.layout.parquet import open_parquet\n"
        "from lrstream.storage.location import parse_location\n"
        "from lrstream.storage.store import open_store\n"
        "parquet = open_parquet(open_store(parse_location(sys.argv[1])), 't.parquet')\n"
        "table = parquet.read([f'c{number}' for number in range(8)])\n"
        "sys.exit(7 if table.num_rows == 20_000 else 1)\n"
    )
    codes = [
        subprocess.run([sys.executable, "-c", script, str(tmp_path)], timeout=60, check=False).returncode
        for _ in range(4)
    ]
    assert codes == [7] * 4
