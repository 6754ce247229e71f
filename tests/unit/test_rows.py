"""Rows of an episode: values and types as map-style gives them, pruned reads, and K01's checks (LD-8)."""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lrstream.errors import DatasetFormatError, NotFoundError, UsageError
from lrstream.layout.layout import load_layout
from lrstream.layout.open_files import OpenFiles
from lrstream.layout.parquet import ParquetSource, open_parquet
from lrstream.layout.rows import ROW_KEYS, EpisodeRowReader
from lrstream.storage.location import parse_location
from lrstream.storage.store import DatasetStore, open_store
from tests.support.shared import DATASETS, oracle, requires_shared, shared_dataset
from tests.support.tables import TableDataset


def reader(root: Path | str, **options: Any) -> EpisodeRowReader:
    store = open_store(parse_location(root))
    return EpisodeRowReader(store, load_layout(store), **options)


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@requires_shared
@pytest.mark.parametrize("name", DATASETS)
def test_numbers_equal_those_of_lerobots_reader(name: str) -> None:
    rows_of = reader(shared_dataset(name))
    expected = oracle(name)
    rows = [rows_of.read(position) for position in range(int(expected.columns["episode_index"].max()) + 1)]
    assert set(rows[0].arrays) == set(expected.columns)
    for key, values in expected.columns.items():
        read = np.concatenate([each.arrays[key] for each in rows])
        assert read.dtype == values.dtype
        np.testing.assert_array_equal(read, values, strict=True)


def test_rows_of_each_episode(tmp_path: Path) -> None:
    rows_of = reader(TableDataset((5, 7, 9), files=(0, 0, 1)).write(tmp_path, row_group_size=4))
    for episode, (first, length) in enumerate([(0, 5), (5, 7), (12, 9)]):
        rows = rows_of.read(episode)
        assert (rows.episode_index, rows.position, len(rows)) == (episode, episode, length)
        assert rows.arrays["index"].tolist() == list(range(first, first + length))
        assert rows.arrays["observation.state"].tolist() == [[episode, frame] for frame in range(length)]
        assert rows.timestamp_s.dtype == np.float32
        np.testing.assert_allclose(rows.timestamp_s, np.arange(length) / 10, rtol=1e-6)
        # Tensors share their memory, and a read-only one would make torch complain.
        assert all(array.flags.writeable for array in rows.arrays.values())


MATRIX_TYPE = pa.list_(pa.list_(pa.int8()))
FLOATS = pa.list_(pa.float32())
VECTOR = {"dtype": "float32", "shape": [3], "names": None}


def grid(dtype: str, *shape: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "names": None}


@pytest.mark.parametrize(
    ("declared", "kind", "value", "result"),
    [
        # What torch.tensor makes of the Python values of a row, which is what map-style does.
        (grid("float64", 1), pa.float64(), 0.1, np.float32(0.1)),
        (grid("float32", 1), pa.float64(), 0.1, np.float32(0.1)),
        (grid("float16", 1), pa.float16(), np.float16(0.5), np.float32(0.5)),
        (grid("float32", 1), pa.float32(), float("nan"), np.float32("nan")),
        (grid("float64", 1), pa.float64(), 1e300, np.float32("inf")),
        (grid("int32", 1), pa.int32(), -3, np.int64(-3)),
        (grid("uint8", 1), pa.uint8(), 255, np.int64(255)),
        (grid("int64", 1), pa.int64(), 2**62 + 1, np.int64(2**62 + 1)),
        (grid("bool", 1), pa.bool_(), True, np.bool_(True)),
        (grid("float32"), pa.float32(), 2.0, np.float32(2)),
        # Declared a scalar, stored as a list of one.
        (grid("float32", 1), pa.list_(pa.float32()), [2.0], np.float32(2)),
        (VECTOR, FLOATS, [1.0, 2.0, 3.0], np.array([1, 2, 3], np.float32)),
        (VECTOR, pa.large_list(pa.float64()), [1.0, 2.0, 3.0], np.array([1, 2, 3], np.float32)),
        (VECTOR, pa.list_(pa.float32(), 3), [1.0, 2.0, 3.0], np.array([1, 2, 3], np.float32)),
        (grid("bool", 2), pa.list_(pa.bool_()), [True, False], np.array([True, False])),
        (grid("int8", 2, 2), MATRIX_TYPE, [[1, 2], [3, 4]], np.array([[1, 2], [3, 4]], np.int64)),
        (
            grid("float32", 1, 2, 2),
            pa.list_(pa.list_(pa.list_(pa.float32(), 2)), 1),
            [[[1.0, 2.0], [3.0, 4.0]]],
            np.array([[[1, 2], [3, 4]]], np.float32),
        ),
        # A tensor stored flat.
        (grid("int8", 2, 2), pa.list_(pa.int8(), 4), [1, 2, 3, 4], np.array([[1, 2], [3, 4]], np.int64)),
        (grid("float32", 1, 1), pa.list_(pa.list_(pa.float32())), [[5.0]], np.array([[5]], np.float32)),
    ],
)
def test_numeric_types_and_shapes(
    tmp_path: Path, declared: dict[str, Any], kind: pa.DataType, value: Any, result: Any
) -> None:
    dataset = TableDataset((2, 3))
    dataset.add_rows("x", declared, [value] * 5, kind)
    read = reader(dataset.write(tmp_path, row_group_size=2)).read(1).arrays["x"]
    np.testing.assert_array_equal(read, np.stack([result] * 3), strict=True)


