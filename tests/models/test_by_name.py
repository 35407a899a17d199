"""Every family of the review by its timm name: loaded, resized and trained for two steps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from networks import NAMES, TINY, images, logits, save, shuffle

from finetune.models.build import build
from finetune.models.profile import count_parameters, survey
from finetune.recipe.load import parse_recipe
from finetune.training.train import train

# timm's own interpolation of relative positions
pytestmark = [
    pytest.mark.filterwarnings("ignore:Using a non-tuple sequence"),
    pytest.mark.filterwarnings("ignore:.*searchsorted"),
]
SWIN = {"embed_dim": 16, "depths": [1, 1], "num_heads": [1, 2], "window_size": 4}
PVT = {"depths": [1, 1, 1, 1], "embed_dims": [8, 16, 32, 64], "num_heads": [1, 2, 4, 8]}
TNT = {"embed_dim": 32, "inner_dim": 8, "depth": 2, "num_heads_inner": 2, "num_heads_outer": 2}
BIT = {"channels": [128, 128, 256, 256], "stem_chs": 32}  # 32 groups in each norm
# timm name, arguments that make it small, the size that it is saved at, and trained at
FAMILIES: dict[str, tuple[str, dict[str, Any], int, int]] = {
    "deit_s": ("deit_small_patch16_224", TINY, 32, 48),
    "deit_b": ("deit_base_patch16_224", TINY, 32, 48),
    "swin": ("swin_tiny_patch4_window7_224", SWIN, 32, 64),
    "pvt_v2": ("pvt_v2_b0", PVT, 35, 56),
    "tnt_s": ("tnt_s_patch16_224", TNT, 32, 48),
    "tnt_b": ("tnt_b_patch16_224", TNT, 32, 48),
    "bit": ("resnetv2_50x1_bit", BIT, 32, 64),
    "vit_b": ("vit_base_patch16_224", TINY, 32, 48),
    "vit_l": ("vit_large_patch16_224", TINY, 32, 48),
    "vit_h": ("vit_huge_patch14_224", TINY, 32, 48),
    "efficientnet": ("test_efficientnet", {}, 32, 48),  # the blocks of EfficientNet-L2
}
# name, another image size, parameters at its own (millions, timm's tables)
WHOLE: dict[str, tuple[int, float]] = {
    "deit_small_patch16_224": (384, 22.05),
    "deit_base_patch16_224": (384, 86.57),
    "swin_base_patch4_window7_224": (384, 87.77),
    "pvt_v2_b2": (252, 25.36),
    "tnt_s_patch16_224": (384, 23.77),
    "tnt_b_patch16_224": (384, 65.43),
    "resnetv2_152x4_bit": (480, 936.53),
    "tf_efficientnet_l2": (800, 480.31),
    "vit_base_patch16_224": (384, 86.57),
    "vit_large_patch16_224": (384, 304.33),
    "vit_huge_patch14_224": (518, 630.76),
    "vit_base_r50_s16_224": (384, 97.89),
    "vit_small_r26_s32_224": (384, 36.43),
}


@pytest.mark.usefixtures("no_pictures")
@pytest.mark.parametrize("key", FAMILIES)
def test_loads_resizes_and_trains(key: str, tmp_path: Path, image_folder: Path) -> None:
    name, args, small, large = FAMILIES[key]
    made = build(name, pretrained=False, num_classes=5, image_size=small, args=args)
    shuffle(made.model)
    folder = save(tmp_path / "weights", made, names=NAMES)
    again = build(folder)
    assert torch.equal(logits(again.model, x := images(small)), logits(made.model, x))
    text = f"""
model: {{name: "{folder}", image_size: {large}}}
data: {{source: "folder:{image_folder}", train: resize, eval: resize, batch_size: 12}}
optim: {{name: sgd, lr: 0.1, steps: 2}}
run: {{precision: fp32, threads: 1, log_every: 1}}
"""
    train(parse_recipe(text), tmp_path / "run")
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").open()]
    losses = [line["loss"] for line in lines if line["split"] == "train"]
    assert len(losses) == 2
    assert losses[0] == pytest.approx(1.0986, abs=1e-3)  # ln 3: the zero head
    assert losses[1] != losses[0]
    trained = build(str(tmp_path / "run"))
    assert trained.preprocessing.image_size == (large, large)
    assert logits(trained.model, images(large)).shape == (2, 3)


@pytest.mark.parametrize("name", WHOLE)
def test_the_whole_network_at_another_size(name: str) -> None:
    """Without memory for its tensors: the largest would take four gigabytes."""
    size, millions = WHOLE[name]
    with torch.device("meta"):
        own = build(name, pretrained=False)
        made = build(name, pretrained=False, num_classes=10, image_size=size)
    assert count_parameters(own.model.parameters()) / 1e6 == pytest.approx(millions, abs=0.006)
    assert made.preprocessing.image_size == (size, size)
    found = survey(made.model.eval(), (size, size))
    assert found["macs"] > 0
    assert found["layers"][-1]["output"] == [10]


def test_each_small_network_is_of_the_family_it_stands_for() -> None:
    for key, (name, *_) in FAMILIES.items():
        assert timm.is_model(name), key
    assert type(timm.create_model("test_efficientnet")).__name__ == "EfficientNet"
    assert set(WHOLE) <= set(timm.list_models())
