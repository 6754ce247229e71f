"""A dataset as commands open it."""

from __future__ import annotations

from typing import NamedTuple

from lrstream.errors import DatasetFormatError
from lrstream.layout.layout import DatasetLayout, load_layout
from lrstream.storage.location import RepoType, parse_location
from lrstream.storage.store import DatasetStore, open_store

__all__ = ["OpenedDataset", "open_dataset"]


class OpenedDataset(NamedTuple):
    """A store and the metadata read through it."""

    store: DatasetStore
    layout: DatasetLayout


def open_dataset(
    source: str,
    *,
    repo_type: RepoType,
    revision: str | None,
    contradictions: list[DatasetFormatError] | None = None,
) -> OpenedDataset:
    """Open a dataset by whatever the user wrote; errors as `parse_location`, `open_store`, `load_layout`."""
    store = open_store(parse_location(source, repo_type=repo_type, revision=revision))
    return OpenedDataset(store, load_layout(store, contradictions=contradictions))