def test_tensor_extension_type(tmp_path: Path) -> None:
    dataset = TableDataset((2, 3))
    dataset.add_rows("x", grid("int32", 2, 3), list(range(5)), pa.int64())
    root = dataset.write(tmp_path)
    file = root / "data/chunk-000/file-000.parquet"
    values = np.arange(30, dtype=np.int32).reshape(5, 2, 3)
    table = pq.ParquetFile(file).read(use_threads=False)
    column = table.schema.get_field_index("x")
    table = table.set_column(column, "x", pa.FixedShapeTensorArray.from_numpy_ndarray(values))
    pq.write_table(table, file)
    np.testing.assert_array_equal(reader(root).read(1).arrays["x"], values[2:].astype(np.int64), strict=True)


@pytest.mark.parametrize(
    ("declared", "kind", "values", "message"),
    [
        (grid("int8", 1), pa.int8(), [1, 1, 1, None, 1], r"episode 1: x is missing \(null\) in row 1"),
        (VECTOR, FLOATS, [[1.0] * 3] * 4 + [None], r"x is missing \(null\) in row 2"),
        (VECTOR, FLOATS, [[1.0] * 3] * 4 + [[1.0, None, 1.0]], r"x is missing \(null\) in row 2"),
        (VECTOR, FLOATS, [[1.0] * 3] * 4 + [[1.0]], r"lists of 1 to 3 values.*declares \(3,\)"),
        (VECTOR, pa.list_(pa.float32(), 4), [[1.0] * 4] * 5, r"shape \(4,\), but .* declares \(3,\)"),
        (VECTOR, pa.float32(), [1.0] * 5, r"shape \(\), but .* declares \(3,\)"),
        (grid("float32", 1), FLOATS, [[1.0, 2.0]] * 5, r"shape \(2,\), but .* declares \(1,\)"),
        (grid("int8", 3, 2), MATRIX_TYPE, [[[1] * 3] * 2] * 5, r"shape \(2, 3\), but .* declares \(3, 2\)"),
        (grid("int64", 1), pa.float64(), [0.5] * 5, "stored as double and cannot be read as int64"),
        (grid("float32", 1), pa.string(), ["a"] * 5, "stored as string and cannot be read as float32"),
        (grid("int8", 1), pa.int64(), [300] * 5, "cannot be read as int8"),
        (grid("uint64", 1), pa.uint64(), [2**63] * 5, "beyond int64"),
    ],
)
def test_columns_that_contradict_their_declaration(
    tmp_path: Path, declared: dict[str, Any], kind: pa.DataType, values: list[Any], message: str
) -> None:
    dataset = TableDataset((2, 3))
    dataset.add_rows("x", declared, values, kind)
    with pytest.raises(DatasetFormatError, match=message):
        reader(dataset.write(tmp_path)).read(1)


IMAGE = {"dtype": "image", "shape": [4, 4, 3], "names": ["height", "width", "channels"]}
IMAGE_TYPE = pa.struct({"bytes": pa.binary(), "path": pa.string()})


