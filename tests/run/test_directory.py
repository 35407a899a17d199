"""The run directory: one owner, atomic files, complete checkpoints or none."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from forked_runs import child_exit_code, fork_process
from logs import logged
from refusals import refused

from finetune.errors import SetupError
from finetune.run.directory import RunDir, lock_run


def metrics_line(step: int, loss: float) -> dict[str, Any]:
    return {"step": step, "split": "train", "loss": loss}


def file_writer(text: str):
    def write(folder: Path) -> None:
        (folder / "model.safetensors").write_text(text * 100)
        (folder / "state.json").write_text('{"step": 1}')

    return write


def test_second_owner_is_refused_with_the_first_ones_pid(run: RunDir) -> None:
    child = os.fork()  # the lock belongs to a process
    if child == 0:
        try:
            RunDir(run.path).open()
        except SetupError as error:
            os._exit(0 if f"in use by process {os.getppid()} on" in str(error) else 2)
        os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0


def test_two_runs_in_one_process(tmp_path: Path) -> None:
    """The kernel lock belongs to the process, so it cannot separate two runs in one process."""
    first = RunDir(tmp_path / "run")
    first.open()
    (tmp_path / "other").mkdir()
    for name in ("run", "other/../run"):
        with refused("setup.in_use", tmp_path / name, os.getpid()):
            RunDir(tmp_path / name).open()
    exit_code = child_exit_code(lambda: RunDir(tmp_path / "run").open())
    assert exit_code == 5, "the refused run has dropped the lock"
    first.close()
    first.open()
    first.close()


def test_a_locked_run_is_not_trained_meanwhile(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    run.open()
    run.close()
    with lock_run(run.path), lock_run(run.path):  # training pushes with its own lock
        assert child_exit_code(lambda: RunDir(run.path).open()) == 5
    assert child_exit_code(lambda: RunDir(run.path).open()) == 0


def test_open_waits_for_a_process_that_is_ending(tmp_path: Path) -> None:
    """A restarted rank 0 may start while the previous one, perhaps elsewhere, still ends."""
    run, (reader, writer) = RunDir(tmp_path / "run"), os.pipe()

    def hold_for_two_seconds() -> None:
        run_dir = RunDir(run.path)
        run_dir.open()
        os.write(writer, b"!")
        time.sleep(2)

    with tempfile.TemporaryFile() as output:
        first = fork_process(hold_for_two_seconds, output.fileno())
    assert os.read(reader, 1) == b"!"
    with refused("setup.in_use", run.path, first):
        run.open(timeout_seconds=0.3)
    run.open(timeout_seconds=60)
    run.close()
    os.waitpid(first, 0)


def test_lock_stays_when_the_folder_is_copied(run: RunDir, tmp_path: Path) -> None:
    shutil.copytree(run.path, tmp_path / "copy")
    assert child_exit_code(lambda: RunDir(run.path).open()) == 5


def test_worker_that_outlives_its_run_does_not_hold_the_lock(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        RunDir(tmp_path / "run").open()
        worker = os.fork()
        if worker == 0:
            time.sleep(60)
        os.write(writer, str(worker).encode())
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    worker = int(os.read(reader, 20))
    reopened = RunDir(tmp_path / "run")
    try:
        reopened.open()
    finally:
        os.kill(worker, signal.SIGKILL)
    reopened.close()


def test_lock_of_a_dead_process_is_released(tmp_path: Path) -> None:
    child = os.fork()
    if child == 0:
        RunDir(tmp_path / "run").open()
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    assert (tmp_path / "run" / ".lock").read_text()  # the process held the lock
    reopened = RunDir(tmp_path / "run")
    reopened.open()
    reopened.close()


def test_path_that_is_a_file_or_cannot_be_created_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", "/proc/none/run"):
        with refused("setup.not_writable", path, "--out"):
            RunDir(path).open()


@pytest.mark.parametrize("name", ["a" * 300, "loop/run", "a\0b", "\ud800/run", "b" * 5000])
def test_invalid_folder_name_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(SetupError) as caught:  # a message as long as the name
        RunDir(tmp_path / name).open()
    assert caught.value.code == "setup.not_writable"
    assert str(tmp_path) in str(caught.value)


def test_url_is_refused() -> None:
    run = RunDir("s3://bucket/run")
    with refused("setup.not_writable", run.path, "URL"):
        run.open()


def test_folder_with_foreign_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "photo.png").write_bytes(b"")
    with refused("setup.not_a_run", tmp_path, "'photo.png'"):
        RunDir(tmp_path).open()
    assert [entry.name for entry in tmp_path.iterdir()] == ["photo.png"]


def test_checkpoints_are_listed_in_order_and_verified(run: RunDir) -> None:
    for step in (30, 10, 200):
        run.save_checkpoint(step, file_writer(str(step)), num_bytes=0)
    assert run.checkpoint_steps() == [10, 30, 200]
    assert [run.verify_checkpoint(step) for step in run.checkpoint_steps()] == [None, None, None]
    assert run.newest_intact_step() == 200
    run.prune_checkpoints({10, 200})
    assert run.checkpoint_steps() == [10, 200]
    added = run.checkpoint_folder(200) / "ema.safetensors"  # evaluation would use it
    added.write_bytes(b"")
    assert run.verify_checkpoint(200) == f"{added}: is not in the manifest"
    added.rename(added.with_name(".DS_Store"))
    assert run.verify_checkpoint(200) is None
    assert run.verify_checkpoint(30) == f"{run.checkpoint_folder(30)}: the folder is missing"


def test_files_and_symlinks_named_like_checkpoints_are_removed(run: RunDir, tmp_path: Path) -> None:
    run.save_checkpoint(1, file_writer("a"), num_bytes=0)
    (tmp_path / "elsewhere").mkdir()
    run.checkpoint_folder(2).write_text("")
    run.checkpoint_folder(3).symlink_to(tmp_path / "elsewhere")
    (run.checkpoints_folder / "step-٠٠٠٠٠٠٠٤").mkdir()  # Unicode digits do not count
    assert run.checkpoint_steps() == [1, 2, 3]
    assert run.newest_intact_step() == 1
    run.prune_checkpoints({1})
    run.checkpoint_folder(1).rename(run.checkpoint_folder(5))
    run.checkpoint_folder(1).symlink_to(tmp_path / "elsewhere")
    run.save_checkpoint(1, file_writer("b"), num_bytes=0)
    shutil.rmtree(run.checkpoint_folder(5))
    run.checkpoint_folder(5).write_text("")
    run.save_checkpoint(5, file_writer("c"), num_bytes=0)
    assert (tmp_path / "elsewhere").is_dir()
    assert sorted(os.listdir(run.checkpoints_folder)) == [
        *("step-00000001", "step-00000005", "step-٠٠٠٠٠٠٠٤")
    ]
    assert [run.verify_checkpoint(step) for step in run.checkpoint_steps()] == [None, None]


FILES = ("model.safetensors", "state.json", "manifest.json")


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", ["missing", "empty", "truncated", "bit"])
def test_damaged_checkpoint_is_detected_and_the_previous_one_used(
    run: RunDir, name: str, damage: str
) -> None:
    run.save_checkpoint(1, file_writer("a"), num_bytes=0)
    run.save_checkpoint(2, file_writer("b"), num_bytes=0)
    path = run.checkpoint_folder(2) / name
    content = bytearray(path.read_bytes())
    if damage == "missing":
        path.unlink()
    elif damage == "bit":
        content[len(content) // 2] ^= 4
        path.write_bytes(content)
    else:
        path.write_bytes(b"" if damage == "empty" else content[:-3])
    with logged() as messages:
        assert run.newest_intact_step() == 1
    assert len(messages) == 1
    assert name in messages[0]
    run.checkpoint_folder(1).joinpath("state.json").unlink()
    with refused("checkpoint.damaged", run.checkpoints_folder, 2):
        run.newest_intact_step()


def test_any_changed_bit_of_the_manifest_is_detected(run: RunDir) -> None:
    run.save_checkpoint(1, file_writer("a"), num_bytes=0)
    path = run.checkpoint_folder(1) / "manifest.json"
    content = path.read_bytes()
    num_checked = 0
    for index in range(len(content)):
        if content[index : index + 1].isspace():
            continue  # whitespace has no meaning in JSON
        changed = bytearray(content)
        changed[index] ^= 1
        path.write_bytes(changed)
        assert run.verify_checkpoint(1) is not None, changed[max(0, index - 20) : index + 20]
        num_checked += 1
    assert num_checked > 200


def test_failed_save_keeps_the_old_checkpoint_and_leaves_nothing(run: RunDir) -> None:
    run.save_checkpoint(1, file_writer("a"), num_bytes=0)

    def fail(folder: Path) -> None:
        file_writer("b")(folder)
        raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError):
        run.save_checkpoint(2, fail, num_bytes=0)
    assert [entry.name for entry in run.checkpoints_folder.iterdir()] == ["step-00000001"]


@contextlib.contextmanager
def limit_file_size(num_bytes: int) -> Iterator[None]:
    """Limit the size of files that this process writes, as if the disk were full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def test_full_disk_is_reported_with_the_bytes_needed(run: RunDir) -> None:
    run.save_checkpoint(1, file_writer("a"), num_bytes=0)
    with (
        limit_file_size(4096),
        refused("setup.disk_full", run.checkpoint_folder(2), "123,456 bytes"),
    ):
        run.save_checkpoint(2, file_writer("b" * 1000), num_bytes=123456)
    assert [entry.name for entry in run.checkpoints_folder.iterdir()] == ["step-00000001"]
    assert run.verify_checkpoint(1) is None


