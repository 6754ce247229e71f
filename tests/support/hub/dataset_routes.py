"""REST interface of dataset repositories: information, listings, references, commits."""

import base64
import json
from collections.abc import Sequence
from typing import Any
from urllib.parse import parse_qs

from tests.support.hub.blobs import blob_of_bytes
from tests.support.hub.cas_routes import ContentStoreRoutes
from tests.support.hub.repositories import Commit, DatasetRepository, FileEntry, isoformat
from tests.support.hub.state import OWNER_NAME, HubState, require_revision
from tests.support.hub.wire import HubError, Reply, Request, Router, json_reply

_API = rf"/api/datasets/{OWNER_NAME}"


class DatasetRoutes:
    """Everything under ``/api/datasets``, ``/api/repos/create`` and ``/api/whoami-v2``."""

    def __init__(self, state: HubState, content_store: ContentStoreRoutes) -> None:
        self._state = state
        self._content_store = content_store

    def mount(self, router: Router) -> None:
        """Adds the routes."""
        router.add("GET", "/api/whoami-v2", self._whoami)
        router.add("POST", "/api/repos/create", self._create)
        router.add("GET", _API, self._info)
        router.add("GET", rf"{_API}/revision/(?P<revision>[^/]+)", self._info)
        router.add("GET", rf"{_API}/refs", self._refs)
        router.add("GET", rf"{_API}/auth-check(?P<write>/write)?", self._auth_check)
        router.add("GET", rf"{_API}/tree/(?P<revision>[^/]+)(?:/(?P<path>.+))?", self._tree)
        router.add("POST", rf"{_API}/paths-info/(?P<revision>[^/]+)", self._paths_info)
        router.add("GET", rf"{_API}/commits/(?P<revision>[^/]+)", self._commits)
        router.add("POST DELETE", rf"{_API}/branch/(?P<branch>[^/]+)", self._branch)
        router.add("POST DELETE", rf"{_API}/tag/(?P<revision>[^/]+)", self._tag)
        router.add("POST", rf"{_API}/preupload/(?P<revision>[^/]+)", self._preupload)
        router.add("POST", rf"{_API}/commit/(?P<branch>[^/]+)", self._commit)
        router.add("GET", rf"{_API}/xet-(?P<scope>read|write)-token/(?P<revision>[^/]+)", self._xet_token)

    def _whoami(self, request: Request) -> Reply:
        account = self._state.accounts.identify(request)
        if account is None:
            raise HubError(401, "Invalid username or password.")
        token = {"displayName": "loopback", "role": account.role}
        return json_reply(
            {
                "type": "user",
                "id": account.name,
                "name": account.name,
                "fullname": account.name,
                "orgs": [],
                "auth": {"type": "access_token", "accessToken": token},
            }
        )

    def _create(self, request: Request) -> Reply:
        account = self._state.accounts.require_write(request, private=False)
        asked = request.json()
        if asked.get("type") != "dataset":
            raise HubError(400, f"this Hub has datasets only, not {asked.get('type')!r}")
        repo_id = f"{asked.get('organization') or account.name}/{asked['name']}"
        url = f"{self._state.endpoint}/datasets/{repo_id}"
        with self._state.lock:
            if repo_id in self._state.datasets:
                return json_reply({"error": "You already created this dataset repo", "url": url}, 409)
            private = asked.get("visibility") == "private" or bool(asked.get("private"))
            self._state.datasets[repo_id] = DatasetRepository(repo_id, private=private)
        return json_reply({"url": url, "name": repo_id, "id": repo_id})

    def _info(self, request: Request, owner: str, name: str, revision: str = "main") -> Reply:
        repository = self._state.readable_dataset(request, owner, name, contents=False)
        commit = require_revision(repository, revision)
        siblings: list[dict[str, Any]] = [{"rfilename": path} for path in commit.files]
        if request.flag("blobs"):
            for sibling, (path, entry) in zip(siblings, commit.files.items(), strict=True):
                listed = self._file(path, entry)
                sibling.update({"size": listed["size"], "blobId": listed["oid"]})
                if entry.is_lfs:
                    lfs = listed["lfs"]
                    sibling["lfs"] = {**lfs, "sha256": lfs["oid"]}
        info: dict[str, Any] = {
            "_id": repository.repo_id,
            "id": repository.repo_id,
            "author": owner,
            "sha": commit.oid,
            "private": repository.private,
            "gated": "manual" if repository.gated else False,
            "disabled": False,
            "downloads": 0,
            "likes": 0,
            "tags": [],
            "createdAt": isoformat(repository.created),
            "lastModified": isoformat(commit.created),
            "siblings": siblings,
        }
        expand = parse_qs(request.query).get("expand")
        if expand:
            info["xetEnabled"] = self._state.xet
            info = {key: value for key, value in info.items() if key in ("_id", "id", *expand)}
        return json_reply(info)

    def _refs(self, request: Request, owner: str, name: str) -> Reply:
        repository = self._state.readable_dataset(request, owner, name, contents=False)

        def listed(kind: str, refs: dict[str, Commit]) -> list[dict[str, str]]:
            return [
                {"name": ref, "ref": f"refs/{kind}/{ref}", "targetCommit": commit.oid}
                for ref, commit in refs.items()
            ]

        with repository.lock:
            branches, tags = listed("heads", repository.branches), listed("tags", repository.tags)
        return json_reply({"branches": branches, "tags": tags, "converts": [], "pullRequests": []})

    def _auth_check(self, request: Request, owner: str, name: str, write: str) -> Reply:
        if write:
            self._state.writable_dataset(request, owner, name)
        else:
            self._state.readable_dataset(request, owner, name, contents=True)
        return json_reply({})

    def _tree(self, request: Request, owner: str, name: str, revision: str, path: str) -> Reply:
        repository = self._state.readable_dataset(request, owner, name, contents=True)
        commit = require_revision(repository, revision)
        directories = commit.directories()
        if path and path not in directories:
            raise HubError(404, f"{path} does not exist on {revision!r}", code="EntryNotFound")
        prefix = f"{path}/" if path else ""
        expand = request.flag("expand")
        found = [
            candidate
            for candidate in sorted([*directories, *commit.files])
            if candidate.startswith(prefix)
            and (request.flag("recursive") or "/" not in candidate[len(prefix) :])
        ]
        listed = self._listed(commit, directories, found, expand)
        return self._state.page(request, listed, 50 if expand else 1000)

    def _paths_info(self, request: Request, owner: str, name: str, revision: str) -> Reply:
        repository = self._state.readable_dataset(request, owner, name, contents=True)
        commit = require_revision(repository, revision)
        if "json" in request.headers.get("content-type", ""):
            asked = request.json()
            paths, expand = asked["paths"], bool(asked.get("expand"))
        else:
            form = parse_qs(request.body.decode())
            paths, expand = form.get("paths", []), form.get("expand", ["false"])[-1].lower() == "true"
        directories = commit.directories()
        found = [path for path in paths if path in directories or path in commit.files]
        return json_reply(self._listed(commit, directories, found, expand))

    def _listed(
        self, commit: Commit, directories: dict[str, str], paths: Sequence[str], expand: bool
    ) -> list[dict[str, Any]]:
        items = []
        for path in paths:
            if path in directories:
                items.append({"type": "directory", "path": path, "oid": directories[path], "size": 0})
                continue
            item = self._file(path, commit.files[path])
            if expand:
                last = commit.last_change_of(path)
                item["lastCommit"] = {"id": last.oid, "title": last.title, "date": isoformat(last.created)}
            items.append(item)
        return items

    def _file(self, path: str, entry: FileEntry) -> dict[str, Any]:
        item: dict[str, Any] = {"type": "file", "path": path, "size": entry.blob.size, "oid": entry.git_oid}
        if entry.is_lfs:
            pointer_size = len(entry.lfs_pointer)
            item["lfs"] = {"oid": entry.blob.sha256, "size": entry.blob.size, "pointerSize": pointer_size}
            if self._state.xet:
                item["xetHash"] = self._state.store.xet_hash(entry.blob)
        return item

    def _commits(self, request: Request, owner: str, name: str, revision: str) -> Reply:
        repository = self._state.readable_dataset(request, owner, name, contents=False)
        commit: Commit | None = require_revision(repository, revision)
        history = []
        while commit is not None:
            history.append(
                {
                    "id": commit.oid,
                    "title": commit.title,
                    "message": commit.message,
                    "authors": [{"user": "loopback"}],
                    "date": isoformat(commit.created),
                }
            )
            commit = commit.parent
        return self._state.page(request, history)

    def _branch(self, request: Request, owner: str, name: str, branch: str) -> Reply:
        repository = self._state.writable_dataset(request, owner, name)
        with repository.lock:
            if request.method == "DELETE":
                if repository.branches.pop(branch, None) is None:
                    raise HubError(404, f"Invalid rev id: {branch}", code="RevisionNotFound")
                return json_reply({})
            if branch in repository.branches:
                raise HubError(409, f"Reference already exists: refs/heads/{branch}")
            start = request.json().get("startingPoint") or "main"
            repository.branches[branch] = require_revision(repository, start)
        return json_reply({})

    def _tag(self, request: Request, owner: str, name: str, revision: str) -> Reply:
        repository = self._state.writable_dataset(request, owner, name)
        with repository.lock:
            if request.method == "DELETE":
                if repository.tags.pop(revision, None) is None:
                    raise HubError(404, f"Invalid rev id: {revision}", code="RevisionNotFound")
                return json_reply({})
            tag = request.json()["tag"]
            if tag in repository.tags:
                raise HubError(409, f"Tag reference exists already: refs/tags/{tag}")
            repository.tags[tag] = require_revision(repository, revision)
        return json_reply({})

    def _preupload(self, request: Request, owner: str, name: str, revision: str) -> Reply:
        repository = self._state.writable_dataset(request, owner, name)
        commit = require_revision(repository, revision)
        files = []
        for asked in request.json()["files"]:
            path = asked["path"]
            present = commit.files.get(path)
            # For an LFS file the Hub tells the SHA-256 here, the id clients compare theirs with.
            oid = present and (present.blob.sha256 if present.is_lfs else present.git_oid)
            mode = "lfs" if repository.wants_lfs(path, asked["size"]) else "regular"
            files.append({"path": path, "uploadMode": mode, "shouldIgnore": False, "oid": oid})
        return json_reply({"files": files})

    def _commit(self, request: Request, owner: str, name: str, branch: str) -> Reply:
        repository = self._state.writable_dataset(request, owner, name)
        if request.flag("create_pr"):
            raise HubError(400, "this Hub has no pull requests")
        header: dict[str, Any] = {}
        add: dict[str, FileEntry] = {}
        delete: list[str] = []
        for line in request.body.splitlines():
            item = json.loads(line)
            value = item["value"]
            match item["key"]:
                case "header":
                    header = value
                case "file":
                    blob = self._state.store.add(blob_of_bytes(base64.b64decode(value["content"])))
                    add[value["path"]] = FileEntry(blob, is_lfs=False)
                case "lfsFile":
                    content = self._state.store.by_sha256(value["oid"])
                    if content is None or content.size != value.get("size", content.size):
                        raise HubError(400, f"LFS pointer to a file that was not uploaded: {value['path']}")
                    add[value["path"]] = FileEntry(content, is_lfs=True)
                case "deletedFile":
                    delete.append(value["path"])
                case "deletedFolder":
                    delete.append(value["path"].rstrip("/") + "/")
                case other:
                    raise HubError(400, f"unknown commit operation {other!r}")
        with repository.lock:
            if branch not in repository.branches:
                raise HubError(404, f"Invalid rev id: {branch}", code="RevisionNotFound")
            parent = header.get("parentCommit")
            if parent is not None and parent != repository.branches[branch].oid:
                raise HubError(412, "A commit has happened since. Please refresh and try again.")
            commit = repository.commit(
                branch, add, delete, title=header.get("summary", ""), message=header.get("description", "")
            )
        url = f"{self._state.endpoint}/datasets/{repository.repo_id}/commit/{commit.oid}"
        return json_reply({"success": True, "commitOid": commit.oid, "commitUrl": url, "hookOutput": ""})

    def _xet_token(self, request: Request, owner: str, name: str, scope: str, revision: str) -> Reply:
        if scope == "write":
            repository = self._state.writable_dataset(request, owner, name)
        else:
            repository = self._state.readable_dataset(request, owner, name, contents=True)
        require_revision(repository, revision)
        return self._content_store.token_reply(scope, self._state.cas_url)
