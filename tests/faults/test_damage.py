"""Damaged files of a run: found before anything live changes; an intact checkpoint is taken."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

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
    run_file_hashes,
    run_in_child,
    temporary_files,
    tiny_recipe,
    train_until_killed,
)

from finetune.errors import DivergedError
from finetune.run import checkpoint
from finetune.run.directory import RunDir
from finetune.training.train import train

pytestmark = pytest.mark.usefixtures("no_pictures")

RECIPE = tiny_recipe(*SMALL_OVERRIDES)
IMAGE = Path(__file__).with_name("none.png")  # the model comes first
FILES = [
    *("model.safetensors", "optimizer.safetensors", "ema.safetensors"),
    *("optimizer.json", "state.json", "manifest.json"),
]
DAMAGES = ["missing", "empty", "truncated", "bit"]
# one damage for each file, each damage at least once
QUICK = set(zip(FILES, [*DAMAGES, "truncated", "bit"], strict=True))
ALL = [
    pytest.param(name, damage, marks=[] if (name, damage) in QUICK else [pytest.mark.faults])
    for name in FILES
    for damage in DAMAGES
]


@pytest.fixture(scope="module")
def stopped(whole: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run, killed in its last step but one."""
    out = tmp_path_factory.mktemp("stopped") / "run"
    train_until_killed(7, RECIPE, out)
    assert check_all_checkpoints(out)[-2:] == [4, 6]
    assert {path.name for path in RunDir(out).checkpoint_folder(6).iterdir()} == set(FILES)
    return out


