"""Episode metadata, tasks, statistics and selections: read, checked, and cheap (DS-2, DS-5, K01-K03, K06)."""

from __future__ import annotations

import json
import pickle
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lrstream.errors import DatasetFormatError, NotFoundError, UsageError
from lrstream.layout.layout import DatasetLayout, load_layout, resolve_selection
from lrstream.storage.local import LocalStore
from lrstream.storage.location import parse_location
from lrstream.storage.store import open_store
from tests.support.shared import DATASETS, requires_shared, shared_dataset
from tests.support.tables import TableDataset

TOP = "observation.images.top"


def load(root: Path) -> DatasetLayout:
    return load_layout(open_store(parse_location(root)))


def test_what_is_read(tmp_path: Path) -> None:
    layout = load(TableDataset((5, 7, 9), cameras=(TOP, "side"), files=(0, 1, 1)).write(tmp_path))
    episodes = layout.episodes
    assert len(episodes) == 3
    assert episodes.num_frames == 21
    assert episodes.length.tolist() == [5, 7, 9]
    assert episodes.dataset_from_index.tolist() == [0, 5, 12]
    assert episodes.dataset_to_index.tolist() == [5, 12, 21]
    assert [episodes.data_path(position) for position in range(3)] == [
        "data/chunk-000/file-000.parquet",
        "data/chunk-000/file-001.parquet",
        "data/chunk-000/file-001.parquet",
    ]
    top = episodes.cameras[TOP]
    assert [top.path(position) for position in range(3)] == [
        f"videos/{TOP}/chunk-000/file-000.mp4",
        f"videos/{TOP}/chunk-000/file-001.mp4",
        f"videos/{TOP}/chunk-000/file-001.mp4",
    ]
    assert top.from_s.tolist() == [0.0, 0.0, 0.7]
    np.testing.assert_allclose(top.to_s, [0.5, 0.7, 1.6])
    assert layout.video_files() == (
        f"videos/{TOP}/chunk-000/file-000.mp4",
        f"videos/{TOP}/chunk-000/file-001.mp4",
        "videos/side/chunk-000/file-000.mp4",
        "videos/side/chunk-000/file-001.mp4",
    )
    assert layout.tasks == {0: "pick", 1: "place"}
    assert episodes.tasks == [["pick"], ["place"], ["pick"]]
    assert layout.stats is None
    for name in ("episode_index", "length", "dataset_from_index", "dataset_to_index", "data_file"):
        assert getattr(episodes, name).dtype == np.int64


def test_templates_are_obeyed(tmp_path: Path) -> None:
    dataset = TableDataset((2, 3), files=(3, 0))
    dataset.info["video_path"] = "v/{file_index:d}/{chunk_index}-{video_key}.mp4"
    layout = load(dataset.write(tmp_path))
    assert [layout.episodes.cameras[TOP].path(position) for position in (0, 1)] == [
        f"v/3/0-{TOP}.mp4",
        f"v/0/0-{TOP}.mp4",
    ]


def test_a_dataset_without_video(tmp_path: Path) -> None:
    layout = load(TableDataset(cameras=()).write(tmp_path))
    assert layout.episodes.cameras == {}
    assert layout.video_files() == ()


def test_several_files_in_any_order(tmp_path: Path) -> None:
    dataset = TableDataset((1, 2, 3, 4))
    dataset.write(tmp_path)
    whole = pa.table(dataset.episodes)
    (tmp_path / "meta/episodes/chunk-001").mkdir()
    pq.write_table(whole.take(pa.array([3, 1])), tmp_path / "meta/episodes/chunk-000/file-000.parquet")
    pq.write_table(whole.take(pa.array([2, 0])), tmp_path / "meta/episodes/chunk-001/file-000.parquet")
    # Left behind by an interrupted copy; LeRobot's reader does not see such names either.
    (tmp_path / "meta/episodes/chunk-001/.file-001.parquet").write_bytes(b"PAR1")
    layout = load(tmp_path)
    assert layout.episodes.episode_index.tolist() == [0, 1, 2, 3]
    assert layout.episodes.length.tolist() == [1, 2, 3, 4]
    assert layout.episodes.tasks == [["pick"], ["place"], ["pick"], ["place"]]


