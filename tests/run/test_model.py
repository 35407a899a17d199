"""A run whose directory is replaced while its model is loaded."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from demo_server import save_small_model
from refusals import refused

from finetune.inference import Classifier
from finetune.models.build import build_model
from finetune.run import model as run_model
from finetune.run.model import load_run_model

RECIPE = "model: {{name: x}}\ndata: {{source: x, eval: {eval}}}\noptim: {{lr: 0.1, steps: 1}}\n"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A finished run; `another` next to it has other weights and another recipe."""
    for name, transforms in (("run", "resize(32)"), ("another", "resize(40)")):
        folder = tmp_path / name
        save_small_model(folder / "model")
        sha256 = Classifier.load(folder / "model").weights_sha256
        (folder / "run.json").write_text(json.dumps({"status": "done", "model_sha256": sha256}))
        (folder / "recipe.yaml").write_text(RECIPE.format(eval=transforms))
    return tmp_path / "run"


def replace(run: Path) -> None:
    shutil.rmtree(run)
    run.with_name("another").rename(run)


def test_transforms_are_of_the_run_whose_weights_are_loaded(run: Path) -> None:
    built = build_model(str(run))
    replace(run)
    with refused("weights.changed", run, "again"):
        run_model.load_eval_pipeline(run, built)


def test_recipe_is_of_the_run_whose_weights_are_loaded(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def replace_and_load(name: str):
        replace(run)
        return build_model(name)

    assert load_run_model(str(run))[0] is not None
    monkeypatch.setattr(run_model, "load_model", replace_and_load)
    with refused("weights.changed", run, "again"):
        load_run_model(str(run))
