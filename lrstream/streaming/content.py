"""What is known of a dataset's content without reading it, so that a resume notices other data (LD-10)."""

from __future__ import annotations

import hashlib
import json

import numpy as np
from numpy.typing import NDArray

from lrstream.errors import NotFoundError
from lrstream.layout.layout import DatasetLayout
from lrstream.sidecar.identity import SidecarIdentity

__all__ = ["content_digest", "source_sizes"]


def source_sizes(layout: DatasetLayout, identity: SidecarIdentity | None) -> list[int]:
    """Sizes of the MP4 files of a layout, in the order of their paths; empty without a sidecar.

    They stand for the sizes of episodes, which only the readers of each know.
    """
    if identity is None:
        return []
    files = set(layout.video_files())
    return [source.size or 0 for source in identity.source_files if source.path in files]


def content_digest(
    layout: DatasetLayout, positions: NDArray[np.int64], identity: SidecarIdentity | None
) -> str:
    """Name of the content of all files that some episodes are in, 16 hexadecimal digits.

    Made of what the storage says of each file: content hashes of buckets, tags of object stores, times
    of local files. Costs one listing of the tables.

    Args:
        layout: The dataset, with the features that are read.
        positions: int64[n], positions of the episodes in the episode table.
        identity: Of the sidecar; None where there is no video.

    Returns:
        "" where nothing has to be said: a commit of the Hub names its content, and servers without
        listings would have to be asked for every file.
    """
    store, table = layout.store, layout.episodes
    if not store.fingerprints_required or store.location.root.startswith(("http://", "https://")):
        return ""
    try:
        infos = store.file_info([table.data_files[file] for file in np.unique(table.data_file[positions])])
    except NotFoundError:
        return ""  # said where the rows are read, with the episode that needs them
    known = {path: info.fingerprint for path, info in infos.items()}
    if identity is not None:
        for camera in table.cameras.values():
            for file in np.unique(camera.file[positions]).tolist():
                path = camera.files[file]
                known[path] = identity.source_fingerprints.get(path)
    text = json.dumps(known, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode("utf-8")).hexdigest()[:16]