@pytest.mark.parametrize(
    ("kind", "wrap"),
    [(IMAGE_TYPE, lambda data: {"bytes": data, "path": "x.png"}), (pa.binary(), lambda data: data)],
)
def test_images(tmp_path: Path, kind: pa.DataType, wrap: Any) -> None:
    dataset = TableDataset((2, 3), cameras=())
    dataset.add_rows("picture", IMAGE, [wrap(bytes([65 + row])) for row in range(5)], kind)
    assert reader(dataset.write(tmp_path)).read(1).objects["picture"] == [b"C", b"D", b"E"]


@pytest.mark.parametrize(
    ("kind", "value", "message"),
    [
        (IMAGE_TYPE, {"bytes": None, "path": "images/1.png"}, r"row 2 .* only the path 'images/1\.png'"),
        (IMAGE_TYPE, {"bytes": None, "path": None}, "row 2 of picture holds no image"),
        (IMAGE_TYPE, None, "holds no image"),
        (pa.string(), "images/1.png", "stored as string, expected encoded bytes"),
        (pa.struct({"path": pa.string()}), {"path": "a"}, "which has no 'bytes'"),
    ],
)
def test_images_that_are_not_there(tmp_path: Path, kind: pa.DataType, value: Any, message: str) -> None:
    dataset = TableDataset((2, 3), cameras=())
    good: Any = {"bytes": b"x", "path": None} if kind == IMAGE_TYPE else value
    dataset.add_rows("picture", IMAGE, [good] * 4 + [value], kind)
    with pytest.raises(DatasetFormatError, match=message):
        reader(dataset.write(tmp_path)).read(1)


def test_strings_and_language(tmp_path: Path) -> None:
    dataset = TableDataset((2, 3))
    dataset.add_rows("note", grid("string", 1), ["a", "b", "c", None, "é"], pa.string())
    row_type = pa.struct({"role": pa.string(), "content": pa.string(), "tool_calls": pa.list_(pa.string())})
    call = {"function": {"name": "say", "arguments": {"text": "ja"}}}
    events: list[Any] = [
        [],
        [],
        [{"role": "user", "content": "stop", "tool_calls": None}],
        None,
        [{"role": "assistant", "content": None, "tool_calls": [json.dumps(call)]}],
    ]
    dataset.add_rows("language_events", grid("language", 1), events, pa.list_(row_type))
    rows = reader(dataset.write(tmp_path / "good")).read(1)
    assert rows.objects["note"] == ["c", None, "é"]
    parsed = [{"role": "assistant", "content": None, "tool_calls": [call]}]
    assert rows.objects["language_events"] == [events[2], None, parsed]
    events[2] = [{"role": "user", "content": "stop", "tool_calls": ["{"]}]
    dataset.add_rows("language_events", grid("language", 1), events, pa.list_(row_type))
    with pytest.raises(DatasetFormatError, match="tool call that is not valid JSON"):
        reader(dataset.write(tmp_path / "bad")).read(1)


def test_column_selection(tmp_path: Path) -> None:
    dataset = TableDataset((2, 3))
    dataset.add_rows("x", grid("int64", 1), [0] * 5, pa.int64())
    root = dataset.write(tmp_path)
    everything = {"observation.state", "x", *ROW_KEYS}
    assert set(reader(root).read(0).arrays) == everything
    assert set(reader(root, columns=["x"]).read(0).arrays) == everything - {"observation.state"}
    with pytest.raises(UsageError, match=r"observation\.images\.top, y cannot be read from tables"):
        reader(root, columns=["y", "observation.images.top"])
    with pytest.raises(UsageError, match="max_open_files is 0"):
        reader(root, max_open_files=0)


def test_undeclared_row_keys_are_read_all_the_same(tmp_path: Path) -> None:
    dataset = TableDataset((2, 3))
    for key in ("timestamp", "frame_index", "index", "task_index"):
        del dataset.info["features"][key]
    assert reader(dataset.write(tmp_path)).read(1).arrays["task_index"].tolist() == [1, 1, 1]


def test_a_declared_column_that_is_missing(tmp_path: Path) -> None:
    dataset = TableDataset((2, 3))
    dataset.info["features"]["x"] = grid("float32", 1)
    with pytest.raises(DatasetFormatError, match=r"file-000\.parquet lacks the column x; it has obs"):
        reader(dataset.write(tmp_path)).read(0)


