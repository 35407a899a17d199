"""Run directories with unexpected content: pipes, links, damaged neighbors, random values.

tests/run/test_integrity.py has the kinds of content that are refused; here whole commands meet
them, within a time limit.
"""

from __future__ import annotations

import copy
import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from forked_runs import (
    SMALL_OVERRIDES,
    ChildResult,
    KillPoints,
    check_all_checkpoints,
    check_child_error,
    check_child_success,
    copy_run,
    read_train_losses,
    read_weights,
    run_file_hashes,
    run_in_child,
    temporary_files,
    tiny_recipe,
    train_until_killed,
)
from fuzzing import VALUES, fuzz
from logs import logged

from finetune.errors import FinetuneError
from finetune.publish.artifacts import rewrite_artifacts
from finetune.report.page import write_report_pages
from finetune.run.directory import RunDir
from finetune.run.record import record_status
from finetune.training.resume import record_plan, start_or_resume
from finetune.training.setup import TrainingSetup, build_setup
from finetune.training.train import train

pytestmark = pytest.mark.usefixtures("no_plots")

RECIPE = tiny_recipe(*SMALL_OVERRIDES)
TIMEOUT_SECONDS = 60
SPECIAL_FILES = "exit code 4 or 5, or ignored like other damage; no hang, no file is changed"
LINKS = "exit code 5; the target is unchanged"
ANY_VALUES = "a FinetuneError, or it is accepted"


def run_with_timeout(work: Callable[[], object]) -> ChildResult:
    """Run in a child with a timeout; after it, the exit code is minus SIGALRM."""

    def work_with_alarm() -> None:
        signal.alarm(TIMEOUT_SECONDS)
        work()

    return run_in_child(work_with_alarm)


def resume_run(out: Path) -> ChildResult:
    return run_with_timeout(lambda: train(RECIPE, out, resume=True))


def replace_by(path: Path, kind: str) -> None:
    """Replace a file by something else."""
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "deep":
        path.write_text("[" * 200_000)
    elif kind == "endless":
        with path.open("wb") as file:
            file.truncate(1 << 42)  # a sparse file
    else:
        assert kind == "device"
        path.symlink_to("/dev/zero")


