"""Files of weights from the hub, or from an address: through the cache, with the commit."""

from __future__ import annotations

import re
from pathlib import Path

from huggingface_hub import hf_hub_download
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from torch import hub

from finetune.errors import WeightsError

__all__ = ["download", "first_of", "hub_file"]


def first_of(
    repository: str, filenames: tuple[str, ...], revision: str | None
) -> tuple[Path, str | None]:
    """The first of several files that a repository holds."""
    missing: WeightsError | None = None
    for filename in filenames:
        try:
            return hub_file(repository, filename, revision)
        except _NoSuchFile as error:
            missing = missing or error
    raise WeightsError(
        f"hf-hub:{repository}: no weights file (looked for {', '.join(filenames)}); "
        f"choose a repository in timm's format"
    ) from missing


class _NoSuchFile(WeightsError):
    """The repository answered: it does not hold this file."""


def hub_file(repository: str, filename: str, revision: str | None) -> tuple[Path, str | None]:
    """Download one file, or take it from the cache; no request when the hub is set offline.

    Returns: its path and the commit that it belongs to.
    Raises: WeightsError telling apart a wrong name, a wrong revision, no access and no network.
    """
    where = f"hf-hub:{repository}" + (f"@{revision}" if revision else "")
    try:
        path = Path(hf_hub_download(repository, filename, revision=revision))
    except HFValidationError as error:
        raise WeightsError(f"{where}: not a repository name; write hf-hub:owner/name") from error
    except LocalEntryNotFoundError as error:
        raise WeightsError(
            f"{where}: no network (or HF_HUB_OFFLINE is set) and {filename} is not in the cache; "
            f"run once with a connection, or copy the model and give its folder"
        ) from error
    except GatedRepoError as error:
        raise WeightsError(
            f"{where}: access must be granted first; accept the terms on its page, then "
            f"`hf auth login`"
        ) from error
    except RevisionNotFoundError as error:
        raise WeightsError(
            f"{where}: no such revision; leave '@{revision}' away for the newest"
        ) from error
    except RepositoryNotFoundError as error:
        raise WeightsError(
            f"{where}: no such repository, or it is private; check the name, or `hf auth login`"
        ) from error
    except EntryNotFoundError as error:
        raise _NoSuchFile(f"{where}: no file {filename}; is it in timm's format?") from error
    except HfHubHTTPError as error:
        raise WeightsError(f"{where}: the hub answered {error}; try again later") from error
    except OSError as error:
        raise WeightsError(f"{where}: {error}; try again, or give a local folder") from error
    parts = path.parts
    commit = parts[parts.index("snapshots") + 1] if "snapshots" in parts else None
    return path, commit


def download(url: str) -> Path:
    """A file that the registry knows by address only, through torch's cache.

    torch's convention puts the first digits of the sha256 into the name; they are checked.
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
                f"{url}: cannot be downloaded ({error}) and is not in the cache; try again"
            ) from error
    return path
