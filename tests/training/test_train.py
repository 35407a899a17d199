"""Training as a whole: the same on any number of processes, resumed exactly, test read once."""

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
from typing import Any

import pytest
import timm
import torch
from faults_runs import FULL, TINY, in_child, killed_before, losses, tiny, weights
from ranks import command, two_ranks
from refusals import refused
from safetensors.torch import load_file

from finetune.data.image_store import Store
from finetune.data.loader import Loader
from finetune.errors import HubError
from finetune.publish.artifacts import PUBLISHED
from finetune.recipe.load import parse_recipe
from finetune.run.directory import RunDir
from finetune.training.setup import TrainingSetup, open_setup
from finetune.training.train import train
from finetune.training.trainer_state import TrainerState

pytestmark = pytest.mark.usefixtures("no_pictures")


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> tuple[Path, dict[str, Any]]:
    """One finished run with everything on."""
    out = tmp_path_factory.mktemp("plain") / "run"
    return out, train(tiny(*FULL), out)


def test_a_run_leaves_what_the_design_promises(plain) -> None:
    out, results = plain
    assert {"recipe.yaml", "run.json", "metrics.jsonl", "results.json"} <= {
        entry.name for entry in out.iterdir()
    }
    assert {entry.name for entry in (out / "model").iterdir()} == set(PUBLISHED)
    record = json.loads((out / "run.json").read_text())
    assert record["status"] == "done"
    assert record["plan"]["steps"] == 12
    assert len(record["data_fingerprint"]) == 64
    assert json.loads((out / "results.json").read_text()) == results
    test = results["test"]
    assert test["examples"] == sum(map(sum, test["confusion"])) == 355
    assert {"top1", "top5", "loss", "ece", "per_class"} <= set(test)
    assert results["best_step"] in (4, 8, 12)
    assert len(losses(out)) == 12


def test_the_first_loss_is_ln_k_through_train(tmp_path: Path) -> None:
    train(tiny("optim.steps=1", "optim.warmup_steps=0", "data.val_fraction=0"), tmp_path / "run")
    assert losses(tmp_path / "run")[0] == pytest.approx(math.log(10), abs=1e-6)


def test_accumulation_changes_no_loss(plain, tmp_path: Path) -> None:
    expected = tmp_path / "whole"
    train(tiny(), expected)
    train(tiny("data.micro_batch=24"), tmp_path / "parts")
    assert losses(tmp_path / "parts") == pytest.approx(losses(expected), abs=1e-5)
    assert len(set(losses(expected))) >= 11  # the first rate is zero


def test_ways_of_computing_that_change_no_loss(tmp_path: Path) -> None:
    train(tiny(), tmp_path / "plain")
    ways = {
        "checkpointing": ["model.grad_checkpointing=true"],
        "workers": ["data.keep=none", "data.workers=1"],
    }
    for name, overrides in ways.items():
        train(tiny(*overrides), tmp_path / name)
        expected = losses(tmp_path / "plain")
        assert losses(tmp_path / name) == pytest.approx(expected, abs=1e-5), name


# its kernels are compiled anew in each new environment, for 30 s of processor time
@pytest.mark.parametrize(
    "backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.faults)]
)
def test_a_compiled_network_trains_alike_and_is_saved_under_plain_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    compiled = functools.partialmethod(torch.nn.Module.compile, backend=backend)
    monkeypatch.setattr(torch.nn.Module, "compile", compiled)
    train(tiny("optim.steps=4"), tmp_path / "plain")
    train(tiny("optim.steps=4", "model.compile=true"), tmp_path / "compiled")
    assert losses(tmp_path / "compiled") == pytest.approx(losses(tmp_path / "plain"), abs=1e-4)
    names = [load_file(tmp_path / run / "model/model.safetensors") for run in ("plain", "compiled")]
    assert names[0].keys() == names[1].keys()


