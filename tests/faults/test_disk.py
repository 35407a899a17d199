"""Disks that are full, that cannot be written, or that fill up in the middle of a run.

Most trials mount a small tmpfs, which takes root; where that is not permitted they are skipped, and
the limit on the size of a file, which anybody can set, stands for them.
"""

from __future__ import annotations

import errno
import json
import os
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from forked_runs import (
    SMALL_OVERRIDES,
    ChildResult,
    check_all_checkpoints,
    check_child_error,
    check_child_success,
    copy_run,
    read_train_losses,
    read_weights,
    run_command_in_child,
    run_in_child,
    run_ranks,
    temporary_files,
    tiny_recipe,
)
from PIL import Image

import finetune
from finetune.training.train import train
from finetune.training.trainer_state import TrainerState

pytestmark = pytest.mark.usefixtures("no_pictures")

RECIPE = tiny_recipe(*SMALL_OVERRIDES)
PLENTY = 64 << 20
FULL_DISK = "exit code 5 and the bytes needed; the last good checkpoint stays, nothing half written"
READ_ONLY = "exit code 5 before the first step"


class Disk:
    """A tmpfs of a size that can be changed."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def mount(self, options: str) -> None:
        run_command_in_child = ["mount", "-t", "tmpfs", "-o", options, "faults", str(self.path)]
        done = subprocess.run(run_command_in_child, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"no tmpfs can be mounted: {done.stderr.strip()}")

    def resize(self, size: int) -> None:
        self.mount(f"remount,size={size}")

    def fill(self, but: int = 0) -> None:
        """Take all the room that is left, `but` for some bytes."""
        with (self.path / "filler").open("wb", buffering=0) as file:
            free = shutil.disk_usage(self.path).free
            while (left := free - but) > 0:
                file.write(bytes(min(left, 1 << 20)))
                free = shutil.disk_usage(self.path).free


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    place = tmp_path / "disk"
    place.mkdir()
    mounted = Disk(place)
    mounted.mount(f"size={PLENTY},mode=700")
    yield mounted
    subprocess.run(["umount", "-l", str(place)], check=True)


def check_refusal(ended: ChildResult) -> int:
    """The child met a full disk. Returns: the bytes that its message says it needs."""
    check_child_error(ended, "setup.disk_full", "--resume")
    (needed,) = re.findall(r"\(([\d,]+) bytes are needed\)", ended.output)
    return int(needed.replace(",", ""))


def check_resumes(out: Path, whole: Path) -> None:
    check_child_success(run_in_child(lambda: train(RECIPE, out, resume=True)))
    assert read_weights(out) == read_weights(whole)
    assert read_train_losses(out) == read_train_losses(whole)
    assert temporary_files(out) == []


# KiB: full at the recipe, the record, the first, second and third checkpoint, and at the model
SIZES = [4, 8, 12, 16, 20, 40, 200, 300, 400, 600, 700, 800, 900, 1000, 1100, 1200, 1300, 1400]
SIZES += [1440, 1480, 1500, 1520, 1540, 1560]
QUICK = {8, 300, 1000, 1500}


@pytest.mark.parametrize(
    "kibibytes",
    [pytest.param(n, marks=[] if n in QUICK else [pytest.mark.faults]) for n in SIZES],
)
def test_a_disk_that_fills_up(kibibytes: int, whole: Path, disk: Disk, fault) -> None:
    disk.resize(kibibytes << 10)
    out = disk.path / "run"
    ended = run_in_child(lambda: train(RECIPE, out, resume=True))
    check_refusal(ended)
    assert temporary_files(out) == []
    steps = check_all_checkpoints(out) if out.exists() else []
    assert bool(steps) == (kibibytes >= 600), "a checkpoint takes 450 KiB"
    if steps:  # as after a kill, it stays "running" where not even the record finds room
        assert json.loads((out / "run.json").read_text())["status"] in ("failed (5)", "running")
    disk.resize(PLENTY)
    check_resumes(out, whole)
    fault("disk full while a run trains", FULL_DISK, "and --resume gives the same weights")


def test_another_program_fills_the_disk(whole: Path, disk: Disk, fault) -> None:
    out, step = disk.path / "run", TrainerState.train_step

    def work() -> None:
        def fill_first(self: TrainerState, *args: object) -> None:
            if self.counters.step == 4:
                disk.fill(but=8192)
            step(self, *args)

        TrainerState.train_step = fill_first  # type: ignore[method-assign]
        train(RECIPE, out)

    needed = check_refusal(run_in_child(work))
    assert needed > 400_000, "what the checkpoint needs, not what its record does"
    assert check_all_checkpoints(out) == [2, 4]
    assert temporary_files(out) == []
    check_refusal(run_in_child(lambda: train(RECIPE, out, resume=True)))  # nothing is freed yet
    assert check_all_checkpoints(out) == [2, 4]
    (disk.path / "filler").unlink()
    check_resumes(out, whole)
    fault("disk full while a run trains", FULL_DISK, "and --resume gives the same weights")


@pytest.mark.parametrize("kibibytes", [1, 16, 100])
def test_a_limit_on_the_size_of_files(kibibytes: int, whole: Path, tmp_path: Path, fault) -> None:
    out = tmp_path / "run"

    def work() -> None:
        limit = (kibibytes << 10, resource.getrlimit(resource.RLIMIT_FSIZE)[1])
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        train(RECIPE, out)

    check_refusal(run_in_child(work))
    assert temporary_files(out) == []
    check_resumes(out, whole)
    fault("limit on the size of a file (RLIMIT_FSIZE)", FULL_DISK)


@pytest.mark.faults
@pytest.mark.parametrize("kibibytes", [1, 100])
def test_a_limit_on_two_processes(kibibytes: int, tmp_path: Path, fault) -> None:
    out, limited = tmp_path / "run", True

    def work() -> None:
        if limited:
            limit = (kibibytes << 10, resource.getrlimit(resource.RLIMIT_FSIZE)[1])
            resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        train(RECIPE, out, resume=True)

    codes, said = run_ranks([work, work])
    assert codes[0] == 5, said
    assert codes[1] != 0, said
    assert said.count("bytes are needed") == 1, said
    assert temporary_files(out) == []
    limited = False
    codes, said = run_ranks([work, work])
    assert codes == [0, 0], said
    assert temporary_files(out) == []
    fault("limit on the size of a file, two processes", FULL_DISK, "and --resume goes on")


# Not writable -------------------------------------------------------------------------------------


def refused_at_the_start(out: Path, *, as_nobody: bool = False) -> ChildResult:
    def work() -> None:
        def step(*_: object) -> None:
            raise AssertionError("no step may be taken")

        TrainerState.train_step = step  # type: ignore[method-assign]
        if as_nobody and os.geteuid() == 0:
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
        train(RECIPE, out, resume=True)

    ended = run_in_child(work)
    check_child_error(ended, "setup.not_writable", out, "--out")
    return ended


@pytest.mark.parametrize("begun", [False, True], ids=["new", "resumed"])
def test_a_read_only_file_system(begun: bool, whole: Path, disk: Disk, fault) -> None:
    out = disk.path / "run"
    if begun:
        copy_run(whole, out)
        (out / "run.json").write_text((out / "run.json").read_text().replace("done", "running"))
    disk.mount("remount,ro")
    assert "Read-only file system" in refused_at_the_start(out).output
    fault("read-only file system", READ_ONLY)


@pytest.mark.parametrize("begun", [False, True], ids=["new", "resumed"])
def test_a_folder_of_somebody_else(begun: bool, whole: Path, disk: Disk, fault) -> None:
    """On a disk of its own, since nobody else may enter the folders of these tests."""
    out = disk.path / "run"
    if begun:
        copy_run(whole, out)
    # Nobody must reach the disk, and what Python still imports there.
    needed = (disk.path, Path(finetune.__file__).parent, Path(sys.prefix), Path(sys.base_prefix))
    reachable = {above for place in needed for above in (place, *place.parents)}
    modes = {place: mode for place in reachable if not (mode := place.stat().st_mode) & 0o001}
    try:
        for place, mode in modes.items():
            place.chmod(mode | 0o011)
        disk.path.chmod(0o555)
        refused_at_the_start(out, as_nobody=True)
    finally:
        for place, mode in modes.items():
            place.chmod(mode)
    fault("output directory without the right to write", READ_ONLY)


# The other verbs ----------------------------------------------------------------------------------

VERBS = "exit code 5, the file named; what was there before stays, nothing half written"


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pictures")
    for number in range(400):
        pixels = np.full((8, 8, 3), number % 256, dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"a-name-as-long-as-those-of-cameras-{number}.png")
    return folder


@pytest.mark.parametrize("suffix", ["csv", "jsonl"])
def test_predictions_on_a_full_disk(
    suffix: str, whole: Path, pictures: Path, disk: Disk, fault
) -> None:
    target = disk.path / f"rows.{suffix}"
    target.write_text("before")
    disk.fill(but=8192)
    ended = run_command_in_child("predict", whole, pictures, "--out", target)
    check_child_error(ended, "setup.disk_full", target, os.strerror(errno.ENOSPC))
    assert target.read_text() == "before"
    assert {entry.name for entry in disk.path.iterdir()} == {target.name, "filler"}
    fault("disk full: predict, eval, report, export, sheet", VERBS)


@pytest.mark.parametrize("verb", ["eval", "report", "sheet"])
def test_what_else_is_written_on_a_full_disk(
    verb: str, whole: Path, pictures: Path, disk: Disk, fault
) -> None:
    one = sorted(pictures.iterdir())[0]
    words = {
        "eval": ("eval", whole, "--split", "val", "--out", disk.path / "results"),
        "report": ("report", whole, "--out", disk.path / "page.html"),
        "sheet": ("predict", whole, one, "--sheet", disk.path / "sheet.png"),
    }
    disk.fill()
    check_child_error(run_command_in_child(*words[verb]), "setup.disk_full", disk.path)
    left = [entry for entry in disk.path.rglob("*") if entry.is_file()]
    assert [entry.name for entry in left] == ["filler"]
    fault("disk full: predict, eval, report, export, sheet", VERBS)


@pytest.mark.faults
@pytest.mark.parametrize("format", ["onnx", "torch"])
def test_an_export_on_a_full_disk(format: str, whole: Path, disk: Disk, fault) -> None:
    disk.fill(but=16384)
    ended = run_command_in_child("export", whole, "--format", format, "--out", disk.path)
    check_child_error(ended, "setup.disk_full", disk.path)
    assert [entry.name for entry in disk.path.iterdir()] == ["filler"]
    fault("disk full: predict, eval, report, export, sheet", VERBS)


def test_the_cache_of_features_on_a_full_disk(disk: Disk, fault) -> None:
    from finetune.evaluation.feature_cache import read_cached_features, write_cached_features

    disk.fill(but=16384)
    values_ND = np.arange(40_000, dtype=np.float32).reshape(100, 400)
    cache = disk.path / "features"
    key = "0" * 64

    def work() -> None:
        write_cached_features(cache, key, values_ND)
        assert read_cached_features(cache, key, num_images=100) is None

    ended = run_in_child(work)
    assert ended.exit_code == 0, ended.output
    assert "are not kept (No space left on device)" in ended.output
    assert list(cache.iterdir()) == []
    fault("disk full: the cache of features", "the features are computed, used and not kept")
