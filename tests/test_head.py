"""models/head.py: a zero head and frozen parts for every kind of network."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from networks import (
    NAMES,
    NETWORKS,
    built,
    images,
    logits,
    saved,
)
from safetensors.torch import load_file
from torch import nn

from finetune.errors import RecipeError
from finetune.models.build import Built, build, set_train_mode
from finetune.models.head import classifier_names


class TestHead:
    @pytest.mark.parametrize("key", NETWORKS)
    def test_logits_are_zero_and_the_loss_is_ln_k(self, key: str) -> None:
        made = built(key)
        output = logits(made.model, images(NETWORKS[key][2]))
        assert output.shape == (2, 5)
        assert torch.equal(output, torch.zeros(2, 5))
        loss = nn.functional.cross_entropy(output, torch.tensor([0, 3]))
        assert abs(float(loss) - math.log(5)) < 1e-6

    @pytest.mark.parametrize("key", NETWORKS)
    def test_the_head_can_learn(self, key: str) -> None:
        made = built(key)
        set_train_mode(made.model)
        output = made.model(images(NETWORKS[key][2], 4))
        nn.functional.cross_entropy(output, torch.tensor([0, 1, 2, 3])).backward()
        heads = classifier_names(made.model)
        assert heads
        for name in heads:
            gradients = [p.grad for p in made.model.get_submodule(name).parameters()]
            assert gradients
            assert all(g is not None and bool(g.abs().sum() > 0) for g in gradients)

    def test_both_heads_of_a_distilled_network(self) -> None:
        made = built("distilled")
        assert classifier_names(made.model) == ["head", "head_dist"]
        for name in classifier_names(made.model):
            head = made.model.get_submodule(name)
            assert head.weight.shape == (5, 32)
            assert not head.weight.any()
            assert not head.bias.any()

    def test_timms_own_initialisation(self) -> None:
        made = built("vit", head_init="default")
        assert made.model.get_submodule("head").weight.any()

    def test_a_head_without_a_last_layer(self) -> None:
        with pytest.raises(RecipeError, match="head_init"):
            build("test_vit", num_classes=0, pretrained=False)

    def test_own_classes_keep_their_head(self, tmp_path: Path) -> None:
        folder = saved(tmp_path, "vit")
        weight = load_file(f"{folder}/model.safetensors")["head.weight"]
        kept = build(folder)
        assert torch.equal(kept.model.get_submodule("head").weight, weight)
        assert kept.class_names == NAMES
        # Asked for as many classes as there are: still another task.
        new = build(folder, num_classes=5)
        assert not new.model.get_submodule("head").weight.any()
        assert new.class_names is None


def frozen(made: Built) -> set[str]:
    return {name for name, p in made.model.named_parameters() if not p.requires_grad}


class TestFreezing:
    @pytest.mark.parametrize("key", NETWORKS)
    def test_backbone(self, key: str) -> None:
        made = built(key, freeze="backbone")
        heads = tuple(f"{name}." for name in classifier_names(made.model))
        names = [name for name, _ in made.model.named_parameters()]
        assert frozen(made) == {name for name in names if not name.startswith(heads)}
        assert frozen(made)

    @pytest.mark.parametrize("blocks", [0, 1, 2])
    @pytest.mark.parametrize("key", ["vit", "distilled", "registers"])
    def test_first_blocks(self, key: str, blocks: int) -> None:
        made = built(key, freeze=blocks)
        stem = ("patch_embed.", "pos_embed", "cls_token", "dist_token", "reg_token")
        starts = stem + tuple(f"blocks.{index}." for index in range(blocks))
        names = [name for name, _ in made.model.named_parameters()]
        assert frozen(made) == {name for name in names if name.startswith(starts)}
        assert "pos_embed" in frozen(made)

    def test_blocks_of_a_convolutional_network(self) -> None:
        made = built("convnext", freeze=1)
        assert any(name.startswith("stages.0.blocks.0.") for name in frozen(made))
        assert not any(name.startswith(("stages.3.", "head.")) for name in frozen(made))

    def test_wrong_values(self) -> None:
        with pytest.raises(RecipeError, match="3 of 2 blocks"):
            built("vit", freeze=3)
        with pytest.raises(RecipeError, match="did you mean 'backbone'"):
            built("vit", freeze="backbon")

    def test_frozen_statistics_stay(self) -> None:
        made = built("resnet", freeze="backbone")
        before = {k: v.clone() for k, v in made.model.state_dict().items() if "running" in k}
        assert before
        set_train_mode(made.model)
        made.model(images(64))
        after = made.model.state_dict()
        assert all(torch.equal(after[k], v) for k, v in before.items())
        free = built("resnet")
        set_train_mode(free.model)
        free.model(images(64))
        after = free.model.state_dict()
        assert not any(torch.equal(after[k], v) for k, v in before.items())
