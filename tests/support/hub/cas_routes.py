"""HTTP interface of the content-addressed store that hf_xet uploads to and downloads from."""

import hashlib
import re
import threading
import time

from tests.support.hub.blobs import Blob, BlobStore, blob_of_bytes
from tests.support.hub.signing import UrlSigner
from tests.support.hub.wire import HubError, Reply, Request, Router, json_reply
from tests.support.hub.xet_format import CHUNK_HEADER_BYTES, joined, shard_files, stored_chunks, xorb_chunks

_CHUNK_BYTES = 64 * 2**10
_BLOCK_BYTES = 16 * _CHUNK_BYTES
_TOKEN_LIFETIME_S = 3600


class ContentStoreRoutes:
    """Takes xorbs and shards; serves every content of the blob store as made-up xorbs of stored chunks.

    The newer calls (xorb grants, ``/v2/shards``, ``/v2/reconstructions``, chunk queries) are answered with
    404, after which the client falls back to those here.
    """

    def __init__(self, store: BlobStore, signer: UrlSigner) -> None:
        self._store = store
        self._signer = signer
        self._xorbs: dict[str, list[bytes]] = {}
        self._tokens: dict[str, str] = {}
        self._lock = threading.Lock()

    def mount(self, router: Router) -> None:
        """Adds the store's own routes."""
        router.add("POST", r"/v1/xorbs/[^/]+/(?P<xorb>[0-9a-f]{64})", self._put_xorb)
        router.add("POST", r"/v1/shards", self._put_shard)
        router.add("GET", r"/v1/reconstructions/(?P<xet_hash>[0-9a-f]{64})", self._reconstruction)
        router.add("POST", r"/v1/telemetry", lambda request: json_reply({}))

    def mount_blocks(self, router: Router) -> None:
        """Adds to the CDN the route the made-up xorbs are fetched from."""
        router.add("GET", r"/xorbs/(?P<xet_hash>[0-9a-f]{64})/(?P<block>\d+)", self._block)

    def token_reply(self, scope: str, cas_url: str) -> Reply:
        """Grants access to the store; `scope` is ``read`` or ``write``."""
        token = f"xet-{scope}-{hashlib.sha256(f'{scope} {time.time_ns()}'.encode()).hexdigest()[:16]}"
        with self._lock:
            self._tokens[token] = scope
        expires = int(time.time()) + _TOKEN_LIFETIME_S
        # Older clients read the headers, newer ones the body.
        return json_reply(
            {"accessToken": token, "exp": expires, "casUrl": cas_url},
            headers={
                "X-Xet-Cas-Url": cas_url,
                "X-Xet-Access-Token": token,
                "X-Xet-Token-Expiration": str(expires),
            },
        )

    def _require(self, request: Request, scopes: tuple[str, ...]) -> None:
        token = request.headers.get("authorization", "").removeprefix("Bearer ")
        with self._lock:
            scope = self._tokens.get(token)
        if scope not in scopes:
            raise HubError(401 if scope is None else 403, "no access to the content store")

    def _put_xorb(self, request: Request, xorb: str) -> Reply:
        self._require(request, ("write",))
        try:
            chunks = xorb_chunks(request.body)
        except ValueError as error:
            raise HubError(400, str(error)) from error
        with self._lock:
            is_new = xorb not in self._xorbs
            self._xorbs[xorb] = chunks
        return json_reply({"was_inserted": is_new})

    def _put_shard(self, request: Request) -> Reply:
        self._require(request, ("write",))
        for file in shard_files(request.body):
            try:
                with self._lock:
                    blob = blob_of_bytes(joined(file.segments, self._xorbs))
            except KeyError as error:
                raise HubError(400, f"shard names a xorb that was not uploaded: {error}") from error
            if file.sha256 not in (None, blob.sha256):
                raise HubError(400, f"content of {file.xet_hash} has another SHA-256 than the shard says")
            self._store.add(blob, file.xet_hash)
        return json_reply({"result": 1})

    def _blob(self, xet_hash: str) -> Blob:
        blob = self._store.by_xet_hash(xet_hash)
        if blob is None:
            raise HubError(404, f"no file {xet_hash}")
        return blob

    def _reconstruction(self, request: Request, xet_hash: str) -> Reply:
        self._require(request, ("read", "write"))
        blob = self._blob(xet_hash)
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", request.headers.get("range", f"bytes=0-{blob.size}"))
        if asked is None:
            raise HubError(400, "malformed range")
        start, stop = int(asked[1]), min(int(asked[2]) + 1, blob.size)
        if start >= stop:
            raise HubError(416, f"range starts beyond the {blob.size} bytes of the file")
        terms = []
        fetches: dict[str, list[dict[str, object]]] = {}
        for block in range(start // _BLOCK_BYTES, -(-stop // _BLOCK_BYTES)):
            # Chunks of this block that the range touches.
            origin = block * _BLOCK_BYTES
            first = max(0, start - origin) // _CHUNK_BYTES
            last = -(-min(_BLOCK_BYTES, stop - origin) // _CHUNK_BYTES)
            chunks = self._block_chunks(blob, block)
            sizes = [len(chunk) for chunk in chunks]
            name = hashlib.sha256(f"{xet_hash} {block}".encode()).hexdigest()
            chunk_range = {"start": first, "end": last}
            unpacked = sum(sizes[first:last]) - CHUNK_HEADER_BYTES * (last - first)
            terms.append({"hash": name, "unpacked_length": unpacked, "range": chunk_range})
            url_range = {"start": sum(sizes[:first]), "end": sum(sizes[:last]) - 1}
            url = self._signer.sign(f"/xorbs/{xet_hash}/{block}")
            fetches[name] = [{"range": chunk_range, "url": url, "url_range": url_range}]
        offset = start % _CHUNK_BYTES
        return json_reply({"offset_into_first_range": offset, "terms": terms, "fetch_info": fetches})

    def _block_chunks(self, blob: Blob, block: int) -> list[bytes]:
        return stored_chunks(blob.read(block * _BLOCK_BYTES, (block + 1) * _BLOCK_BYTES), _CHUNK_BYTES)

    def _block(self, request: Request, xet_hash: str, block: str) -> Reply:
        if refusal := self._signer.refusal(request):
            return refusal
        content = blob_of_bytes(b"".join(self._block_chunks(self._blob(xet_hash), int(block))))
        return Reply(content=content, headers={"Content-Type": "application/octet-stream"}, ranged=True)
