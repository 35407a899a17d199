"""`finetune start`: choosing a recipe for a dataset, and training it."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from logs import logged
from PIL import Image
from refusals import refused
from small_datasets import random_png
from tar_shards import Member, tar_bytes
from torch import nn

from finetune.cli import main as cli
from finetune.cli.training import default_run_name
from finetune.commands import start as start_module
from finetune.commands.start import DatasetStats, Strategy, _RecipeBuilder, start
from finetune.errors import Interrupted
from finetune.recipe.load import load_recipe, parse_recipe
from finetune.recipe.paths import is_data_source
from finetune.recipe.schema import Recipe
from finetune.training.lr_range import LrRangeCurve

CPU = torch.device("cpu")


def write_photos(folder: Path, counts: dict[str, int], side: int = 40) -> Path:
    """Create class folders of noise images; the mean of an image determines its class."""
    rng = np.random.default_rng(0)
    for number, (name, count) in enumerate(counts.items()):
        (folder / name).mkdir(parents=True)
        for index in range(count):
            pixels = rng.integers(0, 100, (side, side + 8, 3)) + 70 * number
            Image.fromarray(pixels.astype(np.uint8)).save(folder / name / f"{index}.png")
    return folder


@pytest.fixture
def fake_timings(monkeypatch: pytest.MonkeyPatch) -> Callable[[float, float], None]:
    """Return a function that fakes the seconds per image of a forward pass and of a step."""

    def set_timings(forward: float, step: float) -> None:
        def time_candidate(*_: object) -> tuple[float, float]:
            return forward, step

        monkeypatch.setattr(start_module, "_time_candidate", time_candidate)

    return set_timings


@pytest.fixture
def trial_accuracies(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Fake the trial accuracy by `model.freeze`, measured on 25 images."""
    top1 = {"backbone": 0.0, "none": 1.0}
    monkeypatch.setattr(
        start_module, "_train_and_score", lambda recipe: (top1[recipe.model.freeze], 25)
    )
    return top1


