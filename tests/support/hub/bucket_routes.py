"""REST interface of storage buckets."""

import json
from typing import Any

from tests.support.hub.cas_routes import ContentStoreRoutes
from tests.support.hub.repositories import Bucket, BucketEntry, isoformat
from tests.support.hub.state import OWNER_NAME, HubState
from tests.support.hub.wire import HubError, Reply, Request, Router, json_reply

_API = rf"/api/buckets/{OWNER_NAME}"


class BucketRoutes:
    """Everything under ``/api/buckets``."""

    def __init__(self, state: HubState, content_store: ContentStoreRoutes) -> None:
        self._state = state
        self._content_store = content_store

    def mount(self, router: Router) -> None:
        """Adds the routes."""
        router.add("GET", _API, self._info)
        router.add("POST", _API, self._create)
        router.add("GET", rf"{_API}/tree(?:/(?P<prefix>.+))?", self._tree)
        router.add("POST", rf"{_API}/paths-info", self._paths_info)
        router.add("POST", rf"{_API}/batch", self._batch)
        router.add("GET", rf"{_API}/xet-(?P<scope>read|write)-token", self._xet_token)

    def _info(self, request: Request, owner: str, name: str) -> Reply:
        bucket = self._state.readable_bucket(request, owner, name)
        files = bucket.listing()
        return json_reply(
            {
                "id": bucket.bucket_id,
                "private": bucket.private,
                "createdAt": isoformat(bucket.created),
                "size": sum(entry.blob.size for entry in files.values()),
                "totalFiles": len(files),
            }
        )

    def _create(self, request: Request, owner: str, name: str) -> Reply:
        account = self._state.accounts.require_write(request, private=False)
        bucket_id = f"{account.name if owner == 'me' else owner}/{name}"
        url = f"{self._state.endpoint}/buckets/{bucket_id}"
        asked = request.json()
        private = asked.get("visibility") == "private" or bool(asked.get("private"))
        with self._state.lock:
            if bucket_id in self._state.buckets:
                return json_reply({"error": "You already created this bucket", "url": url}, 409)
            self._state.buckets[bucket_id] = Bucket(bucket_id, private=private)
        return json_reply({"url": url, "id": bucket_id, "name": bucket_id})

    def _tree(self, request: Request, owner: str, name: str, prefix: str) -> Reply:
        bucket = self._state.readable_bucket(request, owner, name)
        # The prefix is compared as text: "logs" also finds "logs_old/a". Only a flat listing has directories.
        matching = {path: entry for path, entry in bucket.listing().items() if path.startswith(prefix)}
        if request.flag("recursive"):
            return self._state.page(request, [_listed(path, entry) for path, entry in matching.items()])
        depth = prefix.count("/") + 1 if prefix else 0
        items: dict[str, dict[str, Any]] = {}
        for path, entry in matching.items():
            parts = path.split("/")
            if len(parts) <= depth + 1:
                items[path] = _listed(path, entry)
            else:
                directory = "/".join(parts[: depth + 1])
                items[directory] = {
                    "type": "directory",
                    "path": directory,
                    "uploadedAt": isoformat(entry.uploaded),
                }
        return self._state.page(request, [items[path] for path in sorted(items)])

    def _paths_info(self, request: Request, owner: str, name: str) -> Reply:
        files = self._state.readable_bucket(request, owner, name).listing()
        return json_reply([_listed(path, files[path]) for path in request.json()["paths"] if path in files])

    def _batch(self, request: Request, owner: str, name: str) -> Reply:
        bucket = self._state.writable_bucket(request, owner, name)
        failed: list[dict[str, str]] = []
        lines = request.body.splitlines()
        with bucket.lock:
            for line in lines:
                operation = json.loads(line)
                path = operation["path"]
                if operation["type"] == "deleteFile":
                    if not bucket.delete(path):
                        failed.append({"path": path, "error": "File not found"})
                    continue
                blob = self._state.store.by_xet_hash(operation["xetHash"])
                if blob is None:
                    failed.append({"path": path, "error": "Xet hash not found"})
                    continue
                bucket.put(path, blob, operation["xetHash"], operation["mtime"] / 1000)
        succeeded = len(lines) - len(failed)
        outcome = {"success": not failed, "processed": len(lines), "succeeded": succeeded, "failed": failed}
        return json_reply(outcome, 422 if failed and succeeded == 0 else 200)

    def _xet_token(self, request: Request, owner: str, name: str, scope: str) -> Reply:
        if scope == "write":
            self._state.writable_bucket(request, owner, name)
        else:
            self._state.readable_bucket(request, owner, name)
        return self._content_store.token_reply(scope, self._state.cas_url)


def _listed(path: str, entry: BucketEntry) -> dict[str, Any]:
    return {
        "type": "file",
        "path": path,
        "size": entry.blob.size,
        "xetHash": entry.xet_hash,
        "mtime": isoformat(entry.mtime),
        "uploadedAt": isoformat(entry.uploaded),
    }


def require_file(bucket: Bucket, path: str) -> BucketEntry:
    """Entry of a bucket file.

    Raises:
        HubError: 404 EntryNotFound.
    """
    entry = bucket.listing().get(path)
    if entry is None:
        raise HubError(404, "Entry not found", code="EntryNotFound")
    return entry
