"""List the parquet files of a dataset on the Hugging Face Hub at one commit; read none of them."""

from __future__ import annotations

import glob
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
from huggingface_hub import HfApi, is_offline_mode
from huggingface_hub.hf_api import RepoFile

from finetune.data.hub_dataset import (
    cached_commit,
    download_configuration,
    force_offline,
    resolve_commit,
    snapshot_folder,
    to_user_error,
)
from finetune.data.streaming.remote_file import HubDatasetFile, LocalFile
from finetune.errors import DataError, HubError
from finetune.hub.client import TransientHubError, hub_errors, retry
from finetune.log import warn_once

__all__ = ["DatasetFiles", "describe_hub_files", "list_parquet_files"]

_PATHS_PER_REQUEST = 500


@dataclass(frozen=True)
class DatasetFiles:
    """The parquet files of a dataset.

    Attributes:
        files: files by split, in the dataset's order.
        commit: commit of the dataset repository.
        schema: columns declared in the dataset card; None if it declares none.
    """

    files: Mapping[str, Sequence[HubDatasetFile | LocalFile]]
    commit: str
    schema: pa.Schema | None


def list_parquet_files(
    source: str, repo_id: str, config: str | None, revision: str | None
) -> DatasetFiles:
    """List the parquet files of a dataset at one commit, without reading them.

    Args: see `load_hub_dataset`.
    Returns: files on the Hub; local cached files in offline mode or if the Hub does not respond.
    Raises: same as `load_hub_dataset`; also DataError if the dataset is not stored as parquet.
    """
    if is_offline_mode():
        return _list_cached(source, repo_id, config, revision)
    try:
        return retry(source, lambda: _list_online(source, repo_id, config, revision))
    except TransientHubError as error:
        with force_offline():
            return _list_cached(source, repo_id, config, revision, error)


def _list_online(
    source: str, repo_id: str, config: str | None, revision: str | None
) -> DatasetFiles:
    import datasets

    commit = resolve_commit(source, repo_id, revision)
    download_configuration(source, repo_id, commit)
    try:
        builder = datasets.load_dataset_builder(repo_id, config, revision=commit)
        paths = _paths_by_split(source, builder, commit)
        all_paths = [path for group in paths.values() for path in group]
        infos = _get_paths_info(source, repo_id, commit, all_paths)
    except DataError:
        raise
    except Exception as error:  # `datasets` raises any type of error
        raise to_user_error(source, revision, error) from None
    files = {
        split: [HubDatasetFile(source, repo_id, commit, path, *infos[path]) for path in group]
        for split, group in paths.items()
    }
    return DatasetFiles(files, commit, _declared_schema(builder))


def describe_hub_files(
    source: str, repo_id: str, revision: str | None, paths: list[str]
) -> list[HubDatasetFile]:
    """Request the size and ETag of files in a dataset repository at one commit.

    Args:
        source, repo_id, revision: see `load_hub_dataset`.
        paths: paths in the repository.
    Raises: DataError for an unknown dataset, revision or file; HubError if the Hub fails.
    """

    def request() -> tuple[str, dict[str, tuple[int, str]]]:
        commit = resolve_commit(source, repo_id, revision)
        return commit, _get_paths_info(source, repo_id, commit, paths)

    try:
        commit, infos = retry(source, request)
    except TransientHubError as hub_error:
        message = f"{source}: {hub_error}; try again later"
        raise HubError(message, code="hub.unreachable") from None
    missing = next((path for path in paths if path not in infos), None)
    if missing is not None:
        message = f"{source}: no file {missing} in {repo_id} at revision {commit}; check its name"
        raise DataError(message, code="data.not_found")
    return [HubDatasetFile(source, repo_id, commit, path, *infos[path]) for path in paths]


def _get_paths_info(
    source: str, repo_id: str, commit: str, paths: list[str]
) -> dict[str, tuple[int, str]]:
    """Request the metadata of files from the Hub. Returns: (size in bytes, ETag) by path."""
    infos = {}
    with hub_errors(source, commit, not_found_error=DataError, repo_noun="dataset"):
        for first in range(0, len(paths), _PATHS_PER_REQUEST):
            some = paths[first : first + _PATHS_PER_REQUEST]
            for file in HfApi().get_paths_info(repo_id, some, revision=commit, repo_type="dataset"):
                if isinstance(file, RepoFile):
                    etag = file.lfs.sha256 if file.lfs is not None else file.blob_id
                    infos[file.path] = file.size, etag
    return infos


def _paths_by_split(source: str, builder: Any, commit: str) -> dict[str, list[str]]:
    """Return the files of each split, as paths in the repository or in the local cache."""
    paths: dict[str, list[str]] = {}
    for split, files in (builder.config.data_files or {}).items():
        texts = [str(file) for file in files]
        other = next((text for text in texts if not text.endswith(".parquet")), None)
        if other is not None:
            raise DataError(
                f"{source}: contains {other.rsplit('/', 1)[-1]}, but streaming reads only parquet "
                "files; add @refs/convert/parquet to the name, or set data.streaming=false",
                code="data.not_parquet",
            )
        paths[str(split)] = [re.sub(rf"^hf://datasets/[^@]+@{commit}/", "", t) for t in texts]
    if not paths or any("://" in path for group in paths.values() for path in group):
        raise DataError(
            f"{source}: has no parquet files in its repository, but streaming reads only those; "
            "add @refs/convert/parquet to the name, or set data.streaming=false",
            code="data.not_parquet",
        )
    return paths


def _declared_schema(builder: Any) -> pa.Schema | None:
    features = builder.info.features
    return None if features is None else features.arrow_schema


def _list_cached(
    source: str,
    repo_id: str,
    config: str | None,
    revision: str | None,
    hub_error: TransientHubError | None = None,
) -> DatasetFiles:
    """List the parquet files of a revision in huggingface_hub's cache.

    Args:
        hub_error: why the Hub failed; None in offline mode.
    """
    import datasets

    commit = cached_commit(repo_id, revision)
    folder = snapshot_folder(repo_id, commit or "-")
    cause = "HF_HUB_OFFLINE is set" if hub_error is None else str(hub_error)
    missing = HubError(
        f"{source}: {cause}, and its parquet files are not in the cache; connect, or download the "
        "dataset once with data.streaming=false",
        code="hub.unreachable",
    )
    if commit is None or not any(folder.rglob("*.parquet")):
        raise missing
    try:
        builder = datasets.load_dataset_builder(str(folder), config)
    except Exception as error:
        raise to_user_error(source, revision, error) from None
    paths = _paths_by_split(source, builder, commit)
    for path in (path for group in paths.values() for path in group):
        match = re.search(r"-of-(\d+)\.parquet$", path)
        prefix = glob.escape(re.sub(r"-\d+-of-\d+\.parquet$", "", path))
        if match and len(glob.glob(f"{prefix}-*-of-{match[1]}.parquet")) != int(match[1]):
            raise missing
    warn_once(f"{source}: {cause}; using revision {commit} from the cache")
    files = {
        split: [LocalFile.from_path(Path(path)) for path in group] for split, group in paths.items()
    }
    return DatasetFiles(files, commit, _declared_schema(builder))
