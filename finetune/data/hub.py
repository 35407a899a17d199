"""Data sets of the hub: loaded at one commit, through faults, and never at another one."""

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
from huggingface_hub.errors import HfHubHTTPError, HFValidationError

from finetune.errors import DataError, HubError
from finetune.hub.calls import clean
from finetune.hub.client import Fault, checked, refusal, retried, say_once, was_cut, watching

__all__ = ["asked_for", "explained", "last_seen", "load_hub", "offline", "snapshot_of"]

_ANSWER_SECONDS = 10.0


def load_hub(
    where: str, name: str, config: str | None, revision: str | None
) -> tuple[Any, str | None]:
    """Load a data set through `datasets`, at the commit that a revision stands for.

    Where `datasets` fails on the way it takes the newest copy in its cache, of whatever revision;
    here the commit of what it gives is compared with the one that was asked for.

    Args:
        where: what the user wrote, for messages.
        name: owner/name.
        config: None for the only one, or the default.
        revision: branch, tag or commit; None for the newest.
    Returns: the splits, a `datasets.DatasetDict`; and the commit, None where it is not recorded.
    Raises: DataError: no such data set, revision or configuration; HubError for a refused token,
        no access, and a hub that does not answer when nothing is cached.
    """
    if is_offline_mode():
        return _from_cache(where, name, config, revision)
    has_copy = bool(_copies(name))
    try:
        return retried(where, lambda: _try(where, name, config, revision), has_copy=has_copy)
    except Fault as fault:
        with offline():
            return _from_cache(where, name, config, revision, fault)


def _try(where: str, name: str, config: str | None, revision: str | None) -> tuple[Any, str]:
    import datasets

    loaded, error, started = None, None, time.time()
    with watching(everywhere=True) as watch:
        commit = asked_for(where, name, revision)
        try:
            loaded = datasets.load_dataset(name, config, revision=revision)
        except Exception as caught:  # it lets through what its builders and readers raise
            error = caught
    _refuse_damaged(name, commit, loaded, started)
    found = _commit(loaded) if loaded is not None else None
    if error is None and found in (None, commit):
        return loaded, commit
    if watch.fault is not None or was_cut(error):
        raise watch.fault or Fault("the connection was cut")
    if error is None:
        raise Fault(f"the revision became {commit} while it was read")
    raise explained(where, revision, watch.refusal() or error) from None


def asked_for(where: str, name: str, revision: str | None) -> str:
    """The commit that a revision stands for now; definite refusals are told apart here.

    Args: as for `load_hub`.
    Raises: as `load_hub`; Fault under `watching`.
    """
    failure: Exception
    try:
        info = HfApi().dataset_info(name, revision=revision, timeout=_ANSWER_SECONDS)
        return str(info.sha)
    except (HfHubHTTPError, HFValidationError) as error:
        failure = error
    raise explained(where, revision, failure)


def explained(where: str, revision: str | None, error: Exception) -> Exception:
    """The user's error for what the client or `datasets` raised."""
    answer: BaseException | None = error
    while answer is not None and not isinstance(answer, HfHubHTTPError):
        answer = answer.__cause__
    known = refusal(answer, where, revision, missing=DataError, noun="data set")
    if known is not None:
        return known
    detail = clean(str(error), get_token())
    return DataError(f"{where}: cannot be loaded ({detail}); check its name and configuration")


def _refuse_damaged(name: str, commit: str, loaded: Any, started: float) -> None:
    """Check the files that came during this call, and drop what was made of damaged ones."""
    snapshot = snapshot_of(name, commit)
    files = [path for path in snapshot.rglob("*") if path.is_file()]
    fresh = [path for path in files if path.stat().st_mtime >= started - 1]
    damaged = [path for path in fresh if checked(path) is None]
    if not damaged:
        return
    for path in damaged:
        path.resolve().unlink(missing_ok=True)
    for made in _copies(name):
        if made.name == commit:
            shutil.rmtree(made, ignore_errors=True)
    raise Fault(f"{damaged[0].name} came with bytes that are not those of its checksum")


# --- the cache -----------------------------------------------------------------------------------


def _from_cache(
    where: str, name: str, config: str | None, revision: str | None, fault: Fault | None = None
) -> tuple[Any, str | None]:
    """What `datasets` has of a revision; without a fault it is the user who set the hub offline."""
    import datasets

    wanted = last_seen(name, revision)
    for copy in _copies(name):
        if copy.name == wanted:
            os.utime(copy)  # `datasets` takes the newest one, whichever was asked for
    cause = "HF_HUB_OFFLINE is set" if fault is None else str(fault)
    try:
        loaded = datasets.load_dataset(name, config, revision=revision)
    except ConnectionError:
        raise HubError(
            f"{where}: the hub cannot be reached and nothing is cached ({cause}); connect once, or "
            "use parquet: or folder: with a local copy"
        ) from None
    except Exception as error:
        if fault is None:
            raise explained(where, revision, error) from None
        detail = clean(str(error), get_token())
        raise HubError(f"{where}: {cause}, and not cached ({detail}); try again later") from None
    commit = _commit(loaded)
    if commit is None:
        return loaded, None
    if commit != (wanted if revision else wanted or commit):
        only = f"only revision {commit} is cached"
        if fault is None:
            raise DataError(f"{where}: {only}; connect to fetch this one")
        raise HubError(f"{where}: {cause}, and {only}; try again later")
    say_once(f"{where}: {cause}; using revision {commit} from the cache")
    return loaded, commit


def last_seen(name: str, revision: str | None) -> str | None:
    """The commit that a revision stood for when the hub was last asked."""
    if revision and re.fullmatch(r"[0-9a-f]{40}", revision):
        return revision
    reference = _repository(name) / "refs" / (revision or "main")
    return reference.read_text().strip() if reference.is_file() else None


def snapshot_of(name: str, commit: str) -> Path:
    """Where the client keeps the files of a commit, whether or not there are any."""
    return _repository(name) / "snapshots" / commit


def _repository(name: str) -> Path:
    return Path(constants.HF_HUB_CACHE) / f"datasets--{name.replace('/', '--')}"


def _copies(name: str) -> list[Path]:
    """What `datasets` made of a data set, by configuration, version and commit."""
    from datasets import config
    from datasets.naming import camelcase_to_snakecase

    owner, _, short = name.partition("/")
    top = Path(config.HF_DATASETS_CACHE).expanduser()
    return [p for p in top.glob(f"{owner}___{camelcase_to_snakecase(short)}/*/*/*") if p.is_dir()]


def _commit(loaded: Any) -> str | None:
    """The commit that a loaded data set came from, where `datasets` recorded it."""
    for dataset in loaded.values():
        for url in dataset.info.download_checksums or {}:
            match = re.search(r"@([0-9a-f]{40})/", url)
            if match:
                return match.group(1)
        for file in dataset.cache_files:
            made = Path(file["filename"]).parent.name
            if re.fullmatch(r"[0-9a-f]{40}", made):
                return made
    return None


@contextlib.contextmanager
def offline() -> Iterator[None]:
    """Let `datasets` look in its cache alone, without waiting for a hub that does not answer."""
    from datasets import config

    places = ((constants, "HF_HUB_OFFLINE"), (config, "HF_HUB_OFFLINE"))
    before = [getattr(owner, key) for owner, key in places]
    try:
        for owner, key in places:
            setattr(owner, key, True)
        yield
    finally:
        for (owner, key), value in zip(places, before, strict=True):
            setattr(owner, key, value)
