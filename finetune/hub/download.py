"""Download files from the Hugging Face Hub through its client's cache; verify their checksums."""

from __future__ import annotations

import contextlib
import os
import re
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import (
    get_hf_file_metadata,
    hf_hub_download,
    hf_hub_url,
    is_offline_mode,
    try_to_load_from_cache,
)
from huggingface_hub.errors import (
    HFValidationError,
    LocalEntryNotFoundError,
    RemoteEntryNotFoundError,
)
from torch import hub

from finetune.errors import HubError, WeightsError
from finetune.files import file_sha256, git_blob_sha1
from finetune.hub.client import HubFileNotFoundError, TransientHubError, hub_errors, redact, retry
from finetune.log import warn_once

__all__ = [
    "CachedHubFile",
    "FileNotInRepoError",
    "download_first",
    "download_hub_file",
    "download_url",
    "verify_checksum",
]


@dataclass(frozen=True)
class CachedHubFile:
    """A cached file of a Hub repository.

    Attributes:
        path: path in huggingface_hub's cache.
        commit: commit of the repository; None if the cache has an unknown layout.
        sha256: sha256 of the file; None if the Hub identifies it by another hash.
    """

    path: Path
    commit: str | None
    sha256: str | None


class FileNotInRepoError(WeightsError):
    """The repository does not hold this file."""

    code = "weights.not_found"


def download_first(
    repo_id: str,
    filenames: tuple[str, ...],
    revision: str | None,
    *,
    display_name: str | None = None,
) -> CachedHubFile:
    """Download the first of several files that exists in a repository.

    Args: see `download_hub_file`.
    Raises: WeightsError if none of the files exists; otherwise same as `download_hub_file`.
    """
    missing: WeightsError | None = None
    for filename in filenames:
        try:
            return download_hub_file(repo_id, filename, revision, display_name=display_name)
        except FileNotInRepoError as error:
            missing = missing or error
    raise WeightsError(
        f"{display_name or f'hf-hub:{repo_id}'}: no weights file (looked for "
        f"{', '.join(filenames)}); choose a repository in timm format",
        code="weights.not_found",
    ) from missing


def download_hub_file(
    repo_id: str, filename: str, revision: str | None, *, display_name: str | None = None
) -> CachedHubFile:
    """Download one file, or take it from the cache, and verify its checksum.

    Retries a limited number of times if the connection fails or the checksum does not match. If the
    Hub does not respond, uses the cached copy and logs its commit. Sends no request in offline
    mode.

    Args:
        repo_id: owner/name.
        filename: path in the repository.
        revision: branch, tag or commit; None for the newest.
        display_name: repository as the user typed it, for messages; None for "hf-hub:repo_id".
    Raises: WeightsError for a wrong name, revision or file, or a damaged copy; HubError if the
        Hub rejects the token, denies access or does not respond.
    """
    where = display_name or f"hf-hub:{repo_id}" + (f"@{revision}" if revision else "")
    try:
        cached_path = _find_cached(where, repo_id, filename, revision)
        if is_offline_mode():
            return _use_cached(where, filename, cached_path, "HF_HUB_OFFLINE is set")
        return retry(where, lambda: _download_once(where, repo_id, filename, revision))
    except HFValidationError as error:
        raise WeightsError(
            f"{where}: not a repository name; write hf-hub:owner/name", code="weights.unknown_name"
        ) from error
    except TransientHubError as error:
        if cached_path is not None and cached_path.exists():
            return _use_cached(where, filename, cached_path, str(error))
        raise HubError(
            f"{where}: {filename} could not be fetched: {error}; try again later, or pass a local "
            "folder",
            code=error.code,
        ) from None


def _find_cached(
    display_name: str, repo_id: str, filename: str, revision: str | None
) -> Path | None:
    """Find a cached file, at the commit to which the revision last resolved.

    Returns: its path; None if the file is not in the cache.
    Raises: WeightsError in offline mode, if the cache records that the file does not exist.
    """
    path = try_to_load_from_cache(repo_id, filename, revision=revision)
    if path is None or isinstance(path, str):
        return Path(path) if path else None
    if is_offline_mode():
        raise FileNotInRepoError(
            f"{display_name}: no file {filename}; choose a repository in timm format"
        )
    return None


