"""`finetune push`: check permissions, then send the files of model/ to the Hub in one commit.

An interrupted push can be repeated: it compares the files with the Hub and sends the difference.
The upload runs in a subprocess (`upload.py`), because only a process can be killed while native
code (hf_xet) waits for the Hub's storage.
"""

from __future__ import annotations

import dataclasses
import json
import os
import select
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from finetune import __version__, errors
from finetune.errors import FinetuneError, Interrupted
from finetune.log import logger
from finetune.process_lifecycle import handle_interrupts
from finetune.publish.artifacts import PUBLISHED_ADAPTER_FILES, PUBLISHED_FILES, rewrite_artifacts
from finetune.publish.permissions import (
    DEFAULT_BRANCH,
    check_push_access,
    check_repo_id_and_branch,
    check_rights,
)
from finetune.publish.push_checks import (
    adapter_folder,
    check_card,
    check_no_secrets,
    check_weights,
    files_to_push,
    is_run_dir,
)
from finetune.publish.repo_client import RepoClient
from finetune.publish.upload import UploadJob
from finetune.run.directory import RunDir

__all__ = ["check_rights", "push", "upload_in_subprocess"]

PROGRESS_SECONDS = 15.0  # between two progress messages on standard error
CONFIRM_TIMEOUT_SECONDS = 1.5  # when asking the Hub whether an interrupted commit succeeded
_POLL_SECONDS = 0.1
# The subprocess gets the sys.path of this process, because `-c` would add the working folder.
_UPLOAD_PROGRAM = (
    "import sys; sys.path[:] = sys.argv[1:]; from finetune.publish.upload import main; main()"
)


def push(
    run: str | Path,
    repository: str,
    *,
    private: bool = False,
    revision: str | None = None,
    message: str | None = None,
    adapter: bool = False,
) -> dict[str, Any]:
    """Make a branch on the Hub contain exactly this model, in at most one commit.

    Args:
        run: a finished run directory, or a folder with config.json and model.safetensors.
        repository: owner/name; created if it does not exist.
        private: create the repository as private.
        revision: the branch, created if it does not exist; None pushes to main.
        message: the commit message; None uses a default.
        adapter: push only the adapter, in peft's format, instead of the merged model.
    Returns: a dict with keys `repository`, `url`, `commit` (its sha), `changed` (False if the Hub
        already had all files, so there is no new commit), `revision`, `files` and `deleted`.
    Raises: RecipeError for an invalid name; CheckpointError or WeightsError if the model is
        missing; HubError if the Hub refuses or fails; Interrupted after a signal.
    """
    check_repo_id_and_branch(repository, revision)
    folder, names, is_run = _select_files(Path(run), adapter=adapter)
    hub = RepoClient(
        repository,
        retry_command=_retry_command(run, repository, private, revision, message, adapter),
    )
    branch = revision or DEFAULT_BRANCH
    text = (message or "").strip() or f"Push the model with finetune {__version__}"
    try:
        with hub.translate_errors():
            repo = check_push_access(hub, private=private, revision=branch)
            if is_run:
                rewrite_artifacts(
                    RunDir(run), **{f"{'adapter_' if adapter else ''}repository": repository}
                )
            files = files_to_push(folder, names)
            check_weights(files)
            check_no_secrets(files, text, Path(run), hub)
            check_card(hub, files)
    except KeyboardInterrupt:
        text = (
            f"{repository}: stopped before anything was sent; push again with: {hub.retry_command}"
        )
        raise Interrupted(text, signal.SIGINT) from None
    job = UploadJob(
        repository=repository,
        branch=branch,
        private=private,
        commit_message=text,
        retry_command=hub.retry_command,
        files={name: str(path.absolute()) for name, path in files.items()},
        allowed_names=names,
        repo_exists=repo.exists,
        existing_branches=repo.branches,
    )
    sent = upload_in_subprocess(hub, job)
    return {
        "repository": repository,
        "url": f"{hub.api.endpoint}/{repository}",
        "commit": sent["commit"],
        "changed": sent["changed"],
        "revision": branch,
        "files": sorted(files),
        "deleted": sent["deleted"],
    }


def _select_files(run: Path, *, adapter: bool) -> tuple[Path, tuple[str, ...], bool]:
    """Return the folder to push, the allowed file names, and True if it belongs to a run.

    Raises: CheckpointError or WeightsError if the model or the adapter is missing.
    """
    is_run = is_run_dir(run)
    folder = run / "model" if is_run else run
    if adapter:
        return adapter_folder(folder), PUBLISHED_ADAPTER_FILES, is_run
    return (
        folder,
        (*PUBLISHED_FILES, *(f"adapter/{name}" for name in PUBLISHED_ADAPTER_FILES)),
        is_run,
    )


