"""Disks that are full, read-only, or become full in the middle of a run.

Most trials mount a small tmpfs, which needs root; without root they are skipped, and only the limit
on the size of a file, which every user can set, is tested.
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

pytestmark = pytest.mark.usefixtures("no_plots")

RECIPE = tiny_recipe(*SMALL_OVERRIDES)
LARGE_DISK_BYTES = 64 << 20
FULL_DISK = "exit code 5 and the bytes needed; the last good checkpoint stays, no incomplete file"
READ_ONLY = "exit code 5 before the first step"


class Disk:
    """A tmpfs whose size can be changed."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def mount(self, options: str) -> None:
        command = ["mount", "-t", "tmpfs", "-o", options, "faults", str(self.path)]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode:
            pytest.skip(f"no tmpfs can be mounted: {result.stderr.strip()}")

    def resize(self, size: int) -> None:
        self.mount(f"remount,size={size}")

    def fill(self, except_bytes: int = 0) -> None:
        """Fill the disk, except for some bytes."""
        with (self.path / "filler").open("wb", buffering=0) as file:
            free = shutil.disk_usage(self.path).free
            while (left := free - except_bytes) > 0:
                file.write(bytes(min(left, 1 << 20)))
                free = shutil.disk_usage(self.path).free


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    mount_point = tmp_path / "disk"
    mount_point.mkdir()
    new_disk = Disk(mount_point)
    new_disk.mount(f"size={LARGE_DISK_BYTES},mode=700")
    yield new_disk
    subprocess.run(["umount", "-l", str(mount_point)], check=True)


def check_disk_full(result: ChildResult) -> int:
    """Check that the child failed with a full disk. Returns: the needed bytes in its message."""
    check_child_error(result, "setup.disk_full", "--resume")
    (needed,) = re.findall(r"\(([\d,]+) bytes are needed\)", result.output)
    return int(needed.replace(",", ""))


def check_resumes(out: Path, finished_run: Path) -> None:
    check_child_success(run_in_child(lambda: train(RECIPE, out, resume=True)))
    assert read_weights(out) == read_weights(finished_run)
    assert read_train_losses(out) == read_train_losses(finished_run)
    assert temporary_files(out) == []


# KiB: the disk is full at the recipe, the record, checkpoint 1, 2 and 3, and the model
DISK_SIZES = [4, 8, 12, 16, 20, 40, 200, 300, 400, 600, 700, 800, 900, 1000, 1100, 1200, 1300, 1400]
DISK_SIZES += [1440, 1480, 1500, 1520, 1540, 1560]


@pytest.mark.parametrize("kibibytes", DISK_SIZES)
def test_a_disk_that_becomes_full(kibibytes: int, finished_run: Path, disk: Disk, fault) -> None:
    disk.resize(kibibytes << 10)
    out = disk.path / "run"
    result = run_in_child(lambda: train(RECIPE, out, resume=True))
    check_disk_full(result)
    assert temporary_files(out) == []
    steps = check_all_checkpoints(out) if out.exists() else []
    assert bool(steps) == (kibibytes >= 600), "a checkpoint takes 450 KiB"
    if steps:  # it stays "running", as after a kill, if not even the record fits
        assert json.loads((out / "run.json").read_text())["status"] in ("failed (5)", "running")
    disk.resize(LARGE_DISK_BYTES)
    check_resumes(out, finished_run)
    fault("disk full while a run trains", FULL_DISK, "and --resume gives the same weights")


def test_another_program_fills_the_disk(finished_run: Path, disk: Disk, fault) -> None:
    out, step = disk.path / "run", TrainerState.train_step

    def work() -> None:
        def fill_first(self: TrainerState, *args: object) -> None:
            if self.counters.step == 4:
                disk.fill(except_bytes=8192)
            step(self, *args)

        TrainerState.train_step = fill_first  # type: ignore[method-assign]
        train(RECIPE, out)

    needed = check_disk_full(run_in_child(work))
    assert needed > 400_000, "the message gives the size of the record, not of the checkpoint"
    assert check_all_checkpoints(out) == [2, 4]
    assert temporary_files(out) == []
    check_disk_full(run_in_child(lambda: train(RECIPE, out, resume=True)))  # the disk is still full
    assert check_all_checkpoints(out) == [2, 4]
    (disk.path / "filler").unlink()
    check_resumes(out, finished_run)
    fault("disk full while a run trains", FULL_DISK, "and --resume gives the same weights")


@pytest.mark.parametrize("kibibytes", [1, 16, 100])
def test_a_file_size_limit(kibibytes: int, finished_run: Path, tmp_path: Path, fault) -> None:
    out = tmp_path / "run"

    def work() -> None:
        limit = (kibibytes << 10, resource.getrlimit(resource.RLIMIT_FSIZE)[1])
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        train(RECIPE, out)

    check_disk_full(run_in_child(work))
    assert temporary_files(out) == []
    check_resumes(out, finished_run)
    fault("file size limit (RLIMIT_FSIZE)", FULL_DISK)


@pytest.mark.parametrize("kibibytes", [1, 100])
def test_a_file_size_limit_on_two_processes(kibibytes: int, tmp_path: Path, fault) -> None:
    out, limited = tmp_path / "run", True

    def work() -> None:
        if limited:
            limit = (kibibytes << 10, resource.getrlimit(resource.RLIMIT_FSIZE)[1])
            resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        train(RECIPE, out, resume=True)

    codes, output = run_ranks([work, work])
    assert codes[0] == 5, output
    assert codes[1] != 0, output
    assert output.count("bytes are needed") == 1, output
    assert temporary_files(out) == []
    limited = False
    codes, output = run_ranks([work, work])
    assert codes == [0, 0], output
    assert temporary_files(out) == []
    fault("file size limit, two processes", FULL_DISK, "and --resume continues")


