"""Upload a model to the Hub in one commit; runs in a subprocess that `push.py` starts.

The subprocess reads an `UploadJob` from standard input and writes reports to standard output, one
JSON object per line: "phase" for each phase, then "result" or "error". A commit is a single
request, so however this process ends, the Hub has either the whole commit or nothing of it. This
module does not import torch, directly or indirectly, so the subprocess starts in half a second.
"""

from __future__ import annotations

import fnmatch
import json
import os
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, constants
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.hf_api import RepoSibling
from huggingface_hub.utils import disable_progress_bars

from finetune.errors import FinetuneError, HubError, redact_secrets
from finetune.files import file_sha256, git_blob_sha1
from finetune.hub.client import TransientHubError, call_hub, hub_errors, redact
from finetune.log import logger
from finetune.process_lifecycle import die_with_parent
from finetune.publish.permissions import DEFAULT_BRANCH, authenticated_api, check_privacy

__all__ = ["UploadJob", "main"]

# Top-level files of an earlier push that a loader would read instead of ours: other weight files,
# and the preprocessing of another model. A push deletes them.
STALE_PATTERNS = (
    *("*.safetensors", "*.bin", "*.npz", "*.pt", "*.pth", "*.ckpt", "*.h5", "*.msgpack"),
    *("*.index.json", "preprocessor_config.json", "processor_config.json", "adapter_config.json"),
)
PROGRESS_BAR_MIN_BYTES = 20_000_000  # smaller uploads finish before a bar is useful
PROGRESS_SECONDS = 15.0  # between two progress messages on standard error
_CONFLICTS = (409, 412)  # HTTP status codes: the branch has new commits since it was read


@dataclass(frozen=True)
class UploadJob:
    """The work of the subprocess: a push whose permissions and files have been checked.

    Attributes:
        commit_message: the commit message.
        retry_command: the command that repeats the push, for error messages.
        files: local path of each file to push, by its name on the Hub.
        own_names: names of all files that any such push may send; the push deletes a file on the
            Hub that is in `own_names` but not in `files`.
        repo_type: "model", or "space" for a static Space.
    """

    repository: str
    branch: str
    private: bool
    commit_message: str
    retry_command: str
    files: dict[str, str]
    own_names: Sequence[str]
    repo_type: str = "model"


