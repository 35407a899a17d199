"""Routes of the loopback hub; they copy the HTTP interface of the real hub."""

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

__all__ = ["Reply", "Request", "handle_request"]

_DATE = "2026-01-01T00:00:00.000Z"
_PLURAL = {"models": "model", "datasets": "dataset", "spaces": "space"}


@dataclass
class Request:
    """A request as received, and its parts."""

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

    def has_flag(self, name: str) -> bool:
        return self.query.get(name, ["false"])[0].lower() in ("true", "1")

    @property
    def json(self) -> Any:
        return json.loads(self.body or b"{}")


@dataclass
class Reply:
    status: int = 200
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)


class RequestRejected(Exception):
    def __init__(self, status: int, message: str, code: str | None = None, **extra: Any) -> None:
        super().__init__(message)
        headers = {"X-Error-Message": message, **({"X-Error-Code": code} if code else {})}
        self.reply = Reply(status, json.dumps({"error": message, **extra}).encode(), headers)


def handle_request(hub: Any, request: Request) -> Reply:
    """Find the route of a request and call it."""
    line = f"{request.method} {request.path}"
    try:
        user = authenticate(hub, request)
        for pattern, route in ROUTES:
            match = re.fullmatch(pattern, line)
            if match:
                found = route(hub, request, user, **unquote_groups(match.groupdict()))
                return found if isinstance(found, Reply) else json_reply(found)
        raise RequestRejected(404, "Sorry, we can't find the page you are looking for.")
    except RequestRejected as refusal:
        return refusal.reply


def json_reply(content: Any) -> Reply:
    return Reply(200, json.dumps(content).encode())


def unquote_groups(groups: dict[str, str | None]) -> dict[str, str]:
    return {key: unquote(value or "") for key, value in groups.items()}


# --- users and access ----------------------------------------------------------------------------


def authenticate(hub: Any, request: Request) -> User | None:
    authorization = request.headers.get("authorization")
    if authorization is None or request.path.startswith(("/cdn/", "/lfs-upload/")):
        return None
    user = hub.store.users.get(authorization.removeprefix("Bearer "))
    if user is None:
        raise RequestRejected(401, "Invalid credentials in Authorization header")
    return user


def find_repository(hub: Any, user: User | None, kind: str, name: str) -> Repository:
    """Return the repository; one that is hidden from this user seems not to exist."""
    repository = hub.store.repositories.get((_PLURAL.get(kind, kind), name))
    if repository is None or (repository.private and not (user and user.owns(name))):
        if user is None:
            raise RequestRejected(401, "Invalid username or password.", "RepoNotFound")
        raise RequestRejected(404, "Repository not found", "RepoNotFound")
    return repository


def find_writable_repository(hub: Any, user: User | None, kind: str, name: str) -> Repository:
    repository = find_repository(hub, user, kind, name)
    if user is None:
        raise RequestRejected(401, "Invalid username or password.")
    if not user.owns(name):
        raise RequestRejected(
            403, "Forbidden: you don't have the rights to write to this repository"
        )
    if user.role != "write":
        raise RequestRejected(403, "Forbidden: pass a token with the write role")
    return repository


def find_commit(repository: Repository, revision: str) -> Commit:
    commit = repository.find(revision or MAIN)
    if commit is None:
        raise RequestRejected(404, f"Invalid rev id: {revision}", "RevisionNotFound")
    return commit


def whoami(hub: Any, request: Request, user: User | None) -> Any:
    if user is None:
        raise RequestRejected(401, "Invalid username or password.")
    token = {"displayName": "test", "role": user.role, "createdAt": _DATE}
    orgs = [{"type": "org", "name": org, "roleInOrg": "write"} for org in user.orgs]
    auth = {"type": "access_token", "accessToken": token}
    return {"type": "user", "id": user.name, "name": user.name, "orgs": orgs, "auth": auth}


def auth_check(
    hub: Any, request: Request, user: User | None, kind: str, name: str, write: str
) -> Any:
    repository = (find_writable_repository if write else find_repository)(hub, user, kind, name)
    reject_gated(repository, user)
    return {}


def reject_gated(repository: Repository, user: User | None) -> None:
    if repository.gated and not (user and user.owns(repository.name)):
        message = f"Access to {repository.kind} {repository.name} is restricted."
        raise RequestRejected(403 if user else 401, message, "GatedRepo")


# --- repositories --------------------------------------------------------------------------------