@pytest.fixture(scope="module")
def stopped_run(finished_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run, killed in its second-to-last step."""
    out = tmp_path_factory.mktemp("stopped") / "run"
    train_until_killed(7, RECIPE, out)
    assert check_all_checkpoints(out)[-2:] == [4, 6]
    return out


# Pipes, folders and endless files -----------------------------------------------------------------


@pytest.mark.parametrize(
    "name, kind",
    [
        *(("run.json", "pipe"), ("run.json", "endless"), ("results.json", "pipe")),
        *(("metrics.jsonl", "pipe"), ("metrics.jsonl", "endless")),
    ],
)
def test_special_files_instead_of_run_files(
    name: str, kind: str, stopped_run: Path, finished_run: Path, tmp_path: Path, fault
) -> None:
    source = (
        finished_run if name == "results.json" else stopped_run
    )  # results.json is read only for a finished run
    out = copy_run(source, tmp_path / "run")
    replace_by(out / name, kind)
    before = {} if kind == "endless" else run_file_hashes(out)
    check_child_error(resume_run(out), "checkpoint.damaged", out / name)
    assert kind == "endless" or run_file_hashes(out) == before
    report_result = run_with_timeout(lambda: write_report_pages([out]))
    no_run = name == "run.json" and kind != "endless"
    check_child_error(report_result, "recipe.not_a_run" if no_run else "checkpoint.damaged", out)
    fault("a pipe, a folder or an endless file instead of a file of the run", SPECIAL_FILES)


@pytest.mark.parametrize("kind", ["pipe", "folder", "endless", "device"])
def test_special_files_instead_of_a_manifest(
    kind: str, stopped_run: Path, finished_run: Path, tmp_path: Path, fault
) -> None:
    out = copy_run(stopped_run, tmp_path / "run")
    replace_by(RunDir(out).checkpoint_folder(6) / "manifest.json", kind)
    check_child_success(resume_run(out), "checkpoint of step 6")
    assert read_weights(out) == read_weights(finished_run)
    assert read_train_losses(out) == read_train_losses(finished_run)
    assert temporary_files(out) == []
    fault("a pipe, a folder or an endless file instead of a file of the run", SPECIAL_FILES)


@pytest.mark.parametrize("kind", ["pipe", "deep", "figures", "part"])
def test_a_damaged_run_in_the_same_folder_is_ignored(
    kind: str, finished_run: Path, tmp_path: Path, fault
) -> None:
    out, other = (
        copy_run(finished_run, tmp_path / "run"),
        copy_run(finished_run, tmp_path / "other"),
    )
    for name, old, new in (
        ("recipe.yaml", "seed: 0", "seed: 1"),
        ("run.json", '"seed": 0', '"seed": 1'),
    ):
        text = (other / name).read_text()
        assert old in text
        (other / name).write_text(text.replace(old, new))
    results = json.loads((other / "results.json").read_text())
    test = {**results["val"], "loss": "small"} if kind == "figures" else {"top1": 0.5}
    if kind in ("figures", "part"):
        (other / "results.json").write_text(json.dumps({**results, "test": test}))
    else:
        replace_by(other / "run.json", kind)
        replace_by(other / "results.json", kind)
    check_child_success(run_with_timeout(lambda: rewrite_artifacts(RunDir(out))))
    assert "seeds (" not in (out / "model" / "README.md").read_text()
    fault("a damaged run next to one that ends", "it is left out of the card, no hang")


# Links --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["checkpoints", "run.json"])
def test_links_in_a_run_directory_are_refused(
    name: str, finished_run: Path, tmp_path: Path, fault
) -> None:
    out = copy_run(finished_run, tmp_path / "run")
    target = tmp_path / "elsewhere"
    (out / name).rename(target)
    (out / name).symlink_to(target)
    if target.is_dir():
        (target / ".bashrc").write_text("export PATH")
    before, target_files = run_file_hashes(tmp_path), sorted(target.glob("**/*"))
    check_child_error(resume_run(out), "setup.not_a_run", out / name, "--out")
    assert run_file_hashes(tmp_path) == before
    assert sorted(target.glob("**/*")) == target_files
    fault("links in a run directory to other places", LINKS)


def test_a_leftover_link_is_removed_but_not_followed(
    stopped_run: Path, finished_run: Path, tmp_path: Path, fault
) -> None:
    out = copy_run(stopped_run, tmp_path / "run")
    target = tmp_path / "elsewhere"
    target.mkdir()
    (target / "thesis.tex").write_text("mine")
    for name in (".run.json.1.tmp", ".model.1.tmp", ".model.old.1.tmp", "checkpoints/.doomed-9"):
        (out / name).symlink_to(target)
    check_child_success(resume_run(out))
    assert read_weights(out) == read_weights(finished_run)
    assert temporary_files(out) == []
    assert (target / "thesis.tex").read_text() == "mine"
    fault("links in a run directory to other places", LINKS)


# Kills -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def setup() -> TrainingSetup:
    return build_setup(RECIPE, device=torch.device("cpu"), show_progress=False)


def start_run(run: RunDir, setup: TrainingSetup) -> int | None:
    """Start or resume as `train` does."""
    options: dict[str, Any] = {"precision": "fp32", "num_processes": 1}
    start = start_or_resume(run, setup, **options, resume=True)
    if start is not None:
        record_plan(run, setup, start_step=start)
    return start


def test_a_killed_start_can_be_repeated(setup: TrainingSetup, tmp_path: Path, fault) -> None:
    num_killed = 0
    for kill_at in range(1, 100):
        out = tmp_path / str(kill_at)

        def work(n: int = kill_at, out: Path = out) -> None:
            KillPoints(n).install()
            run = RunDir(out)
            run.open()
            start_run(run, setup)

        for _ in range(2):  # the second try starts from the files of the first
            result = run_in_child(work)
            assert result.exit_code in (0, -signal.SIGKILL), (kill_at, result.output)
        if result.exit_code == 0:
            break
        num_killed += 1
        run = RunDir(out)
        run.open()
        assert start_run(run, setup) == 0, sorted(out.rglob("*"))
        run.close()
        assert temporary_files(out) == []
    assert 20 < num_killed < 99, (
        "too few kill points: each folder, file and rename of a start is one"
    )
    fault("SIGKILL at every kill point of a start", "the next start uses the folder")


# Values -------------------------------------------------------------------------------------------


NESTED_LISTS = st.sampled_from([60, 300, 900, 980]).map(
    lambda depth: json.loads("[" * depth + "]" * depth)
)


def json_paths(tree: Any, prefix: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the path of every value in a JSON object."""
    if not isinstance(tree, (dict, list)):
        return [prefix]
    keys = tree if isinstance(tree, dict) else range(len(tree))
    return [prefix, *(path for key in keys for path in json_paths(tree[key], (*prefix, key)))]


def with_value(tree: Any, path: tuple[Any, ...], value: Any) -> Any:
    """Return a copy with another value at one path."""
    if not path:
        return value
    result = part = copy.deepcopy(tree)
    for key in path[:-1]:
        part = part[key]
    part[path[-1]] = value
    return result


def changed_trees(tree: Any) -> Any:
    """Return a strategy for copies of a JSON object with another value at one path."""
    paths = st.sampled_from(json_paths(tree))
    return st.builds(
        lambda path, value: with_value(tree, path, value), paths, VALUES | NESTED_LISTS
    )


@pytest.fixture
def saved_run(setup: TrainingSetup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    """A run with two checkpoints, written without fsync."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)
    run = RunDir(tmp_path / "run")
    run.open()
    assert start_run(run, setup) == 0
    for step in (2, 4):
        counters = {"step": step, "best": 0.5, "best_step": 2, "pending": [1.0], "scaler": None}
        run.save_checkpoint(step, state_writer(counters), num_bytes=0)
    return run


def state_writer(counters: dict[str, Any]) -> Callable[[Path], None]:
    return lambda folder: (folder / "state.json").write_text(json.dumps(counters)) and None


def test_random_record_values(setup: TrainingSetup, saved_run: RunDir, fault) -> None:
    record, codes = saved_run.read_json("run.json"), set()

    def run(tree: Any) -> bool:
        (saved_run.path / "run.json").write_text(json.dumps(tree))
        try:
            start_run(saved_run, setup)
            with record_status(saved_run, is_main_process=True):
                pass
        except FinetuneError as error:
            codes.add(error.exit_code)
            return False
        return True

    tried, accepted, _ = fuzz(changed_trees(record), 2000, run)
    assert 0 < accepted < tried
    assert codes <= {2, 3, 4}
    fault("run.json, manifest.json, state.json with any values", ANY_VALUES)


@pytest.mark.parametrize("name", ["manifest.json", "state.json"])
def test_random_checkpoint_values(name: str, saved_run: RunDir, fault) -> None:
    path = saved_run.checkpoint_folder(4) / name
    tree = json.loads(path.read_text())

    def run(changed: Any) -> bool:
        path.write_text(json.dumps(changed))
        with logged() as messages:
            accepted = saved_run.newest_intact_step() == 4
        assert len(messages) == (not accepted)
        assert changed == tree or not accepted
        return accepted

    fuzz(changed_trees(tree), 2000, run)
    fault("run.json, manifest.json, state.json with any values", ANY_VALUES)
