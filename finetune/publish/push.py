"""`finetune push`: check permissions, then send the files of model/ to the Hub in one commit.

The files are copied first, and the copies are checked and sent: what is sent is what was checked.
An interrupted push can be repeated: it compares the files with the Hub and sends the difference.
The upload runs in a subprocess (`upload.py`), because only a process can be killed while native
code (hf_xet) waits for the Hub's storage.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import constants

from finetune import __version__
from finetune.errors import HubError, Interrupted, redact_urls
from finetune.files import explain_disk_errors
from finetune.log import logger
from finetune.model_checksums import verify_card_results, verify_model_folder
from finetune.process_lifecycle import handle_interrupts
from finetune.publish.artifacts import (
    EXPORT_FILES,
    PUBLISHED_ADAPTER_FILES,
    PUBLISHED_FILES,
    read_certificate,
    rewrite_artifacts,
)
from finetune.publish.permissions import DEFAULT_BRANCH, check_rights
from finetune.publish.push_checks import (
    adapter_folder,
    check_card,
    check_no_secrets,
    check_results,
    check_weights,
    files_to_push,
    is_run_dir,
)
from finetune.publish.upload import UploadJob
from finetune.run.directory import RunDir, lock_run
from finetune.run.record import read_record

__all__ = ["push", "push_static_files"]

_FILES_OF_ADAPTER = tuple(f"adapter/{name}" for name in PUBLISHED_ADAPTER_FILES)
# Names that any push of a model or an adapter may send. It deletes those that it does not send: a
# model.onnx of an earlier push would belong to other weights.
_OWN_NAMES = (
    *(*PUBLISHED_FILES, *EXPORT_FILES),
    *(*PUBLISHED_ADAPTER_FILES, *_FILES_OF_ADAPTER),
)
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
        private: True to create the repository as private.
        revision: the branch, created if it does not exist; None pushes to main.
        message: the commit message; None uses a default.
        adapter: True to push only the adapter, in peft's format, instead of the merged model.
    Returns: a dict with keys `repository`, `url`, `commit` (its sha), `changed` (False if the Hub
        already had all files, so there is no new commit), `revision`, `files` and `deleted`.
    Raises: RecipeError for an invalid name; CheckpointError or WeightsError if the model is
        missing or damaged; SetupError if another process uses the run; HubError if the Hub refuses
        or fails; Interrupted after a signal.
    """
    retry_command = _push_command(
        str(run), repository, {"--private": private, "--adapter": adapter}, revision, message
    )
    is_run = is_run_dir(Path(run))
    with (
        lock_run(Path(run)) if is_run else contextlib.nullcontext(),
        _temporary_folder() as temporary,
    ):
        model_folder = Path(run, "model") if is_run else Path(run)
        folder, names = _select_files(model_folder, run, is_run=is_run, adapter=adapter)
        text = (message or "").strip() or f"Push the model with finetune {__version__}"
        try:
            check_rights(repository, private=private, revision=revision)
            if is_run:
                rewrite_artifacts(
                    RunDir(run), **{f"{'adapter_' if adapter else ''}repository": repository}
                )
            selected = files_to_push(folder, names)
            copied = _copy_model(model_folder, temporary, is_run=is_run)
            copied, _ = _select_files(copied, run, is_run=is_run, adapter=adapter)
            files = {name: copied / name for name in selected}
            check_weights(files)
            check_results(files)
            check_no_secrets(files, text, Path(run))
            check_card(repository, files)
        except KeyboardInterrupt:
            raise Interrupted(
                f"{repository}: stopped before anything was sent; push again with: {retry_command}",
                signal.SIGINT,
            ) from None
        job = UploadJob(
            repository=repository,
            branch=revision or DEFAULT_BRANCH,
            private=private,
            commit_message=text,
            retry_command=retry_command,
            files={name: str(path.absolute()) for name, path in files.items()},
            own_names=_OWN_NAMES,
        )
        return _upload(job)


def push_static_files(
    folder: Path,
    names: Sequence[str],
    repository: str,
    *,
    model: str,
    private: bool = False,
    revision: str | None = None,
    message: str | None = None,
) -> dict[str, Any]:
    """Make a branch of a static Space contain exactly these files, in at most one commit.

    Args:
        folder: the folder of the files.
        names: names of all files that a push of a static Space may send.
        repository: owner/name of the Space, which `check_rights` has checked.
        model: the model of the page, for error messages and the check for local paths.
        private, revision, message: see `push`.
    Returns, Raises: see `push`.
    """
    text = (message or "").strip() or f"Push the static page with finetune {__version__}"
    files = files_to_push(folder, names)
    check_no_secrets(files, text, Path(model))
    check_card(repository, files, repo_type="space")
    flags = {"--static-space": True, "--private": private}
    job = UploadJob(
        repository=repository,
        branch=revision or DEFAULT_BRANCH,
        private=private,
        commit_message=text,
        retry_command=_push_command(model, repository, flags, revision, message),
        files={name: str(path.absolute()) for name, path in files.items()},
        own_names=names,
        repo_type="space",
    )
    return _upload(job)


def _push_command(
    run: str, repository: str, flags: Mapping[str, bool], revision: str | None, message: str | None
) -> str:
    """Return the command that repeats a push."""
    options = {"--revision": revision, "--message": message}
    return shlex.join(
        [
            *("finetune", "push", run, repository),
            *(flag for flag, is_set in flags.items() if is_set),
            *(word for name, value in options.items() if value for word in (name, value)),
        ]
    )