# K01: metadata that name a file in which the rows are not.


def test_metadata_naming_the_previous_file(tmp_path: Path) -> None:
    dataset = TableDataset((5, 7, 9), files=(0, 0, 1))
    dataset.episodes["data/file_index"][2] = 0
    rows_of = reader(dataset.write(tmp_path))
    assert len(rows_of.read(1)) == 7
    with pytest.raises(DatasetFormatError, match=r"episode 2 has 0 rows .* say 9") as caught:
        rows_of.read(2)
    assert caught.value.fields == {"episode_index": 2, "file_path": "data/chunk-000/file-000.parquet"}
    assert "data/file_index" in str(caught.value)


def test_metadata_naming_an_absent_file(tmp_path: Path) -> None:
    dataset = TableDataset((5, 7, 9))
    dataset.episodes["data/file_index"][2] = 1
    rows_of = reader(dataset.write(tmp_path))
    with pytest.raises(NotFoundError, match=r"file-001\.parquet: episode 2 should be in this file"):
        rows_of.read(2)
    # The failure is not remembered as an open file.
    assert rows_of.num_open_files == 0


@pytest.mark.parametrize(
    ("column", "row", "value", "message"),
    [
        ("episode_index", 6, 0, "episode 1 has 6 rows in this file, but .* say 7"),
        ("episode_index", 12, 1, "episode 1 has 8 rows in this file, but .* say 7"),
        ("index", 7, 99, r"episode 1: index is 8 in row 2, expected 7: its rows are not 5 to 11"),
        ("index", 7, 6, "episode 1: index is 6 in row 2, expected 7"),
        ("index", 7, None, r"index is missing \(null\) in row 2"),
        ("frame_index", 8, 2, "episode 1: frame_index is 2 in row 3, expected 3"),
        ("timestamp", 9, float("inf"), "episode 1: timestamp is inf in row 4"),
        ("timestamp", 9, None, r"timestamp is missing \(null\) in row 4"),
        ("task_index", 9, 5, r"episode 1: task_index 5 is not in meta/tasks\.parquet"),
    ],
)
def test_rows_that_contradict_the_metadata(
    tmp_path: Path, column: str, row: int, value: Any, message: str
) -> None:
    dataset = TableDataset((5, 7, 9))
    dataset.rows[0][column][row] = value
    with pytest.raises(DatasetFormatError, match=message):
        reader(dataset.write(tmp_path)).read(1)


def test_rows_in_another_order_are_put_in_order(tmp_path: Path) -> None:
    dataset = TableDataset((5, 7, 9))
    order = np.random.default_rng(1).permutation(21)
    dataset.rows[0] = {name: [values[row] for row in order] for name, values in dataset.rows[0].items()}
    rows = reader(dataset.write(tmp_path, row_group_size=3)).read(1)
    assert rows.arrays["index"].tolist() == list(range(5, 12))
    assert rows.arrays["observation.state"].tolist() == [[1, frame] for frame in range(7)]


# LD-8: what is fetched.


@pytest.mark.parametrize("statistics", [True, False])
def test_row_groups_are_pruned(tmp_path: Path, statistics: bool) -> None:
    dataset = TableDataset([100] * 20)
    noise = np.random.default_rng(0).random((2000, 50)).tolist()
    dataset.add_rows("wide", grid("float32", 50), noise, pa.list_(pa.float32(), 50))
    dataset.write(tmp_path, row_group_size=100, statistics=statistics)
    rows_of = reader(tmp_path)
    store = rows_of._store
    rows_of.read(7)
    before = store.counters.bytes_read
    for episode in (3, 12):
        rows = rows_of.read(episode)
        np.testing.assert_array_equal(
            rows.arrays["wide"], np.array(noise[episode * 100 : episode * 100 + 100], np.float32)
        )
    # Two of twenty row groups of 100 rows, each row 200 bytes, dictionaries and headers on top.
    assert 2 * 100 * 200 < store.counters.bytes_read - before < 2 * 100 * 400


