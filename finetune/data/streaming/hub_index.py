"""List the parquet files of a data set of the hub at one commit, without reading them."""

from __future__ import annotations

import glob
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
from huggingface_hub import HfApi, is_offline_mode
from huggingface_hub.errors import HTTPError
from huggingface_hub.hf_api import RepoFile

from finetune.data.hub import cached_commit, offline, resolve_commit, snapshot_of, user_error
from finetune.data.streaming.remote_file import HubFile, LocalFile
from finetune.errors import DataError, HubError
from finetune.hub.client import Fault, retried, say_once, understood, was_cut, watching

__all__ = ["Shards", "find_hub_files", "find_shards"]

_PATHS_AT_ONCE = 500


@dataclass(frozen=True)
class Shards:
    """The parquet files of a data set.

    Attributes:
        files: by split, in the data set's order.
        commit: of the data set.
        schema: the columns as the data set's card declares them; None if it does not.
    """

    files: Mapping[str, Sequence[HubFile | LocalFile]]
    commit: str
    schema: pa.Schema | None


def find_shards(where: str, name: str, config: str | None, revision: str | None) -> Shards:
    """Find the parquet files of a data set at one commit, without reading them.

    Args: as for `load_hub`.
    Returns: files of the hub; if it is offline or does not answer, those in the cache.
    Raises: as `load_hub`; DataError for a data set that is not of parquet files.
    """
    if is_offline_mode():
        return _cached_shards(where, name, config, revision)
    seen = cached_commit(name, revision)
    has_copy = seen is not None and any(snapshot_of(name, seen).rglob("*.parquet"))
    try:
        return retried(where, lambda: _try_shards(where, name, config, revision), has_copy=has_copy)
    except Fault as fault:
        with offline():
            return _cached_shards(where, name, config, revision, fault)


def _try_shards(where: str, name: str, config: str | None, revision: str | None) -> Shards:
    import datasets

    infos, error = None, None
    with watching(everywhere=True) as watch:
        commit = resolve_commit(where, name, revision)
        try:
            builder = datasets.load_dataset_builder(name, config, revision=commit)
            paths = _paths_of(where, builder, commit)
            infos = _paths_info(name, commit, [path for group in paths.values() for path in group])
        except DataError:
            if watch.fault is None:
                raise
        except Exception as caught:  # its builders and readers raise errors of any type
            error = caught
    if infos is None:
        if watch.fault is not None or was_cut(error):
            raise watch.fault or Fault("the connection was cut")
        assert error is not None  # nothing else leaves without the files
        raise user_error(where, revision, watch.refusal() or error) from None
    files = {
        split: [HubFile(where, name, commit, path, *infos[path]) for path in group]
        for split, group in paths.items()
    }
    return Shards(files, commit, _declared(builder))


def find_hub_files(where: str, name: str, revision: str | None, paths: list[str]) -> list[HubFile]:
    """Describe files of a data set at one commit, without reading them.

    Args: as for `find_shards`; paths in the repository.
    Raises: DataError if there is no such data set, revision or file; HubError for the hub's faults.
    """

    def ask() -> tuple[str, dict[str, tuple[int, str]]]:
        with watching(everywhere=True) as watch:
            commit = resolve_commit(where, name, revision)
            try:
                return commit, _paths_info(name, commit, paths)
            except HTTPError as error:
                raise user_error(where, revision, watch.refusal() or error) from None

    try:
        commit, infos = retried(where, ask)
    except Fault as fault:
        message = f"{where}: {fault}; try again later"
        raise HubError(message, code="hub.unreachable") from None
    missing = next((path for path in paths if path not in infos), None)
    if missing is not None:
        message = f"{where}: no {missing} in {name} at revision {commit}; check its name"
        raise DataError(message, code="data.not_found")
    return [HubFile(where, name, commit, path, *infos[path]) for path in paths]


def _paths_info(name: str, commit: str, paths: list[str]) -> dict[str, tuple[int, str]]:
    """Ask the hub for files. Returns: size in bytes and name of the content, by path."""
    infos = {}
    with understood(name):
        for first in range(0, len(paths), _PATHS_AT_ONCE):
            some = paths[first : first + _PATHS_AT_ONCE]
            for file in HfApi().get_paths_info(name, some, revision=commit, repo_type="dataset"):
                if isinstance(file, RepoFile):
                    content_name = file.lfs.sha256 if file.lfs is not None else file.blob_id
                    infos[file.path] = file.size, content_name
    return infos


def _paths_of(where: str, builder: Any, commit: str) -> dict[str, list[str]]:
    """Return the files of each split, as paths in the repository or on this machine."""
    paths: dict[str, list[str]] = {}
    for split, files in (builder.config.data_files or {}).items():
        texts = [str(file) for file in files]
        other = next((text for text in texts if not text.endswith(".parquet")), None)
        if other is not None:
            raise DataError(
                f"{where}: holds {other.rsplit('/', 1)[-1]}, and streaming reads parquet files; "
                "add @refs/convert/parquet to the name, or set data.streaming=false",
                code="data.not_parquet",
            )
        paths[str(split)] = [re.sub(rf"^hf://datasets/[^@]+@{commit}/", "", t) for t in texts]
    if not paths or any("://" in path for group in paths.values() for path in group):
        raise DataError(
            f"{where}: lists no parquet files of its own, which streaming reads; add "
            "@refs/convert/parquet to the name, or set data.streaming=false",
            code="data.not_parquet",
        )
    return paths


def _declared(builder: Any) -> pa.Schema | None:
    features = builder.info.features
    return None if features is None else features.arrow_schema


def _cached_shards(
    where: str, name: str, config: str | None, revision: str | None, fault: Fault | None = None
) -> Shards:
    """List the files of a revision in the client's cache; `fault` as for `_from_cache`."""
    import datasets

    commit = cached_commit(name, revision)
    folder = snapshot_of(name, commit or "-")
    cause = "HF_HUB_OFFLINE is set" if fault is None else str(fault)
    missing = HubError(
        f"{where}: {cause}, and its parquet files are not in the cache; connect, or download the "
        "data set once without data.streaming",
        code="hub.unreachable",
    )
    if commit is None or not any(folder.rglob("*.parquet")):
        raise missing
    try:
        builder = datasets.load_dataset_builder(str(folder), config)
    except Exception as error:
        raise user_error(where, revision, error) from None
    paths = _paths_of(where, builder, commit)
    for path in (path for group in paths.values() for path in group):
        numbers = re.search(r"-of-(\d+)\.parquet$", path)
        beside = glob.escape(re.sub(r"-\d+-of-\d+\.parquet$", "", path))
        if numbers and len(glob.glob(f"{beside}-*-of-{numbers[1]}.parquet")) != int(numbers[1]):
            raise missing
    say_once(f"{where}: {cause}; using revision {commit} from the cache")
    files = {split: [LocalFile.at(Path(path)) for path in group] for split, group in paths.items()}
    return Shards(files, commit, _declared(builder))
