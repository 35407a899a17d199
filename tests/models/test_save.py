"""models/save.py: saved folders load in plain timm, with equal logits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from networks import (
    CLASS_NAMES,
    NETWORKS,
    TINY_ARGS,
    build_network,
    compute_logits,
    random_images,
    save_random_network,
)
from safetensors.torch import load_file

from finetune.models.build import build_model
from finetune.models.save import BuiltModel, save_model
from finetune.transforms.preprocessing import Preprocessing


def save_with_defaults(
    folder: Path, built: BuiltModel, state: dict[str, Any], **settings: Any
) -> None:
    """Call save_model() with matching class names and preprocessing."""
    settings = {"class_names": CLASS_NAMES, "preprocessing": built.preprocessing, **settings}
    save_model(folder, built, state, **settings)


class TestSaveModel:
    @pytest.mark.parametrize("key", NETWORKS)
    def test_plain_timm_gives_equal_logits(self, key: str, tmp_path: Path) -> None:
        folder = save_random_network(tmp_path, key)
        x = random_images(NETWORKS[key][2])
        timm_model = timm.create_model(f"local-dir:{folder}", pretrained=True)
        ours = build_model(folder)
        assert compute_logits(timm_model, x).any()
        assert torch.equal(compute_logits(timm_model, x), compute_logits(ours.model, x))
        assert ours.class_names == CLASS_NAMES

    def test_config(self, tmp_path: Path) -> None:
        built = build_network("vit", dropout=0.1, attention_dropout=0.2, drop_path=0.3)
        mean, std = (0.1, 0.2, 0.3), (0.4, 0.5, 0.6)
        preprocessing = Preprocessing((32, 32), mean, std, "bilinear", 0.95, "squash")
        save_with_defaults(tmp_path, built, built.model.state_dict(), preprocessing=preprocessing)
        config = json.loads((tmp_path / "config.json").read_text())
        assert config["architecture"] == "vit_tiny_patch16_224"
        assert config["num_classes"] == 5
        assert config["label_names"] == CLASS_NAMES
        assert config["model_args"] == {**TINY_ARGS, "img_size": [32, 32]}
        assert build_model(str(tmp_path)).preprocessing == preprocessing
        timm_model = timm.create_model(f"local-dir:{tmp_path}", pretrained=True)
        data = timm.data.resolve_model_data_config(timm_model)
        assert tuple(data["mean"]) == mean
        assert tuple(data["std"]) == std
        assert tuple(data["input_size"]) == (3, 32, 32)
        assert data["interpolation"] == "bilinear"
        assert data["crop_pct"] == 0.95
        assert data["crop_mode"] == "squash"

    def test_weights_are_exact_and_contiguous(self, tmp_path: Path) -> None:
        built = build_network("vit")
        state = built.model.state_dict()
        state["blocks.0.attn.qkv.weight"] = torch.randn(32, 96).T
        state["blocks.1.norm1.bias"] = state["blocks.1.norm1.weight"]  # one tensor under two names
        save_with_defaults(tmp_path, built, state)
        loaded = load_file(tmp_path / "model.safetensors")
        assert loaded.keys() == state.keys()
        assert all(torch.equal(loaded[name], state[name]) for name in state)

    def test_channels_last_writes_the_same_file(self, tmp_path: Path) -> None:
        files, built = [], build_network("resnet")
        for name, memory_format in (("a", torch.contiguous_format), ("b", torch.channels_last)):
            state = built.model.to(memory_format=memory_format).state_dict()
            (tmp_path / name).mkdir()
            save_with_defaults(tmp_path / name, built, state)
            files.append((tmp_path / name / "model.safetensors").read_bytes())
        assert not state["conv1.0.weight"].is_contiguous()
        assert files[0] == files[1]

    def test_random_weights_have_no_license(self, tmp_path: Path) -> None:
        assert build_model(save_random_network(tmp_path, "vit")).provenance["license"] is None


class TestTemperature:
    @pytest.fixture
    def uncalibrated_folder(self, tmp_path: Path) -> Path:
        """A saved network without a temperature."""
        return Path(save_random_network(tmp_path, "vit"))

    @pytest.fixture
    def folder(self, uncalibrated_folder: Path, tmp_path: Path) -> Path:
        """The same network with a temperature."""
        built = build_model(str(uncalibrated_folder))
        folder = tmp_path / "calibrated"
        folder.mkdir()
        save_with_defaults(folder, built, built.model.state_dict(), temperature=1.5)
        return folder

    def test_is_saved_and_dropped_with_the_head(
        self, folder: Path, uncalibrated_folder: Path
    ) -> None:
        config = json.loads((folder / "config.json").read_text())
        assert config["calibration"] == {"temperature": 1.5, "split": "val"}
        assert build_model(str(folder)).temperature == 1.5
        assert build_model(str(folder), num_classes=5).temperature is None  # a new head
        assert build_model(str(folder), pretrained=False).temperature is None  # random weights
        uncalibrated_config = json.loads((uncalibrated_folder / "config.json").read_text())
        assert "calibration" not in uncalibrated_config
        assert build_model(str(uncalibrated_folder)).temperature is None

    def test_plain_timm_gives_the_same_logits(
        self, folder: Path, uncalibrated_folder: Path
    ) -> None:
        x = random_images(NETWORKS["vit"][2])
        uncalibrated = timm.create_model(f"local-dir:{uncalibrated_folder}", pretrained=True)
        calibrated = timm.create_model(f"local-dir:{folder}", pretrained=True)
        assert compute_logits(uncalibrated, x).any()
        assert torch.equal(compute_logits(uncalibrated, x), compute_logits(calibrated, x))

    def test_transformers_gives_the_same_logits(self, folder: Path) -> None:
        transformers = pytest.importorskip("transformers", reason="transformers is not installed")
        x = random_images(NETWORKS["vit"][2])
        timm_model = timm.create_model(f"local-dir:{folder}", pretrained=True)
        transformers_model = transformers.AutoModelForImageClassification.from_pretrained(
            str(folder)
        ).eval()
        with torch.no_grad():
            logits_BK = transformers_model(pixel_values=x).logits
        assert torch.allclose(logits_BK, compute_logits(timm_model, x), rtol=0, atol=1e-6)
        assert transformers_model.config.id2label == dict(enumerate(CLASS_NAMES))
