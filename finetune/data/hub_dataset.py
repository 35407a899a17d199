"""Load datasets of the Hugging Face Hub at one commit, or list their parquet files."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
from huggingface_hub import HfApi, constants, hf_hub_download, is_offline_mode
from huggingface_hub.errors import HFValidationError

from finetune.errors import DataError, HubError
from finetune.formatting import format_bytes
from finetune.hub.client import (
    HubFileNotFoundError,
    TransientHubError,
    hub_errors,
    redact,
    retry,
    user_error,
)
from finetune.hub.download import verify_checksum
from finetune.log import logger, warn_once

__all__ = ["DatasetFiles", "list_parquet_files", "load_hub_dataset", "resolve_commit"]

_TIMEOUT_SECONDS = 10.0
_CONFIGURATION_FILES = ("README.md", ".huggingface.yaml")  # they declare the files of each split
_Result = TypeVar("_Result")


def load_hub_dataset(
    source: str, repo_id: str, config: str | None, revision: str | None
) -> tuple[Any, str | None]:
    """Load a dataset through `datasets`, at the commit of a revision.

    If the connection fails, `datasets` loads the newest cached copy, of any revision. So this
    function compares the commit of the loaded data with the commit of the revision.

    Args:
        source: the user's source string, for messages.
        repo_id: owner/name.
        config: name of the configuration; None for the only one or the default.
        revision: branch, tag or commit; None for the newest.
    Returns: the splits, as a `datasets.DatasetDict`; and the commit, None if `datasets` did not
        record it.
    Raises: DataError if the dataset, revision or configuration does not exist; HubError if the Hub
        rejects the token or denies access, or does not respond and nothing is cached.
    """
    if is_offline_mode():
        return _load_cached(source, repo_id, config, revision)
    try:
        return retry(source, lambda: _load_online(source, repo_id, config, revision))
    except TransientHubError as error:
        with _force_offline():
            return _load_cached(source, repo_id, config, revision, error)


def _load_online(
    source: str, repo_id: str, config: str | None, revision: str | None
) -> tuple[Any, str]:
    import datasets

    dataset_dict, error = None, None
    files_before = {
        path.resolve() for path in _repo_cache_folder(repo_id).rglob("*") if path.exists()
    }
    copies_before = {*_datasets_copies(repo_id)}
    commit = _request_commit(source, repo_id, revision)
    _download_configuration(source, repo_id, commit)
    try:
        dataset_dict = datasets.load_dataset(repo_id, config, revision=revision)
    except Exception as caught:  # `datasets` raises any type of error
        error = caught
    is_prepared_now = {*_datasets_copies(repo_id)} != copies_before
    damaged = _damaged_files(repo_id, commit, skip=set() if is_prepared_now else files_before)
    if damaged:
        _remove_damaged_files(repo_id, commit, damaged)
        raise TransientHubError(f"{damaged[0].name} arrived with a wrong checksum")
    loaded_commit = _recorded_commit(dataset_dict) if dataset_dict is not None else None
    if error is None and loaded_commit in (None, commit):
        return dataset_dict, commit
    if error is None:
        raise TransientHubError(f"the connection was dropped, or the branch moved to {commit}")
    raise _to_user_error(source, revision, error) from None


@dataclass(frozen=True)
class DatasetFiles:
    """The parquet files of a dataset.

    Attributes:
        paths: paths in the repository by split, in the dataset's order.
        commit: commit of the dataset repository.
        schema: columns declared in the dataset card; None if it declares none.
    """

    paths: Mapping[str, list[str]]
    commit: str
    schema: pa.Schema | None


def list_parquet_files(
    source: str, repo_id: str, config: str | None, revision: str | None
) -> DatasetFiles:
    """List the parquet files of a dataset at one commit, without reading them.

    Args: see `load_hub_dataset`.
    Raises: same as `load_hub_dataset`; also DataError if the dataset is not stored as parquet.
    """
    return _retry_online(source, lambda: _list_online(source, repo_id, config, revision))


def _list_online(
    source: str, repo_id: str, config: str | None, revision: str | None
) -> DatasetFiles:
    import datasets

    commit = _request_commit(source, repo_id, revision)
    _download_configuration(source, repo_id, commit)
    try:
        builder = datasets.load_dataset_builder(repo_id, config, revision=commit)
    except Exception as error:  # `datasets` raises any type of error
        raise _to_user_error(source, revision, error) from None
    paths: dict[str, list[str]] = {}
    for split, files in (builder.config.data_files or {}).items():
        texts = [re.sub(rf"^hf://datasets/[^@]+@{commit}/", "", str(file)) for file in files]
        other = next((text for text in texts if not text.endswith(".parquet")), None)
        if other is not None:
            raise DataError(
                f"{source}: contains {other.rsplit('/', 1)[-1]}, but streaming reads only parquet "
                "files; add @refs/convert/parquet to the name, or set data.streaming=false",
                code="data.not_parquet",
            )
        paths[str(split)] = texts
    if not paths or any("://" in path for group in paths.values() for path in group):
        raise DataError(
            f"{source}: has no parquet files in its repository, but streaming reads only those; "
            "add @refs/convert/parquet to the name, or set data.streaming=false",
            code="data.not_parquet",
        )
    features = builder.info.features
    return DatasetFiles(paths, commit, None if features is None else features.arrow_schema)


def resolve_commit(source: str, repo_id: str, revision: str | None) -> str:
    """Request the commit of a revision from the Hub, with retries.

    Args and Raises: see `load_hub_dataset`.
    """
    return _retry_online(source, lambda: _request_commit(source, repo_id, revision))


def _retry_online(source: str, call: Callable[[], _Result]) -> _Result:
    """Call a function that needs the Hub. Raises: HubError if it does not respond."""
    cause = "HF_HUB_OFFLINE is set"
    if not is_offline_mode():
        try:
            return retry(source, call)
        except TransientHubError as error:
            cause = str(error)
    raise HubError(
        f"{source}: {cause}, but streaming reads from the hub; go online, or use a local copy",
        code="hub.unreachable",
    )


def _request_commit(source: str, repo_id: str, revision: str | None) -> str:
    """Request the commit of a revision, without retries.

    Raises: same as `load_hub_dataset`; also TransientHubError.
    """
    try:
        with hub_errors(source, revision, not_found_error=DataError, repo_noun="dataset"):
            info = HfApi().dataset_info(repo_id, revision=revision, timeout=_TIMEOUT_SECONDS)
            return str(info.sha)
    except HFValidationError as error:
        raise _to_user_error(source, revision, error) from None


def _download_configuration(source: str, repo_id: str, commit: str) -> None:
    """Download the files that configure a dataset; `datasets` would ignore a failure."""
    for name in _CONFIGURATION_FILES:
        with (
            contextlib.suppress(HubFileNotFoundError),
            hub_errors(source, commit, not_found_error=DataError, repo_noun="dataset"),
        ):
            hf_hub_download(repo_id, name, repo_type="dataset", revision=commit)


def _to_user_error(source: str, revision: str | None, error: Exception) -> Exception:
    """Convert an error of huggingface_hub or `datasets` to a finetune error."""
    hub_error = user_error(error, source, revision, not_found_error=DataError, repo_noun="dataset")
    if hub_error is not None:
        return hub_error
    message = f"{source}: cannot be loaded ({redact(str(error))}); check the name and configuration"
    return DataError(message, code="data.not_loadable")


def _damaged_files(repo_id: str, commit: str, *, skip: Set[Path]) -> list[Path]:
    """Return the files of a commit in the Hub's cache, without `skip`, with a wrong checksum."""
    snapshot = _snapshot_folder(repo_id, commit)
    files = [path for path in snapshot.rglob("*") if path.is_file()]
    if (size := sum(path.stat().st_size for path in files)) > 2**30 and not skip:
        logger.info(f"{repo_id}: verifying {format_bytes(size)} in the Hub's cache")
    return [path for path in files if path.resolve() not in skip and verify_checksum(path) is None]