def test_files_are_found_without_a_listing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = TableDataset((1, 2, 3))
    dataset.info["chunks_size"] = 2
    dataset.write(tmp_path)
    whole = pa.table(dataset.episodes)
    (tmp_path / "meta/episodes/chunk-001").mkdir()
    for row, name in enumerate(("chunk-000/file-000", "chunk-000/file-001", "chunk-001/file-000")):
        pq.write_table(whole.slice(row, 1), tmp_path / f"meta/episodes/{name}.parquet")
    monkeypatch.setattr(LocalStore, "list_files", lambda *_: {})
    assert load(tmp_path).episodes.length.tolist() == [1, 2, 3]


@pytest.mark.parametrize("field", ["chunk_index", "file_index", "from_timestamp", "to_timestamp"])
@pytest.mark.parametrize("missing", [None, float("nan")])
def test_missing_camera_columns_name_episode_and_camera(
    tmp_path: Path, field: str, missing: float | None
) -> None:
    """K02: nothing is guessed from zeros, which are valid numbers."""
    dataset = TableDataset()
    column = dataset.episodes[f"videos/{TOP}/{field}"]
    dataset.episodes[f"videos/{TOP}/{field}"] = [float(column[0]), missing, float(column[2])]
    with pytest.raises(DatasetFormatError, match=rf"episode 1: videos/{TOP}/{field} is missing") as caught:
        load(dataset.write(tmp_path))
    assert caught.value.fields == {"episode_index": 1, "camera": TOP}


def test_integers_stored_as_floats_are_read(tmp_path: Path) -> None:
    dataset = TableDataset()
    for name in ("length", f"videos/{TOP}/file_index"):
        dataset.episodes[name] = [float(value) for value in dataset.episodes[name]]
    assert load(dataset.write(tmp_path)).episodes.length.tolist() == [5, 7, 9]


@pytest.mark.parametrize(
    ("column", "values", "message"),
    [
        ("episode_index", [0, 1, 1], "episode 1 is described 2 times"),
        ("episode_index", [0, -1, 2], "episode_index is -1"),
        ("length", [5, 0, 9], "episode 1: length is 0"),
        ("length", [5, 7, 8], "episode 2: dataset_from_index 12 .* are 9 frames, but length is 8"),
        ("length", [5.5, 7, 9], r"episode 0: length is 5\.5, expected an integer"),
        ("length", ["5", "7", "9"], "length is string, expected numbers"),
        ("length", [None] * 3, "episode 0: length is missing"),
        ("dataset_from_index", [0, 5, None], "episode 2: dataset_from_index is missing"),
        ("data/file_index", [0, -1, 0], "episode 1: data/file_index is -1"),
        (f"videos/{TOP}/file_index", [0, 0, -2], f"episode 2: videos/{TOP}/file_index is -2"),
        (f"videos/{TOP}/from_timestamp", [0.0, 1.2, 1.2], r"episode 1: camera .* from 1\.2 s to 1\.2"),
        (f"videos/{TOP}/from_timestamp", [-0.1, 0.5, 1.2], r"episode 0: .* from -0\.1 s"),
    ],
)
def test_contradictions_are_refused(tmp_path: Path, column: str, values: list[Any], message: str) -> None:
    dataset = TableDataset()
    dataset.episodes[column] = values
    with pytest.raises(DatasetFormatError, match=message):
        load(dataset.write(tmp_path))


def test_overlapping_episodes_are_refused(tmp_path: Path) -> None:
    dataset = TableDataset((5, 7, 9))
    dataset.episodes["dataset_from_index"][1], dataset.episodes["dataset_to_index"][1] = 4, 11
    with pytest.raises(DatasetFormatError, match=r"episode 1: .* \[4, 11\) overlap .* episode 0, \[0, 5\)"):
        load(dataset.write(tmp_path))


@pytest.mark.parametrize("name", ["total_episodes", "total_frames"])
def test_totals(tmp_path: Path, name: str) -> None:
    dataset = TableDataset()
    dataset.info[name] += 1
    with pytest.raises(DatasetFormatError, match=rf"describes .*meta/info\.json says {name} is"):
        load(dataset.write(tmp_path / "wrong"))
    del dataset.info[name]
    assert len(load(dataset.write(tmp_path / "absent")).episodes) == 3


