"""A recipe for data that has none: what is chosen, from what, and that it trains."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from refusals import refused

from finetune.cli import main as cli
from finetune.commands import start as start_module
from finetune.commands.start import Facts, start
from finetune.recipe.load import load_recipe, parse_recipe
from finetune.recipe.local import names_images

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

        monkeypatch.setattr(start_module, "_seconds", measured)

    return seconds


@pytest.fixture
def no_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start_module, "_score", lambda recipe: float(recipe.model.freeze == "none"))


def facts(train: int, side: int = 32, classes: int = 4) -> Facts:
    per_class = np.full(classes, train // classes)
    return Facts({"train": train}, train, per_class, side)


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
        candidate, is_frozen, _ = start_module._network(facts(1000), CPU, None)
        assert (candidate.name, is_frozen) == expected

    def test_small_sets_are_seen_more_often(self) -> None:
        epochs = [start_module._epochs(images) for images in (50, 500, 3000, 10_000, 100_000)]
        assert epochs == sorted(epochs, reverse=True)
        assert (epochs[0], epochs[-1]) == (40, 3)

    @pytest.mark.parametrize("side, size", [(8, 32), (32, 32), (50, 48), (400, 64)])
    def test_the_size_follows_the_images(
        self, side: int, size: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(start_module.importlib.util, "find_spec", lambda name: None)
        assert {c.size for c in start_module._candidates(side, CPU)} == {size}

    def test_weights_of_nobody_are_refused(self, tmp_path: Path) -> None:
        folder = str(photos(tmp_path / "photos", {"a": 3, "b": 3}))
        with refused("weights.unknown_name", "nope"):
            start(folder, overrides=["model.name=vit_base_patch16_224.nope"], notice=print)

    def test_nothing_is_mirrored_unasked(self, tmp_path: Path, no_trial: None) -> None:
        made = start(str(photos(tmp_path / "photos", {"a": 12, "b": 12})), notice=print)
        assert "flip" not in (made.recipe.data.train or "")
        assert "add '| flip'" in made.text


class TestRecipe:
    def test_every_choice_is_in_the_text_and_overrides_win(
        self, tmp_path: Path, no_trial: None, clock: Callable[[float, float], None]
    ) -> None:
        clock(1e-4, 3e-4)
        folder = photos(tmp_path / "my photos # 1", {"a: b": 12, "c": 30})
        made = start(str(folder), overrides=["optim.epochs=2"], notice=print)
        assert made.recipe.data.source == f"folder:{folder}"
        assert made.recipe.optim.epochs == 2
        assert "epochs: 2 # as asked" in made.text
        assert parse_recipe(made.text) == made.recipe
        assert made.recipe.data.unreadable == "quarantine"
        assert "2 classes, from 12 images (a: b) to 30 (c)" in made.text

    def test_a_trial_decides_where_fine_tuning_may_not_pay(
        self,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        clock: Callable[[float, float], None],
    ) -> None:
        clock(1e-4, 3e-4)
        scores = {"backbone": 0.9, "none": 0.8}
        monkeypatch.setattr(start_module, "_score", lambda recipe: scores[recipe.model.freeze])
        folder = str(photos(tmp_path / "photos", {"a": 12, "b": 12}))
        made = start(folder, notice=print)
        assert (made.recipe.model.freeze, made.recipe.data.train) == ("backbone", "resize")
        assert "0.900 with the backbone frozen, 0.800 without" in made.text
        scores["none"] = 0.95
        assert start(folder, notice=print).recipe.model.freeze == "none"

    def test_images_that_cannot_be_read_are_refused_when_all_are(self, tmp_path: Path) -> None:
        for name in ("a", "b"):
            (tmp_path / "photos" / name).mkdir(parents=True)
            (tmp_path / "photos" / name / "1.png").write_bytes(b"no image")
        with refused("data.damaged", "finetune data scan"):
            start(str(tmp_path / "photos"), notice=print)


def test_a_source_is_told_from_a_recipe(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "recipe.yaml").write_text("")
    assert all(names_images(text) for text in (str(tmp_path), "hub:owner/name"))
    assert not any(
        names_images(text) for text in (str(tmp_path / "run"), "recipes/quickstart.yaml")
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
        assert cli.main(words) == 5
        assert (tmp_path / "my.yaml").read_bytes() == before
        assert not (tmp_path / "runs").exists()

    def test_several_processes_want_the_recipe_written_first(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setenv("WORLD_SIZE", "2")
        photos(tmp_path / "photos", {"a": 3, "b": 3})
        assert cli.main(["train", str(tmp_path / "photos"), "--json"]) == 2
        assert json.loads(capsys.readouterr().out)["code"] == "recipe.unsupported"
