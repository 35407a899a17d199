"""Upload a model to the Hub in one commit; runs in a subprocess that `push.py` starts.

The subprocess reads an `UploadJob` from standard input and writes reports to standard output, one
JSON object per line: its current phase, then the result or the error. SIGTERM stops it immediately,
except during a commit, which it finishes first. A commit is a single request, so even after SIGKILL
the Hub has either the whole commit or nothing of it. This module does not import torch, directly or
indirectly, so the subprocess starts in half a second.
"""

from __future__ import annotations

import contextlib
import fnmatch
import importlib.util
import json
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from huggingface_hub import (
    CommitInfo,
    CommitOperationAdd,
    CommitOperationDelete,
    constants,
    get_session,
    hf_raise_for_status,
)
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils import (
    are_progress_bars_disabled,
    build_hf_headers,
    disable_progress_bars,
    enable_progress_bars,
)

from finetune.errors import FinetuneError, redact_secrets
from finetune.files import file_sha256, git_blob_sha1
from finetune.hub.client import TransientHubError, describe_error, http_status, redact, retry
from finetune.log import logger
from finetune.process_lifecycle import die_with_parent
from finetune.publish.permissions import DEFAULT_BRANCH, check_privacy
from finetune.publish.repo_client import RepoClient

__all__ = ["UploadJob", "main", "upload_and_commit"]

# Top-level files of an earlier push that a loader would read instead of ours: other weight files,
# and the preprocessing of another model. A push deletes them.
STALE_PATTERNS = (
    *("*.safetensors", "*.bin", "*.npz", "*.pt", "*.pth", "*.ckpt", "*.h5", "*.msgpack"),
    *("*.index.json", "preprocessor_config.json", "processor_config.json", "adapter_config.json"),
)
PROGRESS_BAR_MIN_BYTES = 20_000_000  # smaller uploads finish before a bar is useful
XET_TIMEOUT_SECONDS = 10.0  # timeout when asking the Hub whether it has Xet storage
_CONFLICTS = (409, 412)  # HTTP status codes: the branch has new commits since it was read

ReportFn = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class UploadJob:
    """The work of the subprocess: a push whose permissions and files have been checked.

    Attributes:
        commit_message: the commit message.
        retry_command: the command that repeats the push, for error messages.
        files: local path of each file to push, by its name on the Hub.
        allowed_names: names of all files that a push may send; the push deletes a file on the Hub
            that is in `allowed_names` but not in `files`.
        repo_exists: True if the repository existed at the permission check.
        existing_branches: branches of the repository at the permission check.
    """

    repository: str
    branch: str
    private: bool
    commit_message: str
    retry_command: str
    files: dict[str, str]
    allowed_names: Sequence[str]
    repo_exists: bool
    existing_branches: Sequence[str]


def upload_and_commit(job: UploadJob, report: ReportFn) -> dict[str, Any]:
    """Create repository and branch if needed, then make the branch contain exactly the job's files.

    Returns: a dict with keys `commit` (its sha), `changed` (False if the Hub already had all files)
        and `deleted`.
    Raises: HubError if the Hub refuses or fails.
    """
    hub = RepoClient(job.repository, retry_command=job.retry_command)
    with hub.translate_errors():
        report({"phase": "creating the repository"})
        _create_repo_and_branch(hub, job)
        return _Committer(hub, job, report).commit()


def _create_repo_and_branch(hub: RepoClient, job: UploadJob) -> None:
    """Create the repository and branch if missing; a retry ignores the error "already exists"."""

    def unless_there(function: Any, *args: Any, **options: Any) -> None:
        try:
            function(*args, **options)
        except HfHubHTTPError as error:
            if http_status(error) != 409:
                raise

    create, create_branch = hub.api.create_repo, hub.api.create_branch
    name = hub.repository
    if not job.repo_exists:
        # None uses the owner's default: an organization may require private repositories
        hub.call_with_retries(
            "creating it", unless_there, create, name, private=job.private or None
        )
    if job.branch != DEFAULT_BRANCH and job.branch not in job.existing_branches:
        hub.call_with_retries(
            "creating the branch", unless_there, create_branch, name, branch=job.branch
        )