def test_missing_column_file_and_directory(tmp_path: Path) -> None:
    dataset = TableDataset()
    del dataset.episodes[f"videos/{TOP}/to_timestamp"]
    root = dataset.write(tmp_path)
    with pytest.raises(DatasetFormatError, match=rf"lacks the column videos/{TOP}/to_timestamp; it has"):
        load(root)
    file = root / "meta/episodes/chunk-000/file-000.parquet"
    file.unlink()
    with pytest.raises(NotFoundError, match="holds no episode metadata"):
        load(root)
    (root / "meta/tasks.parquet").unlink()
    with pytest.raises(NotFoundError, match=r"has no meta/tasks\.parquet"):
        load(root)


@pytest.mark.parametrize("style", ["named index", "unnamed index", "range index", "no pandas", "dictionary"])
def test_tasks_in_every_spelling(tmp_path: Path, style: str) -> None:
    root = TableDataset().write(tmp_path)
    texts: Any = pa.array(["put", "take"])
    name, index_columns = "task", ["task"]
    if style == "unnamed index":
        name, index_columns = "__index_level_0__", ["__index_level_0__"]
    elif style == "range index":
        index_columns = [{"kind": "range", "start": 0, "stop": 2, "step": 1}]  # type: ignore[list-item]
    elif style == "dictionary":
        texts = texts.dictionary_encode()
    table = pa.table({"task_index": [1, 0], name: texts})
    if style != "no pandas":
        table = table.replace_schema_metadata({"pandas": json.dumps({"index_columns": index_columns})})
    pq.write_table(table, root / "meta/tasks.parquet")
    assert load(root).tasks == {1: "put", 0: "take"}


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"task_index": [0, 0], "task": ["a", "b"]}, "task_index 0 stands for 'a' and for 'b'"),
        ({"task_index": [0, None], "task": ["a", "b"]}, "a task is 'b' with number None"),
        ({"task_index": [0, 1], "task": ["a", None]}, "a task is None"),
        ({"task_index": [0, 1], "task": [1, 2]}, "no column of task strings"),
        ({"task": ["a"]}, "lacks the column task_index"),
    ],
)
def test_tasks_refused(tmp_path: Path, columns: dict[str, list[Any]], message: str) -> None:
    root = TableDataset().write(tmp_path)
    pq.write_table(pa.table(columns), root / "meta/tasks.parquet")
    with pytest.raises(DatasetFormatError, match=message):
        load(root)


def test_stats(tmp_path: Path) -> None:
    root = TableDataset().write(tmp_path)
    (root / "meta/stats.json").write_text('{"action": {"mean": [1.5, 2.5], "count": 7}}')
    stats = load(root).stats
    assert stats is not None
    assert stats["action"]["mean"].tolist() == [1.5, 2.5]
    assert stats["action"]["count"].tolist() == [7]
    (root / "meta/stats.json").write_text("[1]")
    with pytest.raises(DatasetFormatError, match=r"stats\.json: expected JSON with statistics"):
        _ = load(root).stats


def test_positions_are_found_by_value(tmp_path: Path) -> None:
    dataset = TableDataset((5, 7, 9))
    dataset.episodes["episode_index"] = [4, 10, 11]
    episodes = load(dataset.write(tmp_path)).episodes
    assert [episodes.position(index) for index in (4, 10, 11)] == [0, 1, 2]
    for absent in (0, 5, 12, -1):
        with pytest.raises(NotFoundError, match=rf"no episode {absent}; it has 3 \(4 to 11\)"):
            episodes.position(absent)


def test_selection(tmp_path: Path) -> None:
    layout = load(TableDataset((5, 7, 9)).write(tmp_path))

    def chosen(episodes: Any = None, exclude: Any = None) -> list[int]:
        positions = resolve_selection(layout, episodes, exclude)
        assert positions.dtype == np.int64
        return [int(position) for position in positions]

    assert chosen() == [0, 1, 2]
    assert chosen([1]) == [1]
    assert chosen([2, 0]) == chosen(np.array([0, 2])) == chosen(range(0, 3, 2)) == [0, 2]
    assert chosen([]) == []
    assert chosen(None, [1]) == [0, 2]
    assert chosen([2, 1], [1]) == [2]
    assert chosen([1], [1]) == []
    refused: list[tuple[list[Any], str]] = [
        ([1, 1], "more than once"),
        ([-1], "0 or more"),
        ([True], "True"),
        ([1.0], "integers"),
    ]
    for wrong, message in refused:
        with pytest.raises(UsageError, match=message):
            chosen(wrong)
        with pytest.raises(UsageError, match=message):
            chosen(None, wrong)
    for text in ("1", 1):
        with pytest.raises(UsageError, match="expected a list"):
            chosen(text)
    with pytest.raises(NotFoundError, match="no episode 3"):
        chosen([3])


