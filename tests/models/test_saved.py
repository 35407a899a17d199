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
from refusals import refused
from safetensors.torch import load_file

from finetune.models.build import build_model
from finetune.models.save import BuiltModel, save_model
from finetune.transforms.preprocessing import Preprocessing


def save_as(folder: Path, made: BuiltModel, state: dict[str, Any], **settings: Any) -> None:
    """save_model() with names and preprocessing that fit."""
    settings = {"class_names": CLASS_NAMES, "preprocessing": made.preprocessing, **settings}
    save_model(folder, made, state, **settings)


class TestSaving:
    @pytest.mark.parametrize("key", NETWORKS)
    def test_plain_timm_gives_equal_logits(self, key: str, tmp_path: Path) -> None:
        folder = save_random_network(tmp_path, key)
        x = random_images(NETWORKS[key][2])
        plain = timm.create_model(f"local-dir:{folder}", pretrained=True)
        ours = build_model(folder)
        assert compute_logits(plain, x).any()
        assert torch.equal(compute_logits(plain, x), compute_logits(ours.model, x))
        assert ours.class_names == CLASS_NAMES

    def test_config(self, tmp_path: Path) -> None:
        made = build_network("vit", dropout=0.1, attention_dropout=0.2, drop_path=0.3)
        mean, std = (0.1, 0.2, 0.3), (0.4, 0.5, 0.6)
        preprocessing = Preprocessing((32, 32), mean, std, "bilinear", 0.95, "squash")
        save_as(tmp_path, made, made.model.state_dict(), preprocessing=preprocessing)
        config = json.loads((tmp_path / "config.json").read_text())
        assert config["architecture"] == "vit_tiny_patch16_224"
        assert config["num_classes"] == 5
        assert config["label_names"] == CLASS_NAMES
        assert config["model_args"] == {**TINY_ARGS, "img_size": [32, 32]}
        assert build_model(str(tmp_path)).preprocessing == preprocessing
        plain = timm.create_model(f"local-dir:{tmp_path}", pretrained=True)
        data = timm.data.resolve_model_data_config(plain)
        assert tuple(data["mean"]) == mean
        assert tuple(data["std"]) == std
        assert tuple(data["input_size"]) == (3, 32, 32)
        assert data["interpolation"] == "bilinear"
        assert data["crop_pct"] == 0.95
        assert data["crop_mode"] == "squash"

    def test_weights_are_exact_and_contiguous(self, tmp_path: Path) -> None:
        made = build_network("vit")
        state = made.model.state_dict()
        state["blocks.0.attn.qkv.weight"] = torch.randn(32, 96).T
        state["blocks.1.norm1.bias"] = state["blocks.1.norm1.weight"]  # one tensor, two names
        save_as(tmp_path, made, state)
        loaded = load_file(tmp_path / "model.safetensors")
        assert loaded.keys() == state.keys()
        assert all(torch.equal(loaded[k], state[k]) for k in state)

    def test_channels_last_makes_the_same_file(self, tmp_path: Path) -> None:
        files, made = [], build_network("resnet")
        for name, memory_format in (("a", torch.contiguous_format), ("b", torch.channels_last)):
            state = made.model.to(memory_format=memory_format).state_dict()
            (tmp_path / name).mkdir()
            save_as(tmp_path / name, made, state)
            files.append((tmp_path / name / "model.safetensors").read_bytes())
        assert not state["conv1.0.weight"].is_contiguous()
        assert files[0] == files[1]

    @pytest.mark.parametrize(
        "settings, named",
        [
            ({"prefix": "module."}, ["module.cls_token"]),
            ({"class_names": CLASS_NAMES[:4]}, ["4 class names", "5 classes"]),
            ({"temperature": 0.0}, ["temperature 0.0"]),
            ({"temperature": -1.0}, ["temperature -1.0"]),
            ({"temperature": float("nan")}, ["temperature nan"]),
            ({"temperature": float("inf")}, ["temperature inf"]),
        ],
    )
    def test_what_does_not_belong_is_refused(
        self, tmp_path: Path, settings: dict[str, Any], named: list[str]
    ) -> None:
        made = build_network("vit")
        prefix = settings.get("prefix", "")
        state = {f"{prefix}{k}": v for k, v in made.model.state_dict().items()}
        settings = {k: v for k, v in settings.items() if k != "prefix"}
        with refused("internal", tmp_path, *named):
            save_as(tmp_path, made, state, **settings)
        assert not list(tmp_path.iterdir())

    def test_no_license_is_claimed_for_weights_from_scratch(self, tmp_path: Path) -> None:
        assert build_model(save_random_network(tmp_path, "vit")).provenance["license"] is None


class TestTemperature:
    @pytest.fixture
    def first(self, tmp_path: Path) -> Path:
        """A saved network without a temperature."""
        return Path(save_random_network(tmp_path, "vit"))

    @pytest.fixture
    def folder(self, first: Path, tmp_path: Path) -> Path:
        """The same with one."""
        made = build_model(str(first))
        folder = tmp_path / "calibrated"
        folder.mkdir()
        save_as(folder, made, made.model.state_dict(), temperature=1.5)
        return folder

    def test_it_is_kept_with_the_head(self, folder: Path, first: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        assert config["calibration"] == {"temperature": 1.5, "split": "val"}
        assert build_model(str(folder)).temperature == 1.5
        assert build_model(str(folder), num_classes=5).temperature is None  # another head
        assert build_model(str(folder), pretrained=False).temperature is None  # other weights
        without = json.loads((first / "config.json").read_text())
        assert "calibration" not in without
        assert build_model(str(first)).temperature is None

    def test_plain_timm_gives_the_same_logits(self, folder: Path, first: Path) -> None:
        x = random_images(NETWORKS["vit"][2])
        before = timm.create_model(f"local-dir:{first}", pretrained=True)
        after = timm.create_model(f"local-dir:{folder}", pretrained=True)
        assert compute_logits(before, x).any()
        assert torch.equal(compute_logits(before, x), compute_logits(after, x))

    def test_transformers_gives_the_same_logits(self, folder: Path) -> None:
        transformers = pytest.importorskip(
            "transformers", reason="transformers is not installed: its side is not tested"
        )
        x = random_images(NETWORKS["vit"][2])
        plain = timm.create_model(f"local-dir:{folder}", pretrained=True)
        theirs = transformers.AutoModelForImageClassification.from_pretrained(str(folder)).eval()
        with torch.no_grad():
            logits_BK = theirs(pixel_values=x).logits
        assert torch.allclose(logits_BK, compute_logits(plain, x), rtol=0, atol=1e-6)
        assert theirs.config.id2label == dict(enumerate(CLASS_NAMES))