def _use_cached(
    display_name: str, filename: str, cached_path: Path | None, cause: str
) -> CachedHubFile:
    if cached_path is None:
        raise HubError(
            f"{display_name}: {cause}, and {filename} is not in the cache; run once with a network "
            f"connection, or pass the folder of a local copy",
            code="hub.unreachable",
        )
    sha256 = verify_checksum(cached_path)
    if not cached_path.is_symlink():
        warn_once(
            f"{cached_path}: cannot be compared with the Hub's hash, because {cause} and the cache "
            "has no symlinks"
        )
    if sha256 is None:
        raise WeightsError(
            f"{display_name}: {filename} in the cache is damaged (its checksum does not match), "
            f"and {cause}; delete {cached_path.resolve()}, or run again with a network connection, "
            "which replaces the file",
            code="weights.damaged",
        )
    commit = _commit_from_path(cached_path)
    warn_once(f"{display_name}: {cause}; using revision {commit} from the cache")
    return CachedHubFile(cached_path, commit, sha256 or None)


def _download_once(
    display_name: str, repo_id: str, filename: str, revision: str | None
) -> CachedHubFile:
    """Download a file, unless it is cached, and verify its checksum.

    Raises: see `download_hub_file`; TransientHubError if a retry may succeed.
    """
    try:
        with hub_errors(display_name, revision, not_found_error=WeightsError):
            commit = etag = None
            # Request the metadata first, because `hf_hub_download` hides errors of the Hub and
            # returns a cached copy. If the file does not exist, the error comes from
            # `hf_hub_download`, which also caches for offline mode that there is no such file.
            with contextlib.suppress(RemoteEntryNotFoundError):
                metadata = get_hf_file_metadata(hf_hub_url(repo_id, filename, revision=revision))
                commit, etag = metadata.commit_hash, metadata.etag
            path = Path(hf_hub_download(repo_id, filename, revision=revision))
    except HubFileNotFoundError:
        raise FileNotInRepoError(
            f"{display_name}: no file {filename}; choose a repository in timm format"
        ) from None
    except LocalEntryNotFoundError:  # a response without the Hub's headers
        raise HubError(
            f"{display_name}: the server is not a hub; check HF_ENDPOINT and the proxy",
            code="hub.wrong_answer",
        ) from None
    except (OSError, RuntimeError) as error:  # from the disk, or from hf_xet
        text = redact(str(error))
        if re.search("xet", f"{type(error)} {error}", re.IGNORECASE):
            raise HubError(
                f"{display_name}: {filename} cannot be read from Xet storage ({text}); set "
                "HF_HUB_DISABLE_XET=1 to download it over plain HTTP",
                code="hub.xet",
            ) from None
        raise WeightsError(
            f"{display_name}: {text}; try again, or pass a local folder",
            code="weights.unreadable",
        ) from None
    if _commit_from_path(path) not in (None, commit):
        raise TransientHubError("the connection was dropped, or the branch moved meanwhile")
    sha256 = verify_checksum(path, etag)
    if sha256 is None:
        # so that the next try downloads it again; timm and transformers would load it unverified
        path.resolve().unlink(missing_ok=True)
        raise TransientHubError(f"{filename} arrived with a wrong checksum")
    return CachedHubFile(path, commit, sha256 or None)


def _commit_from_path(path: Path) -> str | None:
    parts = path.parts
    return parts[parts.index("snapshots") + 1] if "snapshots" in parts else None


def download_url(url: str) -> Path:
    """Download a file by URL through torch's cache, for timm weights that are not on the Hub.

    Verifies the first digits of the sha256, which torch expects in the file name, at every use.

    Raises: WeightsError if the download fails or the checksum does not match.
    """
    filename = url.rsplit("/", 1)[-1]
    path = Path(hub.get_dir()) / "checkpoints" / filename
    digits = re.search(r"-([0-9a-f]{8,})\.", filename)
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            hub.download_url_to_file(url, str(path), digits and digits[1], progress=False)
        except (OSError, RuntimeError) as error:
            raise WeightsError(
                f"{url}: cannot be downloaded ({error}) and is not in the cache; try again",
                code="weights.not_found",
            ) from error
    elif digits and not file_sha256(path).startswith(digits[1]):
        raise WeightsError(
            f"{path}: is damaged (its sha256 does not start with {digits[1]}); delete it, "
            "so that it is downloaded again",
            code="weights.damaged",
        )
    return path


def verify_checksum(path: Path, etag: str | None = None) -> str | None:
    """Verify a file against its ETag on the Hub, which is the name of the cached blob.

    Args:
        path: symlink in a snapshot, or the file itself if the system has no symlinks.
        etag: expected ETag; None for the one in the cache, if `path` is a symlink.
    Returns: the sha256; "" if the ETag is not a sha256; None if the bytes do not match.
    """
    name = etag or (Path(os.readlink(path)).name if path.is_symlink() else "")
    if re.fullmatch(r"[0-9a-f]{64}", name):
        return name if file_sha256(path) == name else None
    if re.fullmatch(r"[0-9a-f]{40}", name) and git_blob_sha1(path) != name:
        return None
    return ""