def create_repo(hub: Any, request: Request, user: User | None) -> Any:
    body = request.json
    kind = body.get("type") or "model"
    if user is None:
        raise RequestRejected(401, "Invalid username or password.")
    name = f"{body.get('organization') or user.name}/{body['name']}"
    if not user.owns(name):
        raise RequestRejected(403, f'You don\'t have the rights to create a {kind} under "{name}"')
    if user.role != "write":
        raise RequestRejected(403, f"You don't have the rights to create a {kind}: read token")
    url = f"{hub.url}/{'' if kind == 'model' else kind + 's/'}{name}"
    if (kind, name) in hub.store.repositories:
        raise RequestRejected(409, f"You already created this {kind} repo", url=url)
    private = bool(body.get("private")) or body.get("visibility") == "private"
    hub.store.create(name, kind, private=private)
    return {"url": url, "name": name, "id": name}


def repo_info(
    hub: Any, request: Request, user: User | None, kind: str, name: str, revision: str = ""
) -> Any:
    repository = find_repository(hub, user, kind, name)
    commit = find_commit(repository, revision)
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
            {"rfilename": path, **(file_entry(path, file) if request.has_flag("blobs") else {})}
            for path, file in commit.files.items()
        ],
        "downloads": 0,
        "likes": 0,
    }


def file_entry(path: str, file: File) -> dict[str, Any]:
    found = {"type": "file", "path": path, "size": len(file.content), "oid": file.blob_id}
    found["blobId"] = file.blob_id
    if file.is_lfs:
        pointer = {"size": len(file.content), "pointerSize": len(file.pointer)}
        found["lfs"] = {"oid": file.sha256, "sha256": file.sha256, **pointer}
    return found


def tree(
    hub: Any, request: Request, user: User | None, kind: str, name: str, revision: str, path: str
) -> Any:
    commit = find_commit(find_repository(hub, user, kind, name), revision)
    entries = list_folder(commit, path.strip("/"), recursive=request.has_flag("recursive"))
    if not entries and path:
        raise RequestRejected(404, f"{path} does not exist on {revision}", "EntryNotFound")
    return entries


def list_folder(commit: Commit, folder: str, *, recursive: bool) -> list[dict[str, Any]]:
    prefix = f"{folder}/" if folder else ""
    files, folders = [], set()
    for path, file in commit.files.items():
        if not path.startswith(prefix):
            continue
        parts = path[len(prefix) :].split("/")
        depth = len(parts) if recursive else 2
        folders |= {prefix + "/".join(parts[:n]) for n in range(1, min(depth, len(parts)))}
        if recursive or len(parts) == 1:
            files.append(add_last_commit(file_entry(path, file), commit))
    return [folder_entry(path, commit) for path in sorted(folders)] + files


def folder_entry(path: str, commit: Commit) -> dict[str, Any]:
    oid = hashlib.sha1(path.encode()).hexdigest()
    return add_last_commit({"type": "directory", "path": path, "size": 0, "oid": oid}, commit)


def add_last_commit(entry: dict[str, Any], commit: Commit) -> dict[str, Any]:
    return {**entry, "lastCommit": {"id": commit.sha, "title": commit.title, "date": _DATE}}


def paths_info(
    hub: Any, request: Request, user: User | None, kind: str, name: str, revision: str
) -> Any:
    commit = find_commit(find_repository(hub, user, kind, name), revision)
    if "json" in request.headers.get("content-type", ""):
        paths = request.json["paths"]
    else:
        paths = parse_qs(request.body.decode()).get("paths", [])
    entries = []
    for path in (path.strip("/") for path in paths):
        if path in commit.files:
            entries.append(add_last_commit(file_entry(path, commit.files[path]), commit))
        elif any(known.startswith(f"{path}/") for known in commit.files):
            entries.append(folder_entry(path, commit))
    return entries


def refs(hub: Any, request: Request, user: User | None, kind: str, name: str) -> Any:
    repository = find_repository(hub, user, kind, name)

    def list_refs(known: dict[str, str], place: str) -> list[dict[str, str]]:
        return [{"name": n, "ref": f"{place}/{n}", "targetCommit": s} for n, s in known.items()]

    branches = list_refs(repository.branches, "refs/heads")
    tags = list_refs(repository.tags, "refs/tags")
    return {"branches": branches, "tags": tags, "converts": [], "pullRequests": []}


