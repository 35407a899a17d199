"""Comparing two models on the same images: flips, slices, limits, and refused pairs."""

from __future__ import annotations

import html
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from networks import forget_checksums
from PIL import Image
from ranks import run_rank_command, run_two_ranks
from recipe_texts import tiny_recipe_text
from refusals import refused
from safetensors.torch import load_file, save_file

from finetune.cli.main import main
from finetune.commands.compare import compare_models, format_comparison
from finetune.commands.evaluate import evaluate_model
from finetune.evaluation.paired import parse_fail_condition
from finetune.recipe.load import parse_recipe
from finetune.training.train import train

pytestmark = pytest.mark.usefixtures("no_plots")

KEYS = {
    *("a", "b", "data", "split", "data_changed", "images", "class_names", "top1", "top5", "loss"),
    *("negative_flip_rate", "both_wrong", "flips", "slices", "small_slices", "fail_if"),
}


SMALL = ("data.num_test=170",)


def train_run(out: Path, *overrides: str, data: str = "eval: resize") -> dict[str, Any]:
    text = tiny_recipe_text(data, optim="lr: 3e-3, steps: 12")
    return train(parse_recipe(text, overrides=overrides), out)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Two runs of one recipe with different seeds, on digits."""
    top = tmp_path_factory.mktemp("compare")
    for seed in (0, 1):
        train_run(top / f"s{seed}", f"run.seed={seed}", "data.split_seed=0", *SMALL)
    return str(top / "s0"), str(top / "s1")


def compare(*arguments: Any, **options: Any) -> dict[str, Any]:
    result, error = compare_models(*map(str, arguments), **options)
    assert error is None
    return result


class TestResult:
    def test_both_models_have_the_metrics_of_eval(self, runs: tuple[str, str]) -> None:
        result = compare(*runs)
        evaluated = [evaluate_model(run) for run in runs]
        for key in ("top1", "top5", "loss"):
            expected = [metrics[key] for metrics in evaluated]
            assert [result[key]["a"], result[key]["b"]] == pytest.approx(expected, abs=1e-9)
        assert (result["images"], result["split"]) == (evaluated[0]["examples"], "test")
        assert result["data"] == "embedded:digits"
        assert set(result) == KEYS

    def test_flips_are_the_images_that_one_model_has_right(self, runs: tuple[str, str]) -> None:
        result = compare(*runs)
        flips, top1 = result["flips"], result["top1"]
        fixed = [flip for flip in flips if flip["fixed"]]
        broken = [flip for flip in flips if not flip["fixed"]]
        assert (len(fixed), len(broken)) == (top1["fixed"], top1["broken"])
        assert min(len(fixed), len(broken)) > 0
        assert top1["difference"] == pytest.approx((len(fixed) - len(broken)) / result["images"])
        assert result["negative_flip_rate"] == pytest.approx(len(broken) / result["images"])
        assert all(flip["b"] == flip["label"] != flip["a"] for flip in fixed)
        assert all(flip["a"] == flip["label"] != flip["b"] for flip in broken)
        sure = [flip["confidence_b"] for flip in flips]
        assert sure == sorted(sure, reverse=True)

    def test_swapping_the_models_swaps_everything(self, runs: tuple[str, str]) -> None:
        forward, backward = compare(*runs), compare(*reversed(runs))
        assert forward["top1"]["difference"] == -backward["top1"]["difference"]
        assert forward["top1"]["p_value"] == backward["top1"]["p_value"]
        assert {flip["index"] for flip in forward["flips"]} == {
            flip["index"] for flip in backward["flips"]
        }

    def test_costs(self, runs: tuple[str, str], tmp_path: Path) -> None:
        train_run(tmp_path / "wide", "model.image_size=24", *SMALL)
        result = compare(runs[0], tmp_path / "wide")
        small, large = result["a"], result["b"]
        assert (small["image_size"], large["image_size"]) == ([16, 16], [24, 24])
        assert 0 < small["parameters"] < large["parameters"]  # more position embeddings
        assert small["size_bytes"] == 4 * small["parameters"]
        assert small["latency_ms"] > 0

    def test_text(self, runs: tuple[str, str]) -> None:
        result = compare(*runs)
        text = format_comparison(result, out=None)
        for part in (*runs, "'test' of embedded:digits", "fixed by B", "p =", "class ", "top5"):
            assert part in text

    def test_run_on_cached_features(self, runs: tuple[str, str], tmp_path: Path) -> None:
        """A run whose backbone is frozen reads features; the other one reads images."""
        train_run(tmp_path / "frozen", "model.freeze=backbone", "data.train=resize", *SMALL)
        result = compare(runs[0], tmp_path / "frozen")
        expected = evaluate_model(str(tmp_path / "frozen"))["top1"]
        assert result["top1"]["b"] == pytest.approx(expected)

    def test_two_processes_give_the_same_result(self, runs: tuple[str, str]) -> None:
        expected = compare(*runs)
        finished = run_two_ranks(run_rank_command, "compare", *runs, "--json")
        result = json.loads(finished.stdout)
        assert result["top1"] == expected["top1"]
        assert [flip["index"] for flip in result["flips"]] == [
            flip["index"] for flip in expected["flips"]
        ]


class TestClasses:
    def permuted_copy(self, run: str, folder: Path) -> Path:
        """Copy a model with its classes in reverse order; it gives the same answers."""
        shutil.copytree(Path(run) / "model", folder)
        state = load_file(folder / "model.safetensors")
        for name in ("head.weight", "head.bias"):
            state[name] = state[name].flip(0).contiguous()
        save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
        config = json.loads((folder / "config.json").read_text())
        config["label_names"] = config["label_names"][::-1]
        (folder / "config.json").write_text(json.dumps(config))
        forget_checksums(folder)
        return folder

    def test_other_order_is_matched_by_name(
        self, runs: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        copy = self.permuted_copy(runs[0], tmp_path / "reversed")
        result = compare(runs[0], copy)
        assert result["flips"] == []
        assert result["top1"]["p_value"] == 1
        assert result["loss"]["difference"] == pytest.approx(0, abs=1e-6)
        expected = [(f["index"], f["a"], f["b"]) for f in compare(runs[1], runs[0])["flips"]]
        renamed = [(f["index"], f["a"], f["b"]) for f in compare(runs[1], copy)["flips"]]
        assert sorted(renamed) == sorted(expected)

    def test_copies_of_one_model_are_named(
        self, runs: tuple[str, str], capsys: pytest.CaptureFixture[str]
    ) -> None:
        compare(runs[0], Path(runs[0]) / "model")
        assert "copies of one model?" in capsys.readouterr().err

    def test_other_classes_are_refused(self, runs: tuple[str, str], tmp_path: Path) -> None:
        copy = self.permuted_copy(runs[0], tmp_path / "renamed")
        config = json.loads((copy / "config.json").read_text())
        config["label_names"][0] = "ten"
        (copy / "config.json").write_text(json.dumps(config))
        with refused("recipe.conflict", "renamed has ten (1)", f"only {runs[0]} has 9 (1)"):
            compare(runs[0], copy)

    def test_multilabel_models_are_refused(self, runs: tuple[str, str], tmp_path: Path) -> None:
        source = "data.source=embedded:digit_pairs"
        data = "eval: resize, train: resize, task: multilabel, num_train: 64"
        train_run(tmp_path / "pairs", source, data=data)
        with refused("recipe.conflict", "pairs: a multi-label model", "finetune eval"):
            compare(runs[0], tmp_path / "pairs")


class TestRefused:
    def test_one_model_twice(self, runs: tuple[str, str]) -> None:
        with refused("recipe.conflict", "same model", runs[0]):
            compare(runs[0], f"{runs[1]}/../s0/")

    def test_missing_model(self, runs: tuple[str, str], tmp_path: Path) -> None:
        for pair in ((tmp_path / "gone", runs[0]), (runs[0], tmp_path / "gone")):
            with refused("weights.not_found", "gone"):
                compare(*pair)

    def test_unknown_data_of_a_model_folder(self, runs: tuple[str, str]) -> None:
        with refused("recipe.missing_option", "--data"):
            compare(f"{runs[0]}/model", runs[1])
        assert compare(f"{runs[0]}/model", runs[1], data="embedded:digits")["split"] == "test"

    def test_split_with_a_typo(self, runs: tuple[str, str]) -> None:
        with refused("recipe.unknown_name", "--split", "'test'"):
            compare(*runs, split="tset")


def write_photos(root: Path, *, num_images: int) -> None:
    """Write images of two classes in three folders each, half of them dark and small."""
    rng = np.random.default_rng(0)
    for split in ("train", "test"):
        for channel, name in ((0, "red"), (1, "green")):
            for number in range(num_images):
                folder = root / split / name / f"camera{number % 3}"
                folder.mkdir(parents=True, exist_ok=True)
                is_dark = number % 2
                side = 20 if is_dark else 40
                pixels = rng.integers(0, 40 if is_dark else 150, (side, side, 3), dtype=np.uint8)
                pixels[..., channel] += 60
                Image.fromarray(pixels).save(folder / f"{number}.png")


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, str]:
    """A folder of images, and two runs on them."""
    top = tmp_path_factory.mktemp("photos")
    write_photos(top / "photos", num_images=30)
    for seed in (0, 1):
        train_run(top / f"s{seed}", f"data.source=folder:{top / 'photos'}", f"run.seed={seed}")
    return top, str(top / "s0"), str(top / "s1")


class TestPhotos:
    def test_slices(self, photos: tuple[Path, str, str]) -> None:
        slices = compare(*photos[1:])["slices"]
        names = {
            kind: {row["name"] for row in slices if row["kind"] == kind}
            for kind in ("class", "folder", "size", "brightness")
        }
        assert names["class"] == {"red", "green"}
        assert names["size"] == {"shorter side 20–20 px", "shorter side 40–40 px"}
        assert names["folder"] == {
            f"test/{color}/camera{k}" for color in ("red", "green") for k in range(3)
        }
        brightness = [row for row in slices if row["kind"] == "brightness"]
        assert sum(row["images"] for row in brightness) == 60
        assert {row["images"] for row in slices if row["kind"] == "size"} == {30}

    def test_other_runs_own_split_is_checked(
        self, photos: tuple[Path, str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """The validation images of A are training images of B, which has another split seed."""
        result = compare(*photos[1:], split="val", out=tmp_path)
        err = capsys.readouterr().err
        [leak] = result["b"]["leakage"]
        assert (result["a"]["leakage"], result["b"]["leakage"]) == ([], [leak])
        assert json.loads((tmp_path / "compare.json").read_text())["b"]["leakage"] == [leak]
        page = html.unescape((tmp_path / "compare.html").read_text())
        assert f"B: {leak}" in page
        assert f"A: {leak}" not in page
        assert "have changed since" not in page
        assert f"{photos[2]}: split 'val': " in err
        assert "are copies of train images" in err
        assert f"{photos[1]}: " not in err
        assert result["images"] < 30

    def test_copies_of_training_images_are_noticed_in_other_data(
        self, photos: tuple[Path, str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """A folder of classes is one split, named train."""
        copy = f"folder:{shutil.copytree(photos[0] / 'photos' / 'train', tmp_path / 'copy')}"
        compare(*photos[1:], data=copy)
        err = capsys.readouterr().err
        assert [f"{run}: split 'train': " in err for run in photos[1:]] == [True, True]
        evaluate_model(photos[1], data=copy)
        assert "are copies of train images" in capsys.readouterr().err
        evaluate_model(photos[1])
        evaluate_model(photos[1], split="train")
        assert "copies of" not in capsys.readouterr().err
        moved = tmp_path / "moved"
        shutil.copytree(photos[1], moved)
        recipe = (moved / "recipe.yaml").read_text()
        (moved / "recipe.yaml").write_text(recipe.replace(str(photos[0]), str(tmp_path / "gone")))
        evaluate_model(str(moved), data=copy)
        assert f"{moved}: its training images cannot be opened here" in capsys.readouterr().err

    def test_three_images(self, photos: tuple[Path, str, str], tmp_path: Path) -> None:
        for number, name in enumerate(("red", "red", "green")):
            (tmp_path / "few" / name).mkdir(parents=True, exist_ok=True)
            folder = photos[0] / "photos" / "test" / name / "camera0"
            shutil.copy(folder / f"{3 * number}.png", tmp_path / "few" / name)
        result = compare(*photos[1:], data=f"folder:{tmp_path / 'few'}", out=str(tmp_path / "out"))
        assert (result["images"], result["slices"]) == (3, [])
        assert result["small_slices"] >= 2
        text = format_comparison(result, out=None)
        assert "too few images" in text
        assert "slices of fewer than 10 images" in text
        assert "too few images" in (tmp_path / "out" / "compare.html").read_text()

    def test_decisions_on_test_images_are_said(
        self, photos: tuple[Path, str, str], tmp_path: Path
    ) -> None:
        file = tmp_path / "decisions.csv"
        file.write_text("action,path,label\ndrop,test/red/camera0/0.png,\n")
        data = [f"data.source=folder:{photos[0] / 'photos'}", f"data.decisions={file}"]
        train_run(tmp_path / "run", *data, "data.decisions_on_test=true")
        result = compare(str(tmp_path / "run"), photos[1], out=str(tmp_path / "out"))
        assert (result["images"], result["decisions"]["dropped"]) == (59, 1)
        assert "59 images, after decisions (1 dropped)" in format_comparison(result, out=None)
        assert "after decisions (1 dropped)" in (tmp_path / "out" / "compare.html").read_text()

    def test_unreadable_image(self, photos: tuple[Path, str, str], tmp_path: Path) -> None:
        copy = tmp_path / "copy"
        shutil.copytree(photos[0] / "photos", copy)
        (copy / "test" / "red" / "camera0" / "broken.png").write_bytes(b"no image")
        with refused("data.unreadable", "broken.png"):
            compare(*photos[1:], data=f"folder:{copy}")


class TestOutput:
    def test_files(self, runs: tuple[str, str], tmp_path: Path) -> None:
        out = tmp_path / "out"
        result = compare(*runs, out=str(out))
        assert json.loads((out / "compare.json").read_text()) == json.loads(json.dumps(result))
        page = (out / "compare.html").read_text()
        num_pictures = sum(min(result["top1"][key], 24) for key in ("fixed", "broken"))
        assert page.count("<img ") == page.count('src="data:image/') == num_pictures
        assert "http" not in page.replace("http-equiv", "")
        for text in ("Broken by B", "Fixed by B", runs[0], runs[1], "embedded:digits"):
            assert text in page

    def test_exceeded_limit_has_an_exit_code_of_its_own(
        self, runs: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        top1 = compare(*runs)["top1"]
        better, worse = runs if top1["difference"] < 0 else runs[::-1]
        points = 100 * abs(top1["difference"])
        assert points > 0
        capsys.readouterr()
        command = ["compare", better, worse, "--out", str(tmp_path / "o"), "--json", "--fail-if"]
        assert main([*command, f"top1 drops {points / 2:.6f}"]) == 8
        captured = capsys.readouterr()
        outcome = json.loads(captured.out)["fail_if"]
        assert outcome["failed"]
        assert outcome["message"] in captured.err
        for text in (worse, f"drops by {points:.4g} points", "p ", "images)", "compare.html"):
            assert text in outcome["message"]
        assert "--fail-if accepts" in (tmp_path / "o" / "compare.html").read_text()
        assert main([*command, f"top1 drops {points + 0.01:.6f}"]) == 0
        assert json.loads(capsys.readouterr().out)["fail_if"] == {
            "condition": f"top1 drops {points + 0.01:.6f}", "failed": False, "message": "",
        }  # fmt: skip
        assert main(["compare", worse, better, "--fail-if", "top1 drops 0"]) == 0

    def test_top5_of_few_classes_is_refused(self, photos: tuple[Path, str, str]) -> None:
        with refused("recipe.wrong_value", "--fail-if", "top5"):
            compare_models(*photos[1:], fail_if=parse_fail_condition("top5 drops 1"))
