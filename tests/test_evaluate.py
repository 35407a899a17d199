"""Measuring a saved model: the run's own figures, and no figure where the classes differ."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from finetune.engine import train
from finetune.errors import DataError, RecipeError, SetupError
from finetune.evaluate import evaluate_model
from finetune.recipe import parse_recipe

RECIPE = """
model: {name: vit_tiny_patch16_224, pretrained: false, image_size: 16,
        args: {patch_size: 4, embed_dim: 32, depth: 1, num_heads: 2}}
data: {source: "embedded:digits", eval: "resize(18) | center_crop"}
optim: {lr: 3e-3, steps: 6}
run: {precision: fp32}
"""


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> tuple[Path, dict[str, Any]]:
    out = tmp_path_factory.mktemp("evaluate") / "run"
    return out, train(parse_recipe(RECIPE), out)


@pytest.mark.parametrize("split", ["val", "test"])
def test_the_runs_figures_are_repeated(finished, split: str) -> None:
    out, results = finished
    measured = evaluate_model(str(out), split=split)
    assert measured["confusion"] == results[split]["confusion"]
    assert measured["loss"] == pytest.approx(results[split]["loss"], abs=1e-6)
    assert (measured["split"], measured["data"]) == (split, "embedded:digits")


def test_the_model_folder_alone_gives_the_same_pixels(finished) -> None:
    out, results = finished
    measured = evaluate_model(str(out / "model"), data="embedded:digits")
    assert measured["confusion"] == results["test"]["confusion"]


def test_what_the_training_was_launched_with_does_not_bind_evaluation(finished) -> None:
    out, _ = finished
    recorded = out / "recipe.yaml"
    text = recorded.read_text()
    try:
        recorded.write_text(text.replace("num_processes: null", "num_processes: 8"))
        assert "num_processes: 8" in recorded.read_text()
        evaluate_model(str(out), split="val")
    except SetupError as error:  # pragma: no cover
        pytest.fail(str(error))
    finally:
        recorded.write_text(text)


def test_wrong_splits_data_and_classes_are_refused(finished, image_folder: Path) -> None:
    out, _ = finished
    with pytest.raises(DataError, match="has no split 'tset'"):
        evaluate_model(str(out), split="tset")
    with pytest.raises(DataError, match="its 3 classes are not those of"):
        evaluate_model(str(out), data=f"folder:{image_folder}")
    with pytest.raises(RecipeError, match="--data"):
        evaluate_model(str(out / "model"))
