"""Small networks of every architecture for the tests of finetune/models, and folders with them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from finetune.errors import WeightsError
from finetune.models.build import build_model
from finetune.models.head import classifier_names
from finetune.models.save import BuiltModel, save_model
from finetune.models.weights.resolve import resolve_weights

TINY_ARGS = {"embed_dim": 32, "depth": 2, "num_heads": 2, "patch_size": 8}
CLASS_NAMES = ["ant", "bee", "cat", "dog", "elk"]
# timm name, arguments, image size in pixels, another size that it can be resized to
NETWORKS: dict[str, tuple[str, dict[str, Any], int, int]] = {
    "vit": ("vit_tiny_patch16_224", TINY_ARGS, 32, 48),
    "vit_average": ("vit_base_patch16_224", {**TINY_ARGS, "global_pool": "avg"}, 32, 48),
    "distilled": ("deit_tiny_distilled_patch16_224", TINY_ARGS, 32, 48),
    "registers": ("vit_small_patch14_reg4_dinov2", TINY_ARGS, 32, 48),
    "beit": ("beit_base_patch16_224", TINY_ARGS, 32, 48),
    "cait": ("cait_xxs24_224", {**TINY_ARGS, "depth_token_only": 1}, 32, 48),
    "swin": (
        "swin_tiny_patch4_window7_224",
        {"embed_dim": 16, "depths": (1, 1), "num_heads": (1, 2), "window_size": 4},
        32,
        64,
    ),
    "convnext": ("test_convnext", {}, 64, 96),
    "resnet": ("test_resnet", {}, 64, 96),
    "byobnet": ("test_byobnet", {}, 64, 96),
    "representation": (
        "vit_representation",
        {**TINY_ARGS, "representation_size": 12, "img_size": 32},
        32,
        48,
    ),
    "shiftvit": ("shiftvit_tiny_patch4_48", {"embed_dim": 48, "depths": [1, 2]}, 48, 32),
    "conv_classifier": (
        "resnetv2_50",
        {"layers": (1, 1, 1, 1), "channels": (8, 8, 16, 16)},
        64,
        96,
    ),
}


# --- reference layers in numpy ------------------------------------------------------------------

Arrays = Mapping[str, "np.ndarray[Any, Any]"]


def linear(x: np.ndarray, weights: Arrays, name: str) -> np.ndarray:
    matrix = weights[f"{name}.weight"]
    return x @ matrix.reshape(len(matrix), -1).T + weights[f"{name}.bias"]


def layer_norm(x: np.ndarray, weights: Arrays, name: str) -> np.ndarray:
    centered = x - x.mean(-1, keepdims=True)
    scaled = centered / np.sqrt((centered**2).mean(-1, keepdims=True) + 1e-5)
    return scaled * weights[f"{name}.weight"] + weights[f"{name}.bias"]


def gelu(x: np.ndarray) -> np.ndarray:
    return x * 0.5 * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))


# --- small networks ------------------------------------------------------------------------------


def build_network(key: str, **kwargs: Any) -> BuiltModel:
    name, args, size, _ = NETWORKS[key]
    kwargs = {"num_classes": 5, "pretrained": False, "image_size": size, "args": args, **kwargs}
    return build_model(name, **kwargs)


def random_images(size: int | tuple[int, int], count: int = 2) -> Tensor:
    height, width = (size, size) if isinstance(size, int) else size
    return torch.randn(count, 3, height, width)


@torch.no_grad()
def compute_logits(model: nn.Module, images_BCHW: Tensor) -> Tensor:
    return model.eval()(images_BCHW)


def randomize_head(model: nn.Module) -> None:
    """Give the head random weights instead of timm's zeros."""
    for name in classifier_names(model):
        for parameter in model.get_submodule(name).parameters():
            nn.init.normal_(parameter, std=0.5)


def save_network(
    folder: Path, built_model: BuiltModel, class_names: list[str] | None = None
) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    save_model(
        folder,
        built_model,
        built_model.model.state_dict(),
        class_names=CLASS_NAMES if class_names is None else class_names,
        preprocessing=built_model.preprocessing,
    )
    return str(folder)


def save_random_network(tmp_path: Path, key: str) -> str:
    """Save one of NETWORKS with a random head. Returns: the folder."""
    built_model = build_network(key)
    randomize_head(built_model.model)
    return save_network(tmp_path / key, built_model)


def forget_checksums(folder: Path) -> Path:
    """Remove the checksums of a model folder and of its run, so that a test may change files."""
    for path, keys in (
        (folder / "config.json", ["checksums"]),
        (
            folder.parent / "run.json",
            [f"{name}_sha256" for name in ("model", "results", "metrics", "training_images")],
        ),
    ):
        if path.is_file():
            content = json.loads(path.read_text())
            path.write_text(json.dumps({k: v for k, v in content.items() if k not in keys}))
    return folder


def config_without_checksums(folder: Path) -> dict[str, Any]:
    """Return config.json of a model folder without the checksums, which depend on run times."""
    content: dict[str, Any] = json.loads((folder / "config.json").read_text())
    del content["checksums"]
    return content


SMALL_VIT_ARGS = {"img_size": 32, "patch_size": 8, "embed_dim": 16, "depth": 1, "num_heads": 2}


def write_timm_folder(folder: Path) -> Path:
    """Write a network with three classes in timm's hub format, without timm's own writer."""
    folder.mkdir()
    network = timm.create_model("vit_tiny_patch16_224", num_classes=3, **SMALL_VIT_ARGS)
    save_file(network.state_dict(), folder / "model.safetensors")
    config: dict[str, Any] = {
        "architecture": "vit_tiny_patch16_224",
        "num_classes": 3,
        "label_names": ["ant", "bee", "cat"],
        "model_args": SMALL_VIT_ARGS,
        "pretrained_cfg": {
            "num_classes": 3,
            "input_size": [3, 32, 32],
            "fixed_input_size": True,
            "mean": [0.1, 0.2, 0.3],
            "std": [0.4, 0.5, 0.6],
            "classifier": "head",
            "first_conv": "patch_embed.proj",
            "license": "mit",
        },
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def weights_error_message(name: object, **kwargs: Any) -> str:
    """Load weights that must be refused. Returns: the error message, one line."""
    with pytest.raises(WeightsError) as caught:
        resolve_weights(str(name), **kwargs)
    text = str(caught.value)
    assert "\n" not in text
    return text