def branch(hub: Any, request: Request, user: User | None, kind: str, name: str, ref: str) -> Any:
    repository = find_writable_repository(hub, user, kind, name)
    if request.method == "DELETE":
        repository.branches.pop(ref, None)
    elif ref in repository.branches:
        raise RequestRejected(409, f"Reference already exists: refs/heads/{ref}")
    else:
        start = find_commit(repository, request.json.get("startingPoint") or MAIN)
        repository.branches[ref] = start.sha
    return {}


# --- uploads -------------------------------------------------------------------------------------


def preupload(
    hub: Any, request: Request, user: User | None, kind: str, name: str, revision: str
) -> Any:
    commit = find_commit(find_writable_repository(hub, user, kind, name), revision)
    entries = []
    for entry in request.json["files"]:
        mode = "lfs" if is_lfs(entry["path"], entry["size"]) else "regular"
        existing_file = commit.files.get(entry["path"])
        oid = existing_file.etag if existing_file else None
        entries.append(
            {"path": entry["path"], "uploadMode": mode, "shouldIgnore": False, "oid": oid}
        )
    return {"files": entries}


def lfs_batch(hub: Any, request: Request, user: User | None, kind: str, name: str) -> Any:
    find_writable_repository(hub, user, kind or "models", name)
    body = request.json
    objects = []
    for entry in body["objects"]:
        lfs_object: dict[str, Any] = {"oid": entry["oid"], "size": entry["size"]}
        if entry["oid"] not in hub.store.objects:
            verify = {"href": f"{hub.url}/{name}.git/info/lfs/objects/verify", "header": {}}
            upload = {"href": f"{hub.cdn}/lfs-upload/{entry['oid']}", "header": {}}
            lfs_object["actions"] = {"upload": upload, "verify": verify}
        objects.append(lfs_object)
    xet = hub.xet and "xet" in body.get("transfers", [])
    return {"transfer": "xet" if xet else "basic", "objects": objects}


def lfs_upload(hub: Any, request: Request, user: User | None, oid: str) -> Any:
    if hashlib.sha256(request.body).hexdigest() != oid:
        raise RequestRejected(400, "the content does not match its sha256")
    hub.store.objects[oid] = request.body
    return Reply()


def lfs_verify(hub: Any, request: Request, user: User | None, kind: str, name: str) -> Any:
    body = request.json
    if len(hub.store.objects.get(body["oid"], b"")) != body["size"]:
        raise RequestRejected(404, "this object was not uploaded")
    return {}


def commit(
    hub: Any, request: Request, user: User | None, kind: str, name: str, revision: str
) -> Any:
    repository = find_writable_repository(hub, user, kind, name)
    if revision not in repository.branches:
        raise RequestRejected(404, f"Invalid rev id: {revision}", "RevisionNotFound")
    head = find_commit(repository, revision)
    lines = [json.loads(line) for line in request.body.splitlines() if line.strip()]
    header = next(line["value"] for line in lines if line["key"] == "header")
    parent = header.get("parentCommit")
    if parent and not head.sha.startswith(parent):
        raise RequestRejected(412, "A commit has happened since. Please refresh and try again.")
    changes: dict[str, File | None] = {}
    for line in lines:
        if line["key"] != "header":
            changes |= read_change(hub, head, line["key"], line["value"])
    readme = changes.get("README.md")
    if readme is not None:
        errors, _ = check_card(readme.content.decode(errors="replace"), repository.kind)
        if errors:
            raise RequestRejected(400, f"Invalid metadata in README.md: {'; '.join(errors)}")
    new_commit = repository.add(revision, changes, header["summary"])
    prefix = "" if repository.kind == "model" else kind + "/"
    url = f"{hub.url}/{prefix}{name}/commit/{new_commit.sha}"
    return {"success": True, "commitOid": new_commit.sha, "commitUrl": url, "hookOutput": ""}


def read_change(hub: Any, head: Commit, key: str, value: dict[str, Any]) -> dict[str, File | None]:
    path = value["path"]
    if key == "file":
        content = value["content"]
        encoded = value.get("encoding") == "base64"
        return {path: File(base64.b64decode(content) if encoded else content.encode(), False)}
    if key == "lfsFile":
        known = {f.sha256: f.content for f in head.files.values() if f.is_lfs}
        content = hub.store.objects.get(value["oid"], known.get(value["oid"]))
        if content is None:
            raise RequestRejected(400, f"{path}: its content {value['oid']} was not uploaded")
        return {path: File(content, True)}
    deleted = [path] if key == "deletedFile" else []
    if key == "deletedFolder":
        deleted = [known for known in head.files if known.startswith(path.rstrip("/") + "/")]
    if not deleted or any(known not in head.files for known in deleted):
        raise RequestRejected(404, "A file with this name doesn't exist", "EntryNotFound")
    return dict.fromkeys(deleted)


