"""Publish a model on the hub: rights first, then the files of model/ in one commit.

A push that was interrupted anywhere can be repeated: it compares with what the hub holds and sends
the difference.
"""

from __future__ import annotations

import contextlib
import fnmatch
import hashlib
import importlib.util
import shlex
import sys
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import CommitInfo, CommitOperationAdd, CommitOperationDelete, constants
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils import (
    are_progress_bars_disabled,
    disable_progress_bars,
    enable_progress_bars,
)

from finetune import __version__
from finetune.console import say
from finetune.errors import FinetuneError
from finetune.files import sha256_of
from finetune.hub.calls import ANSWER_SECONDS, TRIES, Fault, Hub, clean, status_of
from finetune.publish.artifacts import PUBLISHED, refresh
from finetune.publish.contents import check_card, check_weights, is_run, published, refuse_secrets
from finetune.publish.permissions import MAIN, Found, check_names, check_privacy, check_rights, find
from finetune.run.directory import RunDir

__all__ = ["check_rights", "push"]

# What an earlier push may have left at the top of a repository and a loader would prefer: other
# weights, and preprocessing that would not be this model's.
STALE = (
    *("*.safetensors", "*.bin", "*.npz", "*.pt", "*.pth", "*.ckpt", "*.h5", "*.msgpack"),
    *("*.index.json", "preprocessor_config.json", "processor_config.json", "adapter_config.json"),
)
CLIENT_TRIES = 2  # where the client tries each request several times itself
BAR_BYTES = 20_000_000  # below that an upload is over before a bar tells anything
_CONFLICTS = (409, 412)  # the branch has moved since it was read


def push(
    run: str | Path,
    repository: str,
    *,
    private: bool = False,
    revision: str | None = None,
    message: str | None = None,
) -> dict[str, Any]:
    """Make a branch on the hub hold exactly this model, in one commit or none.

    Args:
        run: a finished run directory, or a folder with config.json and model.safetensors.
        repository: owner/name; created when there is none.
        private: create it private.
        revision: the branch; by default main; created when there is none.
        message: of the commit.
    Returns: repository, url, commit (its sha), changed (False if the hub held it all already),
        revision, files, deleted.
    Raises: RecipeError for a wrong name, CheckpointError or WeightsError for a model that is not
        there, HubError for what the hub refuses or cannot do now.
    """
    check_names(repository, revision)
    of_run = is_run(Path(run))
    hub = Hub(repository, again=_command(run, repository, private, revision, message))
    branch = revision or MAIN
    text = (message or "").strip() or f"Push the model with finetune {__version__}"
    with hub.explained():
        repo = find(hub, private=private, revision=branch)
        if of_run:
            refresh(RunDir(run), repository=repository)
        files = published(Path(run) / "model" if of_run else Path(run))
        check_weights(files)
        refuse_secrets(files, text, Path(run), hub)
        check_card(hub, files)
        _create(hub, repo, private=private, branch=branch)
        commit, changed, deleted = _commit(hub, files, private=private, branch=branch, text=text)
    return {
        "repository": repository,
        "url": f"{hub.api.endpoint}/{repository}",
        "commit": commit,
        "changed": changed,
        "revision": branch,
        "files": sorted(files),
        "deleted": deleted,
    }


def _command(
    run: str | Path, repository: str, private: bool, revision: str | None, message: str | None
) -> str:
    words = ["finetune", "push", str(run), repository, *(["--private"] if private else [])]
    words += ["--revision", revision] if revision else []
    words += ["--message", message] if message else []
    return shlex.join(words)


# --- sending -------------------------------------------------------------------------------------


def _create(hub: Hub, repo: Found, *, private: bool, branch: str) -> None:
    """Create what is absent; "exists already" is the echo of a lost answer."""

    def unless_there(function: Any, *args: Any, **options: Any) -> None:
        try:
            function(*args, **options)
        except HfHubHTTPError as error:
            if status_of(error) != 409:
                raise

    create, create_branch = hub.api.create_repo, hub.api.create_branch
    name = hub.repository
    if not repo.exists:
        # None is the owner's default: an organisation may want all of its repositories private
        hub.call("creating it", unless_there, create, name, private=private or None)
    if branch != MAIN and branch not in repo.branches:
        hub.call("creating the branch", unless_there, create_branch, name, branch=branch)


