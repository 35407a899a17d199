"""Send a model to the hub in one commit; it runs in a process of its own, see `push.py`.

That process is given a `Job` on its standard input and reports on its standard output, one JSON
object a line: the phase it is in, then the result or the error. SIGTERM asks it to stop: it does
so at once, except while a commit is being made, which is finished first. SIGKILL at any moment
leaves the hub without the commit or with all of it: a commit is one request. Nothing that imports
torch is imported here, so that it starts in half a second.
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

from finetune.console import say
from finetune.errors import FinetuneError, masked
from finetune.files import git_sha1_of, sha256_of
from finetune.hub.client import Fault, clean, described, retried, status_of
from finetune.processes import end_with_parent
from finetune.publish.permissions import MAIN, check_privacy
from finetune.publish.repository import Hub

__all__ = ["Job", "main", "send"]

# What an earlier push may have left at the top of a repository and a loader would prefer: other
# weights, and preprocessing that would not be this model's.
STALE = (
    *("*.safetensors", "*.bin", "*.npz", "*.pt", "*.pth", "*.ckpt", "*.h5", "*.msgpack"),
    *("*.index.json", "preprocessor_config.json", "processor_config.json", "adapter_config.json"),
)
BAR_BYTES = 20_000_000  # below that an upload is over before a bar tells anything
STORAGE_SECONDS = 10.0  # for the hub to say whether it has Xet storage
_CONFLICTS = (409, 412)  # the branch has moved since it was read

Report = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class Job:
    """A push whose rights and files have been checked.

    Attributes:
        text: the commit's message.
        again: the command that does the same again.
        files: the path of each file by its name on the hub.
        names: of all files that a push may send; those that are not sent now are deleted.
        exists: True if the repository was there when it was looked for.
        branches: that it had then.
    """

    repository: str
    branch: str
    private: bool
    text: str
    again: str
    files: dict[str, str]
    names: Sequence[str]
    exists: bool
    branches: Sequence[str]


def send(job: Job, report: Report) -> dict[str, Any]:
    """Create what is absent, then make the branch hold exactly the job's files.

    Returns: commit (its sha), changed (False if the hub held it all already) and deleted.
    Raises: HubError for what the hub refuses or cannot do now.
    """
    hub = Hub(job.repository, again=job.again)
    with hub.explained():
        report({"phase": "creating the repository"})
        _create(hub, job)
        return _Push(hub, job, report).run()


def _create(hub: Hub, job: Job) -> None:
    """Create what is absent; "exists already" is the echo of a lost answer."""

    def unless_there(function: Any, *args: Any, **options: Any) -> None:
        try:
            function(*args, **options)
        except HfHubHTTPError as error:
            if status_of(error) != 409:
                raise

    create, create_branch = hub.api.create_repo, hub.api.create_branch
    name = hub.repository
    if not job.exists:
        # None is the owner's default: an organisation may want all of its repositories private
        hub.call("creating it", unless_there, create, name, private=job.private or None)
    if job.branch != MAIN and job.branch not in job.branches:
        hub.call("creating the branch", unless_there, create_branch, name, branch=job.branch)


class _Push:
    """The commit of a job, over as many tries as it takes.

    Attributes:
        plain: True once Xet storage has failed, and the files go by LFS.
    """

    def __init__(self, hub: Hub, job: Job, report: Report) -> None:
        self.hub = hub
        self.job = job
        self.report = report
        self.plain = False
        has_xet = importlib.util.find_spec("hf_xet") is not None
        self._has_xet = has_xet and not constants.HF_HUB_DISABLE_XET
        self._knows_storage = not self._has_xet
        self._deleted: list[str] = []
        self._digests: dict[tuple[str, bool], str] = {}
        self._first = ""

    def run(self) -> dict[str, Any]:
        """Commit. Returns: commit, changed and deleted. Raises: HubError."""
        try:
            return retried(self.hub.repository, self._try)
        except Fault as fault:
            last = fault
        if done := self._unchanged():  # the answer to the last try may have been lost
            return done
        raise self.hub.gave_up("the commit", last)

    def _try(self) -> dict[str, Any]:
        """Read the head and send what differs; again, this finds out what became of the last try.

        The parent is pinned, so that a commit whose answer was lost cannot be made a second time.
        """
        if done := self._unchanged():
            return done
        try:
            sha = self._send().oid
        except HfHubHTTPError as error:
            if status_of(error) not in _CONFLICTS:
                raise
            raise Fault("the branch has moved meanwhile", seconds=0.0) from None
        return {"commit": sha, "changed": True, "deleted": self._deleted}

    def _unchanged(self) -> dict[str, Any] | None:
        """Compare with the hub. Returns: the answer, if it holds exactly the files; or None."""
        self.report({"phase": "comparing with the hub"})
        self._head, held = _head(self.hub, self.job.branch, private=self.job.private)
        self._first = self._first or self._head
        files = {name: Path(path) for name, path in self.job.files.items()}
        self._changed = [
            name for name, path in files.items() if not _same(path, held.get(name), self._digests)
        ]
        self._stale = [name for name in held if name not in files and self._is_stale(name)]
        if not self._changed and not self._stale:
            changed = self._head != self._first
            return {"commit": self._head, "changed": changed, "deleted": self._deleted}
        self._deleted = self._stale
        return None

    def _is_stale(self, name: str) -> bool:
        return name in self.job.names or any(fnmatch.fnmatch(name, kind) for kind in STALE)

    def _send(self) -> CommitInfo:
        """Upload the large files, then commit everything, on top of the head or not at all."""
        hub, branch = self.hub, self.job.branch
        title, _, rest = self.job.text.partition("\n")
        additions = [CommitOperationAdd(name, self.job.files[name]) for name in self._changed]
        deletions = [CommitOperationDelete(name, is_folder=False) for name in self._stale]
        with contextlib.ExitStack() as opened:
            if not self._knows_storage:
                self.report({"phase": "asking for storage"})
                self._ask_for_storage()
            self.report({"phase": "sending the files"})
            self.plain = self.plain or not self._upload(additions)
            if self.plain:
                # huggingface_hub takes open files to where there is no Xet
                paths = {one.path_in_repo: str(one.path_or_fileobj) for one in additions}
                additions = [
                    CommitOperationAdd(name, opened.enter_context(open(path, "rb")))
                    for name, path in paths.items()
                ]
                self._upload(additions)
            opened.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")  # on the card: they were told when it was checked
            self.report({"phase": "committing", "parent": self._head})
            return hub.once(
                hub.api.create_commit,
                hub.repository,
                [*additions, *deletions],
                commit_message=title,
                commit_description=rest.strip(),
                revision=branch,
                parent_commit=self._head,
            )

    def _ask_for_storage(self) -> None:
        """Ask for the token of Xet storage: hf_xet would repeat this for minutes, silently."""
        hub, self._knows_storage = self.hub, True
        url = f"{hub.api.endpoint}/api/models/{hub.repository}/xet-write-token/"
        url += self.job.branch.replace("/", "%2F")
        headers = build_hf_headers(token=hub.token)

        def ask() -> None:
            response = get_session().get(url, headers=headers, timeout=STORAGE_SECONDS)
            hf_raise_for_status(response)

        try:
            retried(hub.repository, lambda: hub.once(ask))
        except (Fault, HfHubHTTPError) as error:
            is_fault = isinstance(error, Fault)
            self._leave_xet(str(error) if is_fault else described(error)[0])

    def _leave_xet(self, problem: str) -> None:
        self.plain = True
        say(
            f"{self.hub.repository}: Xet does not work here ({problem}); sending by plain LFS, as "
            "HF_HUB_DISABLE_XET=1 does from the start"
        )

    def _upload(self, additions: list[CommitOperationAdd]) -> bool:
        """Upload the large files; the commit itself is then a small request.

        Returns: False if Xet did not work and plain LFS has yet to be tried.
        """
        hub = self.hub
        try:
            with _bars(sum(one.upload_info.size for one in additions) >= BAR_BYTES):
                hub.call(
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
        except (OSError, RuntimeError, ValueError) as error:  # hf_xet's, or of the LFS answer
            problem = clean(str(error), hub.token)
        if self.plain or not self._has_xet:
            switch = "; without Xet, by HF_HUB_DISABLE_XET=1, it may work" * self._has_xet
            raise hub.failure(f"sending the files failed ({problem}){switch}", code="hub.upload")
        self._leave_xet(problem)
        return False


@contextlib.contextmanager
def _bars(shown: bool) -> Iterator[None]:
    """Show the client's progress bars for what takes a while; it leaves them open on failure."""
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
    """Read the branch. Returns: its newest commit, and the files at its top by name."""
    reading, name = "reading the branch", hub.repository
    info = hub.call(reading, hub.api.model_info, name, revision=branch)
    check_privacy(hub, wanted=private, is_private=bool(info.private))
    sha = str(info.sha)

    def tree() -> list[Any]:  # the client gives them one after another
        return list(hub.api.list_repo_tree(name, revision=sha))

    entries = hub.call(reading, tree)
    return sha, {entry.path: entry for entry in entries if isinstance(entry, RepoFile)}