def damage_file(path: Path, damage: str, place: float = 0.5) -> None:
    """Damage a file; of a flipped bit `place` says where, from 0 to 1."""
    content = bytearray(path.read_bytes())
    if damage == "missing":
        path.unlink()
    elif damage == "bit":
        at = int(place * (len(content) - 1))
        if content[at : at + 1].isspace():  # indentation of JSON carries nothing
            at = next(n for n in range(len(content)) if not content[n : n + 1].isspace())
        content[at] ^= 4
        path.write_bytes(content)
    else:
        path.write_bytes(b"" if damage == "empty" else content[: len(content) // 2])


def resumed(out: Path) -> ChildResult:
    return run_in_child(lambda: train(RECIPE, out, resume=True))


def same(out: Path, whole: Path) -> None:
    assert read_weights(out) == read_weights(whole)
    assert read_train_losses(out) == read_train_losses(whole)
    assert check_all_checkpoints(out)[-1] == 8
    assert temporary_files(out) == []


# Checkpoints --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name, damage", ALL)
def test_the_checkpoint_before_a_damaged_one_is_taken(
    name: str, damage: str, whole: Path, stopped: Path, tmp_path: Path, fault
) -> None:
    out, read = copy_run(stopped, tmp_path / "run"), tmp_path / "read"
    damage_file(RunDir(out).checkpoint_folder(6) / name, damage)

    def work() -> None:
        restore = checkpoint.load_checkpoint

        def noted(folder: Path, *trainer: object, **rest: object) -> object:
            with read.open("a") as file:
                file.write(f"{folder.name}\n")
            return restore(folder, *trainer, **rest)

        checkpoint.load_checkpoint = noted
        train(RECIPE, out, resume=True)

    check_child_success(run_in_child(work), "checkpoint of step 6", name)
    assert read.read_text() == "step-00000004\n", "the damaged one is never loaded"
    same(out, whole)
    fault(
        "damaged checkpoint: each file missing, empty, truncated, one bit flipped",
        "found before anything is loaded; the one before is taken, to the same weights",
    )


@pytest.mark.parametrize("name, damage", ALL)
def test_without_an_intact_checkpoint_the_run_ends(
    name: str, damage: str, stopped: Path, tmp_path: Path, fault
) -> None:
    out = copy_run(stopped, tmp_path / "run")
    run = RunDir(out)
    for step in run.checkpoint_steps():
        damage_file(run.checkpoint_folder(step) / name, damage)
    before = run_file_hashes(out)
    check_child_error(
        resumed(out), "checkpoint.damaged", run.checkpoints_folder, len(run.checkpoint_steps())
    )
    assert run_file_hashes(out) == before
    fault("no checkpoint is intact", "exit code 4, and nothing in the directory is changed")


@pytest.mark.parametrize("damage", DAMAGES)
def test_an_older_checkpoint_that_is_damaged_is_in_nobodys_way(
    damage: str, whole: Path, tmp_path: Path, fault
) -> None:
    out, keeps = tmp_path / "run", tiny_recipe(*SMALL_OVERRIDES, "run.keep_checkpoints=4")
    train_until_killed(7, keeps, out)
    assert RunDir(out).checkpoint_steps() == [2, 4, 6]  # that of step 4 holds the best weights
    damage_file(RunDir(out).checkpoint_folder(2) / "state.json", damage)
    check_child_success(run_in_child(lambda: train(keeps, out, resume=True)))
    assert read_weights(out) == read_weights(whole)
    fault("an older checkpoint is damaged", "the run goes on from the newest to the same weights")


@pytest.mark.parametrize("part", ["checkpoint", "checkpoints"])
def test_checkpoints_that_are_gone(part: str, whole: Path, stopped: Path, tmp_path: Path) -> None:
    out = copy_run(stopped, tmp_path / "run")
    shutil.rmtree(
        RunDir(out).checkpoint_folder(6) if part == "checkpoint" else RunDir(out).checkpoints_folder
    )
    check_child_success(resumed(out))
    same(out, whole)


def test_a_damaged_best_checkpoint_is_said_and_another_is_found(tmp_path: Path, fault) -> None:
    out = tmp_path / "run"
    # The rate destroys what was learned: the first evaluation stays the best, an old checkpoint's.
    worse = tiny_recipe("optim.lr=30", "run.best=val.loss", "run.eval_every=1", "run.save_every=1")
    train_until_killed(9, worse, out)
    run = RunDir(out)
    assert run.checkpoint_steps()[0] == 1 < run.checkpoint_steps()[-1] - 2
    (run.checkpoint_folder(1) / "model.safetensors").write_bytes(b"")

    def work() -> None:
        with pytest.raises(DivergedError):
            train(worse, out, resume=True)

    check_child_success(run_in_child(work), "best", str(run.checkpoint_folder(1)))
    assert json.loads((out / "results.json").read_text())["best_step"] > 1
    fault("the best checkpoint is damaged", "said, and another best is looked for")


# The other files of a run -------------------------------------------------------------------------


RECORD = (
    "damaged run.json or recipe.yaml",
    "exit code 4 or 2, the file named, nothing in the directory changed",
)


@pytest.mark.parametrize("name", ["run.json", "recipe.yaml"])
@pytest.mark.parametrize("damage", ["missing", "empty", "truncated"])
def test_a_damaged_record_or_recipe(
    name: str, damage: str, stopped: Path, tmp_path: Path, fault
) -> None:
    out = copy_run(stopped, tmp_path / "run")
    damage_file(out / name, damage)
    before = run_file_hashes(out)
    code = "checkpoint.damaged"
    if name == "recipe.yaml":
        code = {"missing": "recipe.not_found", "empty": "recipe.not_a_recipe"}.get(
            damage, "recipe.syntax"
        )
    check_child_error(resumed(out), code, out / name)
    assert run_file_hashes(out) == before, "what is left can still be restored from a copy"
    fault(*RECORD)


@pytest.mark.parametrize("name", ["run.json", "recipe.yaml"])
@pytest.mark.parametrize(
    "trial", [pytest.param(n, marks=[] if n < 2 else [pytest.mark.faults]) for n in range(20)]
)
def test_a_flipped_bit_in_the_record_or_the_recipe(
    name: str, trial: int, whole: Path, stopped: Path, tmp_path: Path, fault
) -> None:
    """Not every bit matters there: the run ends as it would have, or says what is wrong."""
    out = copy_run(stopped, tmp_path / "run")
    damage_file(out / name, "bit", random.Random(trial).random())
    ended = resumed(out)
    assert "Traceback" not in ended.output
    if ended.exit_code == 0:
        same(out, whole)
    else:
        assert ended.exit_code in (2, 3, 4), ended.output
        # a record of another number of images speaks of the data
        assert str(out) in ended.output or "embedded:digits" in ended.output
    fault(
        "one bit flipped in run.json or recipe.yaml",
        "a clear error, or the same weights where the bit decides nothing",
    )


NOT_OBJECTS = [b"[]", b"null", b"3", b"\xff\xfe{", b"[" * 100_000]


@pytest.mark.parametrize("content", NOT_OBJECTS, ids=["list", "null", "number", "bytes", "deep"])
@pytest.mark.parametrize("name", ["run.json", "metrics.jsonl"])
def test_other_things_in_their_place(
    name: str, content: bytes, whole: Path, stopped: Path, tmp_path: Path, fault
) -> None:
    out = copy_run(stopped, tmp_path / "run")
    (out / name).write_bytes(content)
    ended = resumed(out)
    assert "Traceback" not in ended.output
    if name == "run.json":
        check_child_error(ended, "checkpoint.damaged", out / name)
        fault(*RECORD)
    else:
        check_child_success(ended)
        assert read_weights(out) == read_weights(whole)


def flipped_line(text: bytes) -> bytes:
    lines = text.splitlines(keepends=True)
    lines[2] = b"\xff" + lines[2][1:]
    return b"".join(lines)


@pytest.mark.parametrize(
    "damage, lost",
    [
        (lambda text: text + b'{"step": 7, "lo', []),
        (lambda text: text + b'{"step"', []),
        (flipped_line, [2]),
        (lambda text: text.replace(b"\n", b"\n\n\0\n", 1), []),
    ],
    ids=["half", "shorter", "bytes", "zeros"],
)
def test_damaged_lines_of_the_log(
    damage, lost: list[int], whole: Path, stopped: Path, tmp_path: Path, fault
) -> None:
    out = copy_run(stopped, tmp_path / "run")
    log = out / "metrics.jsonl"
    log.write_bytes(damage(log.read_bytes()))
    check_child_success(resumed(out))
    assert read_weights(out) == read_weights(whole)
    kept = [loss for place, loss in enumerate(read_train_losses(whole)) if place not in lost]
    assert read_train_losses(out) == kept
    fault("damaged lines in metrics.jsonl, a half last one", "only those lines are lost")


@pytest.mark.parametrize("damage", ["missing", "empty", "truncated"])
@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_damaged_model(name: str, damage: str, whole: Path, tmp_path: Path, fault) -> None:
    out = copy_run(whole, tmp_path / "run")
    damage_file(out / "model" / name, damage)
    for verb in (["predict", out, IMAGE], ["eval", out]):
        ended = run_command_in_child(*verb)
        assert ended.exit_code == 4, (verb, ended.output)
        assert ended.error_code.startswith(("weights.", "checkpoint."))
        assert "Traceback" not in ended.output
    fault("damaged model/ of a finished run", "predict and eval end with exit code 4")


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", ""])
def test_a_model_that_is_gone_comes_back(name: str, whole: Path, tmp_path: Path, fault) -> None:
    out = copy_run(whole, tmp_path / "run")
    if name:
        (out / "model" / name).unlink()
    else:
        shutil.rmtree(out / "model")
    check_child_success(resumed(out))
    same(out, whole)
    assert {path.name for path in (out / "model").iterdir()} == {
        path.name for path in (whole / "model").iterdir()
    }
    fault("model/ of a finished run is gone", "--resume makes it again from its checkpoint")