class _Committer:
    """Uploads and commits a job, with retries.

    Attributes:
        use_lfs: True after Xet storage has failed; the files are then sent with plain LFS.
    """

    def __init__(self, hub: RepoClient, job: UploadJob, report: ReportFn) -> None:
        self.hub = hub
        self.job = job
        self.report = report
        self.use_lfs = False
        has_xet = importlib.util.find_spec("hf_xet") is not None
        self._has_xet = has_xet and not constants.HF_HUB_DISABLE_XET
        self._has_checked_xet = not self._has_xet
        self._deleted: list[str] = []
        self._digests: dict[tuple[str, bool], str] = {}
        self._initial_head = ""

    def commit(self) -> dict[str, Any]:
        """Commit with retries. Returns: see `upload_and_commit`. Raises: HubError."""
        try:
            return retry(self.hub.repository, self._try_commit)
        except TransientHubError as fault:
            last = fault
        if done := self._result_if_up_to_date():  # the response of the last try may be lost
            return done
        raise self.hub.retries_exhausted_error("the commit", last)

    def _try_commit(self) -> dict[str, Any]:
        """Compare the files with the head of the branch and commit the difference.

        A retry also compares first, so it notices a commit that succeeded although its response was
        lost. The request names the parent commit, so the Hub cannot apply it twice.
        """
        if done := self._result_if_up_to_date():
            return done
        try:
            sha = self._send_changes().oid
        except HfHubHTTPError as error:
            if http_status(error) not in _CONFLICTS:
                raise
            raise TransientHubError(
                "the branch moved during the push", retry_after_seconds=0.0
            ) from None
        return {"commit": sha, "changed": True, "deleted": self._deleted}

    def _result_if_up_to_date(self) -> dict[str, Any] | None:
        """Compare files with the Hub. Returns: the result if nothing differs, else None."""
        self.report({"phase": "comparing with the hub"})
        self._head, held = _read_branch(self.hub, self.job.branch, private=self.job.private)
        self._initial_head = self._initial_head or self._head
        files = {name: Path(path) for name, path in self.job.files.items()}
        self._changed = [
            name
            for name, path in files.items()
            if not _is_same_file(path, held.get(name), self._digests)
        ]
        self._stale = [name for name in held if name not in files and self._is_stale(name)]
        if not self._changed and not self._stale:
            changed = self._head != self._initial_head
            return {"commit": self._head, "changed": changed, "deleted": self._deleted}
        self._deleted = self._stale
        return None

    def _is_stale(self, name: str) -> bool:
        return name in self.job.allowed_names or any(
            fnmatch.fnmatch(name, kind) for kind in STALE_PATTERNS
        )

    def _send_changes(self) -> CommitInfo:
        """Upload the large files, then commit all changes on top of the head read before."""
        hub, branch = self.hub, self.job.branch
        title, _, rest = self.job.commit_message.partition("\n")
        additions = [CommitOperationAdd(name, self.job.files[name]) for name in self._changed]
        deletions = [CommitOperationDelete(name, is_folder=False) for name in self._stale]
        with contextlib.ExitStack() as opened:
            if not self._has_checked_xet:
                self.report({"phase": "asking for storage"})
                self._check_xet()
            self.report({"phase": "sending the files"})
            self.use_lfs = self.use_lfs or not self._upload_large_files(additions)
            if self.use_lfs:
                # huggingface_hub sends open file objects without Xet
                paths = {one.path_in_repo: str(one.path_or_fileobj) for one in additions}
                additions = [
                    CommitOperationAdd(name, opened.enter_context(open(path, "rb")))
                    for name, path in paths.items()
                ]
                self._upload_large_files(additions)
            opened.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")  # check_card has reported the card's warnings
            self.report({"phase": "committing", "parent": self._head})
            return hub.call_once(
                hub.api.create_commit,
                hub.repository,
                [*additions, *deletions],
                commit_message=title,
                commit_description=rest.strip(),
                revision=branch,
                parent_commit=self._head,
            )

    def _check_xet(self) -> None:
        """Request a Xet storage token, to fail early: hf_xet would silently retry for minutes."""
        hub, self._has_checked_xet = self.hub, True
        url = f"{hub.api.endpoint}/api/models/{hub.repository}/xet-write-token/"
        url += self.job.branch.replace("/", "%2F")
        headers = build_hf_headers(token=hub.token)

        def ask() -> None:
            response = get_session().get(url, headers=headers, timeout=XET_TIMEOUT_SECONDS)
            hf_raise_for_status(response)

        try:
            retry(hub.repository, lambda: hub.call_once(ask))
        except (TransientHubError, HfHubHTTPError) as error:
            is_fault = isinstance(error, TransientHubError)
            self._fall_back_to_lfs(str(error) if is_fault else describe_error(error)[0])

    def _fall_back_to_lfs(self, problem: str) -> None:
        self.use_lfs = True
        logger.info(
            f"{self.hub.repository}: Xet does not work here ({problem}); sending by plain LFS; "
            "set HF_HUB_DISABLE_XET=1 to do so from the start"
        )

    def _upload_large_files(self, additions: list[CommitOperationAdd]) -> bool:
        """Upload the large files before the commit, which then is a small request.

        Returns: True after the upload; False if Xet failed, and the caller should use plain LFS.
        """
        hub = self.hub
        try:
            with _progress_bars(
                sum(one.upload_info.size for one in additions) >= PROGRESS_BAR_MIN_BYTES
            ):
                hub.call_with_retries(
                    "sending the files",
                    hub.api.preupload_lfs_files,
                    hub.repository,
                    additions,
                    revision=self.job.branch,
                    free_memory=False,
                )
            return True
        except (FinetuneError, HfHubHTTPError):
            raise
        except (OSError, RuntimeError, ValueError) as error:  # hf_xet, or an invalid LFS response
            problem = redact(str(error), hub.token)
        if self.use_lfs or not self._has_xet:
            switch = "; try again without Xet: HF_HUB_DISABLE_XET=1" * self._has_xet
            raise hub.error_with_retry_command(
                f"sending the files failed ({problem}){switch}", code="hub.upload"
            )
        self._fall_back_to_lfs(problem)
        return False