def _remove_damaged_files(repo_id: str, commit: str, damaged: Sequence[Path]) -> None:
    """Remove files from the Hub's cache, and the data that `datasets` prepared from them."""
    for path in damaged:
        with contextlib.suppress(OSError):  # a shared cache may be read-only
            path.resolve().unlink(missing_ok=True)
    for copy in _datasets_copies(repo_id):
        if copy.name == commit:
            shutil.rmtree(copy, ignore_errors=True)


# --- the cache -----------------------------------------------------------------------------------


def _load_cached(
    source: str,
    repo_id: str,
    config: str | None,
    revision: str | None,
    hub_error: TransientHubError | None = None,
) -> tuple[Any, str | None]:
    """Load a revision from the cache of `datasets`.

    Args:
        hub_error: error of the request to the Hub; None in offline mode.
    """
    import datasets

    expected = _cached_commit(repo_id, revision)
    copies = _datasets_copies(repo_id)
    for copy in copies:
        if copy.name == expected:  # make it the newest, which `datasets` loads for any revision
            newest = max(other.stat().st_mtime_ns for other in copies)
            os.utime(copy, ns=(newest, max(time.time_ns(), newest + 1_000_000)))
    cause = "HF_HUB_OFFLINE is set" if hub_error is None else str(hub_error)
    try:
        dataset_dict = datasets.load_dataset(repo_id, config, revision=revision)
    except ConnectionError:
        raise HubError(
            f"{source}: the hub cannot be reached and nothing is cached ({cause}); go online once, "
            "or use parquet: or folder: with a local copy",
            code="hub.unreachable",
        ) from None
    except Exception as error:
        if hub_error is None:
            raise _to_user_error(source, revision, error) from None
        detail = redact(str(error))
        message = f"{source}: {cause}, and the dataset is not cached ({detail}); try again later"
        raise HubError(message, code="hub.unreachable") from None
    commit = _recorded_commit(dataset_dict)
    if commit is None:
        return dataset_dict, None
    if {*_datasets_copies(repo_id)} != {*copies} and (
        damaged := _damaged_files(repo_id, commit, skip=set())
    ):
        _remove_damaged_files(repo_id, commit, damaged)
        raise DataError(
            f"{source}: {damaged[0].name} in the Hub's cache was damaged (its checksum is not the "
            "Hub's); go online to download it again",
            code="data.damaged",
        )
    if commit != (expected if revision else expected or commit):
        only = f"only revision {commit} is cached"
        if hub_error is None:
            raise DataError(
                f"{source}: {only}; go online to load another revision", code="data.not_cached"
            )
        message = f"{source}: {cause}, and {only}; try again later"
        raise HubError(message, code="hub.unreachable")
    warn_once(f"{source}: {cause}; using revision {commit} from the cache")
    return dataset_dict, commit


