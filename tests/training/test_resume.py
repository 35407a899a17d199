"""Starting and resuming a run: what may change, and what the record contains."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from forked_runs import run_file_hashes
from huggingface_hub import constants
from logs import forget_warnings, logged, logging_nothing
from networks import write_timm_folder
from recipe_texts import tiny_recipe_text
from refusals import refused
from small_datasets import random_png, write_image_folder
from tar_shards import RangeServer, write_tar_shards

from finetune.commands.evaluate import warn_if_changed
from finetune.files import file_sha256
from finetune.recipe.load import parse_recipe
from finetune.run.directory import RunDir
from finetune.run.record import (
    describe_changed_metrics,
    have_other_shards,
    load_run_recipe,
    read_record,
    write_record,
)
from finetune.training.resume import record_plan, start_or_resume
from finetune.training.setup import TrainingSetup, build_setup

RECIPE = tiny_recipe_text()


def make_setup(*overrides: str) -> TrainingSetup:
    with logging_nothing():
        return build_setup(
            parse_recipe(RECIPE, overrides=overrides),
            device=torch.device("cpu"),
            show_progress=False,
        )


def start(run: RunDir, setup: TrainingSetup, **changes: Any) -> int | None:
    arguments: dict[str, Any] = {"precision": "fp32", "num_processes": 1, "resume": False}
    return start_or_resume(run, setup, **{**arguments, **changes})


def save(run: RunDir, step: int, **counters: int) -> None:
    def write(folder: Path) -> None:
        (folder / "state.json").write_text(json.dumps(counters))

    run.save_checkpoint(step, write, num_bytes=0)


def test_run_without_checkpoint_restarts_and_one_with_needs_resume(run: RunDir) -> None:
    assert start(run, make_setup()) == 0
    assert start(run, make_setup("optim.lr=2e-3")) == 0
    save(run, 2)
    with refused("setup.run_exists", "running", f"finetune train {run.path} --resume"):
        start(run, make_setup("optim.lr=2e-3"))
    assert start(run, make_setup("optim.lr=2e-3"), resume=True) == 2


def test_a_run_without_checkpoint_says_what_has_changed(
    run: RunDir, caplog: pytest.LogCaptureFixture
) -> None:
    start(run, make_setup(), resume=True)
    assert not caplog.messages
    start(run, make_setup(), resume=True)
    assert caplog.messages == [f"{run.path}: has no checkpoint, so it starts again"]
    caplog.clear()
    assert start(run, make_setup("optim.lr=2e-3", "data.val_fraction=0.3"), resume=True) == 0
    (line,) = caplog.messages
    for change in (
        "optim.lr (the run has 0.003, now 0.002)",
        "data.val_fraction",
        "images or labels",
    ):
        assert change in line
    caplog.clear()
    start(run, make_setup())
    assert not caplog.messages
    teacher = {"name": "t", "sha256": "a", "config_sha256": "a"}
    write_record(run, {**read_record(run), "weights_sha256": "0" * 64, "teacher": teacher})
    start(run, make_setup(), resume=True, teacher={**teacher, "sha256": "b"})
    assert "pretrained weights or their config.json; teacher" in caplog.text


def test_resume_allows_only_changes_that_do_not_affect_training(run: RunDir) -> None:
    start(run, make_setup())
    save(run, 2)
    unrelated = ["data.micro_batch=8", "data.workers=1", "run.log_every=3", "run.threads=1"]
    assert start(run, make_setup(*unrelated), resume=True) == 2
    for override, *names in (
        ("model.dropout=0.1", "model.dropout", "0.0", "0.1"),
        ("data.batch_size=32", "data.batch_size"),
        ("run.seed=1", "run.seed"),
    ):
        commands = f"finetune train {run.path} --resume", f"--out {run.path}-2"
        with refused("recipe.not_this_run", *names, *commands):
            start(run, make_setup(override), resume=True)
    with refused("recipe.not_this_run", "run.precision", "fp32", "bf16"):
        start(run, make_setup(), resume=True, precision="bf16")


def test_no_secret_is_recorded(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIMM_TOKEN", "canary0timm0f00d")
    start(run, make_setup())
    assert read_record(run)["numerics"]["variables"]["TIMM_TOKEN"] == "***"


def test_other_versions_are_named(run: RunDir, caplog: pytest.LogCaptureFixture) -> None:
    start(run, make_setup())
    save(run, 2)
    record = read_record(run)
    write_record(run, {**record, "numerics": {**record["numerics"], "timm": "0.1"}})
    start(run, make_setup(), resume=True)
    assert "differ perhaps by more than the last bits: timm 0.1 -> " in caplog.text


@pytest.mark.parametrize(
    "network, message",
    [
        (
            ["model.name=test_resnet", "model.args={}", "model.image_size=32"],
            "because batch norm gets its statistics from other numbers of images",
        ),
        (["model.dropout=0.1"], "because dropout masks change"),
        (
            ["model.drop_path=0.1", "model.args={patch_size: 4, depth: 2, num_heads: 2}"],
            "because dropout masks change",
        ),
    ],
)
def test_other_micro_batches_change_more_than_the_last_bits(
    run: RunDir, caplog: pytest.LogCaptureFixture, network: list[str], message: str
) -> None:
    start(run, make_setup(*network, "data.micro_batch=16"))
    save(run, 2)
    start(run, make_setup(*network, "data.micro_batch=4"), resume=True)
    assert message in caplog.text


def test_what_changes_the_last_bits_is_said_and_recorded(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    with logged(lines):
        start(run, make_setup("data.micro_batch=16"))
        assert start(run, make_setup("data.micro_batch=8")) == 0  # it starts from scratch
        save(run, 2)
        start(run, make_setup("data.micro_batch=8"), resume=True)
        assert not any("last bits" in line for line in lines)
        start(run, make_setup("data.micro_batch=4"), resume=True, num_processes=2)
    changes = ["data.micro_batch 8 -> 4", "processes 1 -> 2"]
    assert f"results will differ in the last bits: {', '.join(changes)}" in lines
    record = read_record(run)
    assert record["numerics_changed"] == changes
    old = {"run.threads": -1, "instructions": ["none"], "variables": {"TIMM_FUSED_ATTN": "0"}}
    write_record(run, {**record, "numerics": {**record["numerics"], **old}})
    start(run, make_setup("data.micro_batch=4"), resume=True, num_processes=2)
    threads, instructions, variable = read_record(run)["numerics_changed"][2:]
    assert threads == f"run.threads -1 -> {torch.get_num_threads()}"
    assert instructions.startswith("instructions ['none'] -> ")
    assert variable.startswith("variables {'TIMM_FUSED_ATTN': '0'} -> {")
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
    start(run, make_setup("data.micro_batch=4"), resume=True, num_processes=2)
    assert read_record(run)["numerics_changed"][5:] == ["oneDNN True -> False"]


def test_resume_accepts_moved_but_not_changed_images(run: RunDir, tmp_path: Path) -> None:
    def setup_from(name: str) -> TrainingSetup:
        source = f"data.source=folder:{tmp_path / name}"
        return make_setup(source, "data.val_fraction=0.2", "data.batch_size=4")

    write_image_folder(tmp_path / "here", {"a": 12, "b": 12})
    start(run, setup_from("here"))
    save(run, 2)
    (tmp_path / "here").rename(tmp_path / "there")
    lines: list[str] = []
    with logged(lines):
        assert start(run, setup_from("there"), resume=True) == 2
    (said,) = (line for line in lines if "data.source: the run has" in line)
    assert all(f"{tmp_path / name}" in said for name in ("here", "there"))
    assert str(tmp_path / "there") in (run.path / "recipe.yaml").read_text()
    write_image_folder(tmp_path / "other", {"a": 12, "b": 13})
    with refused("data.changed", "there", "data.source: the run has", "other"):
        start(run, setup_from("other"), resume=True)
    next((tmp_path / "there").rglob("*.png")).rename(tmp_path / "gone.png")
    with refused("data.changed", "there"):
        start(run, setup_from("there"), resume=True)


def test_resume_refuses_other_pretrained_weights_under_the_same_name(
    run: RunDir, tmp_path: Path
) -> None:
    def write_weights() -> str:
        shutil.rmtree(tmp_path / "net", ignore_errors=True)
        return file_sha256(write_timm_folder(tmp_path / "net") / "model.safetensors")

    def setup() -> TrainingSetup:
        return make_setup(
            f"model.name={tmp_path / 'net'}", "model.pretrained=true", "model.args={}"
        )

    first = write_weights()
    start(run, setup())
    save(run, 2)
    assert start(run, setup(), resume=True) == 2
    second = write_weights()
    with refused("weights.wrong_version", tmp_path / "net", first, second):
        start(run, setup(), resume=True)
    assert read_record(run)["weights_sha256"] == first


def test_resume_refuses_other_class_names_of_a_head_that_is_kept(
    run: RunDir, tmp_path: Path
) -> None:
    config_path = write_timm_folder(tmp_path / "net") / "config.json"

    def setup(*names: str) -> TrainingSetup:
        config = json.loads(config_path.read_text())
        config_path.write_text(json.dumps({**config, "label_names": names}))
        overrides = ["model.pretrained=true", "model.args={}", "model.head_init=keep"]
        recipe = parse_recipe(RECIPE, overrides=[f"model.name={tmp_path / 'net'}", *overrides])
        return build_setup(recipe, device=torch.device("cpu"), show_progress=False)

    start(run, setup("1", "2", "other"))
    save(run, 2)
    assert start(run, setup("1", "2", "renamed"), resume=True) == 2
    with refused("weights.wrong_version", tmp_path / "net"):
        start(run, setup("2", "1", "other"), resume=True)


def test_a_search_without_its_record_is_not_replaced(run: RunDir) -> None:
    (run.path / "trials").mkdir()
    with refused("setup.run_exists"):
        start(run, make_setup())


def test_resume_refuses_weights_with_another_config(run: RunDir, tmp_path: Path) -> None:
    write_timm_folder(tmp_path / "net")
    config_path = tmp_path / "net" / "config.json"

    def setup() -> TrainingSetup:
        # with a filter for the published model that training does not use
        evaluation = "data.eval=resize(interpolation='bilinear')"
        return make_setup(
            *(f"model.name={tmp_path / 'net'}", "model.pretrained=true", "model.args={}"),
            *("data.train=resize", evaluation),
        )

    start(run, setup())
    save(run, 2)
    assert start(run, setup(), resume=True) == 2
    config = json.loads(config_path.read_text())
    config["pretrained_cfg"]["interpolation"] = "nearest"
    config_path.write_text(json.dumps(config))
    with refused("weights.wrong_version", tmp_path / "net", "interpolation", "now nearest"):
        start(run, setup(), resume=True)
    del config["pretrained_cfg"]["interpolation"]
    config["pretrained_cfg"]["mean"] = [0.7, 0.8, 0.9]
    config_path.write_text(json.dumps(config))
    with refused("weights.wrong_version", tmp_path / "net", "[0.7, 0.8, 0.9]"):
        start(run, setup(), resume=True)
    config["pretrained_cfg"]["mean"] = [0.1, 0.2, 0.3]
    config["model_args"]["num_heads"] = 4  # another network with tensors of the same shapes
    config_path.write_text(json.dumps(config))
    with refused("weights.wrong_version", tmp_path / "net", "num_heads: the run has 2, now 4"):
        start(run, setup(), resume=True)


def test_resume_refuses_a_changed_test_split_unless_it_could_not_be_read(
    run: RunDir, tmp_path: Path
) -> None:
    counts = {"train/a": 12, "train/b": 12, "test/a": 2, "test/b": 2}
    overrides = [f"data.source={write_image_folder(tmp_path / 'set', counts)}"]
    overrides += ["data.val_fraction=0.2", "data.batch_size=4"]
    start(run, make_setup(*overrides))
    save(run, 2)
    (tmp_path / "set/test/a/1.png").rename(tmp_path / "set/test/b/9.png")
    with refused("data.changed", "test"):
        start(run, make_setup(*overrides), resume=True)
    run.model_folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        (run.model_folder / name).write_text("{}")
    with refused("data.changed", "test"):
        start(run, make_setup(*overrides), resume=True)
    write_record(run, {**read_record(run), "status": "failed (3)", "error_code": "data.changed"})
    with refused("data.changed", "test"):
        start(run, make_setup(*overrides), resume=True)
    write_record(run, {**read_record(run), "error_code": "data.unreadable"})
    shutil.copy(tmp_path / "set/train/a/0.png", tmp_path / "set/test/b/9.png")
    assert start(run, make_setup(*overrides), resume=True) == 2
    record = read_record(run)
    assert record["split_fingerprints"] == make_setup(*overrides).fingerprints()
    assert "1 of 4 images are copies of train images" in "".join(record["leakage"])


def test_a_resumed_run_was_drawn_from_the_images_of_its_start(run: RunDir, tmp_path: Path) -> None:
    source = write_image_folder(tmp_path / "set", {"train/a": 12, "train/b": 12})
    overrides = [f"data.source={source}", "data.num_train=8", "data.val_fraction=0"]
    overrides += ["data.num_test=null", "data.batch_size=4"]
    setup = make_setup(*overrides)
    start(run, setup)
    save(run, 2)
    used = {setup.source.splits["train"].name_of(index) for index in range(8)}
    files = {
        path.relative_to(tmp_path / "set").as_posix(): path for path in tmp_path.rglob("*.png")
    }
    assert used < files.keys()
    unused = files[min(files.keys() - used)]
    unused.write_bytes(random_png(99))
    lines: list[str] = []
    with logged(lines):
        assert start(run, make_setup(*overrides), resume=True) == 2
    assert any("images that this run does not use have changed" in line for line in lines)
    assert read_record(run)["whole_fingerprints"] == setup.source.whole_fingerprints()


def test_a_resume_names_groups_that_splits_share_now(run: RunDir, tmp_path: Path) -> None:
    write_image_folder(tmp_path, {"images": 12})
    table = tmp_path / "labels.csv"

    def write_table(test_group: str) -> None:
        rows = [
            f"images/{n}.png,{'ab'[n % 2]},{split},{group}"
            for n, (split, group) in enumerate(
                [*[("train", "p1")] * 8, *[("test", test_group)] * 4]
            )
        ]
        table.write_text("\n".join(["path,label,split,patient", *rows]) + "\n")

    write_table("p2")
    overrides = [f"data.source=csv:{table}", "data.group=patient", "data.val_fraction=0"]
    overrides += ["data.num_train=null", "data.num_test=null", "data.batch_size=4"]
    start(run, make_setup(*overrides))
    save(run, 2)
    assert read_record(run)["leakage"] == []
    write_table("p1")
    lines: list[str] = []
    with logged(lines):
        start(run, make_setup(*overrides), resume=True)
    (leak,) = read_record(run)["leakage"]
    assert "group" in leak
    assert leak in lines


def test_resume_warns_about_local_shards_that_were_written_since(
    run: RunDir, tmp_path: Path
) -> None:
    write_tar_shards(tmp_path, train=1)
    overrides = [f"data.source=tar:{tmp_path}/set-train-0000.tar", "data.streaming=true"]
    overrides += ["data.val_fraction=0", "data.batch_size=2"]
    start(run, make_setup(*overrides))
    save(run, 2)
    for mtime, is_said in ((None, False), (1, True), (None, False)):
        if mtime is not None:
            os.utime(tmp_path / "set-train-0000.tar", (mtime, mtime))
        lines: list[str] = []
        with logged(lines):
            assert start(run, make_setup(*overrides), resume=True) == 2
        assert any("images were not compared" in line for line in lines) == is_said
    record = read_record(run)
    assert record["copied_shards"] == ["train"]
    assert record["numerics_changed"] == ["shards of 'train' were written or copied"]
    new = {key: value for key, value in record.items() if key != "copied_shards"}
    assert not have_other_shards([record])
    assert not have_other_shards([new, new])
    assert have_other_shards([record, new])
    source = make_setup(*overrides).source
    os.utime(tmp_path / "set-train-0000.tar", (2, 2))
    with logged() as lines:  # also in eval
        assert not warn_if_changed(str(run.path), source, "train")
    assert "images were not compared" in lines[0]


def test_resume_refuses_shards_from_another_server(
    run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sizes may be equal, and a server may send no ETag for the content."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)

    def setup_from(server: RangeServer) -> TrainingSetup:
        server.validator = ""
        source = f"data.source=tar:{server.url}/set-train-0000.tar"
        return make_setup(source, "data.val_fraction=0", "data.batch_size=2")

    write_tar_shards(tmp_path, train=1)
    with RangeServer(tmp_path) as first_server, RangeServer(tmp_path) as other_server:
        start(run, setup_from(first_server))
        save(run, 2)
        assert start(run, setup_from(first_server), resume=True) == 2
        with refused("recipe.not_this_run", "data.source"):
            start(run, setup_from(other_server), resume=True)


@pytest.mark.parametrize("first", ["train", "val"])
def test_start_warns_about_test_images_of_another_split(
    run: RunDir, tmp_path: Path, first: str
) -> None:
    counts = {"train/a": 9, "train/b": 9, "val/a": 2, "val/b": 2, "test/a": 1, "test/b": 1}
    source = write_image_folder(tmp_path / "set", counts)
    shutil.copy(tmp_path / f"set/{first}/a/1.png", tmp_path / "set/test/a/0.png")
    lines: list[str] = []
    with logged(lines):
        start(run, make_setup(f"data.source={source}", "data.batch_size=4"))
    assert ["split 'test': 1 of 2 images" in line for line in lines] == [True]


def test_checkpoints_after_the_newest_intact_one_are_removed(run: RunDir) -> None:
    start(run, make_setup())
    save(run, 1)
    save(run, 2)
    (run.checkpoint_folder(2) / "manifest.json").unlink()
    assert start(run, make_setup(), resume=True) == 1
    assert run.checkpoint_steps() == [1]
    (run.checkpoint_folder(1) / "manifest.json").unlink()
    with refused("checkpoint.damaged", run.checkpoints_folder):
        start(run, make_setup(), resume=True)


def test_resume_skips_checkpoints_of_another_run(run: RunDir, tmp_path: Path) -> None:
    other = RunDir(tmp_path / "other")
    other.open()
    for each, step in ((run, 1), (other, 2)):
        start(each, make_setup())
        save(each, step)
    shutil.copytree(other.checkpoint_folder(2), run.checkpoint_folder(2))
    assert start(run, make_setup(), resume=True) == 1


WSD = ("optim.schedule=wsd", "optim.steps=20", "optim.warmup_steps=2", "run.eval_every=5")


@pytest.fixture
def wsd_run(run: RunDir) -> RunDir:
    """A finished run of 20 steps, whose decay starts at step 16."""
    setup = make_setup(*WSD)
    start(run, setup)
    record_plan(run, setup, start_step=0)
    for step in (5, 16, 20):
        save(run, step, best_step=min(step, 5))
        run.append_metrics({"step": step, "split": "val", "loss": float(step)})
    write_record(run, {**read_record(run), "status": "done", "model_sha256": "0"})
    return run


def branch(
    run: RunDir, name: str, *overrides: str, schedule: tuple[str, ...] = WSD
) -> tuple[RunDir, int | None]:
    new = RunDir(run.path.with_name(name))
    new.open()
    return new, start(new, make_setup(*schedule, *overrides), resume=True, branch_from=run)


def test_branch_starts_from_the_newest_common_checkpoint(wsd_run: RunDir) -> None:
    before = run_file_hashes(wsd_run.path)
    for name, length, steps in (
        ("longer", 30, [5, 16]),
        ("same", 20, [5, 20]),
        ("shorter", 10, [5]),
    ):
        new, step = branch(wsd_run, name, f"optim.steps={length}")
        assert step == steps[-1]
        assert new.checkpoint_steps() == steps
        assert [new.verify_checkpoint(step) for step in steps] == [None] * len(steps)
        assert [line["step"] for line in new.read_metrics()] == [
            s for s in (5, 16, 20) if s <= step
        ]
        record, old = read_record(new), read_record(wsd_run)
        assert record["branched_from"] == {"run": old["id"], "step": step}
        assert record["id"] != old["id"]
        assert (record["status"], record.get("model_sha256")) == ("running", None)
        setup = make_setup(*WSD, f"optim.steps={length}")
        assert start(new, setup, resume=True, branch_from=wsd_run) == step, "it continues itself"
        assert read_record(new)["id"] == record["id"]
    assert run_file_hashes(wsd_run.path) == before


def test_a_branch_without_a_checkpoint_says_what_has_changed(wsd_run: RunDir) -> None:
    for steps, said in ((30, []), (30, []), (28, ["optim.steps"])):
        with logged() as messages:
            new, _ = branch(wsd_run, "longer", f"optim.steps={steps}")
        new.close()
        shutil.rmtree(new.checkpoints_folder)
        texts = [text for text in messages if "starts again from" in text]
        assert [text.split("started: ")[1].split()[0] for text in texts] == said


@pytest.mark.parametrize("change", ["edited", "removed", None])
def test_changed_metrics_of_a_run_that_continues_stay_known(
    wsd_run: RunDir, change: str | None
) -> None:
    write_record(wsd_run, {**read_record(wsd_run), **wsd_run.checksums(), "status": "stopped"})
    path = wsd_run.path / "metrics.jsonl"
    if change == "edited":
        path.write_text(path.read_text().replace("16.0", "1.0"))
    elif change == "removed":
        path.unlink()
    new, _ = branch(wsd_run, "longer", "optim.steps=30")
    for run, steps in ((new, [5, 16]), (wsd_run, [5, 16, 20])):
        for _ in range(2):
            start(wsd_run, make_setup(*WSD), resume=True)
        write_record(run, {**read_record(run), **run.checksums()})
        forget_warnings()
        with logged() as messages:
            read = [line["step"] for line in run.read_metrics()]
        assert read == ([] if change == "removed" else steps)
        assert any("was changed" in text for text in messages) == (change is not None)
        assert bool(describe_changed_metrics(read_record(run))) == (change is not None)
    shutil.rmtree(wsd_run.checkpoints_folder)
    start(wsd_run, make_setup(*WSD), resume=True)
    assert not read_record(wsd_run)["metrics_changed"], "it starts from scratch"


def test_branch_skips_damaged_checkpoints(wsd_run: RunDir) -> None:
    (wsd_run.checkpoint_folder(16) / "state.json").write_text("{}")
    new, step = branch(wsd_run, "a", "optim.steps=30")
    assert (step, new.checkpoint_steps()) == (5, [5])
    (wsd_run.checkpoint_folder(5) / "state.json").write_text("{}")
    with refused("checkpoint.damaged", wsd_run.checkpoints_folder):
        branch(wsd_run, "b", "optim.steps=30")


def test_checkpoint_that_is_removed_during_the_copy_is_refused(
    wsd_run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    def remove(source: Path, target: Path) -> None:
        Path(source).unlink()
        raise FileNotFoundError(source)

    monkeypatch.setattr(shutil, "copyfile", remove)
    with refused("checkpoint.damaged", wsd_run.checkpoint_folder(5), "again"):
        branch(wsd_run, "a", "optim.steps=30")


def test_branch_excludes_an_evaluation_that_the_longer_run_does_not_make(run: RunDir) -> None:
    schedule = ("optim.schedule=constant", "optim.steps=12", "run.eval_every=5")
    setup = make_setup(*schedule)
    start(run, setup)
    record_plan(run, setup, start_step=0)
    for step in (10, 12):
        save(run, step)
    assert branch(run, "a", "optim.steps=20", schedule=schedule)[1] == 10
    assert branch(run, "b", "optim.steps=20", "run.eval_every=5", schedule=schedule)[1] == 10
    assert start(run, make_setup(*schedule, "optim.steps=20"), resume=True) == 12


def test_an_evaluation_that_the_longer_run_does_not_make_is_said(
    run: RunDir, caplog: pytest.LogCaptureFixture
) -> None:
    options = ["optim.schedule=constant", "data.val_fraction=0.2", "run.eval_every=6"]
    for steps in (6, 12, 20):
        start(run, make_setup(*options, f"optim.steps={steps}"), resume=steps > 6)
        save(run, steps)
    assert "was evaluated because" not in caplog.text
    start(run, make_setup(*options, "optim.steps=30"), resume=True)
    [note] = read_record(run)["numerics_changed"]
    assert note.startswith("step 20 was evaluated because the run ended there")
    assert note in caplog.text


def test_branch_does_not_trust_the_length_in_the_plan(wsd_run: RunDir) -> None:
    record = read_record(wsd_run)
    write_record(wsd_run, {**record, "plan": {**record["plan"], "steps": 30}})
    assert branch(wsd_run, "a", "optim.steps=30")[1] == 16, "not from the end of the decay"


def test_branch_without_any_checkpoint_starts_from_scratch(run: RunDir) -> None:
    start(run, make_setup(*WSD))
    new, step = branch(run, "a", "optim.steps=30")
    assert (step, new.checkpoint_steps()) == (0, [])


def test_run_is_lengthened_in_place_only_before_its_decay(wsd_run: RunDir) -> None:
    longer = make_setup(*WSD, "optim.steps=30")
    command = f"finetune train {wsd_run.path} --resume --out {wsd_run.path}-2 optim.steps=30"
    with refused("recipe.not_this_run", "optim.steps", 20, 30, "step 17", command):
        start(wsd_run, longer, resume=True)
    wsd_run.prune_checkpoints({5, 16})
    assert start(wsd_run, longer, resume=True) == 16
    assert [line["step"] for line in wsd_run.read_metrics()] == [5, 16]
    wsd_run.prune_checkpoints({16})
    record_plan(wsd_run, longer, start_step=16)
    with refused("recipe.not_this_run", "step 9", "step 16", f"--out {wsd_run.path}-2"):
        start(wsd_run, make_setup(*WSD, "optim.steps=10"), resume=True)


def test_other_schedules_are_not_lengthened(run: RunDir) -> None:
    cosine = ("optim.schedule=cosine", "optim.steps=20")
    setup = make_setup(*cosine)
    start(run, setup)
    record_plan(run, setup, start_step=0)
    save(run, 16)
    with refused("recipe.not_this_run", "optim.schedule=cosine", "optim.schedule=wsd", 20, 30):
        branch(run, "a", "optim.steps=30", schedule=cosine)
    with refused("recipe.not_this_run", "optim.schedule=cosine", "optim.schedule=wsd", 20, 30):
        start(run, make_setup(*cosine, "optim.steps=30"), resume=True)


def test_branch_with_another_recipe_is_refused(wsd_run: RunDir) -> None:
    command = f"finetune train {wsd_run.path / 'recipe.yaml'} --out {wsd_run.path.parent / 'a'}"
    with refused("recipe.not_this_run", "optim.lr", "0.001", command):
        branch(wsd_run, "a", "optim.lr=0.001")
    assert read_record(RunDir(wsd_run.path.parent / "a")) == {}


def test_a_run_that_continues_forgets_how_it_ended(run: RunDir) -> None:
    """Its files will change, and its new weights are not the pushed ones."""
    start(run, make_setup("optim.schedule=constant"))
    save(run, 2)
    keys = ["model_sha256", "results_sha256", "metrics_sha256", "training_images_sha256"]
    ended = {**dict.fromkeys(keys, "0"), "pushed": {"repository": "alice/net"}, "error_code": None}
    write_record(run, {**read_record(run), "status": "done", **ended})
    longer = make_setup("optim.schedule=constant", "optim.steps=300")
    assert start(run, longer, resume=True) == 2
    assert not ended.keys() & read_record(run).keys()
    write_record(run, {**read_record(run), "status": "done", **ended})
    assert start(run, longer, resume=True) == 2  # model/ is missing
    assert ended.keys() & read_record(run).keys() == {"pushed"}


def test_edited_recipe_of_a_run_is_refused(run: RunDir) -> None:
    start(run, make_setup("optim.schedule=constant"))
    save(run, 2)
    longer = make_setup("optim.schedule=constant", "optim.steps=300")
    assert start(run, longer, resume=True) == 2
    assert load_run_recipe(run.path) == longer.recipe
    path = run.path / "recipe.yaml"
    text = path.read_text()
    path.write_text(text.replace("threads: 1", "threads: 2"))
    assert load_run_recipe(run.path) != longer.recipe
    for old, new, key in (
        ("lr: 0.003", "lr: 0.03", "optim.lr"),
        ("steps: 300", "steps: 30", "optim.steps"),
        ("eval: resize", "eval: null", "data.eval"),
    ):
        path.write_text(text.replace(old, new))
        with refused("checkpoint.damaged", path, key):
            load_run_recipe(run.path)
    path.write_text(text.replace("seed: 0", "seed: 1"))
    with refused("checkpoint.damaged", path, "run.seed"):  # as `finetune train RUN --resume`
        start(run, make_setup("optim.schedule=constant", "run.seed=1"), resume=True)


def test_run_is_finished_only_with_results_and_model(run: RunDir) -> None:
    start(run, make_setup())
    save(run, 4)
    record = read_record(run)
    write_record(run, {**record, "status": "done"})
    assert start(run, make_setup(), resume=True) == 4, "killed before its results were written"
    write_record(run, {**record, "status": "done"})
    run.write_json("results.json", {})
    assert start(run, make_setup(), resume=True) == 4, "model/ is missing"
    write_record(run, {**record, "status": "done"})
    for name in ("config.json", "model.safetensors"):
        run.model_folder.mkdir(exist_ok=True)
        (run.model_folder / name).write_text("{}")
    assert start(run, make_setup(), resume=True) is None


def test_resume_refuses_a_run_without_its_record(run: RunDir) -> None:
    start(run, make_setup())
    save(run, 4)
    (run.path / "run.json").unlink()
    with refused("checkpoint.damaged", run.path / "run.json"):
        start(run, make_setup(), resume=True)


def test_resume_refuses_another_number_of_readable_images(run: RunDir) -> None:
    setup = make_setup()
    start(run, setup)
    record_plan(run, setup, start_step=0, num_val=19)
    assert read_record(run)["plan"]["images_read"] == setup.num_samples
    with refused("data.changed", "19 validation images", "20 are now"):
        record_plan(run, setup, start_step=2, num_val=20)
    setup = setup.with_num_samples(setup.num_samples - 1)
    with refused("data.changed", setup.num_samples, setup.num_samples + 1):
        record_plan(run, setup, start_step=2, num_val=19)


def test_run_with_quarantined_images_resumes_with_its_number_of_steps(run: RunDir) -> None:
    epochs = ["optim.steps=null", "optim.epochs=1", "optim.schedule=constant"]
    setup = make_setup(*epochs)
    readable = setup.with_num_samples(setup.num_samples - setup.recipe.data.batch_size)
    start(run, setup)
    record_plan(run, readable, start_step=0)
    save(run, 2)
    with logging_nothing():
        assert start(run, setup, resume=True) == 2
    longer, lines = make_setup(*epochs, "optim.epochs=2"), []
    with logged(lines):
        assert start(run, longer, resume=True) == 2
    longer_steps = longer.with_num_samples(readable.num_samples).num_steps
    assert [f"{longer_steps} steps instead of {readable.num_steps}" in line for line in lines] == [
        True
    ]
    write_record(run, {**read_record(run), "status": "done"})
    run.write_json("results.json", {})
    run.model_folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        (run.model_folder / name).write_text("{}")
    with logging_nothing():
        assert start(run, setup, resume=True) is None
