"""State of the loopback hub: users, repositories with commits, and validation of model cards."""

from __future__ import annotations

import hashlib
import math
import re
import threading
from dataclasses import dataclass, field
from typing import Any

import yaml

KINDS = ("model", "dataset", "space")
_LFS_SUFFIXES = ".safetensors .bin .pt .pth .onnx .npz .npy .parquet .arrow .h5 .ckpt .zip .gz .tar"
LFS_SUFFIXES = tuple(_LFS_SUFFIXES.split())
LFS_BYTES = 10_000_000  # larger files are LFS files whatever their suffix
MAIN = "main"


@dataclass(frozen=True)
class File:
    """One version of one file, with the two identifiers of its content on a hub."""

    content: bytes
    is_lfs: bool

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.content).hexdigest()

    @property
    def blob_id(self) -> str:
        """git's hash of what git itself stores: the file, or the pointer to it."""
        return git_sha1(self.pointer if self.is_lfs else self.content)

    @property
    def pointer(self) -> bytes:
        head = "version https://git-lfs.github.com/spec/v1"
        return f"{head}\noid sha256:{self.sha256}\nsize {len(self.content)}\n".encode()

    @property
    def etag(self) -> str:
        return self.sha256 if self.is_lfs else self.blob_id


def git_sha1(content: bytes) -> str:
    """Return git's hash of a file with this content."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def is_lfs(path: str, size: int) -> bool:
    return size > 0 and (path.lower().endswith(LFS_SUFFIXES) or size > LFS_BYTES)


@dataclass(frozen=True)
class Commit:
    sha: str
    parent: str | None
    title: str
    files: dict[str, File]


@dataclass
class Repository:
    """A model, dataset or Space with its history."""

    name: str
    kind: str
    private: bool
    gated: bool = False
    commits: dict[str, Commit] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)

    def find(self, revision: str) -> Commit | None:
        """Return the commit of a branch, a tag, or a full or shortened sha."""
        plain = revision.removeprefix("refs/heads/").removeprefix("refs/tags/")
        sha = self.branches.get(plain) or self.tags.get(plain)
        if sha is None and re.fullmatch(r"[0-9a-f]{7,40}", revision):
            sha = next((known for known in self.commits if known.startswith(revision)), None)
        return self.commits.get(sha) if sha else None

    def history(self, revision: str) -> list[Commit]:
        """Return the commits up to a revision, newest first."""
        found = []
        commit = self.find(revision)
        while commit is not None:
            found.append(commit)
            commit = self.commits[commit.parent] if commit.parent else None
        return found

    def add(self, branch: str, changes: dict[str, File | None], title: str) -> Commit:
        """Commit changes; None deletes a file."""
        parent = self.find(branch)
        files = {**(parent.files if parent else {}), **changes}
        remaining = {path: file for path, file in sorted(files.items()) if file is not None}
        seed = repr((self.kind, self.name, len(self.commits), parent and parent.sha, title))
        names = "".join(f"{path}:{file.blob_id};" for path, file in remaining.items())
        sha = hashlib.sha1((seed + names).encode()).hexdigest()
        self.commits[sha] = Commit(sha, parent.sha if parent else None, title, remaining)
        self.branches[branch] = sha
        return self.commits[sha]


@dataclass(frozen=True)
class User:
    name: str
    role: str  # of the token: "write" or "read"
    orgs: tuple[str, ...] = ()

    def owns(self, repository: str) -> bool:
        return repository.split("/")[0] in (self.name, *self.orgs)


class Store:
    """All data of the hub; the lock guards changes of more than one step."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.users: dict[str, User] = {}  # by token
        self.repositories: dict[tuple[str, str], Repository] = {}  # by kind and name
        self.objects: dict[str, bytes] = {}  # uploaded LFS objects, by sha256

    def repository(self, name: str, kind: str = "model") -> Repository:
        return self.repositories[kind, name]

    def create(
        self, name: str, kind: str, *, private: bool, gated: bool = False, branch: str = MAIN
    ) -> Repository:
        repository = Repository(name, kind, private, gated)
        attributes = "".join(f"*{s} filter=lfs diff=lfs merge=lfs -text\n" for s in LFS_SUFFIXES)
        changes: dict[str, File | None] = {".gitattributes": File(attributes.encode(), False)}
        repository.add(branch, changes, "initial commit")
        self.repositories[kind, name] = repository
        return repository

    def any_of(self, name: str) -> Repository:
        """Return the repository with this name, of any kind."""
        matches = [repo for (_, known), repo in self.repositories.items() if known == name]
        assert matches, f"{name}: the test's hub has no such repository"
        return matches[0]


# --- cards ---------------------------------------------------------------------------------------

