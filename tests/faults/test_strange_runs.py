"""Run directories that hold what no run puts there: pipes, links, folders, other people's files."""

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
from hypothesis import HealthCheck, given, settings
from logs import logged

from finetune.errors import FinetuneError
from finetune.publish.artifacts import rewrite_artifacts
from finetune.report.page import write_report_pages
from finetune.run.directory import RunDir
from finetune.run.record import record_status
from finetune.training.resume import record_plan, start_or_resume
from finetune.training.setup import TrainingSetup, build_setup
from finetune.training.train import train

pytestmark = pytest.mark.usefixtures("no_pictures")

RECIPE = tiny_recipe(*SMALL_OVERRIDES)
MOST_SECONDS = 60
PIPES = "exit code 4 or 5, or passed over as other damage is; nobody waits, nothing is changed"
LINKS = "exit code 5; what they lead to is as it was"
OTHERS = "exit code 5 and what is there; every file is as it was"
VALUES = "an error of ours, or it is taken"


def within(work: Callable[[], object]) -> ChildResult:
    """Run in a child that a signal ends if it waits: its code is then negative."""

    def timed() -> None:
        signal.alarm(MOST_SECONDS)
        work()

    return run_in_child(timed)


def resumed(out: Path) -> ChildResult:
    return within(lambda: train(RECIPE, out, resume=True))


def make(path: Path, kind: str) -> None:
    """Put something else in the place of a file."""
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
            file.truncate(1 << 42)  # takes no room
    else:
        assert kind == "device"
        path.symlink_to("/dev/zero")


