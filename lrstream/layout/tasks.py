"""`meta/tasks.parquet`: the text of each task (DS-2)."""

from __future__ import annotations

import json

import pyarrow as pa

from lrstream.errors import DatasetFormatError, NotFoundError
from lrstream.layout.parquet import ParquetSource, open_parquet
from lrstream.storage.store import DatasetStore

__all__ = ["TASKS_PATH", "load_tasks"]

TASKS_PATH = "meta/tasks.parquet"


def load_tasks(store: DatasetStore) -> dict[int, str]:
    """Task strings by ``task_index``.

    The strings are the index of a pandas table; its column is found through pandas' own notes in
    the file, without pandas.

    Raises:
        NotFoundError: If the file does not exist.
        DatasetFormatError: If it cannot be read, has no such columns, or gives one number two texts.
    """
    try:
        parquet = open_parquet(store, TASKS_PATH)
    except NotFoundError as error:
        raise NotFoundError(
            f"{store.location} has no {TASKS_PATH}, which names the tasks.",
            hint="The dataset is incomplete; download or convert it again.",
            file_path=TASKS_PATH,
        ) from error
    try:
        text_column = _text_column(parquet)
        table = parquet.read(["task_index", text_column])
    finally:
        parquet.close()
    numbers, texts = table.column("task_index").to_pylist(), table.column(text_column).to_pylist()
    tasks: dict[int, str] = {}
    for number, text in zip(numbers, texts, strict=True):
        if not isinstance(number, int) or not isinstance(text, str):
            raise DatasetFormatError(
                f"{parquet.where}: a task is {text!r} with number {number!r}, expected text and integer."
            )
        if tasks.setdefault(number, text) != text:
            raise DatasetFormatError(
                f"{parquet.where}: task_index {number} stands for {tasks[number]!r} and for {text!r}."
            )
    return tasks


def _text_column(parquet: ParquetSource) -> str:
    schema = parquet.schema
    candidates = []
    pandas_notes = (schema.metadata or {}).get(b"pandas")
    if pandas_notes is not None:
        try:
            index_columns = json.loads(pandas_notes).get("index_columns", [])
        except (ValueError, AttributeError) as error:
            raise DatasetFormatError(f"{parquet.where}: its pandas metadata is no JSON object.") from error
        # A range index is described by an object instead of a column name.
        candidates += [name for name in index_columns if isinstance(name, str)]
    for name in (*candidates, "task", "__index_level_0__"):
        if name in schema.names and _is_text(schema.field(name).type):
            return name
    raise DatasetFormatError(
        f"{parquet.where} has no column of task strings; it has {', '.join(schema.names) or 'no columns'}.",
        hint="LeRobot stores them as the table's index, named 'task'.",
    )


def _is_text(kind: pa.DataType) -> bool:
    if pa.types.is_dictionary(kind):
        return _is_text(kind.value_type)
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))
