"""A recipe for data that has none: what is chosen, from what, and that it trains."""

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


def photos(folder: Path, counts: dict[str, int], side: int = 40) -> Path:
    """Class folders of noise whose mean tells the class."""
    rng = np.random.default_rng(0)
    for number, (name, count) in enumerate(counts.items()):
        (folder / name).mkdir(parents=True)
        for index in range(count):
            pixels = rng.integers(0, 100, (side, side + 8, 3)) + 70 * number
            Image.fromarray(pixels.astype(np.uint8)).save(folder / name / f"{index}.png")
    return folder


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float, float], None]:
    """Say how fast this machine is: seconds of an image in a forward pass and in a step."""

    def seconds(forward: float, step: float) -> None:
        def measured(*_: object) -> tuple[float, float]:
            return forward, step

        monkeypatch.setattr(start_module, "_time_candidate", measured)

    return seconds


@pytest.fixture
def scores(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Say how a trial ends, by `model.freeze`; it is measured on 25 images."""
    top1 = {"backbone": 0.0, "none": 1.0}
    monkeypatch.setattr(
        start_module, "_train_and_score", lambda recipe: (top1[recipe.model.freeze], 25)
    )
    return top1


@pytest.fixture
def least(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Say where a range test finds the least loss; what was tried is added."""
    found: list[float] = [1e-2]

    def tried(recipe: Recipe, **facts: Any) -> LrRangeCurve:
        found.extend(facts.values())
        return LrRangeCurve([found[0] / 2, found[0], found[0] * 2], [1, 2, 3], [3, 1, 2])

    monkeypatch.setattr(start_module, "run_lr_range_test", tried)
    return found


def facts(train: int, side: int = 32, classes: int = 4) -> DatasetStats:
    per_class = np.full(classes, train // classes)
    return DatasetStats({"train": train}, train, per_class, side)


class TestChoices:
    @pytest.mark.parametrize(
        "seconds, expected",
        [
            ((1e-3, 3e-3), ("embedded:vit_ti", False)),
            ((1e-3, 1.0), ("embedded:vit_ti", True)),
            ((10.0, 30.0), ("embedded:vit_nano", True)),
        ],
    )
    def test_what_takes_too_long_is_made_cheaper(
        self,
        seconds: tuple[float, float],
        expected: tuple[str, bool],
        clock: Callable[[float, float], None],
    ) -> None:
        clock(*seconds)
        way = start_module._feasible_strategies(facts(1000), CPU, {})[-1]
        assert (way.candidate.name, way.frozen) == expected

    def test_better_weights_are_looked_at_frozen_where_only_others_can_be_trained(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        steps = {"embedded:vit_ti": 1.0, "embedded:vit_nano": 1e-3}
        monkeypatch.setattr(
            start_module, "_time_candidate", lambda one, *_: (1e-4, steps[one.name])
        )
        head, whole = start_module._feasible_strategies(facts(1000), CPU, {"model.image_size": 48})
        assert (head.candidate.name, head.candidate.image_size, head.frozen) == (
            "embedded:vit_ti",
            48,
            True,
        )
        assert (whole.candidate.name, whole.frozen) == ("embedded:vit_nano", False)

    def test_what_the_device_s_memory_does_not_hold_is_passed_over(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def measured(one: start_module.WeightsCandidate, *_: Any) -> tuple[float, float]:
            if one.name == "embedded:vit_ti":
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return 1e-5, 1e-4

        monkeypatch.setattr(start_module, "_time_candidate", measured)
        for way in start_module._feasible_strategies(facts(1000), CPU, {}):
            assert way.candidate.name == "embedded:vit_nano"
        with pytest.raises(torch.OutOfMemoryError):  # nothing smaller is left
            start_module._feasible_strategies(facts(1000), CPU, {"model.name": "embedded:vit_ti"})

    def test_waiting_for_a_busy_processor_is_not_computing(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        class Waits(nn.Linear):
            def forward(self, images_BCHW: torch.Tensor) -> torch.Tensor:
                time.sleep(0.05)
                return super().forward(images_BCHW[:, 0, 0])

        built = SimpleNamespace(model=Waits(8, 2))
        monkeypatch.setattr(start_module, "build_model", lambda *_, **__: built)
        forward, step = start_module._time_candidate(
            start_module.WeightsCandidate("any", 8, 1.0, ""), 2, CPU
        )
        assert max(forward, step) < 0.05 / 16

    def test_small_sets_are_seen_more_often(self) -> None:
        epochs = [
            start_module._choose_epochs(images) for images in (50, 500, 3000, 10_000, 100_000)
        ]
        assert epochs == sorted(epochs, reverse=True)
        assert (epochs[0], epochs[-1]) == (40, 3)

    @pytest.mark.parametrize("side, size", [(8, 32), (32, 32), (50, 48), (400, 64)])
    def test_the_size_follows_the_images(
        self, side: int, size: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(start_module.importlib.util, "find_spec", lambda name: None)
        assert {c.image_size for c in start_module._list_candidates(side, CPU)} == {size}

    def test_weights_of_nobody_are_refused(self, tmp_path: Path) -> None:
        folder = str(photos(tmp_path / "photos", {"a": 3, "b": 3}))
        with refused("weights.unknown_name", "nope"):
            start(folder, overrides=["model.name=vit_base_patch16_224.nope"])

    @pytest.mark.usefixtures("scores", "least")
    def test_nothing_is_mirrored_unasked(
        self, tmp_path: Path, clock: Callable[[float, float], None]
    ) -> None:
        clock(1e-4, 3e-4)
        made = start(str(photos(tmp_path / "photos", {"a": 12, "b": 12})))
        assert "flip" not in (made.recipe.data.train or "")
        assert "add '| flip'" in made.yaml_text


class TestRecipe:
    @pytest.mark.usefixtures("scores", "least")
    @pytest.mark.parametrize("columns", [[], ["data.label_column=[a,b]"]])
    def test_several_labels_as_asked(
        self, columns: list[str], tmp_path: Path, clock: Callable[[float, float], None]
    ) -> None:
        clock(1e-4, 3e-4)
        lines = ["path,a,b"]
        for number in range(40):
            (tmp_path / f"{number}.png").write_bytes(random_png(number, (8, 8)))
            lines.append(f"{number}.png,{number % 2},{int(number % 3 > 0)}")
        (tmp_path / "t.csv").write_text("\n".join(lines))
        asked = ["data.task=multilabel", *columns]
        made = start(f"csv:{tmp_path / 't.csv'}", overrides=asked)
        assert made.recipe.data.task == "multilabel"
        assert "2 classes, images from 20 (a) to 26 (b)" in made.yaml_text
        assert "val mAP 0.000" in made.yaml_text

    @pytest.mark.usefixtures("scores", "least")
    def test_the_choices_are_for_the_images_that_are_asked_for(
        self, tmp_path: Path, clock: Callable[[float, float], None]
    ) -> None:
        clock(1e-4, 3e-4)
        folder = photos(tmp_path / "photos", {"a": 8, "b": 40, "c": 40})
        asked = ["data.classes=[b, c]", "data.num_train=60", "data.num_val=5", "run.seed=3"]
        made = start(str(folder), overrides=asked)
        assert "; 2 classes, images from " in made.yaml_text
        assert "# of 60 images, stratified by class" in made.yaml_text
        assert "# 48 training images" in made.yaml_text

    @pytest.mark.usefixtures("scores", "least")
    def test_patience_has_a_figure_to_wait_for(
        self, tmp_path: Path, clock: Callable[[float, float], None]
    ) -> None:
        clock(1e-4, 3e-4)
        folder = str(photos(tmp_path / "photos", {"a": 12, "b": 12}))
        assert start(folder).recipe.run.best == "last"
        assert start(folder, overrides=["run.patience=3"]).recipe.run.best == "val.loss"
        assert start(folder, overrides=["run.best=val.top1"]).recipe.run.best == "val.top1"

    @pytest.mark.usefixtures("scores", "least")
    def test_every_choice_is_in_the_text_and_overrides_win(
        self, tmp_path: Path, clock: Callable[[float, float], None]
    ) -> None:
        clock(1e-4, 3e-4)
        folder = photos(tmp_path / "my photos # 1", {"a: b": 12, "c": 30})
        made = start(str(folder), overrides=["optim.epochs=2"])
        assert made.recipe.data.source == f"folder:{folder}"
        assert made.recipe.optim.epochs == 2
        assert "epochs: 2 # as asked" in made.yaml_text
        assert parse_recipe(made.yaml_text) == made.recipe
        assert made.recipe.data.unreadable == "quarantine"
        assert "2 classes, images from 12 (a: b) to 30 (c)" in made.yaml_text

    @pytest.mark.usefixtures("least")
    def test_a_trial_decides_and_a_lead_that_may_be_chance_is_none(
        self, tmp_path: Path, scores: dict[str, float], clock: Callable[[float, float], None]
    ) -> None:
        clock(1e-4, 3e-4)
        folder = str(photos(tmp_path / "photos", {"a": 12, "b": 12}))
        scores |= {"backbone": 0.8, "none": 0.87}  # a standard error is 0.08
        made = start(folder)
        assert (made.recipe.model.freeze, made.recipe.data.train) == ("backbone", "resize")
        trial = "15 epochs: val top-1 0.800 with the backbone of embedded:vit_ti frozen, 0.870"
        assert trial in made.yaml_text
        scores["none"] = 0.89
        assert start(folder).recipe.model.freeze == "none"
        scores |= {"backbone": 1.0}
        del scores["none"]  # is not trained for nothing
        made = start(folder)
        assert made.recipe.model.freeze == "backbone"
        assert "1.000 with the backbone of embedded:vit_ti frozen, which leaves" in made.yaml_text

    def test_a_stop_in_a_trial_sends_nobody_into_its_folder(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def stopped(recipe: Recipe, out: Path) -> None:
            raise Interrupted(f"{out}: stopped; continue with --resume", 2)

        monkeypatch.setattr("finetune.training.train.train", stopped)
        with refused("interrupted", "run the command again") as caught:
            start_module._train_and_score(load_recipe("recipes/quickstart.yaml"))
        assert "--resume" not in str(caught.value)
        assert caught.value.exit_code == 130

    def test_a_large_set_is_tried_only_where_the_weights_differ(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        ti, nano = (start_module.WeightsCandidate(name, 32, 1e-3, "") for name in ("ti", "nano"))
        large = _RecipeBuilder(SimpleNamespace(), facts(40_000), {}, [])
        whole = Strategy(nano, False, 1e-3)
        assert start_module._choose_strategy(large, [Strategy(nano, True, 1e-4), whole])[0] == whole
        scores = {"ti": (0.9, 100), "nano": (0.8, 100)}
        monkeypatch.setattr(
            _RecipeBuilder,
            "build_recipe",
            lambda self, way, *_, **__: SimpleNamespace(recipe=way.candidate.name),
        )
        monkeypatch.setattr(start_module, "_train_and_score", scores.get)
        with logged() as messages:
            way, why = start_module._choose_strategy(large, [Strategy(ti, True, 1e-4), whole])
        assert way.candidate == ti
        assert "0.900 with the backbone of ti frozen, 0.800 with all of nano trained" in why
        assert "1 epoch each" in messages[0]

    @pytest.mark.parametrize(
        "word, code",
        [
            ("optim.lrr=1e-3", "recipe.unknown_key"),
            ("lr=1e-3", "recipe.unknown_key"),
            ("optim.steps=many", "recipe.wrong_value"),
        ],
    )
    def test_wrong_keys_are_refused_before_the_images_are_looked_at(
        self, word: str, code: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delattr(start_module, "open_data")
        with refused(code, f"override '{word}'"):
            start("embedded:digits", overrides=["optim.steps=3", word])

    def test_images_that_cannot_be_read_are_refused_when_all_are(self, tmp_path: Path) -> None:
        for name in ("a", "b"):
            (tmp_path / "photos" / name).mkdir(parents=True)
            (tmp_path / "photos" / name / "1.png").write_bytes(b"no image")
        with refused("data.damaged", "finetune data scan"):
            start(str(tmp_path / "photos"))


class TestLearningRate:
    """Of a frozen backbone, whose rule of thumb is 3e-3."""

    FROZEN = ("model.name=embedded:vit_nano", "model.freeze=backbone")

    @pytest.mark.parametrize("where, lr", [(4e-2, 4e-3), (0.5, 9e-3), (1e-4, 1e-3)])
    def test_it_is_a_tenth_of_that_with_the_least_loss_within_bounds(
        self, tmp_path: Path, least: list[float], where: float, lr: float
    ) -> None:
        least[0] = where
        folder = str(photos(tmp_path / "photos", {"a": 12, "b": 12}))
        made = start(folder, overrides=[*self.FROZEN, "optim.steps=400"])
        assert made.recipe.optim.lr == pytest.approx(lr)
        assert least[1:] == pytest.approx([1e-4, 9e-2, 20])
        assert f"the loss was least at {where:.1e}" in made.yaml_text

    @pytest.mark.parametrize(
        "override, said", [("optim.steps=319", "a rule of thumb"), ("optim.lr=3e-3", "as asked")]
    )
    def test_no_test_where_it_costs_too_much_or_the_rate_is_given(
        self, tmp_path: Path, least: list[float], override: str, said: str
    ) -> None:
        folder = str(photos(tmp_path / "photos", {"a": 12, "b": 12}))
        made = start(folder, overrides=["optim.steps=319", *self.FROZEN, override])
        assert (made.recipe.optim.lr, made.lr_range, len(least)) == (3e-3, None, 1)
        assert f"lr: 0.003 # {said}" in made.yaml_text

    def test_the_curve_is_kept_beside_the_run_and_comes_out_alike(self, tmp_path: Path) -> None:
        folder = str(photos(tmp_path / "photos", {"a": 12, "b": 12}))
        one, two = (start(folder, overrides=[*self.FROZEN, "optim.steps=320"]) for _ in range(2))
        assert one == two
        start_module.write_start_files(one, tmp_path / "run")
        curve = json.loads((tmp_path / "run" / "lr_range.json").read_text())
        assert curve["chosen"] == one.recipe.optim.lr
        assert len(curve["lr"]) == len(curve["loss"]) == len(curve["smoothed"]) == 16
        assert curve["smoothed"][0] > min(curve["smoothed"])
        # a start that ended here can be begun anew
        start_module.write_start_files(dataclasses.replace(one, lr_range=None), tmp_path / "run")
        assert not (tmp_path / "run" / "lr_range.json").exists()


class TestTarShards:
    ASKED = ("data.image_column=left.png", "model.freeze=none", "optim.lr=1e-3")

    @pytest.fixture
    def source(self, tmp_path: Path, clock: Callable[[float, float], None]) -> str:
        clock(1e-3, 3e-3)
        members: list[Member] = [(f"{n}.left.png", random_png(n)) for n in range(8)]
        members += [(f"{n}.right.png", b"") for n in range(8)]
        members += [(f"{n}.cls", str(n % 2).encode()) for n in range(8)]
        (tmp_path / "two.tar").write_bytes(tar_bytes(members))
        return f"tar:{tmp_path}/two.tar"

    def test_the_images_that_were_asked_for_are_looked_at(self, source: str) -> None:
        made = start(source, overrides=self.ASKED)
        assert made.recipe.data.image_column == "left.png"
        assert "2 classes, images from 4 (0)" in made.yaml_text
        assert made.recipe.data.unreadable == "quarantine"

    def test_streamed_images_cannot_be_left_out(self, source: str) -> None:
        made = start(source, overrides=[*self.ASKED, "data.streaming=true"])
        assert made.recipe.data.unreadable == "stop"
        assert "1 tar shard, streamed" in made.yaml_text


@pytest.mark.parametrize(
    "source, name",
    [
        ("tar:d/set-{000..099}.tar", "set-000..099"),
        ("tar:d/*.tar", "run"),
        ("my photos/", "my photos"),
        ("hub:owner/name", "name"),
    ],
)
def test_a_run_is_named_after_its_source(source: str, name: str) -> None:
    assert default_run_name(source) == name


def test_a_source_is_told_from_a_recipe(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "recipe.yaml").write_text("")
    assert all(is_data_source(text) for text in (str(tmp_path), "hub:owner/name"))
    assert not any(
        is_data_source(text) for text in (str(tmp_path / "run"), "recipes/quickstart.yaml")
    )


class TestCommandLine:
    QUICK = ("model.name=embedded:vit_nano", "model.freeze=backbone", "optim.steps=3")

    def test_one_line_from_photos_to_a_model(
        self,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        monkeypatch.chdir(tmp_path)
        photos(tmp_path / "photos", {"a": 12, "b": 12})
        (tmp_path / "photos" / "a" / "broken.png").write_bytes(b"no image")
        assert cli.main(["train", "photos", *self.QUICK]) == 0
        shown = capsys.readouterr()
        written = (tmp_path / "runs" / "photos" / "start.yaml").read_text()
        assert written in shown.err
        assert "steps: 3 # as asked" in written
        assert "broken.png" in caplog.text
        assert (tmp_path / "runs" / "photos" / "model" / "model.safetensors").is_file()
        with monkeypatch.context() as patch:  # refused before it is looked at
            patch.setattr(start_module, "start", None)
            assert cli.main(["train", "photos", *self.QUICK]) == 5
        assert cli.main(["train", "photos", *self.QUICK, "--resume"]) == 0

    def test_the_recipe_alone_is_written_and_nothing_overwritten(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        photos(tmp_path / "photos", {"a": 12, "b": 12})
        words = ["start", "photos", *self.QUICK, "--out", "my.yaml"]
        assert cli.main(words) == 0
        assert load_recipe("my.yaml").optim.steps == 3
        before = (tmp_path / "my.yaml").read_bytes()
        monkeypatch.setattr(start_module, "start", None)
        assert cli.main(words) == 5
        assert (tmp_path / "my.yaml").read_bytes() == before
        assert cli.main([*words[:-1], "no folder/my.yaml"]) == 5
        assert not (tmp_path / "runs").exists()

    def test_several_processes_want_the_recipe_written_first(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setenv("WORLD_SIZE", "2")
        photos(tmp_path / "photos", {"a": 3, "b": 3})
        assert cli.main(["train", str(tmp_path / "photos"), "--json"]) == 2
        assert json.loads(capsys.readouterr().out)["code"] == "recipe.unsupported"
