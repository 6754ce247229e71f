"""A store that another machine can open: with the credentials of this one, and without showing them.

Between the processes of one machine a store is simply pickled: the others find tokens and settings in the
same environment and files (LD-11). A machine of a cluster has another environment, so what is found in this
one goes along.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from lrstream.storage.fsspec_store import FsspecStore
from lrstream.storage.local import LocalStore
from lrstream.storage.store import DatasetStore

if TYPE_CHECKING:  # nothing of the Hub's client is needed for other storage
    from lrstream.storage.hub_client import HubAccess

__all__ = ["PortableStore"]

# Environment variables that S3 clients look at, and the arguments of s3fs that say the same.
_S3_OPTIONS = {
    "AWS_ACCESS_KEY_ID": "key",
    "AWS_SECRET_ACCESS_KEY": "secret",
    "AWS_SESSION_TOKEN": "token",
    "AWS_ENDPOINT_URL": "endpoint_url",
    "AWS_ENDPOINT_URL_S3": "endpoint_url",
}


class PortableStore:
    """A store on its way to another machine. Picklable; its text shows nothing of what is inside.

    What goes along: options the store was opened with, the token and endpoint of the Hub, keys and endpoint
    of S3 from the environment. Configuration files and keys of other storage do not; the other machine needs
    its own. Paths of local datasets must be the same there.

    Args:
        store: The store as it is used here.
    """

    def __init__(self, store: DatasetStore) -> None:
        self._access: HubAccess | None = None
        if isinstance(store, LocalStore):
            store = LocalStore(replace(store.location, root=os.path.abspath(store.location.root)))
        elif isinstance(store, FsspecStore):
            store = store.with_defaults(_environment_options(store))
        elif store.location.kind in ("hub", "bucket"):
            from lrstream.storage.bucket_store import BucketStore
            from lrstream.storage.hub_client import current_access

            self._access = current_access()
            if isinstance(store, BucketStore):
                # Its listing may be long, and this goes along with every piece of work.
                store = store.without_listing()
        self._pickled = pickle.dumps(store)

    def open(self) -> DatasetStore:
        """The store, for this process."""
        # Pickled above by the process that asks for the work, as everything that a cluster runs is.
        store: DatasetStore = pickle.loads(self._pickled)
        return store

    @contextmanager
    def access(self) -> Iterator[None]:
        """Let reads of this thread within the block use the credentials that came along."""
        if self._access is None:
            yield
            return
        from lrstream.storage.hub_client import using_access

        with using_access(self._access):
            yield

    def __repr__(self) -> str:
        return "PortableStore()"


def _environment_options(store: FsspecStore) -> dict[str, Any]:
    if store.location.root.partition("://")[0].lower() not in ("s3", "s3a"):
        return {}
    options: dict[str, Any] = {
        option: os.environ[name] for name, option in _S3_OPTIONS.items() if os.environ.get(name)
    }
    region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    if region:
        options["client_kwargs"] = {"region_name": region}
    return options
