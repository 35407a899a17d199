"""End-to-end training: equivalent on several processes, exact resume, test split used once."""

from __future__ import annotations

import functools
import json
import math
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import timm
import torch
from forked_runs import (
    FULL_OVERRIDES,
    TINY_RECIPE,
    check_child_success,
    check_same_run,
    read_train_losses,
    read_weights,
    run_command_in_child,
    run_file_hashes,
    run_in_child,
    tiny_recipe,
    train_until_killed,
)
from ranks import run_rank_command, run_two_ranks
from refusals import refused
from safetensors.torch import load_file
from small_datasets import random_png, write_image_folder, write_parquet

from finetune.commands.compare import compare_models
from finetune.commands.evaluate import check_same_models_on_all_ranks, evaluate_model
from finetune.commands.probe import probe_model
from finetune.data.loader import ImageLoader
from finetune.data.pixel_store import PixelStore
from finetune.errors import HubError
from finetune.models.save import BuiltModel
from finetune.publish.artifacts import PUBLISHED_FILES
from finetune.run.directory import RunDir
from finetune.training.setup import TrainingSetup, build_setup
from finetune.training.train import train
from finetune.training.trainer_state import TrainerState

pytestmark = pytest.mark.usefixtures("no_plots")

SMALL = ["data.num_train=256", "data.batch_size=16"]
FULL = [*FULL_OVERRIDES, *SMALL, "data.micro_batch=8"]


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory) -> tuple[Path, dict[str, Any]]:
    """A finished run with every feature enabled, and its results."""
    out = tmp_path_factory.mktemp("plain") / "run"
    return out, train(tiny_recipe(*FULL), out)