# Not writable -------------------------------------------------------------------------------------


def check_refused_before_training(out: Path, *, as_nobody: bool = False) -> ChildResult:
    def work() -> None:
        def step(*_: object) -> None:
            raise AssertionError("a training step was run")

        TrainerState.train_step = step  # type: ignore[method-assign]
        if as_nobody and os.geteuid() == 0:
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
        train(RECIPE, out, resume=True)

    result = run_in_child(work)
    check_child_error(result, "setup.not_writable", out, "--out")
    return result


@pytest.mark.parametrize("resume", [False, True], ids=["new", "resumed"])
def test_a_read_only_file_system(resume: bool, finished_run: Path, disk: Disk, fault) -> None:
    out = disk.path / "run"
    if resume:
        copy_run(finished_run, out)
        (out / "run.json").write_text((out / "run.json").read_text().replace("done", "running"))
    disk.mount("remount,ro")
    assert "Read-only file system" in check_refused_before_training(out).output
    fault("read-only file system", READ_ONLY)


@pytest.mark.parametrize("resume", [False, True], ids=["new", "resumed"])
def test_a_folder_without_write_permission(
    resume: bool, finished_run: Path, disk: Disk, fault
) -> None:
    """Use a separate disk: other users cannot enter the folders of these tests."""
    out = disk.path / "run"
    if resume:
        copy_run(finished_run, out)
    # The user nobody must reach the disk, and everything that Python still imports.
    needed = (disk.path, Path(finetune.__file__).parent, Path(sys.prefix), Path(sys.base_prefix))
    reachable = {above for place in needed for above in (place, *place.parents)}
    modes = {place: mode for place in reachable if not (mode := place.stat().st_mode) & 0o001}
    try:
        for place, mode in modes.items():
            place.chmod(mode | 0o011)
        disk.path.chmod(0o555)
        check_refused_before_training(out, as_nobody=True)
    finally:
        for place, mode in modes.items():
            place.chmod(mode)
    fault("output directory without write permission", READ_ONLY)


# Other commands -----------------------------------------------------------------------------------

COMMANDS = "exit code 5, the file is named; the old file stays, no incomplete file"


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pictures")
    for number in range(400):
        image = np.full((8, 8, 3), number % 256, dtype=np.uint8)
        Image.fromarray(image).save(folder / f"a-name-as-long-as-those-of-cameras-{number}.png")
    return folder


@pytest.mark.parametrize("suffix", ["csv", "jsonl"])
def test_predictions_on_a_full_disk(
    suffix: str, finished_run: Path, images: Path, disk: Disk, fault
) -> None:
    target = disk.path / f"rows.{suffix}"
    before = {"csv": "path,label,confidence,error\n", "jsonl": '{"path": "a.png"}\n'}[suffix]
    target.write_text(before)
    disk.fill(except_bytes=8192)
    result = run_command_in_child("predict", finished_run, images, "--out", target)
    check_child_error(result, "setup.disk_full", target, os.strerror(errno.ENOSPC))
    assert target.read_text() == before
    assert {entry.name for entry in disk.path.iterdir()} == {target.name, "filler"}
    fault("disk full: predict, eval, report, export, sheet", COMMANDS)


@pytest.mark.parametrize("command", ["eval", "report", "sheet"])
def test_other_output_on_a_full_disk(
    command: str, finished_run: Path, images: Path, disk: Disk, fault
) -> None:
    first_image = sorted(images.iterdir())[0]
    arguments = {
        "eval": ("eval", finished_run, "--split", "val", "--out", disk.path / "results"),
        "report": ("report", finished_run, "--out", disk.path / "page.html"),
        "sheet": ("predict", finished_run, first_image, "--sheet", disk.path / "sheet.png"),
    }
    disk.fill()
    check_child_error(run_command_in_child(*arguments[command]), "setup.disk_full", disk.path)
    files = [entry for entry in disk.path.rglob("*") if entry.is_file()]
    assert [entry.name for entry in files] == ["filler"]
    fault("disk full: predict, eval, report, export, sheet", COMMANDS)


@pytest.mark.parametrize("format", ["onnx", "torch"])
def test_an_export_on_a_full_disk(format: str, finished_run: Path, disk: Disk, fault) -> None:
    disk.fill(except_bytes=16384)
    result = run_command_in_child("export", finished_run, "--format", format, "--out", disk.path)
    check_child_error(result, "setup.disk_full", disk.path)
    assert [entry.name for entry in disk.path.iterdir()] == ["filler"]
    fault("disk full: predict, eval, report, export, sheet", COMMANDS)


def test_the_feature_cache_on_a_full_disk(disk: Disk, fault) -> None:
    from finetune.evaluation.feature_cache import read_cached_features, write_cached_features

    disk.fill(except_bytes=16384)
    values_ND = np.arange(40_000, dtype=np.float32).reshape(100, 400)
    cache = disk.path / "features"
    key = "0" * 64

    def work() -> None:
        write_cached_features(cache, key, values_ND)
        assert read_cached_features(cache, key, num_images=100) is None

    result = run_in_child(work)
    assert result.exit_code == 0, result.output
    assert "are not kept (No space left on device)" in result.output
    assert list(cache.iterdir()) == []
    fault("disk full: the feature cache", "the features are computed and used, but not cached")
