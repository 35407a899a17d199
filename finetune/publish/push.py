"""Publish a model on the hub: rights first, then the files of model/ in one commit.

A push that was interrupted anywhere can be repeated: it compares with what the hub holds and sends
the difference. The sending has a process of its own (`upload.py`), as only that can be ended while
native code waits for the hub's storage.
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
from finetune.console import say
from finetune.errors import FinetuneError, Interrupted
from finetune.processes import signals_to
from finetune.publish.artifacts import ADAPTER, PUBLISHED, refresh
from finetune.publish.contents import (
    adapter_of,
    check_card,
    check_weights,
    is_run,
    published,
    refuse_secrets,
)
from finetune.publish.permissions import MAIN, check_names, check_rights, find
from finetune.publish.repository import Hub
from finetune.publish.upload import Job
from finetune.run.directory import RunDir

__all__ = ["check_rights", "push", "send_apart"]

NOTICE_SECONDS = 15.0  # between two words on standard error
LOOK_SECONDS = 1.5  # for the hub to say what became of a commit, after the second signal
_POLL_SECONDS = 0.1
# The imports of this program and no others: the working folder is not searched.
_COMMAND = (
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
    """Make a branch on the hub hold exactly this model, in one commit or none.

    Args:
        run: a finished run directory, or a folder with config.json and model.safetensors.
        repository: owner/name; created when there is none.
        revision: the branch; by default main; created when there is none.
        private, message: create it private; text of the commit.
        adapter: send the adapter alone, in peft's format, in the place of the merged model.
    Returns: repository, url, commit (its sha), changed (False if the hub held it all already),
        revision, files, deleted.
    Raises: RecipeError for a wrong name, CheckpointError or WeightsError for a model that is not
        there, HubError for what the hub refuses or cannot do now, Interrupted after a signal.
    """
    check_names(repository, revision)
    folder, names, of_run = _to_send(Path(run), adapter=adapter)
    hub = Hub(repository, again=_command(run, repository, private, revision, message, adapter))
    branch = revision or MAIN
    text = (message or "").strip() or f"Push the model with finetune {__version__}"
    try:
        with hub.explained():
            repo = find(hub, private=private, revision=branch)
            if of_run:
                refresh(RunDir(run), **{f"{'adapter_' if adapter else ''}repository": repository})
            files = published(folder, names)
            check_weights(files)
            refuse_secrets(files, text, Path(run), hub)
            check_card(hub, files)
    except KeyboardInterrupt:
        text = f"{repository}: stopped before anything was sent; push again with: {hub.again}"
        raise Interrupted(text, signal.SIGINT) from None
    job = Job(
        repository=repository,
        branch=branch,
        private=private,
        text=text,
        again=hub.again,
        files={name: str(path.absolute()) for name, path in files.items()},
        names=names,
        exists=repo.exists,
        branches=repo.branches,
    )
    sent = send_apart(hub, job)
    return {
        "repository": repository,
        "url": f"{hub.api.endpoint}/{repository}",
        "commit": sent["commit"],
        "changed": sent["changed"],
        "revision": branch,
        "files": sorted(files),
        "deleted": sent["deleted"],
    }


def _to_send(run: Path, *, adapter: bool) -> tuple[Path, tuple[str, ...], bool]:
    """The folder to send, the names that it may hold, and whether it is a run's.

    Raises: CheckpointError or WeightsError for a model, or an adapter, that is not there.
    """
    of_run = is_run(run)
    folder = run / "model" if of_run else run
    if adapter:
        return adapter_of(folder), ADAPTER, of_run
    return folder, (*PUBLISHED, *(f"adapter/{name}" for name in ADAPTER)), of_run


def _command(
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


# --- sending -------------------------------------------------------------------------------------


def send_apart(hub: Hub, job: Job) -> dict[str, Any]:
    """Carry out a job in a process of its own, which the first signal asks to stop and the second
    one ends.

    Returns: commit, changed and deleted.
    Raises: its error; Interrupted after a signal, with what the hub holds now.
    """
    received: list[int] = []
    with signals_to(received.append):
        command = [sys.executable, "-c", _COMMAND, *sys.path]
        # a session of its own: what the terminal sends comes here only
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
        ) as process:
            try:
                reports = _follow(process, job, received)
            finally:
                process.kill()
        if received:
            raise Interrupted(_outcome(hub, job, reports), received[0])
    if "result" in reports:
        return dict(reports["result"])
    if "error" in reports:
        error = reports["error"]
        kind: type[FinetuneError] = getattr(errors, error["kind"])
        raise kind(error["message"], code=error["code"])
    if "internal" in reports:
        raise RuntimeError(reports["internal"])
    how = f"exit code {process.returncode}"
    if process.returncode < 0:
        how = signal.Signals(-process.returncode).name
    text = f"the process that sends the files has ended by itself ({how}; is memory short?)"
    raise hub.failure(text, code="hub.push_crashed")


def _follow(process: subprocess.Popen[bytes], job: Job, signals: list[int]) -> dict[str, Any]:
    """Give a process its work, pass signals on and tell what it does, until it ends.

    Returns: the newest of each kind of report, by name.
    """
    assert process.stdin is not None
    assert process.stdout is not None
    work = {**dataclasses.asdict(job), "parent": os.getpid()}
    try:
        process.stdin.write(json.dumps(work).encode())
        process.stdin.close()
    except BrokenPipeError:  # its exit code tells more
        pass
    reports: dict[str, Any] = {"phase": "starting"}
    passed_on, began = 0, time.monotonic()
    spoken, rest = began, b""
    while True:
        ready, _, _ = select.select([process.stdout], [], [], _POLL_SECONDS)
        if ready:
            piece = os.read(process.stdout.fileno(), 1 << 16)
            if not piece:
                process.wait()
                return reports
            *lines, rest = (rest + piece).split(b"\n")
            for line in lines:
                reports |= json.loads(line)
        if len(signals) > passed_on:
            passed_on = len(signals)
            (process.terminate if passed_on == 1 else process.kill)()
            if passed_on == 1:
                _say(f"{job.repository}: stopping after what is in flight; again to stop at once")
                spoken = time.monotonic()
        elif time.monotonic() - spoken >= NOTICE_SECONDS:
            spoken = time.monotonic()
            stop = "" if passed_on else "; Ctrl-C stops it"
            _say(f"{job.repository}: {reports['phase']}, {spoken - began:.0f} s so far{stop}")


def _say(text: str) -> None:
    """Tell one line; on a terminal, in the place of the other process's progress bar."""
    if sys.stderr.isatty():
        sys.stderr.write("\r\x1b[K")
    say(text)


def _outcome(hub: Hub, job: Job, reports: dict[str, Any]) -> str:
    """Say what the hub holds after a push that was stopped."""
    name, again = job.repository, f"push again with: {job.again}"
    if "result" in reports:
        commit = reports["result"]["commit"]
    elif "parent" in reports:  # the hub was asked to commit
        try:
            info = hub.once(hub.api.model_info, name, revision=job.branch, timeout=LOOK_SECONDS)
        except Exception:  # of any kind, after what the user has asked for
            return (
                f"{name}: stopped while the hub was asked to commit, and it does not answer now: "
                f"it holds the whole commit or nothing of it; {again}"
            )
        commit = info.sha
        if commit == reports["parent"]:
            return (
                f"{name}: stopped while the hub was asked to commit: it holds nothing of it yet, "
                f"and may still take the whole; {again}"
            )
    else:
        left = "it holds nothing of this push" if job.exists else "the new repository is empty"
        return f"{name}: stopped before the commit: {left}; {again}"
    return f"{name}: stopped, and the hub holds the whole commit {commit}"