@pytest.fixture(scope="module")
def plain_losses(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of a run with no feature enabled."""
    out = tmp_path_factory.mktemp("losses") / "run"
    train(tiny_recipe(*SMALL), out)
    return read_train_losses(out)


def test_run_directory_contains_all_files(finished_run) -> None:
    out, results = finished_run
    assert {"recipe.yaml", "run.json", "metrics.jsonl", "results.json"} <= {
        entry.name for entry in out.iterdir()
    }
    assert {entry.name for entry in (out / "model").iterdir()} == set(PUBLISHED_FILES)
    record = json.loads((out / "run.json").read_text())
    assert record["status"] == "done"
    assert record["plan"]["steps"] == 12
    assert len(record["data_fingerprint"]) == 64
    assert json.loads((out / "results.json").read_text()) == results
    test = results["test"]
    assert test["examples"] == sum(map(sum, test["confusion"])) == 355
    assert {"top1", "top5", "loss", "ece", "per_class"} <= set(test)
    assert results["best_step"] in (4, 8, 12)
    assert len(read_train_losses(out)) == 12


def test_first_loss_is_ln_of_the_number_of_classes(tmp_path: Path) -> None:
    train(
        tiny_recipe(*SMALL, "optim.steps=1", "optim.warmup_steps=0", "data.val_fraction=0"),
        tmp_path / "run",
    )
    assert read_train_losses(tmp_path / "run")[0] == pytest.approx(math.log(10), abs=1e-6)


@pytest.mark.parametrize(
    "overrides",
    [
        ["data.micro_batch=6"],
        ["model.grad_checkpointing=true"],
        ["data.keep=none", "data.workers=1"],
    ],
    ids=["accumulation", "checkpointing", "workers"],
)
def test_settings_that_do_not_change_the_losses(
    overrides: list[str], plain_losses: list[float], tmp_path: Path
) -> None:
    train(tiny_recipe(*SMALL, *overrides), tmp_path / "run")
    assert read_train_losses(tmp_path / "run") == pytest.approx(plain_losses, abs=1e-5)
    assert len(set(plain_losses)) >= 11  # the first learning rate is zero


# inductor compiles its kernels in each new environment, for 30 s of CPU time
@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.faults)])
def test_compiled_model_trains_the_same_and_saves_plain_parameter_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    compiled = functools.partialmethod(torch.nn.Module.compile, backend=backend)
    monkeypatch.setattr(torch.nn.Module, "compile", compiled)
    small = [*SMALL, "optim.steps=3", "model.args.depth=1", "run.test=false"]
    train(tiny_recipe(*small), tmp_path / "plain")
    train(tiny_recipe(*small, "model.compile=true"), tmp_path / "compiled")
    assert read_train_losses(tmp_path / "compiled") == pytest.approx(
        read_train_losses(tmp_path / "plain"), abs=1e-4
    )
    names = [load_file(tmp_path / run / "model/model.safetensors") for run in ("plain", "compiled")]
    assert names[0].keys() == names[1].keys()


@pytest.mark.parametrize(
    "overrides",
    [
        ["model.freeze=1", "optim.layer_decay=0.75"],
        ["model.freeze=backbone"],
        ["run.precision=bf16", "data.train=resize | mixup(0.8) | cutmix(1.0)"],
        ["model.name=test_resnet", "model.args={}", "model.image_size=32"],
    ],
    ids=["freeze-blocks", "freeze-backbone", "mix", "resnet"],
)
def test_timm_loads_the_model_of_every_kind_of_run(tmp_path: Path, overrides: list[str]) -> None:
    recipe = tiny_recipe(*SMALL, "optim.steps=4", *overrides)
    results = train(recipe, tmp_path / "run")
    assert 0 <= results["test"]["top1"] <= 1
    model = timm.create_model(f"local-dir:{tmp_path / 'run' / 'model'}", pretrained=True)
    assert model.num_classes == 10
    if "model.freeze=backbone" in overrides:
        torch.manual_seed(0)
        first = load_file(RunDir(tmp_path / "run").checkpoint_folder(4) / "model.safetensors")
        fresh = build_setup(recipe, device=torch.device("cpu"), show_progress=False)
        frozen = fresh.built.model.state_dict()
        assert torch.equal(first["blocks.0.mlp.fc1.weight"], frozen["blocks.0.mlp.fc1.weight"])
        assert not torch.equal(first["head.weight"], frozen["head.weight"])


def test_missing_tracker_package_is_refused(tmp_path: Path) -> None:
    with refused("setup.missing_package", "run.trackers", "comet_ml"):
        train(tiny_recipe("run.trackers=[comet_ml]"), tmp_path / "run")


def test_run_that_failed_before_its_first_step_can_be_restarted(
    image_folder: Path, tmp_path: Path
) -> None:
    broken = image_folder / "train" / "red" / "red-0.png"
    original = broken.read_bytes()
    broken.write_bytes(b"no image")
    recipe = tiny_recipe(f"data.source=folder:{image_folder}", "data.batch_size=6", "optim.steps=3")
    with refused("data.unreadable", "red-0.png"):
        train(recipe, tmp_path / "run")
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert (record["status"], record["error_code"]) == ("failed (3)", "data.unreadable")
    broken.write_bytes(original)
    train(recipe, tmp_path / "run")


def test_invalid_recipe_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    for dry_run in (True, False):
        with refused("recipe.unknown_name", "'adamww'", "'adamw'"):
            train(tiny_recipe("optim.name=adamww"), tmp_path / "run", dry_run=dry_run)
    assert not (tmp_path / "run").exists()


def test_accelerate_environment_variables_do_not_change_training(
    finished_run, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    train(tiny_recipe(*FULL), tmp_path / "run")
    assert read_weights(tmp_path / "run") == read_weights(finished_run[0])


def test_log_intervals_continue_across_a_resume(plain_losses: list[float], tmp_path: Path) -> None:
    recipe = tiny_recipe(*SMALL, "run.log_every=5", "run.save_every=3", "run.eval_every=6")
    out = tmp_path / "run"
    train_until_killed(8, recipe, out)
    train(recipe, out, resume=True)
    means = [sum(part) / len(part) for part in (plain_losses[i : i + 5] for i in (0, 5, 10))]
    assert read_train_losses(out) == pytest.approx(means, abs=1e-6)


def test_wsd_run_is_lengthened_to_the_weights_of_a_longer_run(tmp_path: Path) -> None:
    wsd = [*SMALL, "optim.schedule=wsd", "run.best=last", "run.keep_checkpoints=1"]
    wsd += ["optim.ema_decay=0.9", "run.save_every=3", "run.test=false"]
    recipe, longer = tiny_recipe(*wsd), tiny_recipe(*wsd, "optim.steps=20")
    whole, short, branch, extended = (tmp_path / name for name in ("whole", "short", "b", "e"))
    train(longer, whole)
    train(recipe, short)
    assert RunDir(short).checkpoint_steps() == [8, 10, 12]  # 8 is the best before the decay
    before = run_file_hashes(short)
    arguments = (short, "--resume", "--out", branch, "optim.steps=20")
    check_child_success(run_command_in_child("train", *arguments))
    assert run_file_hashes(short) == before
    train_until_killed(7, recipe, extended)
    train(longer, extended, resume=True)
    for run in (branch, extended):
        check_same_run(run, whole)
        assert read_validations(run) == read_validations(whole)
    assert read_weights(short) != read_weights(whole)


def read_validations(run: Path) -> list[tuple[int, float]]:
    lines = RunDir(run).read_metrics()
    return [(line["step"], line["loss"]) for line in lines if line["split"] == "val"]


def test_signal_to_the_process_group_does_not_kill_workers(tmp_path: Path, monkeypatch) -> None:
    import resource

    step = TrainerState.train_step

    def interrupted_step(self: TrainerState, *args: Any) -> None:
        step(self, *args)
        if self.counters.step == 3:
            os.killpg(os.getpgid(0), signal.SIGTERM)

    def work() -> None:
        os.setpgid(0, 0)
        # Allow fewer new file descriptors than the images of a batch.
        limit = len(os.listdir("/proc/self/fd")) + 90
        assert limit < 256
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
        monkeypatch.setattr(TrainerState, "train_step", interrupted_step)
        train(tiny_recipe("data.keep=none", "data.batch_size=256"), tmp_path / "run")

    ended = run_in_child(work)
    assert ended.exit_code == 128 + signal.SIGTERM, ended.output
    assert RunDir(tmp_path / "run").checkpoint_steps() == [3]


def test_signal_saves_a_checkpoint_and_resume_gives_the_same_weights(
    finished_run, tmp_path: Path, monkeypatch
) -> None:
    out = tmp_path / "run"
    step = TrainerState.train_step

    def interrupted_step(self: TrainerState, *args: Any) -> None:
        step(self, *args)
        if self.counters.step == 5:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(TrainerState, "train_step", interrupted_step)
    with refused("interrupted", out, "step 5 of 12", "--resume") as caught:
        train(tiny_recipe(*FULL), out)
    assert caught.value.exit_code == 143
    assert json.loads((out / "run.json").read_text())["status"] == "stopped (143)"
    monkeypatch.undo()
    train(tiny_recipe(*FULL), out, resume=True)
    assert read_weights(out) == read_weights(finished_run[0])


@pytest.mark.parametrize("cause", ["signal during the wait", "source fails"])
def test_checkpoint_is_saved_if_no_next_batch_arrives(
    cause: str, finished_run, tmp_path: Path, monkeypatch
) -> None:
    out, read_all = tmp_path / "run", PixelStore.read_batches

    def failing_read_batches(self: PixelStore, batches: Any) -> Any:
        for number, batch in enumerate(read_all(self, batches)):
            if number == 9 and self.split.name == "train":  # in the middle of step 5
                if cause == "source fails":
                    raise HubError("http://x/a.tar: gone; try again later", code="hub.unreachable")
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(60)
            yield batch

    monkeypatch.setattr(PixelStore, "read_batches", failing_read_batches)
    is_signal, started = cause != "source fails", time.monotonic()
    names = (out, "step 4 of 12") if is_signal else ("gone",)
    with refused("interrupted" if is_signal else "hub.unreachable", *names):
        train(tiny_recipe(*FULL), out)
    assert time.monotonic() - started < 50
    assert RunDir(out).checkpoint_steps()[-1] == 4
    monkeypatch.undo()
    train(tiny_recipe(*FULL), out, resume=True)
    assert read_weights(out) == read_weights(finished_run[0])


def test_finished_run_is_not_restarted(finished_run) -> None:
    with refused("setup.run_exists", finished_run[0], "--out"):
        train(tiny_recipe(*FULL), finished_run[0])


def test_resuming_a_finished_run_returns_its_results(finished_run) -> None:
    before = read_weights(finished_run[0])
    assert (
        train(tiny_recipe(*FULL, "run.log_every=5"), finished_run[0], resume=True)
        == finished_run[1]
    )
    assert read_weights(finished_run[0]) == before


def test_early_stopping_and_the_choice_of_published_weights(tmp_path: Path) -> None:
    # With a learning rate near zero, no evaluation is better than the first, and the last is equal.
    out = tmp_path / "run"
    no_improvement = ["optim.lr=1e-30", "run.best=val.loss", "run.eval_every=2", "run.patience=2"]
    results = train(tiny_recipe(*SMALL, *no_improvement), out)
    assert results["steps"] == results["best_step"] == 6
    # A destructive learning rate: the first evaluation stays best; `last` keeps the last weights.
    worse = ["optim.lr=30", "optim.schedule=constant", "run.eval_every=1", "run.keep_checkpoints=1"]
    for best, step in (("val.loss", 1), ("last", 3)):
        out = tmp_path / best
        with refused("diverged.loss", f"the weights of step {step}"):
            train(tiny_recipe(*SMALL, *worse, "optim.steps=3", f"run.best={best}"), out)
        checkpoint = load_file(RunDir(out).checkpoint_folder(step) / "model.safetensors")[
            "head.weight"
        ]
        assert torch.equal(checkpoint, load_file(out / "model/model.safetensors")["head.weight"])
        card = (out / "model/README.md").read_text()
        assert ("the weights were selected on them" in card) == (best != "last")


def test_non_finite_gradients_are_skipped_until_max_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = ImageLoader.train_steps

    def with_nan_images(bad_steps: set[int]) -> Callable[..., Any]:
        def steps(self: Any, sampler: Any, step_numbers: range, **kwargs: Any) -> Any:
            for number, (count, batches) in zip(
                step_numbers, original(self, sampler, step_numbers, **kwargs), strict=True
            ):
                all_batches = list(batches)
                if number in bad_steps:
                    all_batches[0].images_BCHW[0] = float("nan")
                yield count, iter(all_batches)

        return steps

    monkeypatch.setattr(ImageLoader, "train_steps", with_nan_images({1, 5}))
    results = train(tiny_recipe(*SMALL), tmp_path / "some")
    assert results["skipped_steps"] == 2
    assert math.isfinite(results["test"]["loss"])
    monkeypatch.setattr(ImageLoader, "train_steps", with_nan_images(set(range(6, 12))))
    with refused("diverged.gradients", "3 steps", "step 9", "step 4", "optim.lr"):
        train(tiny_recipe("run.max_skipped=3"), tmp_path / "many")
    best = load_file(RunDir(tmp_path / "many").checkpoint_folder(4) / "model.safetensors")
    assert all(torch.isfinite(tensor).all() for tensor in best.values())


def test_test_split_is_loaded_once_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    build_loader, train_step = TrainingSetup.build_loader, TrainerState.train_step
    monkeypatch.setattr(
        TrainingSetup,
        "build_loader",
        lambda self, split, **kwargs: (
            order.append(split.name) or build_loader(self, split, **kwargs)
        ),
    )
    monkeypatch.setattr(
        TrainerState, "train_step", lambda self, *a: order.append("step") or train_step(self, *a)
    )
    train(tiny_recipe(*SMALL, "optim.steps=3"), tmp_path / "run")
    assert order == ["train", "val", "step", "step", "step", "test"]


def test_unreadable_test_image_loses_only_the_test_metrics(
    image_folder: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    broken = image_folder / "test" / "red" / "red-0.png"
    broken.write_bytes(b"no image")
    overrides = [f"data.source=folder:{image_folder}", "data.batch_size=6", "optim.steps=3"]
    with refused("data.unreadable", "red-0.png"):
        train(tiny_recipe(*overrides), out)
    assert timm.create_model(f"local-dir:{out / 'model'}", pretrained=True).num_classes == 3
    trained = read_weights(out)
    results = train(tiny_recipe(*overrides, "data.unreadable=quarantine"), out, resume=True)
    assert results["test"]["examples"] == 11
    shutil.rmtree(out)
    with refused("data.unreadable", "red-0.png"):
        train(tiny_recipe(*overrides), out)
    broken.unlink()
    assert train(tiny_recipe(*overrides), out, resume=True)["test"]["examples"] == 11
    assert read_weights(out) == trained


def test_images_that_change_during_a_run_stop_it(
    image_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    overrides = [f"data.source=folder:{image_folder}", "data.batch_size=6", "optim.steps=8"]
    recipe = tiny_recipe(*overrides, "data.keep=none", "data.workers=0")
    train(recipe, tmp_path / "whole")
    step, red, blue = (
        TrainerState.train_step,
        *(image_folder / "train" / c for c in ("red", "blue")),
    )

    def swap() -> None:
        for number in range(8):
            images = red / f"red-{number}.png", blue / f"blue-{number}.png"
            contents = [image.read_bytes() for image in images]
            for image, content in zip(images, contents[::-1], strict=True):
                state = image.stat()
                image.write_bytes(content)
                os.utime(image, ns=(state.st_atime_ns, state.st_mtime_ns))

    def swap_and_step(self: TrainerState, *args: Any) -> None:
        step(self, *args)
        if self.counters.step == 5:
            swap()

    monkeypatch.setattr(TrainerState, "train_step", swap_and_step)
    with refused("data.changed", "train/", ".png"):
        train(recipe, tmp_path / "run")
    with refused("data.changed", "train"):
        train(recipe, tmp_path / "run", resume=True)
    monkeypatch.undo()
    swap()
    train(recipe, tmp_path / "run", resume=True)
    assert read_weights(tmp_path / "run") == read_weights(tmp_path / "whole")


def test_transform_with_the_wrong_output_size_is_refused_before_training(tmp_path: Path) -> None:
    for key in ("train", "eval"):
        with refused("recipe.wrong_size", f"data.{key}", "8x8", "16x16"):
            train(tiny_recipe(f"data.{key}=resize((8, 8))"), tmp_path / "run", dry_run=True)


def test_dry_run_writes_nothing(tmp_path: Path) -> None:
    plan = train(tiny_recipe(), tmp_path / "run", dry_run=True)
    assert plan["steps"] == 12
    assert plan["images"]["test"] == 355
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_two_processes_give_the_losses_of_one(plain_losses: list[float], tmp_path: Path) -> None:
    """Each accumulates two micro-batches; without accumulation, test_stages.py compares them."""
    recipe, out = tmp_path / "tiny.yaml", tmp_path / "two"
    recipe.write_text(TINY_RECIPE)
    overrides = [*SMALL, "data.micro_batch=4"]
    run_two_ranks(run_rank_command, "train", str(recipe), *overrides, "--out", str(out))
    assert json.loads((out / "run.json").read_text())["num_processes"] == 2
    assert read_train_losses(out) == pytest.approx(plain_losses, abs=1e-5)
    assert json.loads((out / "results.json").read_text())["test"]["examples"] == 355


@pytest.mark.parametrize(
    "other,name",
    [
        ("optim.lr=0.5", "optim.lr"),
        ("data.source=csv:{}/other.csv", "labels, classes or shards"),
    ],
)
def test_a_rank_with_another_recipe_or_other_labels_is_refused(
    tmp_path: Path, other: str, name: str
) -> None:
    write_image_folder(tmp_path, {"images": 8})
    for file, classes in (("labels.csv", "ab"), ("other.csv", "ba")):
        rows = [f"images/{number}.png,{classes[number % 2]}\n" for number in range(8)]
        (tmp_path / file).write_text("image,label\n" + "".join(rows))
    data = ("data.num_train=null", "data.num_test=null", "data.batch_size=4")
    overrides = [*data, f"data.source=csv:{tmp_path}/labels.csv"]
    run_two_ranks(train_refused, tmp_path / "run", overrides, other.format(tmp_path), name)


def train_refused(out: Path, overrides: list[str], other: str, name: str) -> None:
    """Train with another override on rank 1; both ranks refuse it."""
    if os.environ["RANK"] == "1":
        overrides = [*overrides, other]
    with refused("setup.ranks_differ", f"rank 1 differs from rank 0 in {name};"):
        train(tiny_recipe(*overrides), out)


def test_ranks_with_other_images_are_refused(tmp_path: Path) -> None:
    for folder, first in (("rank0", 0), ("copy", 0), ("other", 50)):
        for split in ("train", "test"):
            images = [{"bytes": random_png(first + number), "path": None} for number in range(8)]
            write_parquet(tmp_path / folder / f"{split}.parquet", [0, 1] * 4, images=images)
    run_two_ranks(read_other_images_on_rank_1, tmp_path)


def read_other_images_on_rank_1(folder: Path) -> None:
    """Train, evaluate, compare and probe on a copy of the images, and on other ones."""
    copy, other = (
        f"parquet:{folder / ('rank0' if os.environ['RANK'] == '0' else name)}"
        for name in ("copy", "other")
    )
    data, run = ("data.num_train=null", "data.num_test=null", "data.batch_size=4"), folder / "run"
    with refused("setup.ranks_differ", "images of 'train'"):
        train(tiny_recipe(*data, f"data.source={other}"), folder / "no", keep_process_group=True)
    train(tiny_recipe(*data, f"data.source={copy}"), run, keep_process_group=True)
    for command in (
        lambda: evaluate_model(str(run), data=other),
        lambda: compare_models(str(run), str(run / "model"), data=other),
        lambda: probe_model(str(run), data=other, shots=[1]),
    ):
        with refused("setup.ranks_differ", "rank 1", "images of 'test'"):
            command()
    same: dict[str, Any] = {"provenance": {}, "temperature": None, "thresholds": None}
    rank = os.environ["RANK"]
    for changed, name in (
        ({"provenance": {"sha256": rank}}, "weights"),
        ({"temperature": 1.0 + int(rank)}, "temperature or thresholds"),
    ):
        with refused("setup.ranks_differ", f"in {name};"):
            check_same_models_on_all_ranks([cast(BuiltModel, SimpleNamespace(**same | changed))])
