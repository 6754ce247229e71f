"""The loopback Hub as tests use it."""

import shutil
import sys
import tempfile
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Literal

import huggingface_hub
import huggingface_hub.file_download  # so that its copies of the constants can be replaced
import pytest

from tests.support.hub.accounts import Account, Accounts
from tests.support.hub.blobs import Blob, BlobStore, blob_of_bytes
from tests.support.hub.bucket_routes import BucketRoutes
from tests.support.hub.cas_routes import ContentStoreRoutes
from tests.support.hub.content_routes import ContentRoutes
from tests.support.hub.dataset_routes import DatasetRoutes
from tests.support.hub.faults import Faults
from tests.support.hub.process import client_environment
from tests.support.hub.repositories import Bucket, DatasetRepository, folder_contents
from tests.support.hub.request_log import RequestLog
from tests.support.hub.signing import UrlSigner
from tests.support.hub.state import HubState
from tests.support.hub.wire import RoleServer, Router

READ_TOKEN = "hf_LoopbackReadTokenSENTINEL"
WRITE_TOKEN = "hf_LoopbackWriteTokenSENTINEL"
STRANGER_TOKEN = "hf_LoopbackStrangerTokenSENTINEL"


class LoopbackHub:
    """A Hub on three loopback servers; use :meth:`start`, then :meth:`stop`, or as a context manager.

    Attributes:
        endpoint: Base URL of the Hub (``http://127.0.0.1:PORT``).
        cdn_url: Base URL of the CDN (``http://localhost:OTHER``): another origin for every client.
        cas_url: Base URL of the content store xet clients talk to.
        log: Every request to any of the three.
        faults: What goes wrong.
        settings: Page size, xet on or off, redirects of regular files; see :class:`HubState`.
        signer: Signed URLs: ``lifetime_s``, ``expire_all()``.
        home: ``HF_HOME`` of the clients started with :meth:`env`; removed at the end.
        read_token: Member, may read all, write nothing.
        write_token: Member, may write all.
        stranger_token: Write token of a user who sees no private repository, passes no gate, writes nowhere.
    """

    read_token = READ_TOKEN
    write_token = WRITE_TOKEN
    stranger_token = STRANGER_TOKEN

    def __init__(self) -> None:
        self.log = RequestLog()
        self.faults = Faults()
        self._store = BlobStore()
        routers = {role: Router() for role in ("hub", "cdn", "cas")}
        self._servers = {
            role: RoleServer(
                role, "localhost" if role == "cdn" else "127.0.0.1", router, self.faults, self.log
            )
            for role, router in routers.items()
        }
        self.endpoint = self._servers["hub"].url
        self.cdn_url = self._servers["cdn"].url
        self.cas_url = self._servers["cas"].url
        self.signer = UrlSigner(self.cdn_url)
        accounts = Accounts(
            {
                READ_TOKEN: Account("reader", "read"),
                WRITE_TOKEN: Account("writer", "write"),
                STRANGER_TOKEN: Account("stranger", "write", member=False, gate_passed=False),
            }
        )
        self.settings = HubState(self.endpoint, self.cas_url, self._store, self.signer, accounts)
        content_store = ContentStoreRoutes(self._store, self.signer)
        contents = ContentRoutes(self.settings)
        DatasetRoutes(self.settings, content_store).mount(routers["hub"])
        BucketRoutes(self.settings, content_store).mount(routers["hub"])
        contents.mount(routers["hub"])
        contents.mount_cdn(routers["cdn"])
        content_store.mount(routers["cas"])
        content_store.mount_blocks(routers["cdn"])
        self.home = Path(tempfile.mkdtemp(prefix="loopback-hub-"))

    @classmethod
    def start(cls) -> "LoopbackHub":
        """A running Hub with nothing in it."""
        hub = cls()
        for server in hub._servers.values():
            server.start()
        return hub

    def stop(self) -> None:
        """Ends all threads and removes `home`.

        Raises:
            AssertionError: The double itself failed while answering; the text holds the tracebacks.
        """
        # All at once: each listener notices within its polling interval.
        stops = [threading.Thread(target=server.stop) for server in self._servers.values()]
        for stop in stops:
            stop.start()
        for stop in stops:
            stop.join()
        shutil.rmtree(self.home, ignore_errors=True)
        errors = self.internal_errors
        assert not errors, "the loopback Hub failed:\n" + "\n".join(errors)

    def __enter__(self) -> "LoopbackHub":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def cdn_host(self) -> str:
        """Host and port of the CDN, as in a Host header."""
        return self.cdn_url.removeprefix("http://")

    @property
    def internal_errors(self) -> list[str]:
        """Tracebacks of bugs of the double."""
        return [error for server in self._servers.values() for error in server.internal_errors]

    def env(
        self, token: str | None = None, *, home: Path | None = None, extra: Mapping[str, str] | None = None
    ) -> dict[str, str]:
        """Environment for a child process; `home` defaults to one all children of this Hub share."""
        return client_environment(self.endpoint, home or self.home, token, extra)

    def connect_process(self, monkeypatch: pytest.MonkeyPatch, token: str | None = None) -> None:
        """Makes this Hub the one of the running process, until the test ends.

        The client reads ``HF_ENDPOINT`` once, when it is imported; so what it made of it is replaced, and its
        cached file systems are dropped. For uploads through xet use a child process: hf_xet keeps a runtime.
        """
        for name, value in self.env(token).items():
            # Homes and caches are the business of the test's own fixtures.
            if name in ("HF_ENDPOINT", "HF_TOKEN", "NO_PROXY", "no_proxy"):
                monkeypatch.setenv(name, value)
        replaced = {
            "ENDPOINT": self.endpoint,
            "HUGGINGFACE_CO_URL_TEMPLATE": self.endpoint + "/{repo_id}/resolve/{revision}/{filename}",
        }
        # Older clients import these names into other modules, where each has a copy.
        for module_name, module in list(sys.modules.items()):
            if module_name.partition(".")[0] == "huggingface_hub":
                for name in replaced.keys() & vars(module).keys():
                    monkeypatch.setattr(module, name, replaced[name])
        huggingface_hub.HfFileSystem.clear_instance_cache()

    def add_token(self, token: str, account: Account) -> None:
        """Makes another token known."""
        self.settings.accounts.by_token[token] = account

    # Datasets

    def create_dataset(
        self,
        repo_id: str,
        folder: Path | None = None,
        *,
        private: bool = False,
        gated: bool = False,
        lfs_mode: Literal["auto", "lfs", "regular"] = "auto",
    ) -> str:
        """A dataset repository with the files of `folder` on branch ``main``.

        Args:
            repo_id: ``OWNER/NAME``.
            folder: Files to start with; None for an empty repository.
            private: Hidden from all but members.
            gated: Contents only for those let through the gate.
            lfs_mode: ``auto``: .mp4, .parquet, .npz, .bin, .arrow and files above 10 MiB are LFS; else all or
                none.

        Returns:
            Id of the commit (40 hex digits).
        """
        assert repo_id not in self.settings.datasets, f"dataset {repo_id} exists"
        repository = DatasetRepository(repo_id, private=private, gated=gated, lfs_mode=lfs_mode)
        self.settings.datasets[repo_id] = repository
        return repository.branches["main"].oid if folder is None else self.commit_folder(repo_id, folder)

    def commit_folder(
        self,
        repo_id: str,
        folder: Path,
        *,
        branch: str = "main",
        replace: bool = False,
        title: str = "commit",
    ) -> str:
        """Commits every file under `folder`; with `replace` all others go. Returns the commit id."""
        return self._commit(repo_id, folder_contents(folder, self._store), branch, replace, (), title)

    def commit_files(
        self,
        repo_id: str,
        files: Mapping[str, bytes],
        *,
        branch: str = "main",
        delete: Iterable[str] = (),
        title: str = "commit",
    ) -> str:
        """Commits contents by path and removes those in `delete`. Returns the commit id."""
        contents = {path: self._store.add(blob_of_bytes(data)) for path, data in files.items()}
        return self._commit(repo_id, contents, branch, False, delete, title)

    def _commit(
        self,
        repo_id: str,
        contents: Mapping[str, Blob],
        branch: str,
        replace: bool,
        delete: Iterable[str],
        title: str,
    ) -> str:
        repository = self.settings.datasets[repo_id]
        with repository.lock:
            present = repository.branches[branch].files if branch in repository.branches else {}
            gone = [path for path in present if path not in contents] if replace else list(delete)
            return repository.commit(branch, repository.entries_of(contents), gone, title=title).oid

    def tag(self, repo_id: str, tag: str, revision: str = "main") -> str:
        """Sets a tag and returns the commit it names."""
        return self._reference(repo_id, revision, tag, is_tag=True)

    def branch(self, repo_id: str, branch: str, revision: str = "main") -> str:
        """Creates or moves a branch and returns the commit it names."""
        return self._reference(repo_id, revision, branch, is_tag=False)

    def _reference(self, repo_id: str, revision: str, name: str, *, is_tag: bool) -> str:
        repository = self.settings.datasets[repo_id]
        with repository.lock:
            commit = repository.resolve(revision)
            assert commit is not None, f"{repo_id} has no revision {revision}"
            (repository.tags if is_tag else repository.branches)[name] = commit
            return commit.oid

    def references(self, repo_id: str) -> dict[str, str]:
        """Commit id by full reference name (``refs/heads/main``, ``refs/tags/v1``)."""
        repository = self.settings.datasets[repo_id]
        with repository.lock:
            heads = {f"refs/heads/{name}": commit.oid for name, commit in repository.branches.items()}
            return heads | {f"refs/tags/{name}": commit.oid for name, commit in repository.tags.items()}

    def dataset_files(self, repo_id: str, revision: str = "main") -> dict[str, bytes]:
        """Contents by path of a branch, tag or commit."""
        commit = self.settings.datasets[repo_id].resolve(revision)
        assert commit is not None, f"{repo_id} has no revision {revision}"
        return {path: entry.blob.read() for path, entry in commit.files.items()}

    # Buckets

    def create_bucket(self, bucket_id: str, folder: Path | None = None, *, private: bool = False) -> None:
        """A bucket with the files of `folder`."""
        assert bucket_id not in self.settings.buckets, f"bucket {bucket_id} exists"
        bucket = Bucket(bucket_id, private=private)
        self.settings.buckets[bucket_id] = bucket
        for path, blob in (folder_contents(folder, self._store) if folder else {}).items():
            bucket.put(path, blob, self._store.xet_hash(blob))

    def put_bucket_file(self, bucket_id: str, path: str, data: bytes, *, mtime: float | None = None) -> str:
        """Writes a bucket file (`mtime` in seconds, None for now) and returns its xet hash."""
        blob = self._store.add(blob_of_bytes(data))
        xet_hash = self._store.xet_hash(blob)
        self.settings.buckets[bucket_id].put(path, blob, xet_hash, mtime)
        return xet_hash

    def replace_bucket_file(self, bucket_id: str, path: str, data: bytes) -> str:
        """Like :meth:`put_bucket_file` for a file that exists, keeping its modification time."""
        present = self.settings.buckets[bucket_id].listing()[path]
        return self.put_bucket_file(bucket_id, path, data, mtime=present.mtime)

    def delete_bucket_file(self, bucket_id: str, path: str) -> None:
        """Removes a bucket file."""
        assert self.settings.buckets[bucket_id].delete(path), f"bucket {bucket_id} has no {path}"

    def bucket_files(self, bucket_id: str) -> dict[str, bytes]:
        """Contents by path."""
        return {path: entry.blob.read() for path, entry in self.settings.buckets[bucket_id].listing().items()}