def test_open_removes_leftovers_of_an_interrupted_write(tmp_path: Path) -> None:
    for leftover in ("checkpoints/.step-00000002.1f", ".model.1.tmp"):
        (tmp_path / leftover).mkdir(parents=True)
    (tmp_path / ".run.json.1.tmp").write_text("{")
    run = RunDir(tmp_path)
    run.open()
    run.close()
    assert sorted(entry.name for entry in tmp_path.rglob("*")) == [".lock", "checkpoints"]


def test_open_keeps_foreign_files(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.open()
    run.close()
    run.write_json("run.json", {"status": "running", "data_fingerprint": "0"})
    names = ["checkpoints/.gitkeep", ".notes.tmp", ".env"]
    for name in names:
        (tmp_path / name).write_text("mine")
    run.open()
    run.close()
    assert [(tmp_path / name).read_text() for name in names] == ["mine"] * 3


def test_open_restores_a_model_whose_replacement_was_killed(run: RunDir) -> None:
    run.publish_model(file_writer("a"), num_bytes=0)
    before = sorted(entry.name for entry in run.model_folder.iterdir())
    replace = os.replace

    def publish_and_die() -> None:
        def die_before_replacing_model(source: Path, target: Path) -> None:
            if target == run.model_folder:
                os._exit(9)
            replace(source, target)

        os.replace = die_before_replacing_model
        run.publish_model(file_writer("b"), num_bytes=0)

    child = os.fork()
    if not child:
        publish_and_die()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    assert not run.model_folder.exists()
    run.close()
    run.open()
    assert sorted(entry.name for entry in run.model_folder.iterdir()) == before
    assert not [entry for entry in run.path.iterdir() if entry.name.endswith(".tmp")]


def test_leftovers_of_a_killed_process_with_the_same_pid_do_not_block_publishing(
    run: RunDir,
) -> None:
    for leftover in (f".model.{os.getpid()}.tmp", f".model.old.{os.getpid()}.tmp"):
        (run.path / leftover / "README.md").mkdir(parents=True)
    run.publish_model(file_writer("a"), num_bytes=0)
    run.publish_model(file_writer("b"), num_bytes=0)


def test_metrics_drop_repeated_steps(run: RunDir) -> None:
    for step in (1, 2, 3):
        run.append_metrics(metrics_line(step, 0.5))
    run.close()
    run.drop_metrics_after(2)
    run.append_metrics(metrics_line(3, 0.25))
    assert run.read_metrics() == [
        metrics_line(1, 0.5),
        metrics_line(2, 0.5),
        metrics_line(3, 0.25),
    ]


def test_damaged_metrics_lines_are_counted_and_do_not_affect_others(run: RunDir) -> None:
    for step in (1, 2):
        run.append_metrics(metrics_line(step, 0.5))
    run.close()
    path, lines = run.path / "metrics.jsonl", []
    damaged = b"\xff\n[1]\n" + path.read_bytes().replace(b"\n", b"\n\0\n", 1) + b'{"step": 4, "lo'
    path.write_bytes(damaged)
    with logged(lines):
        for _ in range(2):
            assert [line["step"] for line in run.read_metrics()] == [1, 2]
    assert [("4 lines" in line, str(path) in line) for line in lines] == [(True, True)]


def test_only_a_checkpoint_of_the_branched_run_is_copied(run: RunDir, tmp_path: Path) -> None:
    run.write_json("run.json", {"id": "first"})
    run.save_checkpoint(1, file_writer("a"), num_bytes=0)
    with contextlib.closing(RunDir(tmp_path / "branch")) as branch:
        branch.open()
        branch.write_json("run.json", {"id": "branch"})
        with refused("checkpoint.damaged", run.path, "again"):
            branch.copy_checkpoint(run, 1, run_id="another")
        assert not branch.checkpoint_steps()
        branch.copy_checkpoint(run, 1, run_id="first")
        assert branch.verify_checkpoint(1) is None


@pytest.mark.parametrize("change", ["move", "replace"])
def test_nothing_is_written_into_a_run_that_takes_the_place_of_another(
    change: str, run: RunDir, tmp_path: Path
) -> None:
    run.write_json("run.json", {"id": "first"})
    run.path.rename(tmp_path / "moved")
    if change == "replace":
        with contextlib.closing(RunDir(run.path)) as new:
            new.open()
            new.write_json("run.json", {"id": "new"})
    for write in (
        lambda: run.write_json("run.json", {"id": "first"}),
        lambda: run.write_recipe("seed: 1\n"),
        lambda: run.append_metrics(metrics_line(1, 0.5)),
        lambda: run.save_checkpoint(1, file_writer("a"), num_bytes=0),
        lambda: run.publish_model(file_writer("a"), num_bytes=0),
        lambda: run.prune_checkpoints(set()),
    ):
        with refused("setup.replaced", run.path, "--resume"):
            write()
    if change == "replace":
        assert json.loads((run.path / "run.json").read_text()) == {"id": "new"}
        assert not run.checkpoint_steps()
    assert not (run.path / "model").exists()


@pytest.mark.parametrize("change", ["replace", "remove", "cut"])
def test_metrics_that_another_program_changes_are_said(change: str, run: RunDir) -> None:
    run.write_json("run.json", {"status": "running"})
    for step in (1, 2):
        run.append_metrics(metrics_line(step, 0.5))
    path, lines = run.path / "metrics.jsonl", []
    content = path.read_bytes()
    if change != "cut":
        path.unlink()
    if change != "remove":
        path.write_bytes(content[: len(content) // 2] if change == "cut" else content)
    with logged(lines):
        run.append_metrics(metrics_line(3, 0.25))
        run.append_metrics(metrics_line(4, 0.25))
        assert [line["step"] for line in run.read_metrics()][-2:] == [3, 4]
    assert "has replaced or changed" in lines[0]
    assert run.has_changed_metrics()


def test_an_edited_number_in_the_metrics_is_said(run: RunDir) -> None:
    run.append_metrics(metrics_line(1, 0.5))
    assert not run.has_changed_metrics()
    path, lines = run.path / "metrics.jsonl", []
    path.write_text(path.read_text().replace("0.5", "0.1"))
    with logged(lines):
        run.append_metrics(metrics_line(2, 0.5))
        assert [line["loss"] for line in run.read_metrics()] == [0.1, 0.5]
    assert "was changed after the run had written it" in lines[0]


def test_metrics_lines_of_another_run_are_skipped(run: RunDir, tmp_path: Path) -> None:
    other = RunDir(tmp_path / "other")
    other.open()
    for each, loss in ((run, 0.5), (other, 0.25)):
        each.write_json("run.json", {"id": each.path.name})
        each.append_metrics(metrics_line(1, loss))
        each.close()
    path, lines = run.path / "metrics.jsonl", []
    without_id = json.dumps(metrics_line(2, 0.125)).encode() + b"\n"
    others = (other.path / "metrics.jsonl").read_bytes() + without_id
    path.write_bytes(path.read_bytes() + others)
    with logged(lines):
        assert run.read_metrics() == [metrics_line(1, 0.5)]
    assert [("2 lines" in line, str(path) in line) for line in lines] == [(True, True)]


def test_missing_metrics_are_reported_once_the_run_has_saved_something(run: RunDir) -> None:
    lines: list[str] = []
    with logged(lines):
        assert run.read_metrics() == []
        assert lines == []
        run.save_checkpoint(1, file_writer("a"), num_bytes=0)
        assert run.read_metrics() == []
    assert [str(run.path / "metrics.jsonl") in line for line in lines] == [True]


@pytest.mark.parametrize("create", [os.mkdir, os.mkfifo])
def test_folder_or_pipe_instead_of_a_file_is_damage(create, run: RunDir) -> None:
    run.save_checkpoint(1, file_writer("a"), num_bytes=0)
    for name in ("run.json", "metrics.jsonl"):
        create(run.path / name)
    with refused("checkpoint.damaged", run.path / "run.json"):
        run.read_json("run.json")
    with refused("checkpoint.damaged", run.path / "metrics.jsonl"):
        run.read_metrics()
    (run.checkpoint_folder(1) / "manifest.json").unlink()
    create(run.checkpoint_folder(1) / "manifest.json")
    assert "not a file" in str(run.verify_checkpoint(1))


def test_deeply_nested_manifest_is_damage(run: RunDir) -> None:
    run.save_checkpoint(1, file_writer("a"), num_bytes=0)
    (run.checkpoint_folder(1) / "manifest.json").write_text("[" * 200_000)
    assert "levels deep" in str(run.verify_checkpoint(1))


def test_metrics_line_on_a_full_disk_is_not_written_partly(run: RunDir) -> None:
    run.append_metrics({"step": 1})
    with limit_file_size(30), refused("setup.disk_full", "metrics.jsonl"):
        run.append_metrics({"step": 2})
    run.append_metrics({"step": 3})
    assert (run.path / "metrics.jsonl").read_text() == (
        '{"step": 1, "run": null}\n{"step": 3, "run": null}\n'
    )


def test_write_json_is_atomic_and_refuses_non_finite_numbers(run: RunDir) -> None:
    run.write_json("run.json", {"status": "running"})
    with pytest.raises(ValueError, match="not JSON compliant"):
        run.write_json("run.json", {"loss": float("nan")})
    assert run.read_json("run.json") == {"status": "running"}
    assert run.read_json("absent.json") is None
    for content in ("{", "[]"):
        (run.path / "run.json").write_text(content)
        with refused("checkpoint.damaged", run.path / "run.json"):
            run.read_json("run.json")


def test_has_model_needs_weights_and_config(run: RunDir) -> None:
    assert not run.has_model()
    for name in ("config.json", "model.safetensors"):
        run.model_folder.mkdir(exist_ok=True)
        assert not run.has_model()
        (run.model_folder / name).write_text("{}")
    assert run.has_model()


def test_publish_model_replaces_the_whole_folder(run: RunDir) -> None:
    run.publish_model(file_writer("a"), num_bytes=0)
    run.publish_model(lambda folder: (folder / "README.md").write_text("b"), num_bytes=0)
    assert [entry.name for entry in run.model_folder.iterdir()] == ["README.md"]
    assert not [entry for entry in run.path.iterdir() if entry.name.endswith(".tmp")]


def test_interrupted_publish_keeps_the_old_model(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.publish_model(file_writer("a"), num_bytes=0)
    replace, calls = os.replace, []

    def interrupt_second_call(source: Path, target: Path) -> None:
        calls.append(target)
        if len(calls) == 2:
            raise KeyboardInterrupt
        replace(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", interrupt_second_call)
        with pytest.raises(KeyboardInterrupt):
            run.publish_model(file_writer("b"), num_bytes=0)
    assert (run.model_folder / "model.safetensors").read_text() == "a" * 100
    assert not [entry for entry in run.path.iterdir() if entry.name.endswith(".tmp")]