class _Upload:
    """One upload, over all its tries; a try may have succeeded although its response was lost.

    Attributes:
        head: commit of the branch before the first try.
        deleted: stale files that the latest try deletes; if that try succeeded but its response was
            lost, the retry reports these files.
    """

    def __init__(self, job: UploadJob, report: Callable[[dict[str, Any]], None]) -> None:
        self.job = job
        self.api: HfApi = authenticated_api(job.repository)
        self.report = report
        self.head = ""
        self.deleted: list[str] = []

    def run(self) -> dict[str, Any]:
        """Create repository and branch if needed, and make the branch contain exactly the files.

        Returns: a dict with keys `commit` (its sha), `changed` (False if the Hub already had all
            files) and `deleted`.
        Raises: HubError if the Hub refuses or fails.
        """
        name, branch = self.job.repository, self.job.branch
        self.report({"phase": "creating the repository"})
        # None uses the owner's default: an organization may require private repositories
        private = self.job.private or None
        kind: dict[str, Any] = {"repo_type": self.job.repo_type, "exist_ok": True}
        sdk = "static" if self.job.repo_type == "space" else None
        call_hub(name, self.api.create_repo, name, private=private, space_sdk=sdk, **kind)
        if branch != DEFAULT_BRANCH:
            call_hub(name, self.api.create_branch, name, branch=branch, **kind)
        return call_hub(name, self._try_commit)

    def _try_commit(self) -> dict[str, Any]:
        """Compare the files with the head of the branch, and commit the difference on top of it.

        A retry therefore finds no difference if the earlier commit succeeded, but its response was
        lost.
        """
        job, name = self.job, self.job.repository
        self.report({"phase": "comparing with the hub"})
        with hub_errors(name):
            read_info = self.api.space_info if job.repo_type == "space" else self.api.model_info
            info = read_info(name, revision=job.branch, files_metadata=True)
            check_privacy(name, want_private=job.private, is_private=bool(info.private))
            held = {file.rfilename: file for file in info.siblings or []}
        self.head = self.head or str(info.sha)
        changed = {
            file: path for file, path in job.files.items() if not _is_same(path, held.get(file))
        }
        stale = [file for file in held if file not in job.files and self._is_stale(file)]
        if not changed and not stale:
            is_new = info.sha != self.head
            return {"commit": info.sha, "changed": is_new, "deleted": self.deleted}
        self.deleted = stale
        additions = [CommitOperationAdd(file, path) for file, path in changed.items()]
        self._send_files(additions)
        self.report({"phase": "committing", "has_sent_commit": True})
        title, _, rest = job.commit_message.partition("\n")
        with hub_errors(name), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # check_card has reported the card's warnings
            try:
                commit = self.api.create_commit(
                    name,
                    [*additions, *(CommitOperationDelete(file) for file in stale)],
                    commit_message=title,
                    commit_description=rest.strip(),
                    repo_type=job.repo_type,
                    revision=job.branch,
                    parent_commit=info.sha,
                )
            except HfHubHTTPError as error:
                if error.response.status_code not in _CONFLICTS:
                    raise
                raise TransientHubError(
                    "the branch moved during the push", retry_after_seconds=0.0
                ) from None
        return {"commit": commit.oid, "changed": True, "deleted": stale}

    def _is_stale(self, name: str) -> bool:
        if name in self.job.own_names:
            return True
        return "/" not in name and any(fnmatch.fnmatch(name, kind) for kind in STALE_PATTERNS)

    def _send_files(self, additions: list[CommitOperationAdd]) -> None:
        """Send the large files, so that the commit is a small request."""
        self.report({"phase": "sending the files"})
        name = self.job.repository
        if sum(one.upload_info.size for one in additions) < PROGRESS_BAR_MIN_BYTES:
            disable_progress_bars()
        try:
            with hub_errors(name):
                self.api.preupload_lfs_files(
                    name,
                    additions,
                    repo_type=self.job.repo_type,
                    revision=self.job.branch,
                    free_memory=False,
                )
        except (OSError, RuntimeError) as error:  # from hf_xet, or from the disk
            text = f"sending the files failed ({redact(str(error))})"
            if constants.HF_HUB_DISABLE_XET:
                raise HubError(f"{name}: {text}; try again", code="hub.upload") from None
            constants.HF_HUB_DISABLE_XET = True  # send by plain HTTP, in this process
            raise TransientHubError(f"{text} through Xet storage") from None


def _is_same(path: str, held: RepoSibling | None) -> bool:
    """Return True if the Hub has the same file, by sha256 for LFS files, else by git's sha1."""
    if held is None or held.size != os.path.getsize(path):
        return False
    if held.lfs:
        return held.lfs.sha256 == file_sha256(Path(path))
    return held.blob_id == git_blob_sha1(Path(path))


# --- subprocess ----------------------------------------------------------------------------------


def main() -> None:
    """Run the job read from standard input; the last report is the result or the error."""
    die_with_parent()
    work = json.load(sys.stdin)
    if os.getppid() != work.pop("parent"):  # the parent ended before die_with_parent took effect
        return
    job, phase = UploadJob(**work), "starting"
    # redirect the output of libraries to stderr, so that stdout has only reports
    stream = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def report(content: dict[str, Any]) -> None:
        nonlocal phase
        phase = content.get("phase", phase)
        stream.write(json.dumps(content) + "\n")
        stream.flush()

    def log_progress() -> None:
        start = time.monotonic()
        while True:
            time.sleep(PROGRESS_SECONDS)
            seconds = time.monotonic() - start
            logger.info(f"{job.repository}: {phase}, {seconds:.0f} s so far; Ctrl-C stops it")

    threading.Thread(target=log_progress, daemon=True).start()
    try:
        report({"result": _Upload(job, report).run()})
    except FinetuneError as error:
        message = f"{error}; nothing is lost, push again with: {job.retry_command}"
        report({"error": {"message": redact_secrets(message), "code": error.code}})
    except Exception:
        report({"crash": redact_secrets(traceback.format_exc())})
    # skip the interpreter shutdown, which would wait for the threads of a failed upload
    os._exit(0)