@contextlib.contextmanager
def _progress_bars(show: bool) -> Iterator[None]:
    """Show or hide huggingface_hub's progress bars; on failure, end the line of an open bar."""
    if are_progress_bars_disabled():
        yield
    elif show:
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


def _read_branch(hub: RepoClient, branch: str, *, private: bool) -> tuple[str, dict[str, RepoFile]]:
    """Read a branch. Returns: its head commit, and its top-level files by name."""
    reading, name = "reading the branch", hub.repository
    info = hub.call_with_retries(reading, hub.api.model_info, name, revision=branch)
    check_privacy(hub, want_private=private, is_private=bool(info.private))
    sha = str(info.sha)

    def tree() -> list[Any]:  # the client returns an iterator
        return list(hub.api.list_repo_tree(name, revision=sha))

    entries = hub.call_with_retries(reading, tree)
    return sha, {entry.path: entry for entry in entries if isinstance(entry, RepoFile)}


def _is_same_file(path: Path, held: RepoFile | None, digests: dict[tuple[str, bool], str]) -> bool:
    """Return True if the Hub has the same file, by sha256 for LFS files, else by git's sha1."""
    if held is None or held.size != path.stat().st_size:
        return False
    key = (path.name, held.lfs is not None)
    if key not in digests:
        digests[key] = file_sha256(path) if held.lfs else git_blob_sha1(path)
    return digests[key] == (held.lfs.sha256 if held.lfs else held.blob_id)


# --- subprocess ----------------------------------------------------------------------------------


class _StopRequested(BaseException):
    """Raised after SIGTERM; a BaseException, so that `except Exception` does not catch it."""


class _Reporter:
    """Writes reports to standard output, and raises _StopRequested on SIGTERM outside a commit."""

    def __init__(self) -> None:
        # redirect the output of libraries to stderr, so that stdout has only reports
        self._stream = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)
        self._stop_requested = False
        self._is_committing = False
        signal.signal(signal.SIGTERM, self._on_sigterm)

    def __call__(self, report: dict[str, Any]) -> None:
        if "phase" in report:
            self._is_committing = report["phase"] == "committing"
            if self._stop_requested:
                raise _StopRequested
        self._stream.write(json.dumps(report) + "\n")
        self._stream.flush()

    def _on_sigterm(self, number: int, frame: FrameType | None) -> None:
        self._stop_requested = True
        if not self._is_committing:
            raise _StopRequested


def main() -> None:
    """Run the job read from standard input; the last report is the result or the error."""
    die_with_parent()
    work = json.load(sys.stdin)
    if os.getppid() != work.pop("parent"):  # the parent ended before die_with_parent took effect
        return
    report: ReportFn | None = None
    outcome: dict[str, Any]
    try:
        report = _Reporter()
        outcome = {"result": upload_and_commit(UploadJob(**work), report)}
    except _StopRequested:
        outcome = {"stopped": True}
    except FinetuneError as error:
        kind, message = type(error).__name__, redact_secrets(str(error))
        outcome = {"error": {"kind": kind, "message": message, "code": error.code}}
    except Exception as error:
        trace = redact_secrets(f"{type(error).__name__}: {error}\n{traceback.format_exc()}")
        outcome = {"internal": trace}
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if report is not None:
        report(outcome)
    # skip the interpreter shutdown, which would wait for the threads of a stopped upload
    os._exit(0)
