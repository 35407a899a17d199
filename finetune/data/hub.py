"""Data sets of the hub, loaded at one commit, with retries, and never at another commit."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, constants, get_token, is_offline_mode
from huggingface_hub.errors import HFValidationError, HTTPError

from finetune.errors import DataError, FinetuneError, HubError
from finetune.hub.client import (
    Fault,
    clean,
    refusal,
    retried,
    say_once,
    understood,
    was_cut,
    watching,
)
from finetune.hub.download import checked

__all__ = ["cached_commit", "load_hub", "offline", "resolve_commit", "snapshot_of", "user_error"]

_ANSWER_SECONDS = 10.0


def load_hub(
    where: str, name: str, config: str | None, revision: str | None
) -> tuple[Any, str | None]:
    """Load a data set through `datasets`, at the commit that a revision stands for.

    If the connection fails, `datasets` takes the newest copy in its cache, of any revision. So the
    commit of the loaded data is compared with the commit of the revision.

    Args:
        where: what the user wrote, for messages.
        config: None for the only one, or the default.
        revision: branch, tag or commit; None for the newest.
    Returns: the splits, a `datasets.DatasetDict`; and the commit, None where it is not recorded.
    Raises: DataError: no such data set, revision or configuration; HubError: a refused token, no
        access, or no answer of the hub and nothing cached.
    """
    if is_offline_mode():
        return _from_cache(where, name, config, revision)
    has_copy = bool(_copies(name))
    try:
        return retried(where, lambda: _load(where, name, config, revision), has_copy=has_copy)
    except Fault as fault:
        with offline():
            return _from_cache(where, name, config, revision, fault)


def _load(where: str, name: str, config: str | None, revision: str | None) -> tuple[Any, str]:
    import datasets

    loaded, error = None, None
    before = {path.resolve() for path in _repository(name).rglob("*") if path.exists()}
    with watching(everywhere=True) as watch:
        commit = resolve_commit(where, name, revision)
        try:
            loaded = datasets.load_dataset(name, config, revision=revision)
        except Exception as caught:  # its builders and readers raise errors of any type
            error = caught
    _refuse_damaged(name, commit, loaded, before)
    loaded_commit = _recorded_commit(loaded) if loaded is not None else None
    if error is None and loaded_commit in (None, commit):
        return loaded, commit
    if watch.fault is not None or was_cut(error):
        raise watch.fault or Fault("the connection was cut")
    if error is None:
        raise Fault(f"the revision became {commit} while it was read")
    raise user_error(where, revision, watch.refusal() or error) from None


def resolve_commit(where: str, name: str, revision: str | None) -> str:
    """Ask the hub for the commit of a revision.

    Args: as for `load_hub`.
    Raises: as `load_hub`; Fault under `watching`.
    """
    failure: Exception
    try:
        with understood(where):
            info = HfApi().dataset_info(name, revision=revision, timeout=_ANSWER_SECONDS)
        return str(info.sha)
    except (HTTPError, HFValidationError) as error:
        failure = error
    raise user_error(where, revision, failure)


def user_error(where: str, revision: str | None, error: Exception) -> Exception:
    """Return the error to show for one that the client or `datasets` raised."""
    answer: BaseException | None = error
    while answer is not None and not isinstance(answer, (HTTPError, FinetuneError)):
        answer = answer.__cause__
    if isinstance(answer, FinetuneError):
        return answer
    known = refusal(answer, where, revision, missing=DataError, noun="data set")
    if known is not None:
        return known
    detail = clean(str(error), get_token())
    message = f"{where}: cannot be loaded ({detail}); check its name and configuration"
    return DataError(message, code="data.not_loadable")


def _refuse_damaged(name: str, commit: str, loaded: Any, before: set[Path]) -> None:
    """Check the files that were not there before; delete damaged ones and what was made of them."""
    snapshot = snapshot_of(name, commit)
    files = [path for path in snapshot.rglob("*") if path.is_file()]
    damaged = [path for path in files if path.resolve() not in before and checked(path) is None]
    if not damaged:
        return
    for path in damaged:
        path.resolve().unlink(missing_ok=True)
    for copy in _copies(name):
        if copy.name == commit:
            shutil.rmtree(copy, ignore_errors=True)
    raise Fault(f"{damaged[0].name} came with bytes that are not those of its checksum")


# --- the cache -----------------------------------------------------------------------------------


def _from_cache(
    where: str, name: str, config: str | None, revision: str | None, fault: Fault | None = None
) -> tuple[Any, str | None]:
    """Load a revision from the cache of `datasets`.

    Args:
        fault: of the hub; None if the user has set it offline.
    """
    import datasets

    wanted = cached_commit(name, revision)
    copies = _copies(name)
    for copy in copies:
        if copy.name == wanted:  # `datasets` takes the newest copy, of any revision
            newest = max(other.stat().st_mtime_ns for other in copies)
            os.utime(copy, ns=(newest, max(time.time_ns(), newest + 1_000_000)))
    cause = "HF_HUB_OFFLINE is set" if fault is None else str(fault)
    try:
        loaded = datasets.load_dataset(name, config, revision=revision)
    except ConnectionError:
        raise HubError(
            f"{where}: the hub cannot be reached and nothing is cached ({cause}); connect once, or "
            "use parquet: or folder: with a local copy",
            code="hub.unreachable",
        ) from None
    except Exception as error:
        if fault is None:
            raise user_error(where, revision, error) from None
        detail = clean(str(error), get_token())
        message = f"{where}: {cause}, and not cached ({detail}); try again later"
        raise HubError(message, code="hub.unreachable") from None
    commit = _recorded_commit(loaded)
    if commit is None:
        return loaded, None
    if commit != (wanted if revision else wanted or commit):
        only = f"only revision {commit} is cached"
        if fault is None:
            raise DataError(f"{where}: {only}; connect to fetch this one", code="data.not_cached")
        message = f"{where}: {cause}, and {only}; try again later"
        raise HubError(message, code="hub.unreachable")
    say_once(f"{where}: {cause}; using revision {commit} from the cache")
    return loaded, commit


def cached_commit(name: str, revision: str | None) -> str | None:
    """Return the commit of a revision when the hub was last asked; None if it never was."""
    if revision and re.fullmatch(r"[0-9a-f]{40}", revision):
        return revision
    reference = _repository(name) / "refs" / (revision or "main")
    return reference.read_text().strip() if reference.is_file() else None


def snapshot_of(name: str, commit: str) -> Path:
    """Return the folder in which the client keeps the files of a commit; it may not exist."""
    return _repository(name) / "snapshots" / commit


def _repository(name: str) -> Path:
    return Path(constants.HF_HUB_CACHE) / f"datasets--{name.replace('/', '--')}"


def _copies(name: str) -> list[Path]:
    """List the folders that `datasets` made of a data set, by configuration, version, commit."""
    from datasets import config
    from datasets.naming import camelcase_to_snakecase

    owner, _, short = name.partition("/")
    top = Path(config.HF_DATASETS_CACHE).expanduser()
    return [p for p in top.glob(f"{owner}___{camelcase_to_snakecase(short)}/*/*/*") if p.is_dir()]


def _recorded_commit(loaded: Any) -> str | None:
    """Return the commit of a loaded data set; None if `datasets` did not record it."""
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
def offline() -> Iterator[None]:
    """Let `datasets` use its cache only, without waiting for a hub that does not answer."""
    from datasets import config

    before = constants.HF_HUB_OFFLINE, config.HF_HUB_OFFLINE
    try:
        constants.HF_HUB_OFFLINE = config.HF_HUB_OFFLINE = True
        yield
    finally:
        constants.HF_HUB_OFFLINE, config.HF_HUB_OFFLINE = before