def _commit(
    hub: Hub, files: Mapping[str, Path], *, private: bool, branch: str, text: str
) -> tuple[str, bool, list[str]]:
    """Read the head, send what differs, and look again whenever the outcome is not known.

    The parent is pinned, so that a commit whose answer was lost cannot be made a second time.
    Returns: the sha, whether there is a new commit, and the names that it deletes.
    """
    digests: dict[tuple[str, bool], str] = {}
    first, last = "", Fault("")
    deleted: list[str] = []
    for attempt in range(TRIES + 1):
        head, held = _head(hub, branch, private=private)
        first = first or head
        changed = [name for name, path in files.items() if not _same(path, held.get(name), digests)]
        stale = [name for name in held if name not in files and _is_stale(name)]
        if not changed and not stale:
            return head, head != first, deleted
        if attempt == TRIES:
            break
        deleted = stale
        additions = [CommitOperationAdd(name, files[name]) for name in changed]
        deletions = [CommitOperationDelete(name, is_folder=False) for name in stale]
        try:
            done = _send(hub, additions, deletions, parent=head, branch=branch, text=text)
            return done.oid, True, stale
        except Fault as fault:
            last = fault
        except HfHubHTTPError as error:
            if status_of(error) not in _CONFLICTS:
                raise
            last = Fault("the branch has moved meanwhile", 0.0)
        hub.wait(attempt, last)
    raise hub.gave_up("the commit", last, TRIES)


def _send(
    hub: Hub,
    additions: list[CommitOperationAdd],
    deletions: list[CommitOperationDelete],
    *,
    parent: str,
    branch: str,
    text: str,
) -> CommitInfo:
    """Upload the large files, then commit everything, on top of `parent` or not at all."""
    title, _, rest = text.partition("\n")
    with contextlib.ExitStack() as opened:
        if not hub.plain and not _upload(hub, additions, branch):
            hub.plain = True
        if hub.plain:
            # the client takes open files to where there is no Xet
            additions = [
                CommitOperationAdd(
                    one.path_in_repo, opened.enter_context(open(str(one.path_or_fileobj), "rb"))
                )
                for one in additions
            ]
            _upload(hub, additions, branch)
        opened.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")  # on the card: they were told when it was checked
        return hub.once(
            hub.api.create_commit,
            hub.repository,
            [*additions, *deletions],
            commit_message=title,
            commit_description=rest.strip(),
            revision=branch,
            parent_commit=parent,
        )


def _upload(hub: Hub, additions: list[CommitOperationAdd], branch: str) -> bool:
    """Upload the large files; the commit itself is then a small request.

    Returns: False if Xet did not work and plain LFS has yet to be tried.
    """
    try:
        with _bars(sum(one.upload_info.size for one in additions) >= BAR_BYTES):
            hub.call(
                "sending the files",
                hub.api.preupload_lfs_files,
                hub.repository,
                additions,
                revision=branch,
                free_memory=False,
                tries=CLIENT_TRIES,
            )
        return True
    except (FinetuneError, HfHubHTTPError):
        raise
    except (OSError, RuntimeError, ValueError) as error:  # hf_xet's, or of the LFS answer
        problem = clean(str(error), hub.token)
    has_xet = importlib.util.find_spec("hf_xet") is not None and not constants.HF_HUB_DISABLE_XET
    if hub.plain or not has_xet:
        switch = "; without Xet, by HF_HUB_DISABLE_XET=1, it may work" if has_xet else ""
        raise hub.failure(f"sending the files failed ({problem}){switch}")
    say(
        f"{hub.repository}: Xet does not work here ({problem}); sending by plain LFS, as "
        "HF_HUB_DISABLE_XET=1 does from the start"
    )
    return False


@contextlib.contextmanager
def _bars(shown: bool) -> Iterator[None]:
    """The client's progress bars for what takes a while; it leaves them open when it fails."""
    if are_progress_bars_disabled():
        yield
    elif shown:
        try:
            yield
        except Exception:
            print(file=sys.stderr)
            raise
    else:
        disable_progress_bars()
        try:
            yield
        finally:
            enable_progress_bars()


def _head(hub: Hub, branch: str, *, private: bool) -> tuple[str, dict[str, RepoFile]]:
    """The newest commit of the branch, and the files at its top by name."""

    reading, name = "reading the branch", hub.repository
    info = hub.call(reading, hub.api.model_info, name, revision=branch, timeout=ANSWER_SECONDS)
    check_privacy(hub, wanted=private, found=bool(info.private))
    sha = str(info.sha)

    def tree() -> list[Any]:  # the client gives them one after another
        return list(hub.api.list_repo_tree(name, revision=sha))

    entries = hub.call(reading, tree)
    return sha, {entry.path: entry for entry in entries if isinstance(entry, RepoFile)}


def _same(path: Path, held: RepoFile | None, digests: dict[tuple[str, bool], str]) -> bool:
    """Whether the hub holds this very file: by sha256 if it is in LFS, by git's sha1 if not."""
    if held is None or held.size != path.stat().st_size:
        return False
    key = (path.name, held.lfs is not None)
    if key not in digests:
        content = b"" if held.lfs else path.read_bytes()
        digests[key] = sha256_of(path) if held.lfs else _git_sha1(content)
    return digests[key] == (held.lfs.sha256 if held.lfs else held.blob_id)


def _git_sha1(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


def _is_stale(name: str) -> bool:
    return name in PUBLISHED or any(fnmatch.fnmatch(name, pattern) for pattern in STALE)