@pytest.fixture
def range_test(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Fake the learning rate with the lowest loss; the range test's arguments are appended."""
    calls: list[float] = [1e-2]

    def run_range_test(recipe: Recipe, **kwargs: Any) -> LrRangeCurve:
        calls.extend(kwargs.values())
        return LrRangeCurve([calls[0] / 2, calls[0], calls[0] * 2], [1, 2, 3], [3, 1, 2])

    monkeypatch.setattr(start_module, "run_lr_range_test", run_range_test)
    return calls


def dataset_stats(num_train: int, side: int = 32, classes: int = 4) -> DatasetStats:
    per_class = np.full(classes, num_train // classes)
    return DatasetStats({"train": num_train}, num_train, per_class, side)


class TestStrategies:
    @pytest.mark.parametrize(
        "seconds, expected",
        [
            ((1e-3, 3e-3), ("embedded:vit_ti", False)),
            ((1e-3, 1.0), ("embedded:vit_ti", True)),
            ((10.0, 30.0), ("embedded:vit_nano", True)),
        ],
    )
    def test_too_slow_candidates_are_replaced_by_cheaper_ones(
        self,
        seconds: tuple[float, float],
        expected: tuple[str, bool],
        fake_timings: Callable[[float, float], None],
    ) -> None:
        fake_timings(*seconds)
        strategy = start_module._feasible_strategies(dataset_stats(1000), CPU, {})[-1]
        assert (strategy.candidate.name, strategy.frozen) == expected

    def test_better_weights_are_tried_frozen_if_only_smaller_ones_can_be_trained(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        step_seconds = {"embedded:vit_ti": 1.0, "embedded:vit_nano": 1e-3}
        monkeypatch.setattr(
            start_module,
            "_time_candidate",
            lambda candidate, *_: (1e-4, step_seconds[candidate.name]),
        )
        head, full = start_module._feasible_strategies(
            dataset_stats(1000), CPU, {"model.image_size": 48}
        )
        assert (head.candidate.name, head.candidate.image_size, head.frozen) == (
            "embedded:vit_ti",
            48,
            True,
        )
        assert (full.candidate.name, full.frozen) == ("embedded:vit_nano", False)

    def test_candidates_that_do_not_fit_in_memory_are_skipped(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def time_candidate(
            candidate: start_module.WeightsCandidate, *_: Any
        ) -> tuple[float, float]:
            if candidate.name == "embedded:vit_ti":
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return 1e-5, 1e-4

        monkeypatch.setattr(start_module, "_time_candidate", time_candidate)
        for strategy in start_module._feasible_strategies(dataset_stats(1000), CPU, {}):
            assert strategy.candidate.name == "embedded:vit_nano"
        with pytest.raises(torch.OutOfMemoryError):  # no smaller model is left
            start_module._feasible_strategies(
                dataset_stats(1000), CPU, {"model.name": "embedded:vit_ti"}
            )

    def test_timing_excludes_waiting(self, monkeypatch: pytest.MonkeyPatch) -> None:
        class SleepingModel(nn.Linear):
            def forward(self, images_BCHW: torch.Tensor) -> torch.Tensor:
                time.sleep(0.05)
                return super().forward(images_BCHW[:, 0, 0])

        built = SimpleNamespace(model=SleepingModel(8, 2))
        monkeypatch.setattr(start_module, "build_model", lambda *_, **__: built)
        forward, step = start_module._time_candidate(
            start_module.WeightsCandidate("any", 8, 1.0, ""), 2, CPU
        )
        assert max(forward, step) < 0.05 / 16

    def test_small_datasets_get_more_epochs(self) -> None:
        epochs = [
            start_module._choose_epochs(images) for images in (50, 500, 3000, 10_000, 100_000)
        ]
        assert epochs == sorted(epochs, reverse=True)
        assert (epochs[0], epochs[-1]) == (40, 3)

    @pytest.mark.parametrize("side, size", [(8, 32), (32, 32), (50, 48), (400, 64)])
    def test_image_size_follows_the_images(
        self, side: int, size: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(start_module.importlib.util, "find_spec", lambda name: None)
        assert {c.image_size for c in start_module._list_candidates(side, CPU)} == {size}

    def test_unknown_weights_are_refused(self, tmp_path: Path) -> None:
        folder = str(write_photos(tmp_path / "photos", {"a": 3, "b": 3}))
        with refused("weights.unknown_name", "nope"):
            start(folder, overrides=["model.name=vit_base_patch16_224.nope"])

    @pytest.mark.usefixtures("trial_accuracies", "range_test")
    def test_flip_is_only_suggested(
        self, tmp_path: Path, fake_timings: Callable[[float, float], None]
    ) -> None:
        fake_timings(1e-4, 3e-4)
        result = start(str(write_photos(tmp_path / "photos", {"a": 12, "b": 12})))
        assert "flip" not in (result.recipe.data.train or "")
        assert "add '| flip'" in result.yaml_text


class TestRecipe:
    @pytest.mark.usefixtures("trial_accuracies", "range_test")
    @pytest.mark.parametrize("columns", [[], ["data.label_column=[a,b]"]])
    def test_multilabel_task(
        self, columns: list[str], tmp_path: Path, fake_timings: Callable[[float, float], None]
    ) -> None:
        fake_timings(1e-4, 3e-4)
        lines = ["path,a,b"]
        for number in range(40):
            (tmp_path / f"{number}.png").write_bytes(random_png(number, (8, 8)))
            lines.append(f"{number}.png,{number % 2},{int(number % 3 > 0)}")
        (tmp_path / "t.csv").write_text("\n".join(lines))
        overrides = ["data.task=multilabel", *columns]
        result = start(f"csv:{tmp_path / 't.csv'}", overrides=overrides)
        assert result.recipe.data.task == "multilabel"
        assert "2 classes, images from 20 (a) to 26 (b)" in result.yaml_text
        assert "val mAP 0.000" in result.yaml_text

    @pytest.mark.usefixtures("trial_accuracies", "range_test")
    def test_choices_use_the_selected_images(
        self, tmp_path: Path, fake_timings: Callable[[float, float], None]
    ) -> None:
        fake_timings(1e-4, 3e-4)
        folder = write_photos(tmp_path / "photos", {"a": 8, "b": 40, "c": 40})
        overrides = ["data.classes=[b, c]", "data.num_train=60", "data.num_val=5", "run.seed=3"]
        result = start(str(folder), overrides=overrides)
        assert "; 2 classes, images from " in result.yaml_text
        assert "# of 60 images, stratified by class" in result.yaml_text
        assert "# 48 training images" in result.yaml_text

    @pytest.mark.usefixtures("trial_accuracies", "range_test")
    def test_patience_sets_a_validation_metric_for_best(
        self, tmp_path: Path, fake_timings: Callable[[float, float], None]
    ) -> None:
        fake_timings(1e-4, 3e-4)
        folder = str(write_photos(tmp_path / "photos", {"a": 12, "b": 12}))
        assert start(folder).recipe.run.best == "last"
        assert start(folder, overrides=["run.patience=3"]).recipe.run.best == "val.loss"
        assert start(folder, overrides=["run.best=val.top1"]).recipe.run.best == "val.top1"

    @pytest.mark.usefixtures("trial_accuracies", "range_test")
    def test_recipe_text_explains_every_choice_and_overrides_apply(
        self, tmp_path: Path, fake_timings: Callable[[float, float], None]
    ) -> None:
        fake_timings(1e-4, 3e-4)
        folder = write_photos(tmp_path / "my photos # 1", {"a: b": 12, "c": 30})
        result = start(str(folder), overrides=["optim.epochs=2"])
        assert result.recipe.data.source == f"folder:{folder}"
        assert result.recipe.optim.epochs == 2
        assert "epochs: 2 # as asked" in result.yaml_text
        assert parse_recipe(result.yaml_text) == result.recipe
        assert result.recipe.data.unreadable == "quarantine"
        assert "2 classes, images from 12 (a: b) to 30 (c)" in result.yaml_text

    @pytest.mark.usefixtures("range_test")
    def test_trial_picks_full_fine_tuning_only_if_its_lead_exceeds_one_standard_error(
        self,
        tmp_path: Path,
        trial_accuracies: dict[str, float],
        fake_timings: Callable[[float, float], None],
    ) -> None:
        fake_timings(1e-4, 3e-4)
        folder = str(write_photos(tmp_path / "photos", {"a": 12, "b": 12}))
        trial_accuracies |= {"backbone": 0.8, "none": 0.87}  # one standard error is 0.08
        result = start(folder)
        assert (result.recipe.model.freeze, result.recipe.data.train) == ("backbone", "resize")
        trial = "15 epochs: val top-1 0.800 with the backbone of embedded:vit_ti frozen, 0.870"
        assert trial in result.yaml_text
        trial_accuracies["none"] = 0.89
        assert start(folder).recipe.model.freeze == "none"
        trial_accuracies |= {"backbone": 1.0}
        del trial_accuracies["none"]  # full fine-tuning is not tried
        result = start(folder)
        assert result.recipe.model.freeze == "backbone"
        assert "1.000 with the backbone of embedded:vit_ti frozen, which leaves" in result.yaml_text

    @pytest.mark.usefixtures("range_test")
    def test_trials_neither_push_nor_track(
        self,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        fake_timings: Callable[[float, float], None],
    ) -> None:
        fake_timings(1e-4, 3e-4)
        trials: list[Recipe] = []
        monkeypatch.setattr(
            start_module, "_train_and_score", lambda recipe: (trials.append(recipe) or 0.5, 25)
        )
        folder = str(write_photos(tmp_path / "photos", {"a": 12, "b": 12}))
        overrides = ["run.push_to=someone/net", "run.trackers=[tensorboard]"]
        run = start(folder, overrides=overrides).recipe.run
        assert (run.push_to, run.trackers) == ("someone/net", ("tensorboard",))
        assert [(trial.run.push_to, trial.run.trackers) for trial in trials] == [(None, ())] * 2

    def test_interrupted_trial_does_not_suggest_resume(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def raise_interrupted(recipe: Recipe, out: Path) -> None:
            raise Interrupted(f"{out}: stopped; continue with --resume", 2)

        monkeypatch.setattr("finetune.training.train.train", raise_interrupted)
        with refused("interrupted", "run the command again") as caught:
            start_module._train_and_score(load_recipe("recipes/quickstart.yaml"))
        assert "--resume" not in str(caught.value)
        assert caught.value.exit_code == 130

    def test_large_dataset_gets_a_trial_only_if_the_weights_differ(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        ti, nano = (start_module.WeightsCandidate(name, 32, 1e-3, "") for name in ("ti", "nano"))
        builder = _RecipeBuilder(SimpleNamespace(), dataset_stats(40_000), {}, [])
        full_nano = Strategy(nano, False, 1e-3)
        assert (
            start_module._choose_strategy(builder, [Strategy(nano, True, 1e-4), full_nano])[0]
            == full_nano
        )
        accuracies = {"ti": (0.9, 100), "nano": (0.8, 100)}
        monkeypatch.setattr(
            _RecipeBuilder,
            "build_recipe",
            lambda self, strategy, *_, **__: SimpleNamespace(recipe=strategy.candidate.name),
        )
        monkeypatch.setattr(start_module, "_train_and_score", accuracies.get)
        with logged() as messages:
            strategy, reason = start_module._choose_strategy(
                builder, [Strategy(ti, True, 1e-4), full_nano]
            )
        assert strategy.candidate == ti
        assert "0.900 with the backbone of ti frozen, 0.800 with all of nano trained" in reason
        assert "1 epoch each" in messages[0]

    @pytest.mark.parametrize(
        "override, code",
        [
            ("optim.lrr=1e-3", "recipe.unknown_key"),
            ("lr=1e-3", "recipe.unknown_key"),
            ("optim.steps=many", "recipe.wrong_value"),
        ],
    )
    def test_invalid_overrides_are_refused_before_inspecting_images(
        self, override: str, code: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delattr(start_module, "open_data")
        with refused(code, f"override '{override}'"):
            start("embedded:digits", overrides=["optim.steps=3", override])

    def test_all_images_unreadable_is_refused(self, tmp_path: Path) -> None:
        for name in ("a", "b"):
            (tmp_path / "photos" / name).mkdir(parents=True)
            (tmp_path / "photos" / name / "1.png").write_bytes(b"no image")
        with refused("data.damaged", "finetune data scan"):
            start(str(tmp_path / "photos"))


class TestLearningRate:
    """The learning rate for a frozen backbone; its default is 3e-3."""

    FROZEN = ("model.name=embedded:vit_nano", "model.freeze=backbone")

    @pytest.mark.parametrize("lowest_loss_lr, lr", [(4e-2, 4e-3), (0.5, 9e-3), (1e-4, 1e-3)])
    def test_lr_is_a_tenth_of_the_lowest_loss_lr_within_bounds(
        self, tmp_path: Path, range_test: list[float], lowest_loss_lr: float, lr: float
    ) -> None:
        range_test[0] = lowest_loss_lr
        folder = str(write_photos(tmp_path / "photos", {"a": 12, "b": 12}))
        result = start(folder, overrides=[*self.FROZEN, "optim.steps=400"])
        assert result.recipe.optim.lr == pytest.approx(lr)
        assert range_test[1:] == pytest.approx([1e-4, 9e-2, 20])
        assert f"the loss was lowest at {lowest_loss_lr:.1e}" in result.yaml_text

    @pytest.mark.parametrize(
        "override, reason", [("optim.steps=319", "a rule of thumb"), ("optim.lr=3e-3", "as asked")]
    )
    def test_no_range_test_for_short_runs_or_a_given_lr(
        self, tmp_path: Path, range_test: list[float], override: str, reason: str
    ) -> None:
        folder = str(write_photos(tmp_path / "photos", {"a": 12, "b": 12}))
        result = start(folder, overrides=["optim.steps=319", *self.FROZEN, override])
        assert (result.recipe.optim.lr, result.lr_range, len(range_test)) == (3e-3, None, 1)
        assert f"lr: 0.003 # {reason}" in result.yaml_text

    def test_lr_range_curve_is_saved_and_reproducible(self, tmp_path: Path) -> None:
        folder = str(write_photos(tmp_path / "photos", {"a": 12, "b": 12}))
        result, repeated = (
            start(folder, overrides=[*self.FROZEN, "optim.steps=320"]) for _ in range(2)
        )
        assert result == repeated
        start_module.write_start_files(result, tmp_path / "run")
        curve = json.loads((tmp_path / "run" / "lr_range.json").read_text())
        assert curve["chosen"] == result.recipe.optim.lr
        assert len(curve["lr"]) == len(curve["loss"]) == len(curve["smoothed"]) == 16
        assert curve["smoothed"][0] > min(curve["smoothed"])
        # a start that was interrupted here can run again
        start_module.write_start_files(dataclasses.replace(result, lr_range=None), tmp_path / "run")
        assert not (tmp_path / "run" / "lr_range.json").exists()


class TestTarShards:
    OVERRIDES = ("data.image_column=left.png", "model.freeze=none", "optim.lr=1e-3")

    @pytest.fixture
    def source(self, tmp_path: Path, fake_timings: Callable[[float, float], None]) -> str:
        fake_timings(1e-3, 3e-3)
        members: list[Member] = [(f"{n}.left.png", random_png(n)) for n in range(8)]
        members += [(f"{n}.right.png", b"") for n in range(8)]
        members += [(f"{n}.cls", str(n % 2).encode()) for n in range(8)]
        (tmp_path / "two.tar").write_bytes(tar_bytes(members))
        return f"tar:{tmp_path}/two.tar"

    def test_image_column_selects_the_inspected_images(self, source: str) -> None:
        result = start(source, overrides=self.OVERRIDES)
        assert result.recipe.data.image_column == "left.png"
        assert "2 classes, images from 4 (0)" in result.yaml_text
        assert result.recipe.data.unreadable == "quarantine"

    def test_streaming_does_not_quarantine(self, source: str) -> None:
        result = start(source, overrides=[*self.OVERRIDES, "data.streaming=true"])
        assert result.recipe.data.unreadable == "stop"
        assert "1 tar shard, streamed" in result.yaml_text


@pytest.mark.parametrize(
    "source, name",
    [
        ("tar:d/set-{000..099}.tar", "set-000..099"),
        ("tar:d/*.tar", "run"),
        ("my photos/", "my photos"),
        ("hub:owner/name", "name"),
    ],
)
def test_default_run_name_follows_the_source(source: str, name: str) -> None:
    assert default_run_name(source) == name


def test_is_data_source_distinguishes_sources_from_recipes(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "recipe.yaml").write_text("")
    assert all(is_data_source(text) for text in (str(tmp_path), "hub:owner/name"))
    assert not any(
        is_data_source(text) for text in (str(tmp_path / "run"), "recipes/quickstart.yaml")
    )


class TestCommandLine:
    QUICK_OVERRIDES = ("model.name=embedded:vit_nano", "model.freeze=backbone", "optim.steps=3")

    def test_train_on_a_photo_folder_with_one_command(
        self,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        monkeypatch.chdir(tmp_path)
        write_photos(tmp_path / "photos", {"a": 12, "b": 12})
        (tmp_path / "photos" / "a" / "broken.png").write_bytes(b"no image")
        assert cli.main(["train", "photos", *self.QUICK_OVERRIDES]) == 0
        captured = capsys.readouterr()
        recipe_text = (tmp_path / "runs" / "photos" / "start.yaml").read_text()
        assert recipe_text in captured.err
        assert "steps: 3 # as asked" in recipe_text
        assert "broken.png" in caplog.text
        assert (tmp_path / "runs" / "photos" / "model" / "model.safetensors").is_file()
        with monkeypatch.context() as patch:  # refused before the data is inspected
            patch.setattr(start_module, "start", None)
            assert cli.main(["train", "photos", *self.QUICK_OVERRIDES]) == 5
        assert cli.main(["train", "photos", *self.QUICK_OVERRIDES, "--resume"]) == 0

    def test_start_writes_a_recipe_and_overwrites_nothing(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        write_photos(tmp_path / "photos", {"a": 12, "b": 12})
        args = ["start", "photos", *self.QUICK_OVERRIDES, "--out", "my.yaml"]
        assert cli.main(args) == 0
        assert load_recipe("my.yaml").optim.steps == 3
        before = (tmp_path / "my.yaml").read_bytes()
        monkeypatch.setattr(start_module, "start", None)
        assert cli.main(args) == 5
        assert (tmp_path / "my.yaml").read_bytes() == before
        assert cli.main([*args[:-1], "no folder/my.yaml"]) == 5
        assert not (tmp_path / "runs").exists()

    def test_several_processes_need_a_written_recipe(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setenv("WORLD_SIZE", "2")
        write_photos(tmp_path / "photos", {"a": 3, "b": 3})
        assert cli.main(["train", str(tmp_path / "photos"), "--json"]) == 2
        assert json.loads(capsys.readouterr().out)["code"] == "recipe.unsupported"
