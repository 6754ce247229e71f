"""Where contents come and go: resolve URLs and LFS on the Hub, signed downloads and uploads on the CDN."""

from urllib.parse import quote

from tests.support.hub.blobs import Blob, blob_of_bytes
from tests.support.hub.bucket_routes import require_file
from tests.support.hub.state import OWNER_NAME, HubState, require_revision
from tests.support.hub.wire import HubError, Reply, Request, Router, json_reply, text_reply

_TYPES = {".json": "application/json", ".txt": "text/plain; charset=utf-8", ".mp4": "video/mp4"}


class ContentRoutes:
    """Resolve and LFS routes of the Hub, and the CDN's own."""

    def __init__(self, state: HubState) -> None:
        self._state = state

    def mount(self, router: Router) -> None:
        """Adds the Hub's routes."""
        resolve = rf"/datasets/{OWNER_NAME}/resolve/(?P<revision>[^/]+)/(?P<path>.+)"
        cached = rf"/api/resolve-cache/datasets/{OWNER_NAME}/(?P<revision>[^/]+)/(?P<path>.+)"
        lfs = rf"/datasets/{OWNER_NAME}\.git/info/lfs"
        router.add("GET HEAD", resolve, self._resolve)
        router.add("GET HEAD", cached, self._resolve_cached)
        router.add("GET HEAD", rf"/buckets/{OWNER_NAME}/resolve/(?P<path>.+)", self._resolve_bucket)
        router.add("POST", rf"{lfs}/objects/batch", self._lfs_batch)
        router.add("POST", rf"{lfs}/verify", self._lfs_verify)

    def mount_cdn(self, router: Router) -> None:
        """Adds the CDN's routes."""
        router.add("GET HEAD", r"/objects/(?P<sha256>[0-9a-f]{64})/(?P<path>.+)", self._download)
        router.add("PUT", r"/uploads/(?P<sha256>[0-9a-f]{64})", self._upload)

    def _resolve(self, request: Request, owner: str, name: str, revision: str, path: str) -> Reply:
        repository = self._state.readable_dataset(request, owner, name, contents=True)
        commit = require_revision(repository, revision)
        entry = commit.files.get(path)
        if entry is None:
            raise HubError(404, "Entry not found", code="EntryNotFound", X_Repo_Commit=commit.oid)
        headers = {"X-Repo-Commit": commit.oid}
        if entry.is_lfs:
            signed = self._state.signer.sign(
                f"/objects/{entry.blob.sha256}/datasets/{repository.repo_id}/{path}"
            )
            headers |= {"X-Linked-Size": str(entry.blob.size), "X-Linked-ETag": f'"{entry.blob.sha256}"'}
            if self._state.xet:
                route = f"/api/datasets/{repository.repo_id}/xet-read-token/{commit.oid}"
                headers |= self._xet_headers(self._state.store.xet_hash(entry.blob), route)
            return text_reply("Found. Redirecting.", 302, {**headers, "Location": signed})
        etag = f'"{entry.git_oid}"'
        if self._state.regular_redirect:
            location = f"/api/resolve-cache/datasets/{repository.repo_id}/{commit.oid}/{quote(path)}"
            headers |= {"X-Linked-Size": str(entry.blob.size), "X-Linked-ETag": etag, "Location": location}
            return text_reply("Temporary Redirect. Redirecting.", 307, headers)
        return _file_reply(entry.blob, path, etag, headers)

    def _resolve_cached(self, request: Request, owner: str, name: str, revision: str, path: str) -> Reply:
        repository = self._state.readable_dataset(request, owner, name, contents=True)
        commit = require_revision(repository, revision)
        entry = commit.files.get(path)
        if entry is None or entry.is_lfs:
            raise HubError(404, "Entry not found", code="EntryNotFound", X_Repo_Commit=commit.oid)
        return _file_reply(entry.blob, path, f'"{entry.git_oid}"', {"X-Repo-Commit": commit.oid})

    def _resolve_bucket(self, request: Request, owner: str, name: str, path: str) -> Reply:
        bucket = self._state.readable_bucket(request, owner, name)
        entry = require_file(bucket, path)
        signed = self._state.signer.sign(f"/objects/{entry.blob.sha256}/buckets/{bucket.bucket_id}/{path}")
        headers = {
            "X-Linked-Size": str(entry.blob.size),
            "X-Linked-ETag": f'"{entry.xet_hash}"',
            "Location": signed,
            **self._xet_headers(entry.xet_hash, f"/api/buckets/{bucket.bucket_id}/xet-read-token"),
        }
        return text_reply("Found. Redirecting.", 302, headers)

    def _xet_headers(self, xet_hash: str, token_route: str) -> dict[str, str]:
        endpoint, cas_url = self._state.endpoint, self._state.cas_url
        return {
            "X-Xet-Hash": xet_hash,
            "Link": f'<{endpoint}{token_route}>; rel="xet-auth", '
            f'<{cas_url}/v1/reconstructions/{xet_hash}>; rel="xet-reconstruction-info"',
        }

    def _lfs_batch(self, request: Request, owner: str, name: str) -> Reply:
        repository = self._state.writable_dataset(request, owner, name)
        asked = request.json()
        if self._state.xet and "xet" in asked.get("transfers", ()):
            return json_reply({"transfer": "xet", "objects": asked["objects"]})
        objects = []
        for wanted in asked["objects"]:
            answer = {"oid": wanted["oid"], "size": wanted["size"]}
            if self._state.store.by_sha256(wanted["oid"]) is None:
                verify = f"{self._state.endpoint}/datasets/{repository.repo_id}.git/info/lfs/verify"
                answer["authenticated"] = True
                answer["actions"] = {
                    "upload": {"href": self._state.signer.sign(f"/uploads/{wanted['oid']}"), "header": {}},
                    "verify": {"href": verify, "header": {}},
                }
            objects.append(answer)
        return json_reply({"transfer": "basic", "objects": objects})

    def _lfs_verify(self, request: Request, owner: str, name: str) -> Reply:
        self._state.writable_dataset(request, owner, name)
        asked = request.json()
        blob = self._state.store.by_sha256(asked["oid"])
        if blob is None or blob.size != asked["size"]:
            raise HubError(404, f"object {asked['oid']} of {asked['size']} bytes is not here")
        return json_reply({})

    def _download(self, request: Request, sha256: str, path: str) -> Reply:
        if refusal := self._state.signer.refusal(request):
            return refusal
        blob = self._state.store.by_sha256(sha256)
        if blob is None:
            return text_reply("<Error><Code>NoSuchKey</Code></Error>", 404)
        return _file_reply(blob, path, f'"{sha256}"', {})

    def _upload(self, request: Request, sha256: str) -> Reply:
        if refusal := self._state.signer.refusal(request):
            return refusal
        blob = blob_of_bytes(request.body)
        if blob.sha256 != sha256:
            return text_reply("<Error><Code>XAmzContentSHA256Mismatch</Code></Error>", 400)
        self._state.store.add(blob)
        return Reply(headers={"ETag": f'"{sha256[:32]}"'})


def _file_reply(blob: Blob, path: str, etag: str, headers: dict[str, str]) -> Reply:
    suffix = path[path.rfind(".") :] if "." in path else ""
    content_type = _TYPES.get(suffix, "application/octet-stream")
    return Reply(content=blob, headers={**headers, "Content-Type": content_type, "ETag": etag}, ranged=True)