def xet_write_token(
    hub: Any, request: Request, user: User | None, kind: str, name: str, revision: str
) -> Any:
    find_writable_repository(hub, user, kind, name)
    if not hub.xet_token:
        raise RequestRejected(404, "Sorry, we can't find the page you are looking for.")
    url, token, end = f"{hub.cdn}/cas", "xet-token", int(time.time()) + 3600
    headers = {
        "X-Xet-Cas-Url": url,
        "X-Xet-Access-Token": token,
        "X-Xet-Token-Expiration": str(end),
    }
    body = json.dumps({"casUrl": url, "accessToken": token, "exp": end}).encode()
    return Reply(200, body, headers)


def validate_yaml(hub: Any, request: Request, user: User | None) -> Any:
    body = request.json
    errors, warnings = check_card(body["content"], body.get("repoType") or "model")
    result = {
        "errors": [{"message": text} for text in errors],
        "warnings": [{"message": text} for text in warnings],
    }
    return Reply(400 if errors else 200, json.dumps(result).encode())


# --- downloads -----------------------------------------------------------------------------------


def resolve(
    hub: Any, request: Request, user: User | None, kind: str, name: str, revision: str, path: str
) -> Reply:
    repository = find_repository(hub, user, kind or "models", name)
    reject_gated(repository, user)
    commit = find_commit(repository, revision)
    headers = {"X-Repo-Commit": commit.sha, "Accept-Ranges": "bytes"}
    file = commit.files.get(path)
    if file is None:
        refusal = RequestRejected(404, "Entry not found", "EntryNotFound")
        refusal.reply.headers |= headers
        raise refusal
    headers["ETag"] = f'"{file.etag}"'
    if not file.is_lfs:
        return content_reply(request, file.content, headers)
    hub.store.objects.setdefault(file.sha256, file.content)
    headers |= {"X-Linked-Etag": f'"{file.sha256}"', "X-Linked-Size": str(len(file.content))}
    headers["Location"] = f"{hub.cdn}/cdn/{file.sha256}"
    if hub.xet:
        route = f"{hub.url}/api/models/{name}/xet-read-token/{commit.sha}"
        headers |= {"X-Xet-Hash": file.sha256, "X-Xet-Refresh-Route": route}
    return Reply(302, b"", headers)


def cdn(hub: Any, request: Request, user: User | None, oid: str) -> Reply:
    content = hub.store.objects.get(oid)
    if content is None:
        raise RequestRejected(403, "this address has expired")
    return content_reply(request, content, {"ETag": f'"{oid[:32]}"', "Accept-Ranges": "bytes"})


def content_reply(request: Request, content: bytes, headers: dict[str, str]) -> Reply:
    headers = {"Content-Type": "application/octet-stream", **headers}
    match = re.fullmatch(r"bytes=(\d*)-(\d*)", request.headers.get("range", ""))
    if not match or not (match[1] or match[2]):
        length_header = {"Content-Length": str(len(content))} if request.method == "HEAD" else {}
        return Reply(
            200, b"" if request.method == "HEAD" else content, {**headers, **length_header}
        )
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
    (r"POST /api/validate-yaml", validate_yaml),
    (rf"GET {_API}", repo_info),
    (rf"GET {_API}/revision/{_REF}", repo_info),
    (rf"GET {_API}/tree/{_REF}(?P<path>/.*)?", tree),
    (rf"POST {_API}/paths-info/{_REF}", paths_info),
    (rf"GET {_API}/refs", refs),
    (rf"GET {_API}/auth-check(?P<write>/write)?", auth_check),
    (rf"(?:POST|DELETE) {_API}/branch/(?P<ref>.+)", branch),
    (rf"GET {_API}/xet-write-token/{_REF}", xet_write_token),
    (rf"POST {_API}/preupload/{_REF}", preupload),
    (rf"POST {_API}/commit/{_REF}", commit),
    (rf"POST {_FILE}\.git/info/lfs/objects/batch", lfs_batch),
    (rf"POST {_FILE}\.git/info/lfs/objects/verify", lfs_verify),
    (r"PUT /lfs-upload/(?P<oid>[0-9a-f]{64})", lfs_upload),
    (r"(?:GET|HEAD) /cdn/(?P<oid>[0-9a-f]{64})", cdn),
    (rf"(?:GET|HEAD) {_FILE}/resolve/{_REF}/(?P<path>.+)", resolve),
]
