"""Which parquet files a data set of the hub is made of, at one commit; none of them is read."""

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

from finetune.data.hub import asked_for, explained, last_seen, offline, snapshot_of
from finetune.data.streaming.remote_file import HubFile, LocalFile
from finetune.errors import DataError, HubError
from finetune.hub.client import Fault, retried, say_once, was_cut, watching

__all__ = ["Shards", "find_shards"]

_PATHS_AT_ONCE = 500


@dataclass(frozen=True)
class Shards:
    """Where the parquet files of a data set are.

    Attributes:
        files: by split, in the data set's order.
        commit: that they belong to.
        schema: the columns as the data set's card declares them; None where it does not.
    """

    files: Mapping[str, Sequence[HubFile | LocalFile]]
    commit: str
    schema: pa.Schema | None


def find_shards(where: str, name: str, config: str | None, revision: str | None) -> Shards:
    """Find the parquet files of a data set at one commit, without reading them.

    Args: as for `load_hub`.
    Returns: files of the hub; where it is offline or does not answer, those in its cache.
    Raises: as `load_hub`; DataError for a data set that is not of parquet files.
    """
    if is_offline_mode():
        return _cached_shards(where, name, config, revision)
    seen = last_seen(name, revision)
    has_copy = seen is not None and any(snapshot_of(name, seen).rglob("*.parquet"))
    try:
        return retried(where, lambda: _try_shards(where, name, config, revision), has_copy=has_copy)
    except Fault as fault:
        with offline():
            return _cached_shards(where, name, config, revision, fault)


def _try_shards(where: str, name: str, config: str | None, revision: str | None) -> Shards:
    import datasets

    found, error = None, None
    with watching(everywhere=True) as watch:
        commit = asked_for(where, name, revision)
        try:
            builder = datasets.load_dataset_builder(name, config, revision=commit)
            paths = _paths(where, builder, commit)
            every = [path for group in paths.values() for path in group]
            api, size = HfApi(), _PATHS_AT_ONCE
            told = [
                entry
                for first in range(0, len(every), size)
                for entry in api.get_paths_info(
                    name, every[first : first + size], revision=commit, repo_type="dataset"
                )
            ]
            found = {e.path: (e.size, _content_name(e)) for e in told if isinstance(e, RepoFile)}
        except DataError:
            if watch.fault is None:
                raise
        except Exception as caught:  # it lets through what its builders and readers raise
            error = caught
    if found is None:
        if watch.fault is not None or was_cut(error):
            raise watch.fault or Fault("the connection was cut")
        raise explained(where, revision, watch.refusal() or error or DataError(where)) from None
    files = {
        split: [HubFile(where, name, commit, path, *found[path]) for path in group]
        for split, group in paths.items()
    }
    return Shards(files, commit, _declared(builder))


def _content_name(entry: RepoFile) -> str:
    return entry.lfs.sha256 if entry.lfs is not None else entry.blob_id


def _paths(where: str, builder: Any, commit: str) -> dict[str, list[str]]:
    """The files of each split, as paths in the repository, or of this machine."""
    found: dict[str, list[str]] = {}
    for split, files in (builder.config.data_files or {}).items():
        texts = [str(file) for file in files]
        other = next((text for text in texts if not text.endswith(".parquet")), None)
        if other is not None:
            raise DataError(
                f"{where}: holds {other.rsplit('/', 1)[-1]}, and streaming reads parquet files; "
                "add @refs/convert/parquet to the name, or set data.streaming=false"
            )
        found[str(split)] = [re.sub(rf"^hf://datasets/[^@]+@{commit}/", "", t) for t in texts]
    if not found or any("://" in path for paths in found.values() for path in paths):
        raise DataError(
            f"{where}: lists no parquet files of its own, which streaming reads; add "
            "@refs/convert/parquet to the name, or set data.streaming=false"
        )
    return found


def _declared(builder: Any) -> pa.Schema | None:
    features = builder.info.features
    return None if features is None else features.arrow_schema


def _cached_shards(
    where: str, name: str, config: str | None, revision: str | None, fault: Fault | None = None
) -> Shards:
    """The files of a revision that the client has in its cache."""
    import datasets

    commit = last_seen(name, revision)
    folder = snapshot_of(name, commit or "-")
    cause = "HF_HUB_OFFLINE is set" if fault is None else str(fault)
    missing = HubError(
        f"{where}: {cause}, and its parquet files are not in the cache; connect, or download the "
        "data set once without data.streaming"
    )
    if commit is None or not any(folder.rglob("*.parquet")):
        raise missing
    try:
        builder = datasets.load_dataset_builder(str(folder), config)
    except Exception as error:
        raise explained(where, revision, error) from None
    paths = _paths(where, builder, commit)
    for path in (path for group in paths.values() for path in group):
        numbers = re.search(r"-of-(\d+)\.parquet$", path)
        beside = glob.escape(re.sub(r"-\d+-of-\d+\.parquet$", "", path))
        if numbers and len(glob.glob(f"{beside}-*-of-{numbers[1]}.parquet")) != int(numbers[1]):
            raise missing
    say_once(f"{where}: {cause}; using revision {commit} from the cache")
    files = {split: [LocalFile.at(Path(path)) for path in group] for split, group in paths.items()}
    return Shards(files, commit, _declared(builder))