@pytest.mark.parametrize(
    "overrides",
    [
        ["model.freeze=1", "optim.layer_decay=0.75"],
        ["model.freeze=backbone"],
        ["run.precision=bf16", "data.train=resize | mixup(0.8) | cutmix(1.0)"],
        [
            "optim.name=sgd",
            "optim.schedule=step",
            "optim.step_every=5",
            "optim.label_smoothing=0.1",
        ],
        ["model.name=test_resnet", "model.args={}", "model.image_size=32"],
        ["model.name=test_convnext", "model.args={}", "model.image_size=32", "run.best=val.loss"],
        ["data.val_fraction=0"],
    ],
    ids=["freeze-blocks", "freeze-backbone", "mix", "sgd", "resnet", "convnext", "no-validation"],
)
def test_every_kind_of_run_ends_with_a_model_that_timm_loads(
    tmp_path: Path, overrides: list[str]
) -> None:
    recipe = parse_recipe(TINY.replace("steps: 12", "steps: 4"), overrides=overrides)
    results = train(recipe, tmp_path / "run")
    assert 0 <= results["test"]["top1"] <= 1
    model = timm.create_model(f"local-dir:{tmp_path / 'run' / 'model'}", pretrained=True)
    assert model.num_classes == 10
    if "model.freeze=backbone" in overrides:
        torch.manual_seed(0)
        first = load_file(RunDir(tmp_path / "run").folder(4) / "model.safetensors")
        fresh = open_setup(recipe, device=torch.device("cpu"), notice=print, progress=False)
        frozen = fresh.built.model.state_dict()
        assert torch.equal(first["blocks.0.mlp.fc1.weight"], frozen["blocks.0.mlp.fc1.weight"])
        assert not torch.equal(first["head.weight"], frozen["head.weight"])


def test_a_tracker_that_is_not_there_is_not_left_out_silently(tmp_path: Path) -> None:
    with refused("setup.missing_package", "run.trackers", "comet_ml"):
        train(tiny("run.trackers=[comet_ml]"), tmp_path / "run")


def test_a_run_that_failed_before_its_first_step_can_be_begun_anew(
    image_folder: Path, tmp_path: Path
) -> None:
    broken = image_folder / "train" / "red" / "red-0.png"
    whole = broken.read_bytes()
    broken.write_bytes(b"no image")
    recipe = tiny(f"data.source=folder:{image_folder}", "data.batch_size=6", "optim.steps=3")
    with refused("data.unreadable", "red-0.png"):
        train(recipe, tmp_path / "run")
    assert json.loads((tmp_path / "run" / "run.json").read_text())["status"] == "failed (3)"
    broken.write_bytes(whole)
    train(recipe, tmp_path / "run")


def test_a_recipe_that_does_not_fit_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    for dry_run in (True, False):
        with refused("recipe.unknown_name", "'adamww'", "'adamw'"):
            train(tiny("optim.name=adamww"), tmp_path / "run", dry_run=dry_run)
    assert not (tmp_path / "run").exists()