def _same(path: Path, held: RepoFile | None, digests: dict[tuple[str, bool], str]) -> bool:
    """True if the hub holds this very file: by sha256 if it is in LFS, by git's sha1 if not."""
    if held is None or held.size != path.stat().st_size:
        return False
    key = (path.name, held.lfs is not None)
    if key not in digests:
        digests[key] = sha256_of(path) if held.lfs else git_sha1_of(path)
    return digests[key] == (held.lfs.sha256 if held.lfs else held.blob_id)


# --- the process ---------------------------------------------------------------------------------


class _Stopped(BaseException):
    """SIGTERM came; no `except Exception` catches it."""


class _Reports:
    """The reports of this process, and its obedience to SIGTERM between two phases."""

    def __init__(self) -> None:
        # what a library prints must not come between the reports
        self._stream = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)
        self._stops = False
        self._commits = False
        signal.signal(signal.SIGTERM, self._stop)

    def __call__(self, report: dict[str, Any]) -> None:
        if "phase" in report:
            self._commits = report["phase"] == "committing"
            if self._stops:
                raise _Stopped
        self._stream.write(json.dumps(report) + "\n")
        self._stream.flush()

    def _stop(self, number: int, frame: FrameType | None) -> None:
        self._stops = True
        if not self._commits:
            raise _Stopped


def main() -> None:
    """Carry out the job on standard input; the last report is its result or error."""
    end_with_parent()
    work = json.load(sys.stdin)
    if os.getppid() != work.pop("parent"):  # it ended before it could be noticed
        return
    report: Report | None = None
    outcome: dict[str, Any]
    try:
        report = _Reports()
        outcome = {"result": send(Job(**work), report)}
    except _Stopped:
        outcome = {"stopped": True}
    except FinetuneError as error:
        kind, message = type(error).__name__, masked(str(error))
        outcome = {"error": {"kind": kind, "message": message, "code": error.code}}
    except Exception as error:
        trace = masked(f"{type(error).__name__}: {error}\n{traceback.format_exc()}")
        outcome = {"internal": trace}
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if report is not None:
        report(outcome)
    # not through the interpreter's end: threads of an upload that was stopped would be waited for
    os._exit(0)