def _retry_command(
    run: str | Path,
    repository: str,
    private: bool,
    revision: str | None,
    message: str | None,
    adapter: bool,
) -> str:
    words = ["finetune", "push", str(run), repository, *(["--private"] if private else [])]
    words += ["--revision", revision] if revision else []
    words += ["--message", message] if message else []
    words += ["--adapter"] if adapter else []
    return shlex.join(words)


# --- upload --------------------------------------------------------------------------------------


def upload_in_subprocess(hub: RepoClient, job: UploadJob) -> dict[str, Any]:
    """Run the upload in a subprocess; the first signal asks it to stop, the second kills it.

    Returns: a dict with keys `commit`, `changed` and `deleted`.
    Raises: the error of the subprocess; Interrupted after a signal, with a message that says what
        the Hub now contains.
    """
    received: list[int] = []
    with handle_interrupts(received.append):
        command = [sys.executable, "-c", _UPLOAD_PROGRAM, *sys.path]
        # in a new session, so that signals from the terminal reach only this process
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
        ) as process:
            try:
                reports = _monitor_upload(process, job, received)
            finally:
                process.kill()
        if received:
            raise Interrupted(_interruption_message(hub, job, reports), received[0])
    if "result" in reports:
        return dict(reports["result"])
    if "error" in reports:
        error = reports["error"]
        kind: type[FinetuneError] = getattr(errors, error["kind"])
        raise kind(error["message"], code=error["code"])
    if "internal" in reports:
        raise RuntimeError(reports["internal"])
    cause = f"exit code {process.returncode}"
    if process.returncode < 0:
        cause = signal.Signals(-process.returncode).name
    text = f"the upload process ended unexpectedly ({cause}; out of memory?)"
    raise hub.error_with_retry_command(text, code="hub.push_crashed")


def _monitor_upload(
    process: subprocess.Popen[bytes], job: UploadJob, signals: list[int]
) -> dict[str, Any]:
    """Send the job to the subprocess, forward signals and log progress until it ends.

    Returns: the latest report of each kind, by its key, such as "phase" or "result".
    """
    assert process.stdin is not None
    assert process.stdout is not None
    payload = {**dataclasses.asdict(job), "parent": os.getpid()}
    try:
        process.stdin.write(json.dumps(payload).encode())
        process.stdin.close()
    except BrokenPipeError:  # the subprocess has ended; the caller reports its exit code
        pass
    reports: dict[str, Any] = {"phase": "starting"}
    num_forwarded, started = 0, time.monotonic()
    last_log, partial_line = started, b""
    while True:
        ready, _, _ = select.select([process.stdout], [], [], _POLL_SECONDS)
        if ready:
            chunk = os.read(process.stdout.fileno(), 1 << 16)
            if not chunk:
                process.wait()
                return reports
            *lines, partial_line = (partial_line + chunk).split(b"\n")
            for line in lines:
                reports |= json.loads(line)
        if len(signals) > num_forwarded:
            num_forwarded = len(signals)
            (process.terminate if num_forwarded == 1 else process.kill)()
            if num_forwarded == 1:
                _say(
                    f"{job.repository}: stopping after the current request; "
                    "interrupt again to stop now"
                )
                last_log = time.monotonic()
        elif time.monotonic() - last_log >= PROGRESS_SECONDS:
            last_log = time.monotonic()
            stop = "" if num_forwarded else "; Ctrl-C stops it"
            _say(f"{job.repository}: {reports['phase']}, {last_log - started:.0f} s so far{stop}")


def _say(text: str) -> None:
    """Log one line; on a terminal, overwrite the subprocess's progress bar."""
    if sys.stderr.isatty():
        sys.stderr.write("\r\x1b[K")
    logger.info(text)


def _interruption_message(hub: RepoClient, job: UploadJob, reports: dict[str, Any]) -> str:
    """Return the message for an interrupted push, which says what the Hub now contains."""
    name, retry = job.repository, f"push again with: {job.retry_command}"
    if "result" in reports:
        commit = reports["result"]["commit"]
    elif "parent" in reports:  # the commit request may have been sent
        try:
            info = hub.call_once(
                hub.api.model_info, name, revision=job.branch, timeout=CONFIRM_TIMEOUT_SECONDS
            )
        except Exception:  # report any failure instead of retrying: the user wants to stop
            return (
                f"{name}: stopped during the commit, and the hub does not answer now: "
                f"it holds the whole commit or nothing of it; {retry}"
            )
        commit = info.sha
        if commit == reports["parent"]:
            return (
                f"{name}: stopped during the commit: the hub holds nothing of it yet, and may "
                f"still take the whole commit; {retry}"
            )
    else:
        state = (
            "the hub holds nothing of this push"
            if job.repo_exists
            else "the new repository is empty"
        )
        return f"{name}: stopped before the commit: {state}; {retry}"
    return f"{name}: stopped, but the hub holds the whole commit {commit}"