def test_the_environment_does_not_change_the_training(plain, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    train(tiny(*FULL), tmp_path / "run")
    assert weights(tmp_path / "run") == weights(plain[0])


def test_log_lines_after_a_resume_cover_the_same_images(tmp_path: Path) -> None:
    recipe = tiny("run.log_every=5", "run.save_every=3", "run.eval_every=6")
    train(recipe, tmp_path / "whole")
    out = tmp_path / "run"
    killed_before(8, recipe, out)
    train(recipe, out, resume=True)
    assert losses(out) == losses(tmp_path / "whole")


def test_a_signal_to_the_group_leaves_workers_alone(tmp_path: Path, monkeypatch) -> None:
    import resource

    step = TrainerState.step

    def interrupted_step(self: TrainerState, *args: Any) -> None:
        step(self, *args)
        if self.counters.step == 3:
            os.killpg(os.getpgid(0), signal.SIGTERM)

    def work() -> None:
        os.setpgid(0, 0)
        # Fewer file descriptors than a batch has images, beside those that earlier tests left open.
        limit = len(os.listdir("/proc/self/fd")) + 90
        assert limit < 256
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
        monkeypatch.setattr(TrainerState, "step", interrupted_step)
        train(tiny("data.keep=none", "data.batch_size=256"), tmp_path / "run")

    ended = in_child(work)
    assert ended.code == 128 + signal.SIGTERM, ended.said
    assert RunDir(tmp_path / "run").steps() == [3]


def test_a_signal_saves_and_resume_ends_the_same(plain, tmp_path: Path, monkeypatch) -> None:
    out = tmp_path / "run"
    step = TrainerState.step

    def interrupted_step(self: TrainerState, *args: Any) -> None:
        step(self, *args)
        if self.counters.step == 5:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(TrainerState, "step", interrupted_step)
    with refused("interrupted", out, "step 5 of 12", "--resume") as caught:
        train(tiny(*FULL), out)
    assert caught.value.exit_code == 143
    assert json.loads((out / "run.json").read_text())["status"] == "stopped (143)"
    monkeypatch.undo()
    train(tiny(*FULL), out, resume=True)
    assert weights(out) == weights(plain[0])


@pytest.mark.parametrize("way", ["a signal while it waits", "the source gives up"])
def test_where_no_batch_comes_what_is_done_is_saved(
    way: str, plain, tmp_path: Path, monkeypatch
) -> None:
    out, read_all = tmp_path / "run", Store.read_all

    def silent(self: Store, batches: Any) -> Any:
        for number, batch in enumerate(read_all(self, batches)):
            if number == 18 and self.split.name == "train":  # in the middle of step 5
                if way == "the source gives up":
                    raise HubError("http://x/a.tar: gone; try again later", code="hub.unreachable")
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(60)
            yield batch

    monkeypatch.setattr(Store, "read_all", silent)
    is_signal, began = way != "the source gives up", time.monotonic()
    named = (out, "step 4 of 12") if is_signal else ("gone",)
    with refused("interrupted" if is_signal else "hub.unreachable", *named):
        train(tiny(*FULL), out)
    assert time.monotonic() - began < 50
    assert RunDir(out).steps()[-1] == 4
    monkeypatch.undo()
    train(tiny(*FULL), out, resume=True)
    assert weights(out) == weights(plain[0])


def test_a_finished_run_is_not_begun_again(plain) -> None:
    with refused("setup.run_exists", plain[0], "done", "--resume"):
        train(tiny(*FULL), plain[0])


def test_resuming_a_finished_run_only_answers(plain) -> None:
    before = weights(plain[0])
    assert train(tiny(*FULL, "run.log_every=5"), plain[0], resume=True) == plain[1]
    assert weights(plain[0]) == before


def test_early_stopping_and_the_best_weights_are_kept(tmp_path: Path) -> None:
    # A learning rate of nothing: no evaluation is better than the first, and the last is as good.
    out = tmp_path / "run"
    still = ["optim.lr=1e-30", "run.best=val.loss", "run.eval_every=2", "run.patience=2"]
    results = train(tiny(*still), out)
    assert results["steps"] == results["best_step"] == 6
    # A rate that destroys what was learned: the first stays the best, or the last is kept.
    worse = ["optim.lr=30", "optim.schedule=constant", "run.eval_every=1", "run.keep_checkpoints=1"]
    for best, step in (("val.loss", 1), ("last", 4)):
        out = tmp_path / best
        with refused("diverged.loss", f"The weights of step {step}"):
            train(tiny(*worse, "optim.steps=4", f"run.best={best}"), out)
        kept = load_file(RunDir(out).folder(step) / "model.safetensors")["head.weight"]
        assert torch.equal(kept, load_file(out / "model/model.safetensors")["head.weight"])
        card = (out / "model/README.md").read_text()
        assert ("they alone chose the weights" in card) == (best != "last")


def test_gradients_that_are_not_finite_are_skipped_and_then_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = Loader.train

    def poisoned(bad: set[int]) -> Callable[..., Any]:
        def steps(self: Any, stream: Any, numbers: range, **where: Any) -> Any:
            for number, (count, batches) in zip(
                numbers, original(self, stream, numbers, **where), strict=True
            ):
                whole = list(batches)
                if number in bad:
                    whole[0].images_BCHW[0] = float("nan")
                yield count, iter(whole)

        return steps

    monkeypatch.setattr(Loader, "train", poisoned({1, 5}))
    results = train(tiny(), tmp_path / "some")
    assert results["skipped_steps"] == 2
    assert math.isfinite(results["test"]["loss"])
    monkeypatch.setattr(Loader, "train", poisoned(set(range(6, 12))))
    with refused("diverged.gradients", "3 steps", "step 9", "step 4", "optim.lr"):
        train(tiny("run.max_skipped=3"), tmp_path / "many")
    best = load_file(RunDir(tmp_path / "many").folder(4) / "model.safetensors")
    assert all(torch.isfinite(tensor).all() for tensor in best.values())


def test_the_test_split_is_read_once_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    open_store, step = TrainingSetup.loader, TrainerState.step
    monkeypatch.setattr(
        TrainingSetup,
        "loader",
        lambda self, split, **how: order.append(split.name) or open_store(self, split, **how),
    )
    monkeypatch.setattr(
        TrainerState, "step", lambda self, *a: order.append("step") or step(self, *a)
    )
    train(tiny("optim.steps=3"), tmp_path / "run")
    assert order == ["train", "val", "step", "step", "step", "test"]


def test_a_broken_test_image_costs_only_the_test_figures(
    image_folder: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    broken = image_folder / "test" / "red" / "red-0.png"
    broken.write_bytes(b"no image")
    overrides = [f"data.source=folder:{image_folder}", "data.batch_size=6", "optim.steps=3"]
    with refused("data.unreadable", "red-0.png"):
        train(tiny(*overrides), out)
    assert timm.create_model(f"local-dir:{out / 'model'}", pretrained=True).num_classes == 3
    trained = weights(out)
    results = train(tiny(*overrides, "data.unreadable=quarantine"), out, resume=True)
    assert results["test"]["examples"] == 11
    shutil.rmtree(out)
    with refused("data.unreadable", "red-0.png"):
        train(tiny(*overrides), out)
    broken.unlink()
    assert train(tiny(*overrides), out, resume=True)["test"]["examples"] == 11
    assert weights(out) == trained


def test_a_pipeline_that_misses_the_size_shows_before_training(tmp_path: Path) -> None:
    for key in ("train", "eval"):
        with refused("recipe.wrong_size", f"data.{key}", "8x8", "16x16"):
            train(tiny(f"data.{key}=resize((8, 8))"), tmp_path / "run", dry_run=True)


def test_dry_run_writes_nothing(tmp_path: Path) -> None:
    plan = train(tiny(), tmp_path / "run", dry_run=True)
    assert plan["steps"] == 12
    assert plan["images"]["test"] == 355
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_two_processes_give_the_losses_of_one(tmp_path: Path) -> None:
    recipe = tmp_path / "tiny.yaml"
    recipe.write_text(TINY)
    train(tiny(), tmp_path / "one")
    expected = losses(tmp_path / "one")
    for other, *overrides in (["two"], ["two-by-two", "data.micro_batch=16"]):
        out = str(tmp_path / other)
        two_ranks(command, "train", str(recipe), *overrides, "--out", out)
    for other in ("two", "two-by-two"):
        record = json.loads((tmp_path / other / "run.json").read_text())
        assert record["num_processes"] == 2
        assert losses(tmp_path / other) == pytest.approx(expected, abs=1e-5)
        mine = json.loads((tmp_path / other / "results.json").read_text())
        theirs = json.loads((tmp_path / "one" / "results.json").read_text())
        assert mine["test"]["examples"] == theirs["test"]["examples"] == 355
