"""The routes of the loopback hub, after the real hub's HTTP interface."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from hub_store import MAIN, Commit, File, Repository, User, check_card, front_matter, is_lfs

__all__ = ["Reply", "Request", "answer"]

_DATE = "2026-01-01T00:00:00.000Z"
_PLURAL = {"models": "model", "datasets": "dataset", "spaces": "space"}


@dataclass
class Request:
    """A request as it came, and its parts."""

    method: str
    target: str
    headers: dict[str, str]
    body: bytes

    @property
    def path(self) -> str:
        return urlsplit(self.target).path

    @property
    def query(self) -> dict[str, list[str]]:
        return parse_qs(urlsplit(self.target).query)

    def asks(self, name: str) -> bool:
        return self.query.get(name, ["false"])[0].lower() in ("true", "1")

    @property
    def json(self) -> Any:
        return json.loads(self.body or b"{}")


@dataclass
class Reply:
    status: int = 200
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)


class Refusal(Exception):
    def __init__(self, status: int, words: str, code: str | None = None, **more: Any) -> None:
        super().__init__(words)
        headers = {"X-Error-Message": words, **({"X-Error-Code": code} if code else {})}
        self.reply = Reply(status, json.dumps({"error": words, **more}).encode(), headers)


def answer(hub: Any, request: Request) -> Reply:
    """Find the route of a request and follow it."""
    line = f"{request.method} {request.path}"
    try:
        user = _user(hub, request)
        for pattern, route in ROUTES:
            match = re.fullmatch(pattern, line)
            if match:
                found = route(hub, request, user, **_unquoted(match.groupdict()))
                return found if isinstance(found, Reply) else _json(found)
        raise Refusal(404, "Sorry, we can't find the page you are looking for.")
    except Refusal as refusal:
        return refusal.reply


def _json(content: Any) -> Reply:
    return Reply(200, json.dumps(content).encode())


def _unquoted(groups: dict[str, str | None]) -> dict[str, str]:
    return {key: unquote(value or "") for key, value in groups.items()}


# --- who asks, and what for ----------------------------------------------------------------------


def _user(hub: Any, request: Request) -> User | None:
    given = request.headers.get("authorization")
    if given is None or request.path.startswith(("/cdn/", "/lfs-upload/")):
        return None
    user = hub.store.users.get(given.removeprefix("Bearer "))
    if user is None:
        raise Refusal(401, "Invalid credentials in Authorization header")
    return user


def _repository(hub: Any, user: User | None, kind: str, name: str) -> Repository:
    """The repository, unless it is hidden from this user: then it looks as if there were none."""
    found = hub.store.repositories.get((_PLURAL.get(kind, kind), name))
    if found is None or (found.private and not (user and user.owns(name))):
        if user is None:
            raise Refusal(401, "Invalid username or password.", "RepoNotFound")
        raise Refusal(404, "Repository not found", "RepoNotFound")
    return found


def _writable(hub: Any, user: User | None, kind: str, name: str) -> Repository:
    repository = _repository(hub, user, kind, name)
    if user is None:
        raise Refusal(401, "Invalid username or password.")
    if not user.owns(name):
        raise Refusal(403, "Forbidden: you don't have the rights to write to this repository")
    if user.role != "write":
        raise Refusal(403, "Forbidden: pass a token with the write role")
    return repository


def _commit(repository: Repository, revision: str) -> Commit:
    found = repository.find(revision or MAIN)
    if found is None:
        raise Refusal(404, f"Invalid rev id: {revision}", "RevisionNotFound")
    return found


def whoami(hub: Any, request: Request, user: User | None) -> Any:
    if user is None:
        raise Refusal(401, "Invalid username or password.")
    token = {"displayName": "test", "role": user.role, "createdAt": _DATE}
    orgs = [{"type": "org", "name": org, "roleInOrg": "write"} for org in user.orgs]
    auth = {"type": "access_token", "accessToken": token}
    return {"type": "user", "id": user.name, "name": user.name, "orgs": orgs, "auth": auth}


def auth_check(
    hub: Any, request: Request, user: User | None, kind: str, name: str, write: str
) -> Any:
    repository = (_writable if write else _repository)(hub, user, kind, name)
    _refuse_gated(repository, user)
    return {}


def _refuse_gated(repository: Repository, user: User | None) -> None:
    if repository.gated and not (user and user.owns(repository.name)):
        words = f"Access to {repository.kind} {repository.name} is restricted."
        raise Refusal(403 if user else 401, words, "GatedRepo")


# --- repositories --------------------------------------------------------------------------------


def create_repo(hub: Any, request: Request, user: User | None) -> Any:
    wanted = request.json
    kind = wanted.get("type") or "model"
    if user is None:
        raise Refusal(401, "Invalid username or password.")
    name = f"{wanted.get('organization') or user.name}/{wanted['name']}"
    if not user.owns(name):
        raise Refusal(403, f'You don\'t have the rights to create a {kind} under "{name}"')
    if user.role != "write":
        raise Refusal(403, f"You don't have the rights to create a {kind}: read token")
    url = f"{hub.url}/{'' if kind == 'model' else kind + 's/'}{name}"
    if (kind, name) in hub.store.repositories:
        raise Refusal(409, f"You already created this {kind} repo", url=url)
    private = bool(wanted.get("private")) or wanted.get("visibility") == "private"
    hub.store.create(name, kind, private=private)
    return {"url": url, "name": name, "id": name}


def delete_repo(hub: Any, request: Request, user: User | None) -> Any:
    wanted = request.json
    kind = wanted.get("type") or "model"
    name = f"{wanted.get('organization') or (user.name if user else '')}/{wanted['name']}"
    _writable(hub, user, kind, name)
    del hub.store.repositories[kind, name]
    return {}


def settings(hub: Any, request: Request, user: User | None, kind: str, name: str) -> Any:
    repository = _writable(hub, user, kind, name)
    wanted = request.json
    if "private" in wanted or "visibility" in wanted:
        repository.private = wanted.get("private", wanted.get("visibility") == "private")
    return {"private": repository.private}


def repo_info(
    hub: Any, request: Request, user: User | None, kind: str, name: str, revision: str = ""
) -> Any:
    repository = _repository(hub, user, kind, name)
    commit = _commit(repository, revision)
    readme = commit.files.get("README.md")
    card, _ = front_matter(readme.content.decode(errors="replace")) if readme else (None, None)
    card = card if isinstance(card, dict) else {}
    tags = [tag for tag in card.get("tags") or [] if isinstance(tag, str)]
    tags += [f"license:{card['license']}"] if card.get("license") else []
    return {
        "_id": hashlib.sha1(name.encode()).hexdigest()[:24],
        "id": name,
        "modelId": name,
        "author": name.split("/")[0],
        "sha": commit.sha,
        "lastModified": _DATE,
        "createdAt": _DATE,
        "private": repository.private,
        "gated": "manual" if repository.gated else False,
        "disabled": False,
        "tags": tags,
        "library_name": card.get("library_name"),
        "pipeline_tag": card.get("pipeline_tag"),
        "cardData": json.loads(json.dumps(card, default=str)),
        "siblings": [
            {"rfilename": path, **(_described(path, file) if request.asks("blobs") else {})}
            for path, file in commit.files.items()
        ],
        "downloads": 0,
        "likes": 0,
    }


def _described(path: str, file: File) -> dict[str, Any]:
    found = {"type": "file", "path": path, "size": len(file.content), "oid": file.blob_id}
    found["blobId"] = file.blob_id
    if file.is_lfs:
        pointer = {"size": len(file.content), "pointerSize": len(file.pointer)}
        found["lfs"] = {"oid": file.sha256, "sha256": file.sha256, **pointer}
    return found


def tree(
    hub: Any, request: Request, user: User | None, kind: str, name: str, revision: str, path: str
) -> Any:
    commit = _commit(_repository(hub, user, kind, name), revision)
    found = _listed(commit, path.strip("/"), recursive=request.asks("recursive"))
    if not found and path:
        raise Refusal(404, f"{path} does not exist on {revision}", "EntryNotFound")
    return found


def _listed(commit: Commit, folder: str, *, recursive: bool) -> list[dict[str, Any]]:
    prefix = f"{folder}/" if folder else ""
    files, folders = [], set()
    for path, file in commit.files.items():
        if not path.startswith(prefix):
            continue
        parts = path[len(prefix) :].split("/")
        depth = len(parts) if recursive else 2
        folders |= {prefix + "/".join(parts[:n]) for n in range(1, min(depth, len(parts)))}
        if recursive or len(parts) == 1:
            files.append(_with_commit(_described(path, file), commit))
    return [_folder(path, commit) for path in sorted(folders)] + files


def _folder(path: str, commit: Commit) -> dict[str, Any]:
    oid = hashlib.sha1(path.encode()).hexdigest()
    return _with_commit({"type": "directory", "path": path, "size": 0, "oid": oid}, commit)


def _with_commit(entry: dict[str, Any], commit: Commit) -> dict[str, Any]:
    return {**entry, "lastCommit": {"id": commit.sha, "title": commit.title, "date": _DATE}}


def paths_info(
    hub: Any, request: Request, user: User | None, kind: str, name: str, revision: str
) -> Any:
    commit = _commit(_repository(hub, user, kind, name), revision)
    if "json" in request.headers.get("content-type", ""):
        paths = request.json["paths"]
    else:
        paths = parse_qs(request.body.decode()).get("paths", [])
    found = []
    for path in (path.strip("/") for path in paths):
        if path in commit.files:
            found.append(_with_commit(_described(path, commit.files[path]), commit))
        elif any(known.startswith(f"{path}/") for known in commit.files):
            found.append(_folder(path, commit))
    return found


def refs(hub: Any, request: Request, user: User | None, kind: str, name: str) -> Any:
    repository = _repository(hub, user, kind, name)

    def listed(known: dict[str, str], place: str) -> list[dict[str, str]]:
        return [{"name": n, "ref": f"{place}/{n}", "targetCommit": s} for n, s in known.items()]

    branches = listed(repository.branches, "refs/heads")
    tags = listed(repository.tags, "refs/tags")
    return {"branches": branches, "tags": tags, "converts": [], "pullRequests": []}


def commits(
    hub: Any, request: Request, user: User | None, kind: str, name: str, revision: str
) -> Any:
    repository = _repository(hub, user, kind, name)
    _commit(repository, revision)
    author = [{"user": name.split("/")[0]}]
    return [
        {"id": c.sha, "title": c.title, "message": "", "authors": author, "date": _DATE}
        for c in repository.history(revision)
    ]


def branch(hub: Any, request: Request, user: User | None, kind: str, name: str, ref: str) -> Any:
    repository = _writable(hub, user, kind, name)
    if request.method == "DELETE":
        repository.branches.pop(ref, None)
    elif ref in repository.branches:
        raise Refusal(409, f"Reference already exists: refs/heads/{ref}")
    else:
        start = _commit(repository, request.json.get("startingPoint") or MAIN)
        repository.branches[ref] = start.sha
    return {}


def tag(hub: Any, request: Request, user: User | None, kind: str, name: str, ref: str) -> Any:
    repository = _writable(hub, user, kind, name)
    if request.method == "DELETE":
        repository.tags.pop(ref, None)
        return {}
    wanted = request.json["tag"]
    if wanted in repository.tags:
        raise Refusal(409, f"Tag reference exists already: {wanted}")
    repository.tags[wanted] = _commit(repository, ref).sha
    return {}


# --- what is pushed ------------------------------------------------------------------------------


def preupload(
    hub: Any, request: Request, user: User | None, kind: str, name: str, revision: str
) -> Any:
    commit = _commit(_writable(hub, user, kind, name), revision)
    found = []
    for entry in request.json["files"]:
        mode = "lfs" if is_lfs(entry["path"], entry["size"]) else "regular"
        there = commit.files.get(entry["path"])
        oid = there.etag if there else None
        found.append({"path": entry["path"], "uploadMode": mode, "shouldIgnore": False, "oid": oid})
    return {"files": found}


def lfs_batch(hub: Any, request: Request, user: User | None, kind: str, name: str) -> Any:
    _writable(hub, user, kind or "models", name)
    wanted = request.json
    objects = []
    for entry in wanted["objects"]:
        found: dict[str, Any] = {"oid": entry["oid"], "size": entry["size"]}
        if entry["oid"] not in hub.store.objects:
            verify = {"href": f"{hub.url}/{name}.git/info/lfs/objects/verify", "header": {}}
            upload = {"href": f"{hub.cdn}/lfs-upload/{entry['oid']}", "header": {}}
            found["actions"] = {"upload": upload, "verify": verify}
        objects.append(found)
    xet = hub.xet and "xet" in wanted.get("transfers", [])
    return {"transfer": "xet" if xet else "basic", "objects": objects}


def lfs_upload(hub: Any, request: Request, user: User | None, oid: str) -> Any:
    if hashlib.sha256(request.body).hexdigest() != oid:
        raise Refusal(400, "the content is not what its sha256 says")
    hub.store.objects[oid] = request.body
    return Reply()


def lfs_verify(hub: Any, request: Request, user: User | None, kind: str, name: str) -> Any:
    wanted = request.json
    if len(hub.store.objects.get(wanted["oid"], b"")) != wanted["size"]:
        raise Refusal(404, "this object was not uploaded")
    return {}


def commit(
    hub: Any, request: Request, user: User | None, kind: str, name: str, revision: str
) -> Any:
    repository = _writable(hub, user, kind, name)
    if revision not in repository.branches:
        raise Refusal(404, f"Invalid rev id: {revision}", "RevisionNotFound")
    head = _commit(repository, revision)
    lines = [json.loads(line) for line in request.body.splitlines() if line.strip()]
    header = next(line["value"] for line in lines if line["key"] == "header")
    parent = header.get("parentCommit")
    if parent and not head.sha.startswith(parent):
        raise Refusal(412, "A commit has happened since. Please refresh and try again.")
    changes: dict[str, File | None] = {}
    for line in lines:
        if line["key"] != "header":
            changes |= _change(hub, head, line["key"], line["value"])
    readme = changes.get("README.md")
    if readme is not None:
        errors, _ = check_card(readme.content.decode(errors="replace"), repository.kind)
        if errors:
            raise Refusal(400, f"Invalid metadata in README.md: {'; '.join(errors)}")
    made = repository.add(revision, changes, header["summary"])
    url = f"{hub.url}/{'' if repository.kind == 'model' else kind + '/'}{name}/commit/{made.sha}"
    return {"success": True, "commitOid": made.sha, "commitUrl": url, "hookOutput": ""}


def _change(hub: Any, head: Commit, key: str, value: dict[str, Any]) -> dict[str, File | None]:
    path = value["path"]
    if key == "file":
        content = value["content"]
        encoded = value.get("encoding") == "base64"
        return {path: File(base64.b64decode(content) if encoded else content.encode(), False)}
    if key == "lfsFile":
        known = {f.sha256: f.content for f in head.files.values() if f.is_lfs}
        content = hub.store.objects.get(value["oid"], known.get(value["oid"]))
        if content is None:
            raise Refusal(400, f"{path}: its content {value['oid']} was not uploaded")
        return {path: File(content, True)}
    gone = [path] if key == "deletedFile" else []
    if key == "deletedFolder":
        gone = [known for known in head.files if known.startswith(path.rstrip("/") + "/")]
    if not gone or any(known not in head.files for known in gone):
        raise Refusal(404, "A file with this name doesn't exist", "EntryNotFound")
    return dict.fromkeys(gone)


def xet_write_token(
    hub: Any, request: Request, user: User | None, kind: str, name: str, revision: str
) -> Any:
    _writable(hub, user, kind, name)
    if not hub.xet_token:
        raise Refusal(404, "Sorry, we can't find the page you are looking for.")
    url, token, end = f"{hub.cdn}/cas", "xet-token", int(time.time()) + 3600
    headers = {
        "X-Xet-Cas-Url": url,
        "X-Xet-Access-Token": token,
        "X-Xet-Token-Expiration": str(end),
    }
    body = json.dumps({"casUrl": url, "accessToken": token, "exp": end}).encode()
    return Reply(200, body, headers)


def validate_yaml(hub: Any, request: Request, user: User | None) -> Any:
    wanted = request.json
    errors, warnings = check_card(wanted["content"], wanted.get("repoType") or "model")
    found = {
        "errors": [{"message": text} for text in errors],
        "warnings": [{"message": text} for text in warnings],
    }
    return Reply(400 if errors else 200, json.dumps(found).encode())


# --- what is downloaded --------------------------------------------------------------------------


def resolve(
    hub: Any, request: Request, user: User | None, kind: str, name: str, revision: str, path: str
) -> Reply:
    repository = _repository(hub, user, kind or "models", name)
    _refuse_gated(repository, user)
    found = _commit(repository, revision)
    headers = {"X-Repo-Commit": found.sha, "Accept-Ranges": "bytes"}
    file = found.files.get(path)
    if file is None:
        refusal = Refusal(404, "Entry not found", "EntryNotFound")
        refusal.reply.headers |= headers
        raise refusal
    headers["ETag"] = f'"{file.etag}"'
    if not file.is_lfs:
        return _content(request, file.content, headers)
    hub.store.objects.setdefault(file.sha256, file.content)
    headers |= {"X-Linked-Etag": f'"{file.sha256}"', "X-Linked-Size": str(len(file.content))}
    headers["Location"] = f"{hub.cdn}/cdn/{file.sha256}"
    if hub.xet:
        route = f"{hub.url}/api/models/{name}/xet-read-token/{found.sha}"
        headers |= {"X-Xet-Hash": file.sha256, "X-Xet-Refresh-Route": route}
    return Reply(302, b"", headers)


def cdn(hub: Any, request: Request, user: User | None, oid: str) -> Reply:
    content = hub.store.objects.get(oid)
    if content is None:
        raise Refusal(403, "this address has expired")
    return _content(request, content, {"ETag": f'"{oid[:32]}"', "Accept-Ranges": "bytes"})


def _content(request: Request, content: bytes, headers: dict[str, str]) -> Reply:
    headers = {"Content-Type": "application/octet-stream", **headers}
    match = re.fullmatch(r"bytes=(\d*)-(\d*)", request.headers.get("range", ""))
    if not match or not (match[1] or match[2]):
        length = {"Content-Length": str(len(content))} if request.method == "HEAD" else {}
        return Reply(200, b"" if request.method == "HEAD" else content, {**headers, **length})
    first = int(match[1]) if match[1] else max(len(content) - int(match[2]), 0)
    last = min(int(match[2]), len(content) - 1) if match[1] and match[2] else len(content) - 1
    if first >= len(content):
        return Reply(416, b"", {**headers, "Content-Range": f"bytes */{len(content)}"})
    headers["Content-Range"] = f"bytes {first}-{last}/{len(content)}"
    return Reply(206, content[first : last + 1], headers)


_API = r"/api/(?P<kind>models|datasets|spaces)/(?P<name>[^/]+/[^/]+)"
_FILE = r"/(?:(?P<kind>datasets|spaces)/)?(?P<name>[^/]+/[^/]+)"
_REF = r"(?P<revision>[^/]+)"
ROUTES: list[tuple[str, Callable[..., Any]]] = [
    (r"GET /api/whoami-v2", whoami),
    (r"POST /api/repos/create", create_repo),
    (r"DELETE /api/repos/delete", delete_repo),
    (r"POST /api/validate-yaml", validate_yaml),
    (rf"GET {_API}", repo_info),
    (rf"GET {_API}/revision/{_REF}", repo_info),
    (rf"GET {_API}/tree/{_REF}(?P<path>/.*)?", tree),
    (rf"POST {_API}/paths-info/{_REF}", paths_info),
    (rf"GET {_API}/refs", refs),
    (rf"GET {_API}/commits/{_REF}", commits),
    (rf"GET {_API}/auth-check(?P<write>/write)?", auth_check),
    (rf"PUT {_API}/settings", settings),
    (rf"(?:POST|DELETE) {_API}/branch/(?P<ref>.+)", branch),
    (rf"(?:POST|DELETE) {_API}/tag/(?P<ref>.+)", tag),
    (rf"GET {_API}/xet-write-token/{_REF}", xet_write_token),
    (rf"POST {_API}/preupload/{_REF}", preupload),
    (rf"POST {_API}/commit/{_REF}", commit),
    (rf"POST {_FILE}\.git/info/lfs/objects/batch", lfs_batch),
    (rf"POST {_FILE}\.git/info/lfs/objects/verify", lfs_verify),
    (r"PUT /lfs-upload/(?P<oid>[0-9a-f]{64})", lfs_upload),
    (r"(?:GET|HEAD) /cdn/(?P<oid>[0-9a-f]{64})", cdn),
    (rf"(?:GET|HEAD) {_FILE}/resolve/{_REF}/(?P<path>.+)", resolve),
]