def _write_wide_metadata(root: Path, num_episodes: int, num_stats: int) -> Path:
    """Metadata as large as those of a big dataset, without its data."""
    dataset = TableDataset((1,))
    dataset.info |= {"total_episodes": num_episodes, "total_frames": num_episodes}
    dataset.write(root)
    count = np.arange(num_episodes)
    noise = np.random.default_rng(0)
    columns: dict[str, Any] = {
        "episode_index": count,
        "tasks": pa.array([["pick"]] * num_episodes),
        "length": np.ones_like(count),
        "dataset_from_index": count,
        "dataset_to_index": count + 1,
        "data/chunk_index": np.zeros_like(count),
        "data/file_index": count // 1000,
        f"videos/{TOP}/chunk_index": np.zeros_like(count),
        f"videos/{TOP}/file_index": count // 500,
        f"videos/{TOP}/from_timestamp": count % 500 / 10,
        f"videos/{TOP}/to_timestamp": count % 500 / 10 + 0.1,
    }
    # Shared columns keep the writing of the file short; on disk each is stored in full.
    stats = [noise.random(num_episodes) for _ in range(4)]
    columns |= {f"stats/feature_{number}/mean": stats[number % 4] for number in range(num_stats)}
    pq.write_table(pa.table(columns), root / "meta/episodes/chunk-000/file-000.parquet")
    return root


def test_stats_columns_are_neither_read_nor_parsed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """K03: one open of the file, and bytes in proportion to what is needed."""
    root = _write_wide_metadata(tmp_path, 10_000, 200)
    size = (root / "meta/episodes/chunk-000/file-000.parquet").stat().st_size
    opened: list[str] = []
    real = LocalStore.open

    def counting(self: LocalStore, path: str, known: int | None = None) -> Any:
        opened.append(path)
        return real(self, path, known)

    monkeypatch.setattr(LocalStore, "open", counting)
    store = open_store(parse_location(root))
    layout = load_layout(store)
    assert len(layout.episodes) == 10_000
    assert opened.count("meta/episodes/chunk-000/file-000.parquet") == 1
    assert size > 16_000_000
    assert store.counters.bytes_read < 600_000


def test_a_hundred_thousand_episodes(tmp_path: Path) -> None:
    store = open_store(parse_location(_write_wide_metadata(tmp_path, 100_000, 20)))
    start = time.process_time()
    layout = load_layout(store)
    assert time.process_time() - start < 2
    assert layout.episodes.data_files[99] == "data/chunk-000/file-099.parquet"
    assert layout.episodes.cameras[TOP].path(99_999) == f"videos/{TOP}/chunk-000/file-199.mp4"
    # Eight numbers of eight bytes and a short list of strings for each episode.
    assert len(pickle.dumps(layout.episodes)) < 100_000 * 90


def test_layout_is_picklable(tmp_path: Path) -> None:
    layout = load(TableDataset().write(tmp_path))
    size = len(pickle.dumps(layout))
    assert layout.episodes.tasks[1] == ["place"]
    assert layout.stats is None
    assert len(pickle.dumps(layout)) == size
    copy = pickle.loads(pickle.dumps(layout))
    assert copy.episodes.tasks == layout.episodes.tasks
    assert copy.episodes.length.tolist() == [5, 7, 9]
    assert copy.tasks == layout.tasks


@requires_shared
@pytest.mark.parametrize("name", DATASETS)
def test_datasets_written_by_lerobot(name: str) -> None:
    root = shared_dataset(name)
    layout = load(root)
    file = pq.ParquetFile(root / "meta/episodes/chunk-000/file-000.parquet")
    expected = file.read(use_threads=False).to_pylist()
    assert layout.episodes.length.tolist() == [row["length"] for row in expected]
    assert layout.episodes.tasks == [row["tasks"] for row in expected]
    for key, camera in layout.episodes.cameras.items():
        assert camera.from_s.tolist() == [row[f"videos/{key}/from_timestamp"] for row in expected]
    on_disk = sorted(path.relative_to(root).as_posix() for path in root.rglob("*.mp4"))
    assert list(layout.video_files()) == on_disk
