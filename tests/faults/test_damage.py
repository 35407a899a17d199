"""Damaged files of a run are found before anything is loaded; an intact checkpoint is used."""

from __future__ import annotations

import itertools
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
from networks import config_without_checksums

from finetune.errors import DivergedError
from finetune.run import checkpoint
from finetune.run.directory import RunDir
from finetune.training.train import train

pytestmark = pytest.mark.usefixtures("no_plots")

RECIPE = tiny_recipe(*SMALL_OVERRIDES)
MISSING_IMAGE = Path(__file__).with_name("none.png")  # the model is loaded first
CHECKPOINT_FILES = [
    *("model.safetensors", "optimizer.safetensors", "ema.safetensors"),
    *("optimizer.json", "state.json", "manifest.json"),
]
DAMAGE_KINDS = ["missing", "empty", "truncated", "bit"]
ALL_DAMAGES = list(itertools.product(CHECKPOINT_FILES, DAMAGE_KINDS))


@pytest.fixture(scope="module")
def stopped_run(finished_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run, killed in its second-to-last step."""
    out = tmp_path_factory.mktemp("stopped") / "run"
    train_until_killed(7, RECIPE, out)
    assert check_all_checkpoints(out)[-2:] == [4, 6]
    assert {path.name for path in RunDir(out).checkpoint_folder(6).iterdir()} == set(
        CHECKPOINT_FILES
    )
    return out


def damage_file(path: Path, damage: str, position: float = 0.5) -> None:
    """Damage a file; position: of the flipped bit, from 0 to 1."""
    content = bytearray(path.read_bytes())
    if damage == "missing":
        path.unlink()
    elif damage == "bit":
        index = int(position * (len(content) - 1))
        if content[index : index + 1].isspace():  # indentation of JSON has no effect
            index = next(n for n in range(len(content)) if not content[n : n + 1].isspace())
        content[index] ^= 4
        path.write_bytes(content)
    else:
        path.write_bytes(b"" if damage == "empty" else content[: len(content) // 2])


def resume(out: Path) -> ChildResult:
    return run_in_child(lambda: train(RECIPE, out, resume=True))


def check_same_result(out: Path, finished_run: Path) -> None:
    assert read_weights(out) == read_weights(finished_run)
    assert read_train_losses(out) == read_train_losses(finished_run)
    assert check_all_checkpoints(out)[-1] == 8
    assert temporary_files(out) == []


# Checkpoints --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name, damage", ALL_DAMAGES)
def test_the_checkpoint_before_a_damaged_one_is_used(
    name: str, damage: str, finished_run: Path, stopped_run: Path, tmp_path: Path, fault
) -> None:
    out, loaded_log = copy_run(stopped_run, tmp_path / "run"), tmp_path / "read"
    damage_file(RunDir(out).checkpoint_folder(6) / name, damage)

    def work() -> None:
        load_checkpoint = checkpoint.load_checkpoint

        def load_and_record(folder: Path, *trainer: object, **rest: object) -> object:
            with loaded_log.open("a") as file:
                file.write(f"{folder.name}\n")
            return load_checkpoint(folder, *trainer, **rest)

        checkpoint.load_checkpoint = load_and_record
        train(RECIPE, out, resume=True)

    check_child_success(run_in_child(work), "checkpoint of step 6", name)
    assert loaded_log.read_text() == "step-00000004\n", "the damaged checkpoint was loaded"
    check_same_result(out, finished_run)
    fault(
        "damaged checkpoint: each file missing, empty, truncated, one bit flipped",
        "found before anything is loaded; the checkpoint before it gives the same weights",
    )


@pytest.mark.parametrize("name, damage", ALL_DAMAGES)
def test_without_an_intact_checkpoint_resume_fails(
    name: str, damage: str, stopped_run: Path, tmp_path: Path, fault
) -> None:
    out = copy_run(stopped_run, tmp_path / "run")
    run = RunDir(out)
    for step in run.checkpoint_steps():
        damage_file(run.checkpoint_folder(step) / name, damage)
    before = run_file_hashes(out)
    check_child_error(
        resume(out), "checkpoint.damaged", run.checkpoints_folder, len(run.checkpoint_steps())
    )
    assert run_file_hashes(out) == before
    fault("no checkpoint is intact", "exit code 4, and no file is changed")


@pytest.mark.parametrize("damage", DAMAGE_KINDS)
def test_a_damaged_older_checkpoint_is_ignored(
    damage: str, finished_run: Path, tmp_path: Path, fault
) -> None:
    out, recipe = tmp_path / "run", tiny_recipe(*SMALL_OVERRIDES, "run.keep_checkpoints=4")
    train_until_killed(7, recipe, out)
    assert RunDir(out).checkpoint_steps() == [2, 4, 6]  # step 4 has the best weights
    damage_file(RunDir(out).checkpoint_folder(2) / "state.json", damage)
    check_child_success(run_in_child(lambda: train(recipe, out, resume=True)))
    assert read_weights(out) == read_weights(finished_run)
    fault("an older checkpoint is damaged", "the run continues from the newest to the same weights")


@pytest.mark.parametrize("part", ["checkpoint", "checkpoints"])
def test_deleted_checkpoints(
    part: str, finished_run: Path, stopped_run: Path, tmp_path: Path
) -> None:
    out = copy_run(stopped_run, tmp_path / "run")
    shutil.rmtree(
        RunDir(out).checkpoint_folder(6) if part == "checkpoint" else RunDir(out).checkpoints_folder
    )
    check_child_success(resume(out))
    check_same_result(out, finished_run)


def test_a_damaged_best_checkpoint_is_reported_and_replaced(tmp_path: Path, fault) -> None:
    out = tmp_path / "run"
    # This learning rate destroys the weights: the first evaluation stays the best.
    diverging = tiny_recipe(
        "optim.lr=30", "run.best=val.loss", "run.eval_every=1", "run.save_every=1"
    )
    train_until_killed(9, diverging, out)
    run = RunDir(out)
    assert run.checkpoint_steps()[0] == 1 < run.checkpoint_steps()[-1] - 2
    (run.checkpoint_folder(1) / "model.safetensors").write_bytes(b"")

    def work() -> None:
        with pytest.raises(DivergedError):
            train(diverging, out, resume=True)

    check_child_success(run_in_child(work), "best", str(run.checkpoint_folder(1)))
    assert json.loads((out / "results.json").read_text())["best_step"] > 1
    fault("the best checkpoint is damaged", "a message, and another best checkpoint is chosen")


# The other files of a run -------------------------------------------------------------------------


RECORD_FAULT = ("damaged run.json", "exit code 4, the file is named, no file is changed")


@pytest.mark.parametrize("damage", ["missing", "empty", "truncated"])
def test_a_damaged_record(damage: str, stopped_run: Path, tmp_path: Path, fault) -> None:
    out = copy_run(stopped_run, tmp_path / "run")
    damage_file(out / "run.json", damage)
    before = run_file_hashes(out)
    check_child_error(resume(out), "checkpoint.damaged", out / "run.json")
    assert run_file_hashes(out) == before, "a file was changed"
    fault(*RECORD_FAULT)


def test_a_damaged_recipe_is_rewritten(
    finished_run: Path, stopped_run: Path, tmp_path: Path, fault
) -> None:
    out = copy_run(stopped_run, tmp_path / "run")
    damage_file(out / "recipe.yaml", "truncated")
    check_child_success(resume(out))
    check_same_result(out, finished_run)
    assert (out / "recipe.yaml").read_bytes() == (finished_run / "recipe.yaml").read_bytes()
    fault(
        "damaged recipe.yaml of a run",
        "a resume with the recipe rewrites it; run.json has the keys to compare",
    )


@pytest.mark.parametrize("name", ["run.json", "recipe.yaml"])
@pytest.mark.parametrize("trial", range(20))
def test_a_flipped_bit_in_record_or_recipe(
    name: str, trial: int, finished_run: Path, stopped_run: Path, tmp_path: Path, fault
) -> None:
    """Not every bit matters: the run gives the same result, or a clear error."""
    out = copy_run(stopped_run, tmp_path / "run")
    damage_file(out / name, "bit", random.Random(trial).random())
    result = resume(out)
    assert "Traceback" not in result.output
    if result.exit_code == 0:
        check_same_result(out, finished_run)
    else:
        assert result.exit_code in (2, 3, 4), result.output
        # a changed number of images gives an error about the data
        assert str(out) in result.output or "embedded:digits" in result.output
    fault(
        "one bit flipped in run.json or recipe.yaml",
        "a clear error, or the same weights where the bit has no effect",
    )


NOT_OBJECTS = [b"[]", b"null", b"3", b"\xff\xfe{", b"[" * 100_000]


@pytest.mark.parametrize("content", NOT_OBJECTS, ids=["list", "null", "number", "bytes", "deep"])
@pytest.mark.parametrize("name", ["run.json", "metrics.jsonl"])
def test_record_or_log_with_other_content(
    name: str, content: bytes, finished_run: Path, stopped_run: Path, tmp_path: Path, fault
) -> None:
    out = copy_run(stopped_run, tmp_path / "run")
    (out / name).write_bytes(content)
    result = resume(out)
    assert "Traceback" not in result.output
    if name == "run.json":
        check_child_error(result, "checkpoint.damaged", out / name)
        fault(*RECORD_FAULT)
    else:
        check_child_success(result)
        assert read_weights(out) == read_weights(finished_run)


def damage_third_line(text: bytes) -> bytes:
    lines = text.splitlines(keepends=True)
    lines[2] = b"\xff" + lines[2][1:]
    return b"".join(lines)


@pytest.mark.parametrize(
    "damage, lost",
    [
        (lambda text: text + b'{"step": 7, "lo', []),
        (lambda text: text + b'{"step"', []),
        (damage_third_line, [2]),
        (lambda text: text.replace(b"\n", b"\n\n\0\n", 1), []),
    ],
    ids=["half", "shorter", "bytes", "zeros"],
)
def test_damaged_log_lines(
    damage, lost: list[int], finished_run: Path, stopped_run: Path, tmp_path: Path, fault
) -> None:
    out = copy_run(stopped_run, tmp_path / "run")
    log = out / "metrics.jsonl"
    log.write_bytes(damage(log.read_bytes()))
    check_child_success(resume(out))
    assert read_weights(out) == read_weights(finished_run)
    remaining = [
        loss for index, loss in enumerate(read_train_losses(finished_run)) if index not in lost
    ]
    assert read_train_losses(out) == remaining
    fault("damaged lines and an incomplete last line in metrics.jsonl", "only those lines are lost")


@pytest.mark.parametrize("damage", DAMAGE_KINDS)
@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_damaged_final_model_is_refused_and_rebuilt(
    name: str, damage: str, finished_run: Path, tmp_path: Path, fault
) -> None:
    out = copy_run(finished_run, tmp_path / "run")
    damage_file(out / "model" / name, damage)
    for command in (["predict", out, MISSING_IMAGE], ["eval", out]):
        result = run_command_in_child(*command)
        assert result.exit_code == 4, (command, result.output)
        assert result.error_code.startswith(("weights.", "checkpoint."))
        assert "Traceback" not in result.output
    fault("damaged model/ of a finished run", "predict and eval end with exit code 4")
    check_rebuilt_model(out, finished_run)
    fault("damaged model/ of a finished run, --resume", "rebuilt from the checkpoint")


def test_a_deleted_final_model_is_rebuilt(finished_run: Path, tmp_path: Path, fault) -> None:
    out = copy_run(finished_run, tmp_path / "run")
    shutil.rmtree(out / "model")
    check_rebuilt_model(out, finished_run)
    fault("model/ of a finished run is deleted", "--resume rebuilds it from the checkpoint")


def check_rebuilt_model(out: Path, finished_run: Path) -> None:
    check_child_success(resume(out))
    check_same_result(out, finished_run)
    rebuilt, original = out / "model", finished_run / "model"
    assert config_without_checksums(rebuilt) == config_without_checksums(original)
    name = "model.safetensors"
    assert (rebuilt / name).read_bytes() == (original / name).read_bytes()