@pytest.fixture(scope="module")
def stopped(whole: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run, killed in its last step but one."""
    out = tmp_path_factory.mktemp("stopped") / "run"
    train_until_killed(7, RECIPE, out)
    assert check_all_checkpoints(out)[-2:] == [4, 6]
    return out


# Pipes, folders and files without end -------------------------------------------------------------


@pytest.mark.parametrize("kind", ["pipe", "folder", "endless"])
@pytest.mark.parametrize("name", ["run.json", "results.json", "metrics.jsonl"])
def test_in_the_place_of_a_file(
    name: str, kind: str, stopped: Path, whole: Path, tmp_path: Path, fault
) -> None:
    started = whole if name == "results.json" else stopped  # which is read of a finished run
    out = copy_run(started, tmp_path / "run")
    make(out / name, kind)
    before = {} if kind == "endless" else run_file_hashes(out)
    check_child_error(resumed(out), "checkpoint.damaged", out / name)
    assert kind == "endless" or run_file_hashes(out) == before
    reported = within(lambda: write_report_pages([out]))
    no_run = name == "run.json" and kind != "endless"
    check_child_error(reported, "recipe.not_a_run" if no_run else "checkpoint.damaged", out)
    fault("a pipe, a folder or a file without end in the place of a run's file", PIPES)


@pytest.mark.parametrize("kind", ["pipe", "folder", "deep", "endless", "device"])
def test_in_the_place_of_a_manifest(
    kind: str, stopped: Path, whole: Path, tmp_path: Path, fault
) -> None:
    out = copy_run(stopped, tmp_path / "run")
    make(RunDir(out).checkpoint_folder(6) / "manifest.json", kind)
    check_child_success(resumed(out), "checkpoint of step 6")
    assert read_weights(out) == read_weights(whole)
    assert read_train_losses(out) == read_train_losses(whole)
    assert temporary_files(out) == []
    fault("a pipe, a folder or a file without end in the place of a run's file", PIPES)


def test_in_the_place_of_the_lock(stopped: Path, tmp_path: Path, fault) -> None:
    for kind in ("pipe", "folder", "device"):
        out = copy_run(stopped, tmp_path / kind)
        make(out / ".lock", kind)
        before = run_file_hashes(out)
        check_child_error(resumed(out), "setup.not_a_run", out / ".lock")
        assert run_file_hashes(out) == before
    fault("a pipe, a folder or a file without end in the place of a run's file", PIPES)


def test_a_file_with_the_name_of_a_checkpoint(
    stopped: Path, whole: Path, tmp_path: Path, fault
) -> None:
    out = copy_run(stopped, tmp_path / "run")
    (out / "checkpoints" / "step-00000009").write_text("")
    check_child_success(resumed(out), "checkpoint of step 9")
    assert read_weights(out) == read_weights(whole)
    assert temporary_files(out) == []
    fault("a pipe, a folder or a file without end in the place of a run's file", PIPES)


@pytest.mark.parametrize("kind", ["pipe", "deep", "figures", "part"])
def test_a_neighbour_is_in_nobodys_way(kind: str, whole: Path, tmp_path: Path, fault) -> None:
    out, other = copy_run(whole, tmp_path / "run"), copy_run(whole, tmp_path / "other")
    recipe = (other / "recipe.yaml").read_text()
    assert "seed: 0" in recipe
    (other / "recipe.yaml").write_text(recipe.replace("seed: 0", "seed: 1"))
    results = json.loads((other / "results.json").read_text())
    test = {**results["val"], "loss": "small"} if kind == "figures" else {"top1": 0.5}
    if kind in ("figures", "part"):
        (other / "results.json").write_text(json.dumps({**results, "test": test}))
    else:
        make(other / "run.json", kind)
        make(other / "results.json", kind)
    check_child_success(within(lambda: rewrite_artifacts(RunDir(out))))
    assert "seeds (" not in (out / "model" / "README.md").read_text()
    fault("a damaged run beside one that ends", "it is left out of the card, and nobody waits")


# Links --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", [".lock", "checkpoints", "model", "run.json", "results.json", "metrics.jsonl"]
)
def test_links_in_a_run(name: str, whole: Path, tmp_path: Path, fault) -> None:
    out = copy_run(whole, tmp_path / "run")
    elsewhere = tmp_path / "elsewhere"
    if name == ".lock":
        elsewhere.write_text("export PATH")
    else:
        (out / name).rename(elsewhere)
    (out / name).symlink_to(elsewhere)
    if elsewhere.is_dir():
        (elsewhere / ".bashrc").write_text("export PATH")
    before, kept = run_file_hashes(tmp_path), sorted(elsewhere.glob("**/*"))
    check_child_error(resumed(out), "setup.not_a_run", out / name, "--out")
    assert run_file_hashes(tmp_path) == before
    assert sorted(elsewhere.glob("**/*")) == kept
    fault("links in a run directory that lead elsewhere", LINKS)


def test_a_left_over_that_is_a_link(stopped: Path, whole: Path, tmp_path: Path, fault) -> None:
    out = copy_run(stopped, tmp_path / "run")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "thesis.tex").write_text("mine")
    for name in (".run.json.1.tmp", ".model.1.tmp", ".model.old.1.tmp", "checkpoints/.doomed-9"):
        (out / name).symlink_to(elsewhere)
    check_child_success(resumed(out))
    assert read_weights(out) == read_weights(whole)
    assert temporary_files(out) == []
    assert (elsewhere / "thesis.tex").read_text() == "mine"
    fault("links in a run directory that lead elsewhere", LINKS)


# Other people's folders ---------------------------------------------------------------------------


@pytest.mark.parametrize("resume", [False, True], ids=["new", "resume"])
@pytest.mark.parametrize(
    "files",
    [
        ["checkpoints/.git/HEAD", "checkpoints/.gitkeep", ".notes.tmp", "model/best.pt"],
        ["checkpoints/.gitkeep"],
        ["checkpoints/step-00000002/model.pt", "model/best.pt"],
        ["run.json", "model/best.pt"],
        [".lock", "model/best.pt"],
        ["recipe.yaml", "checkpoints/.step/x"],
    ],
    ids=["project", "kept", "steps", "record", "lock", "recipe"],
)
def test_a_folder_that_is_no_run(files: list[str], resume: bool, tmp_path: Path, fault) -> None:
    out = tmp_path / "project"
    for name in files:
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_text('{"status": "done"}')
    before, there = run_file_hashes(out), sorted(out.rglob("*"))
    ended = within(lambda: train(RECIPE, out, resume=resume))
    check_child_error(ended, "setup.not_a_run", out, "--out")
    assert (run_file_hashes(out), sorted(out.rglob("*"))) == (before, there)
    fault("--out is a folder of something else", OTHERS)


@pytest.fixture(scope="module")
def setup() -> TrainingSetup:
    return build_setup(RECIPE, device=torch.device("cpu"), show_progress=False)


def started(run: RunDir, setup: TrainingSetup) -> int | None:
    """Start or resume as `train` does."""
    facts: dict[str, Any] = {"precision": "fp32", "num_processes": 1}
    start = start_or_resume(run, setup, **facts, resume=True)
    if start is not None:
        record_plan(run, setup, start_step=start)
    return start


def test_a_killed_start_can_be_begun_again(setup: TrainingSetup, tmp_path: Path, fault) -> None:
    killed = 0
    for moment in range(1, 100):
        out = tmp_path / str(moment)

        def work(at: int = moment, out: Path = out) -> None:
            KillPoints(at).install()
            run = RunDir(out)
            run.open()
            started(run, setup)

        for _ in range(2):  # the second one finds what the first one left
            ended = run_in_child(work)
            assert ended.exit_code in (0, -signal.SIGKILL), (moment, ended.output)
        if ended.exit_code == 0:
            break
        killed += 1
        run = RunDir(out)
        run.open()
        assert started(run, setup) == 0, sorted(out.rglob("*"))
        run.close()
        assert temporary_files(out) == []
    assert 20 < killed < 99, "each folder and file of a start, and the renames"
    fault("SIGKILL at every moment of a start", "the next start takes the folder for its own")


# Values -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [{"plan": {"steps": "many"}}, {"plan": []}, {"split_fingerprints": 7}, {"x": [1e999]}],
    ids=["steps", "plan", "fingerprints", "infinite"],
)
def test_a_record_of_other_values(
    changes: dict[str, Any], stopped: Path, tmp_path: Path, fault
) -> None:
    out = copy_run(stopped, tmp_path / "run")
    record = json.loads((out / "run.json").read_text())
    (out / "run.json").write_text(json.dumps({**record, **changes}))
    before = run_file_hashes(out)
    check_child_error(resumed(out), "checkpoint.damaged", out / "run.json")
    assert run_file_hashes(out) == before
    fault("run.json, manifest.json, state.json of any values", VALUES)


SCALARS = st.one_of(
    *(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=6)),
    st.sampled_from([-1, 0, 2**53, 10**400, 1e308, "done", "running", "fp32"]),
)
ANY = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=4,
)
DEEP = st.sampled_from([60, 300, 900, 980]).map(lambda depth: json.loads("[" * depth + "]" * depth))


def paths(tree: Any, above: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The place of every value in an object of JSON."""
    if not isinstance(tree, (dict, list)):
        return [above]
    keys = tree if isinstance(tree, dict) else range(len(tree))
    return [above, *(path for key in keys for path in paths(tree[key], (*above, key)))]


def changed(tree: Any, path: tuple[Any, ...], value: Any) -> Any:
    """A copy with another value in one place."""
    if not path:
        return value
    result = part = copy.deepcopy(tree)
    for key in path[:-1]:
        part = part[key]
    part[path[-1]] = value
    return result


def fuzz(tree: Any, number: int, run: Callable[[Any], object]) -> tuple[int, int]:
    """Try other values in every place. Returns: how many were tried, and how many were taken."""
    tried = taken = 0
    codes: set[int] = set()
    quick = settings(
        max_examples=number,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )

    @quick
    @given(st.sampled_from(paths(tree)), st.one_of(ANY, DEEP))
    def once(path: tuple[Any, ...], value: Any) -> None:
        nonlocal tried, taken
        tried += 1
        try:
            run(changed(tree, path, value))
            taken += 1
        except FinetuneError as error:
            codes.add(error.exit_code)

    once()
    assert codes <= {2, 3, 4}
    return tried, taken


NUMBERS = [pytest.param(80, id="quick"), pytest.param(2000, id="long", marks=pytest.mark.faults)]


@pytest.fixture
def saved(setup: TrainingSetup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    """A run that has two checkpoints, and that no disk is waited for."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)
    run = RunDir(tmp_path / "run")
    run.open()
    assert started(run, setup) == 0
    for step in (2, 4):
        counters = {"step": step, "best": 0.5, "best_step": 2, "pending": [1.0], "scaler": None}
        run.save_checkpoint(step, state_writer(counters), num_bytes=0)
    return run


def state_writer(counters: dict[str, Any]) -> Callable[[Path], None]:
    return lambda folder: (folder / "state.json").write_text(json.dumps(counters)) and None


@pytest.mark.parametrize("number", NUMBERS)
def test_records_of_any_values(number: int, setup: TrainingSetup, saved: RunDir, fault) -> None:
    record = saved.read_json("run.json")

    def run(tree: Any) -> None:
        (saved.path / "run.json").write_text(json.dumps(tree))
        started(saved, setup)
        with record_status(saved, is_main_process=True):
            pass

    tried, taken = fuzz(record, number, run)
    assert tried >= number // 2
    assert 0 < taken < tried
    fault("run.json, manifest.json, state.json of any values", VALUES)


@pytest.mark.parametrize("name", ["manifest.json", "state.json"])
@pytest.mark.parametrize("number", NUMBERS)
def test_checkpoints_of_any_values(number: int, name: str, saved: RunDir, fault) -> None:
    path = saved.checkpoint_folder(4) / name
    tree = json.loads(path.read_text())

    def run(other: Any) -> None:
        path.write_text(json.dumps(other))
        with logged() as messages:
            taken = saved.newest_intact_step() == 4
        assert len(messages) == (not taken)
        assert other == tree or not taken

    tried, taken = fuzz(tree, number, run)
    assert taken == tried >= number // 2
    fault("run.json, manifest.json, state.json of any values", VALUES)