_LICENSES = (
    "apache-2.0 mit bsd bsd-2-clause bsd-3-clause cc cc0-1.0 cc-by-2.0 cc-by-3.0 cc-by-4.0 "
    "cc-by-sa-3.0 cc-by-sa-4.0 cc-by-nc-2.0 cc-by-nc-3.0 cc-by-nc-4.0 cc-by-nc-sa-4.0 gpl gpl-2.0 "
    "gpl-3.0 agpl-3.0 lgpl lgpl-3.0 openrail creativeml-openrail-m mpl-2.0 unlicense wtfpl "
    "llama2 llama3 gemma apple-amlr etalab-2.0 isc zlib unknown other"
)
LICENSES = frozenset(_LICENSES.split())
RELATIONS = ("finetune", "adapter", "quantized", "merge")
COLORS = ("red", "yellow", "green", "blue", "indigo", "purple", "pink", "gray")
_STRING_LIST_KEYS = ("tags", "datasets", "metrics", "language", "base_model")
_STRING_KEYS = ("library_name", "pipeline_tag", "thumbnail", "license_name", "license_link")


def front_matter(text: str) -> tuple[Any, str | None]:
    """Return the YAML front matter of a card, and the error if it cannot be read."""
    match = re.match(r"\s*---[ \t]*\r?\n(.*?)\r?\n---[ \t]*(?:\r?\n|$)", text, re.DOTALL)
    if not match:
        return None, None
    try:
        return yaml.safe_load(match[1]), None
    except yaml.YAMLError as error:
        return None, f"YAML metadata cannot be read: {' '.join(str(error).split())}"


def check_card(text: str, kind: str) -> tuple[list[str], list[str]]:
    """Return errors and warnings about the metadata of a card, as the hub's validation does."""
    data, yaml_error = front_matter(text)
    if yaml_error:
        return [yaml_error], []
    if not data:
        return [], ["empty or missing yaml metadata in repo card"]
    if not isinstance(data, dict):
        return ["YAML metadata must be a mapping"], []
    errors = [
        f'"{key}" must be a string'
        for key in _STRING_KEYS
        if not isinstance(data.get(key, ""), str)
    ]
    for key in _STRING_LIST_KEYS:
        values = data.get(key, [])
        values_list = values if isinstance(values, list) else [values]
        if not all(isinstance(value, str) and value for value in values_list):
            errors.append(f'"{key}" must be a string or a list of strings')
        elif key in ("datasets", "base_model"):
            invalid = [v for v in values_list if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", v)]
            errors += [f'"{key}": {value} is no repository name' for value in invalid]
    license_value = data.get("license", [])
    for value in license_value if isinstance(license_value, list) else [license_value]:
        if value not in LICENSES:
            errors.append(f'"license" must be one of the known licenses, not {value!r}')
    if data.get("base_model_relation", RELATIONS[0]) not in RELATIONS:
        errors.append(f'"base_model_relation" must be one of {", ".join(RELATIONS)}')
    if kind == "space":
        errors += _check_space(data)
    index = data.get("model-index")
    if index is not None:
        errors += _check_index(index)
    warnings = []
    if kind == "model" and "license" not in data:
        warnings.append("no license given")
    return errors, warnings


def _check_space(data: dict[str, Any]) -> list[str]:
    errors = []
    if data.get("sdk") not in ("gradio", "docker", "static", "streamlit"):
        errors.append('"sdk" must be one of gradio, docker, static, streamlit')
    for key in ("colorFrom", "colorTo"):
        if data.get(key, COLORS[0]) not in COLORS:
            errors.append(f'"{key}" must be one of {", ".join(COLORS)}')
    if len(str(data.get("short_description", ""))) > 60:
        errors.append('"short_description" must be at most 60 characters long')
    if not isinstance(data.get("sdk_version", ""), str):
        errors.append('"sdk_version" must be a string')
    return errors


def _check_index(index: Any) -> list[str]:
    if not isinstance(index, list) or not index:
        return ['"model-index" must be a list of models']
    errors = []
    for number, model in enumerate(index):
        location = f"model-index[{number}]"
        if not isinstance(model, dict) or not isinstance(model.get("name"), str):
            errors.append(f'"{location}.name" is required')
            continue
        results = model.get("results")
        if not isinstance(results, list) or not results:
            errors.append(f'"{location}.results" must be a list of results')
            continue
        for position, result in enumerate(results):
            errors += _check_result(result, f"{location}.results[{position}]")
    return errors


def _check_result(result: Any, location: str) -> list[str]:
    if not isinstance(result, dict):
        return [f'"{location}" must be a mapping']
    errors = []
    for section, keys in {"task": ("type",), "dataset": ("type", "name")}.items():
        value = result.get(section)
        missing = [k for k in keys if not isinstance(value, dict) or not _is_text(value.get(k))]
        errors += [f'"{location}.{section}.{key}" is required' for key in missing]
    metrics = result.get("metrics")
    if not isinstance(metrics, list) or not metrics:
        return [*errors, f'"{location}.metrics" must be a list of metrics']
    for position, metric in enumerate(metrics):
        metric_location = f"{location}.metrics[{position}]"
        if not isinstance(metric, dict) or not _is_text(metric.get("type")):
            errors.append(f'"{metric_location}.type" is required')
        elif not _is_value(metric.get("value")):
            errors.append(
                f'"{metric_location}.value" is required and must be a finite number or a string'
            )
    return errors


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value)


def _is_value(value: Any) -> bool:
    if isinstance(value, bool):
        return False
    return _is_text(value) or (isinstance(value, int | float) and math.isfinite(value))
