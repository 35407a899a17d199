"""Files of the hub, through huggingface_hub's cache: with their commit, and their bytes checked."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from huggingface_hub import get_token, hf_hub_download, is_offline_mode, try_to_load_from_cache
from huggingface_hub.errors import EntryNotFoundError, HFValidationError, LocalEntryNotFoundError
from torch import hub

from finetune.errors import HubError, WeightsError
from finetune.files import git_sha1_of, sha256_of
from finetune.hub.client import Fault, Watch, clean, refusal, retried, say_once, was_cut, watching

__all__ = ["HubFile", "checked", "download", "fetch", "first_of"]


@dataclass(frozen=True)
class HubFile:
    """A file of a repository, in the cache.

    Attributes:
        path: in the client's cache.
        commit: of the repository, that the file belongs to; None for a cache of another layout.
        sha256: of its bytes, when checking them took it.
    """

    path: Path
    commit: str | None
    sha256: str | None


class _NoSuchFile(WeightsError):
    """The repository does not hold this file."""

    code = "weights.not_found"


def first_of(
    repository: str, filenames: tuple[str, ...], revision: str | None, *, source: str | None = None
) -> HubFile:
    """Fetch the first of several files that a repository holds.

    Args:
        source: what the user calls it, for messages.
    Raises: WeightsError if it holds none of them; see fetch() for the rest.
    """
    missing: WeightsError | None = None
    for filename in filenames:
        try:
            return fetch(repository, filename, revision, source=source)
        except _NoSuchFile as error:
            missing = missing or error
    raise WeightsError(
        f"{source or f'hf-hub:{repository}'}: no weights file (looked for {', '.join(filenames)}); "
        f"choose a repository in timm's format",
        code="weights.not_found",
    ) from missing


def fetch(
    repository: str, filename: str, revision: str | None, *, source: str | None = None
) -> HubFile:
    """Download one file, or take it from the cache, and check its bytes against the hub's name.

    A file is fetched again, within bounds, if the connection fails or its bytes are wrong. If the
    hub does not answer, the copy in the cache is used and its commit printed. No request is made
    when the hub is set offline.

    Args:
        repository: owner/name.
        filename: in the repository.
        revision: branch, tag or commit; None for the newest.
        source: what the user calls it, for messages; by default their "hf-hub:" name.
    Raises: WeightsError telling apart a wrong name, revision and file, and a damaged copy;
        HubError for a token that is refused, no access, and a hub that does not answer.
    """
    where = source or f"hf-hub:{repository}" + (f"@{revision}" if revision else "")
    try:
        copy = _copy(where, repository, filename, revision)
        if is_offline_mode():
            return _from_copy(where, filename, copy, "HF_HUB_OFFLINE is set")
        return _Download(where, repository, filename, revision).run(copy)
    except HFValidationError as error:
        raise WeightsError(
            f"{where}: not a repository name; write hf-hub:owner/name", code="weights.unknown_name"
        ) from error


def _copy(where: str, repository: str, filename: str, revision: str | None) -> Path | None:
    """Find the copy in the cache that a revision stood for when it was last seen."""
    path = try_to_load_from_cache(repository, filename, revision=revision)
    if path is None or isinstance(path, str):
        return Path(path) if path else None
    if is_offline_mode():
        raise _NoSuchFile(f"{where}: no file {filename}; choose one in timm's format")
    return None


def _from_copy(where: str, filename: str, copy: Path | None, cause: str) -> HubFile:
    if copy is None:
        raise HubError(
            f"{where}: {cause}, and {filename} is not in the cache; run once with a connection, or "
            f"copy the model and give its folder",
            code="hub.unreachable",
        )
    sha256 = checked(copy)
    if sha256 is None:
        raise WeightsError(
            f"{where}: {filename} in the cache is damaged (its bytes are not what its checksum "
            f"says), and {cause}; delete {copy.resolve()}, or connect to fetch it anew",
            code="weights.damaged",
        )
    commit = _commit_of(copy)
    say_once(f"{where}: {cause}; using revision {commit} from the cache")
    return HubFile(copy, commit, sha256 or None)


class _Download:
    """The download of one file, over as many tries as it takes."""

    def __init__(self, where: str, repository: str, filename: str, revision: str | None) -> None:
        self.where = where
        self.repository = repository
        self.filename = filename
        self.revision = revision
        self.damaged: Path | None = None

    def run(self, copy: Path | None) -> HubFile:
        """Try within bounds, then go back to the copy that was there before."""
        try:
            return retried(self.where, self._try, has_copy=copy is not None)
        except Fault as fault:
            cause, code = str(fault), fault.code
            if self.damaged is not None and not fault.unreachable:
                # timm and transformers do not check what they find there
                self.damaged.resolve().unlink(missing_ok=True)
            if copy is not None and (
                fault.unreachable or (copy.exists() and checked(copy) is not None)
            ):
                return _from_copy(self.where, self.filename, copy, cause)
        raise HubError(
            f"{self.where}: {self.filename} could not be fetched: {cause}; try again later, or "
            f"give a local folder",
            code=code,
        )

    def _try(self) -> HubFile:
        with watching() as watch:
            path = self._ask(watch)
        sha256 = checked(path, watch.etag)
        if sha256 is None:
            self.damaged = path
            raise Fault(f"{self.filename} came with bytes that are not those of its checksum")
        return HubFile(path, _commit_of(path), sha256 or None)

    def _ask(self, watch: Watch) -> Path:
        """Ask the client once; it writes a forced download over the damaged one in one step."""
        error: Exception | None = None
        try:
            path = hf_hub_download(
                self.repository,
                self.filename,
                revision=self.revision,
                force_download=self.damaged is not None,
            )
        except (Fault, HFValidationError):
            raise
        except Exception as caught:
            error = caught
        # Where it is refused, the client would go on with a copy, as if nothing had happened.
        error = watch.refusal() or error
        if error is None:
            return Path(path)
        self._explain(error)

    def _explain(self, error: Exception) -> NoReturn:
        text = clean(str(error), get_token())
        if was_cut(error):
            raise Fault(f"the connection was cut ({text})") from None
        if re.search("hf_xet|xet-read-token|Xet", f"{type(error)} {error}"):
            raise HubError(
                f"{self.where}: {self.filename} cannot be read from Xet storage ({text}); set "
                f"HF_HUB_DISABLE_XET=1 to fetch it the plain way",
                code="hub.xet",
            ) from None
        if isinstance(error, EntryNotFoundError) and not isinstance(error, LocalEntryNotFoundError):
            raise _NoSuchFile(
                f"{self.where}: no file {self.filename}; choose one in timm's format"
            ) from None
        cause = error.__cause__ if isinstance(error, LocalEntryNotFoundError) else error
        definite = refusal(cause, self.where, self.revision, missing=WeightsError)
        if definite is not None:
            raise definite from None
        if isinstance(error, LocalEntryNotFoundError):  # an answer without the hub's headers
            raise HubError(
                f"{self.where}: what answers is not a hub; check HF_ENDPOINT and the proxy",
                code="hub.wrong_answer",
            ) from None
        if isinstance(error, OSError):
            raise WeightsError(
                f"{self.where}: {text}; try again, or give a local folder",
                code="weights.unreadable",
            ) from None
        raise HubError(
            f"{self.where}: {text or type(error).__name__}; check HF_ENDPOINT",
            code="hub.wrong_answer",
        ) from None


def _commit_of(path: Path) -> str | None:
    parts = path.parts
    return parts[parts.index("snapshots") + 1] if "snapshots" in parts else None


def download(url: str) -> Path:
    """Fetch a file that timm's registry knows by its address only, through torch's cache.

    torch's convention puts the first digits of the sha256 into the name; they are checked.

    Raises: WeightsError if it cannot be fetched, or has another checksum.
    """
    filename = url.rsplit("/", 1)[-1]
    path = Path(hub.get_dir()) / "checkpoints" / filename
    if not path.is_file():
        digits = re.search(r"-([0-9a-f]{8,})\.", filename)
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            hub.download_url_to_file(url, str(path), digits and digits[1], progress=False)
        except (OSError, RuntimeError) as error:
            raise WeightsError(
                f"{url}: cannot be downloaded ({error}) and is not in the cache; try again",
                code="weights.not_found",
            ) from error
    return path


def checked(path: Path, etag: str | None = None) -> str | None:
    """Compare a file's bytes with the hub's name for them, which its copy in the cache bears.

    Args:
        path: the link in a snapshot, or the file itself where the system has no links.
        etag: the hub's name for it, for the latter.
    Returns: its sha256; "" when the name is not a sha256; None when the bytes are others.
    """
    name = Path(os.readlink(path)).name if path.is_symlink() else etag or ""
    if re.fullmatch(r"[0-9a-f]{64}", name):
        return name if sha256_of(path) == name else None
    if re.fullmatch(r"[0-9a-f]{40}", name) and git_sha1_of(path) != name:
        return None
    return ""