def _select_files(
    folder: Path, run: str | Path, *, is_run: bool, adapter: bool
) -> tuple[Path, tuple[str, ...]]:
    """Return the folder to push, and the allowed file names.

    Args:
        folder: the folder of the model, in a run next to its run.json.
        run: the run or folder as the user gave it, for messages.
    Raises: CheckpointError or WeightsError if the model or the adapter is missing or damaged.
    """
    verify_model_folder(folder, source=str(run))
    if not is_run:  # the cards of a run are written again
        verify_card_results(folder, source=str(run))
    # it is checked that an exported model belongs to the weights
    plan = read_record(RunDir(folder.parent)).get("plan", {}) if is_run else {}
    certificate = read_certificate(folder, eval_spec=plan.get("eval_pipeline"))
    export_files = EXPORT_FILES if certificate else ()
    if adapter:
        return adapter_folder(folder), PUBLISHED_ADAPTER_FILES
    return folder, (*PUBLISHED_FILES, *export_files, *_FILES_OF_ADAPTER)


@contextlib.contextmanager
def _temporary_folder() -> Iterator[Path]:
    """Create a folder, and remove it at the end. Raises: SetupError if none can be created."""
    with contextlib.ExitStack() as stack:
        with explain_disk_errors(Path(os.environ.get("TMPDIR", "/tmp")), option="TMPDIR"):
            name = stack.enter_context(tempfile.TemporaryDirectory(prefix="finetune-push-"))
        yield Path(name)


def _copy_model(folder: Path, target: Path, *, is_run: bool) -> Path:
    """Copy the files of a model that a push may send, and the run.json of a run.

    Returns: the folder of the copy.
    Raises: SetupError if the disk is full.
    """
    copy = target / "model"
    files = [folder / name for name in (*PUBLISHED_FILES, *EXPORT_FILES, *_FILES_OF_ADAPTER)]
    files = [file for file in files if file.is_file()]
    num_bytes = sum(file.stat().st_size for file in files)
    with explain_disk_errors(target, needed_bytes=num_bytes, option="TMPDIR"):
        for file in files:
            path = copy / file.relative_to(folder)
            path.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, path)
        if is_run:
            shutil.copyfile(folder.parent / "run.json", target / "run.json")
    return copy


# --- upload --------------------------------------------------------------------------------------


def _upload(job: UploadJob) -> dict[str, Any]:
    """Upload the files. Returns: see `push`."""
    sent = _upload_in_subprocess(job)
    path = f"spaces/{job.repository}" if job.repo_type == "space" else job.repository
    return {
        "repository": job.repository,
        "url": redact_urls(f"{constants.ENDPOINT}/{path}"),
        "commit": sent["commit"],
        "changed": sent["changed"],
        "revision": job.branch,
        "files": sorted(job.files),
        "deleted": sent["deleted"],
    }


def _upload_in_subprocess(job: UploadJob) -> dict[str, Any]:
    """Run the upload in a subprocess, which a signal ends.

    If a commit is being sent, the first signal waits until it is complete; a second one does not.

    Returns: a dict with keys `commit`, `changed` and `deleted`.
    Raises: the error of the subprocess; Interrupted after a signal, with a message that says what
        the Hub now contains.
    """
    reports: dict[str, Any] = {}
    received: list[int] = []
    process: subprocess.Popen[bytes] | None = None

    def stop(signal_number: int) -> None:
        received.append(signal_number)
        if len(received) == 1 and reports.get("phase") == "committing":
            logger.info(f"{job.repository}: finishing the commit; interrupt again to stop now")
        elif process is not None:
            process.kill()

    command = [sys.executable, "-c", _UPLOAD_PROGRAM, *sys.path]
    pipe = subprocess.PIPE
    with handle_interrupts(stop):
        # in a new session, so that signals from the terminal reach only this process
        process = subprocess.Popen(command, stdin=pipe, stdout=pipe, start_new_session=True)
        with process:
            try:
                if not received:
                    _exchange_reports(process, job, reports)
            finally:
                process.kill()
    if received:
        raise Interrupted(_interruption_message(job, reports), received[0])
    if "result" in reports:
        return dict(reports["result"])
    if "error" in reports:
        raise HubError(reports["error"]["message"], code=reports["error"]["code"])
    if "crash" in reports:
        raise RuntimeError(reports["crash"])
    raise HubError(
        f"{job.repository}: the upload process ended unexpectedly (exit code {process.returncode}; "
        f"out of memory?); push again with: {job.retry_command}",
        code="hub.push_crashed",
    )


def _exchange_reports(
    process: subprocess.Popen[bytes], job: UploadJob, reports: dict[str, Any]
) -> None:
    """Send the job to the subprocess, and collect its reports until it ends."""
    assert process.stdin is not None
    assert process.stdout is not None
    payload = {**dataclasses.asdict(job), "parent": os.getpid()}
    with contextlib.suppress(BrokenPipeError):  # the subprocess has ended
        process.stdin.write(json.dumps(payload).encode())
        process.stdin.close()
    for line in process.stdout:
        if line.endswith(b"\n"):  # a kill may cut the last line
            reports |= json.loads(line)
    process.wait()


def _interruption_message(job: UploadJob, reports: dict[str, Any]) -> str:
    """Return the message for an interrupted push, which says what the Hub now contains."""
    if "result" in reports:
        commit = reports["result"]["commit"]
        return f"{job.repository}: stopped, but the hub holds the whole commit {commit}"
    state = "stopped before the commit: the hub holds nothing of this push"
    if "has_sent_commit" in reports:
        state = "stopped during the commit: the hub holds the whole commit or nothing of it"
    return f"{job.repository}: {state}; push again with: {job.retry_command}"