def _cached_commit(repo_id: str, revision: str | None) -> str | None:
    """Return the commit to which a revision last resolved, from the cache; None if it never did."""
    if revision and re.fullmatch(r"[0-9a-f]{40}", revision):
        return revision
    reference = _repo_cache_folder(repo_id) / "refs" / (revision or "main")
    return reference.read_text().strip() if reference.is_file() else None


def _snapshot_folder(repo_id: str, commit: str) -> Path:
    """Return huggingface_hub's cache folder for a commit; it may not exist."""
    return _repo_cache_folder(repo_id) / "snapshots" / commit


def _repo_cache_folder(repo_id: str) -> Path:
    return Path(constants.HF_HUB_CACHE) / f"datasets--{repo_id.replace('/', '--')}"


def _datasets_copies(repo_id: str) -> list[Path]:
    """List the folders where `datasets` keeps a prepared dataset: configuration/version/commit."""
    from datasets import config
    from datasets.naming import camelcase_to_snakecase

    owner, _, short = repo_id.partition("/")
    top = Path(config.HF_DATASETS_CACHE).expanduser()
    return [p for p in top.glob(f"{owner}___{camelcase_to_snakecase(short)}/*/*/*") if p.is_dir()]


def _recorded_commit(loaded: Any) -> str | None:
    """Return the commit of a loaded dataset; None if `datasets` did not record it."""
    for dataset in loaded.values():
        for url in dataset.info.download_checksums or {}:
            match = re.search(r"@([0-9a-f]{40})/", url)
            if match:
                return match.group(1)
        for file in dataset.cache_files:
            folder = Path(file["filename"]).parent.name
            if re.fullmatch(r"[0-9a-f]{40}", folder):
                return folder
    return None


@contextlib.contextmanager
def _force_offline() -> Iterator[None]:
    """Make `datasets` read only its cache inside the `with` block, without waiting for the Hub."""
    from datasets import config

    before = constants.HF_HUB_OFFLINE, config.HF_HUB_OFFLINE
    try:
        constants.HF_HUB_OFFLINE = config.HF_HUB_OFFLINE = True
        yield
    finally:
        constants.HF_HUB_OFFLINE, config.HF_HUB_OFFLINE = before