def test_only_the_projected_columns_are_fetched(tmp_path: Path) -> None:
    dataset = TableDataset([200])
    noise = np.random.default_rng(0).random((200, 500)).tolist()
    dataset.add_rows("wide", grid("float32", 500), noise, pa.list_(pa.float32(), 500))
    dataset.write(tmp_path)
    rows_of = reader(tmp_path, columns=["observation.state"])
    before = rows_of._store.counters.bytes_read
    rows_of.read(0)
    # The footer's request takes 64 KiB; the wide column alone has 400 KB.
    assert rows_of._store.counters.bytes_read - before < 100_000


def test_a_remote_store(tmp_path: Path) -> None:
    root = TableDataset((5, 7, 9), files=(0, 0, 1)).write(tmp_path, row_group_size=4)
    memory = fsspec.filesystem("memory")
    memory.put(str(root), "/rows-of-a-remote-store", recursive=True)
    remote, local = reader("memory://rows-of-a-remote-store"), reader(root)
    for episode in range(3):
        for key, values in local.read(episode).arrays.items():
            np.testing.assert_array_equal(remote.read(episode).arrays[key], values, strict=True)
    memory.rm("/rows-of-a-remote-store", recursive=True)


# Handles: one open per file and process, bounded, closed, not inherited.


def test_files_are_opened_once_and_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = TableDataset([2] * 12, files=range(12)).write(tmp_path)
    before = open_descriptors()
    rows_of = reader(root, max_open_files=3)
    for episode in (*range(12), *range(11, -1, -1)):
        assert rows_of.read(episode).arrays["episode_index"].tolist() == [episode] * 2
        assert rows_of.num_open_files <= 3
        assert open_descriptors() <= before + 3
    rows_of.close()
    assert open_descriptors() == before
    assert len(rows_of.read(5)) == 2
    opened: list[str] = []

    def counting(store: DatasetStore, path: str) -> ParquetSource:
        opened.append(path)
        return open_parquet(store, path)

    monkeypatch.setattr("lrstream.layout.rows.open_parquet", counting)
    for episode in (5, 5, 6, 5, 6):
        rows_of.read(episode)
    assert opened == ["data/chunk-000/file-006.parquet"]


def test_threads_share_one_reader(tmp_path: Path) -> None:
    files = [episode // 3 for episode in range(24)]
    root = TableDataset([3] * 24, files=files).write(tmp_path, row_group_size=2)
    rows_of = reader(root, max_open_files=2)
    order = np.random.default_rng(0).integers(0, 24, 200).tolist()
    with ThreadPoolExecutor(8) as pool:
        for episode, rows in zip(order, pool.map(rows_of.read, order), strict=True):
            assert rows.arrays["episode_index"].tolist() == [episode] * 3
    assert rows_of.num_open_files <= 2


def test_a_file_in_use_is_not_closed() -> None:
    closed: list[str] = []

    class Source:
        def __init__(self, name: str) -> None:
            self.source = self
            self.name = name

        def close(self) -> None:
            closed.append(self.name)

    def opened(name: str) -> Any:
        return lambda: Source(name)

    files = OpenFiles(1)
    with files.use("a", opened("a")):
        with files.use("b", opened("b")):
            pass
        assert closed == ["b"]
    with files.use("c", opened("c")):
        assert closed == ["b"]
    assert closed == ["b", "a"]
    files.close()
    assert closed == ["b", "a", "c"]


def _read_in_child(rows_of: EpisodeRowReader, answers: multiprocessing.SimpleQueue[list[int]]) -> None:
    answers.put(rows_of.read(1).arrays["index"].tolist())


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_readers_cross_into_workers(tmp_path: Path, method: str) -> None:
    rows_of = reader(TableDataset((5, 7, 9)).write(tmp_path))
    rows_of.read(0)
    context: Any = multiprocessing.get_context(method)
    answers: multiprocessing.SimpleQueue[list[int]] = context.SimpleQueue()
    child = context.Process(target=_read_in_child, args=(rows_of, answers))
    child.start()
    assert answers.get() == list(range(5, 12))
    child.join(20)
    assert child.exitcode == 0
    assert rows_of.read(1).arrays["index"].tolist() == list(range(5, 12))


def test_a_pickled_reader_has_no_open_files(tmp_path: Path) -> None:
    rows_of = reader(TableDataset((5, 7, 9)).write(tmp_path))
    rows_of.read(0)
    copy = pickle.loads(pickle.dumps(rows_of))
    assert copy.num_open_files == 0
    assert copy.read(2).arrays["index"].tolist() == list(range(12, 21))
