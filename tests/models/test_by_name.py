"""Every supported family by its timm name: loaded, resized and trained for two steps.

Other sizes of a family, such as deit_base and tnt_b, differ only in the arguments given here.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from forked_runs import read_train_losses
from networks import (
    CLASS_NAMES,
    TINY_ARGS,
    compute_logits,
    random_images,
    randomize_head,
    save_network,
)

from finetune.models.build import build_model
from finetune.models.summary import count_parameters, summarize_model
from finetune.recipe.load import parse_recipe
from finetune.training.train import train

# warnings of timm's interpolation of relative positions
pytestmark = [
    pytest.mark.filterwarnings("ignore:Using a non-tuple sequence"),
    pytest.mark.filterwarnings("ignore:.*searchsorted"),
]
SWIN = {"embed_dim": 16, "depths": [1, 1], "num_heads": [1, 2], "window_size": 4}
PVT = {"depths": [1, 1, 1, 1], "embed_dims": [8, 16, 32, 64], "num_heads": [1, 2, 4, 8]}
TNT = {"embed_dim": 32, "inner_dim": 8, "depth": 2, "num_heads_inner": 2, "num_heads_outer": 2}
BIT = {"channels": [128, 128, 256, 256], "stem_chs": 32}  # 32 groups in each norm
# timm name, arguments that make it small, saved image size, training image size
FAMILIES: dict[str, tuple[str, dict[str, Any], int, int]] = {
    "deit_s": ("deit_small_patch16_224", TINY_ARGS, 32, 48),
    "swin": ("swin_tiny_patch4_window7_224", SWIN, 32, 64),
    "pvt_v2": ("pvt_v2_b0", PVT, 35, 56),
    "tnt_s": ("tnt_s_patch16_224", TNT, 32, 48),
    "bit": ("resnetv2_50x1_bit", BIT, 32, 64),
    "vit_b": ("vit_base_patch16_224", TINY_ARGS, 32, 48),
    "efficientnet": ("test_efficientnet", {}, 32, 48),  # the blocks of EfficientNet-L2
}
# name: another image size, parameters at its default size (millions, from timm's tables)
FULL_SIZE_NETWORKS: dict[str, tuple[int, float]] = {
    "deit_small_patch16_224": (384, 22.05),
    "swin_base_patch4_window7_224": (384, 87.77),
    "pvt_v2_b2": (252, 25.36),
    "tnt_s_patch16_224": (384, 23.77),
    "resnetv2_152x4_bit": (480, 936.53),
    "tf_efficientnet_l2": (800, 480.31),
    "vit_base_patch16_224": (384, 86.57),
    "vit_huge_patch14_224": (518, 630.76),
    "vit_base_r50_s16_224": (384, 97.89),
    "vit_small_r26_s32_224": (384, 36.43),
}
# The others run before a release.
IN_THE_SUITE = {"swin", "vit_b", "efficientnet", "deit_small_patch16_224"}


def in_the_suite(names: Iterable[str]) -> list[Any]:
    return [
        name if name in IN_THE_SUITE else pytest.param(name, marks=pytest.mark.faults)
        for name in names
    ]


@pytest.mark.usefixtures("no_plots")
@pytest.mark.parametrize("key", in_the_suite(FAMILIES))
def test_loads_resizes_and_trains(key: str, tmp_path: Path, image_folder: Path) -> None:
    name, args, saved_size, train_size = FAMILIES[key]
    built = build_model(name, pretrained=False, num_classes=5, image_size=saved_size, args=args)
    randomize_head(built.model)
    folder = save_network(tmp_path / "weights", built, class_names=CLASS_NAMES)
    loaded = build_model(folder)
    assert torch.equal(
        compute_logits(loaded.model, x := random_images(saved_size)), compute_logits(built.model, x)
    )
    recipe_text = f"""
model: {{name: "{folder}", image_size: {train_size}}}
data: {{source: "folder:{image_folder}", train: resize, eval: resize, batch_size: 12}}
optim: {{name: sgd, lr: 0.1, steps: 2}}
run: {{precision: fp32, threads: 1, log_every: 1}}
"""
    train(parse_recipe(recipe_text), tmp_path / "run")
    losses = read_train_losses(tmp_path / "run")
    assert len(losses) == 2
    assert losses[0] == pytest.approx(1.0986, abs=1e-3)  # ln 3: the zero head
    assert losses[1] != losses[0]
    trained = build_model(str(tmp_path / "run"))
    assert trained.preprocessing.image_size == (train_size, train_size)
    assert compute_logits(trained.model, random_images(train_size)).shape == (2, 3)


@pytest.mark.parametrize("name", in_the_suite(FULL_SIZE_NETWORKS))
def test_full_size_network_at_another_image_size(name: str) -> None:
    """On the meta device: the largest network would take four gigabytes."""
    size, millions = FULL_SIZE_NETWORKS[name]
    with torch.device("meta"):
        default_built = build_model(name, pretrained=False)
        built = build_model(name, pretrained=False, num_classes=10, image_size=size)
    assert count_parameters(default_built.model.parameters()) / 1e6 == pytest.approx(
        millions, abs=0.006
    )
    assert built.preprocessing.image_size == (size, size)
    summary = summarize_model(built.model.eval(), (size, size))
    assert summary["macs"] > 0
    assert summary["layers"][-1]["output"] == [10]


def test_small_networks_belong_to_their_families() -> None:
    for key, (name, *_) in FAMILIES.items():
        assert timm.is_model(name), key
    assert type(timm.create_model("test_efficientnet")).__name__ == "EfficientNet"
    assert set(FULL_SIZE_NETWORKS) <= set(timm.list_models())
