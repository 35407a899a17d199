"""models/head.py: a zero head and frozen parts for every kind of network."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
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
from safetensors.torch import load_file, save_file
from torch import nn

from finetune.models.build import build_model
from finetune.models.freeze import set_train_mode
from finetune.models.head import classifier_names
from finetune.models.save import BuiltModel
from finetune.models.weights.resolve import resolve_weights


class TestHead:
    @pytest.mark.parametrize("key", NETWORKS)
    def test_logits_are_zero_and_the_loss_is_ln_k(self, key: str) -> None:
        made = build_network(key)
        output = compute_logits(made.model, random_images(NETWORKS[key][2]))
        assert output.shape == (2, 5)
        assert torch.equal(output, torch.zeros(2, 5))
        loss = nn.functional.cross_entropy(output, torch.tensor([0, 3]))
        assert abs(float(loss) - math.log(5)) < 1e-6

    @pytest.mark.parametrize("key", NETWORKS)
    def test_the_head_can_learn(self, key: str) -> None:
        made = build_network(key)
        set_train_mode(made.model)
        output = made.model(random_images(NETWORKS[key][2], 4))
        nn.functional.cross_entropy(output, torch.tensor([0, 1, 2, 3])).backward()
        heads = classifier_names(made.model)
        assert heads
        for name in heads:
            gradients = [p.grad for p in made.model.get_submodule(name).parameters()]
            assert gradients
            assert all(g is not None and bool(g.abs().sum() > 0) for g in gradients)

    def test_both_heads_of_a_distilled_network(self) -> None:
        made = build_network("distilled")
        assert classifier_names(made.model) == ["head", "head_dist"]
        for name in classifier_names(made.model):
            head = made.model.get_submodule(name)
            assert head.weight.shape == (5, 32)
            assert not head.weight.any()
            assert not head.bias.any()

    def test_timms_own_initialisation(self) -> None:
        made = build_network("vit", head_init="default")
        assert made.model.get_submodule("head").weight.any()

    def test_a_head_without_a_last_layer(self) -> None:
        with refused("recipe.unsupported", "model.head_init", "test_vit"):
            build_model("test_vit", num_classes=0, pretrained=False)

    def test_own_classes_keep_their_head(self, tmp_path: Path) -> None:
        folder = save_random_network(tmp_path, "vit")
        weight = load_file(f"{folder}/model.safetensors")["head.weight"]
        kept = build_model(folder)
        assert torch.equal(kept.model.get_submodule("head").weight, weight)
        assert kept.class_names == CLASS_NAMES
        # Asked for as many classes as there are: still another task.
        new = build_model(folder, num_classes=5)
        assert not new.model.get_submodule("head").weight.any()
        assert new.class_names is None


class TestKeptClasses:
    """Weights whose config.json names classes of the data; NAMES are ant to elk."""

    @pytest.mark.parametrize("key", NETWORKS)
    def test_the_same_names_in_another_order(self, key: str, tmp_path: Path) -> None:
        folder, size = save_random_network(tmp_path, key), NETWORKS[key][2]
        x = random_images(size)
        before = compute_logits(build_model(folder).model, x)
        names = CLASS_NAMES[::-1]
        again = build_model(folder, num_classes=5, class_names=names, head_init=None)
        assert again.provenance["kept_classes"] == 5
        torch.testing.assert_close(compute_logits(again.model, x), before.flip(1))
        assert len(set(before[0].tolist())) == 5  # the columns can be told apart

    @pytest.mark.parametrize("key", ["vit", "distilled", "conv_classifier", "byobnet"])
    def test_more_and_other_classes(
        self, key: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        folder, x = save_random_network(tmp_path, key), random_images(NETWORKS[key][2])
        before = compute_logits(build_model(folder).model, x)
        names = ["fox", "cat", "gnu", "ant", "hen", "ibis", "jay", "kiwi"]
        made = build_model(folder, num_classes=8, class_names=names, head_init="keep")
        after = compute_logits(made.model, x)
        torch.testing.assert_close(after[:, [1, 3]], before[:, [2, 0]])
        assert not after[:, [0, 2, 4, 5, 6, 7]].any()
        assert made.provenance["kept_classes"] == 2
        (notice,) = (record.getMessage() for record in caplog.records)
        assert "2 of the 8" in notice
        assert "fox, gnu, hen, ibis, jay, …" in notice

    @pytest.mark.parametrize("head_init", ["zeros", "default"])
    def test_a_new_head_is_had_for_the_asking(self, head_init: str, tmp_path: Path) -> None:
        folder = save_random_network(tmp_path, "vit")
        before = build_model(folder).model.get_submodule("head").weight
        made = build_model(folder, num_classes=5, class_names=CLASS_NAMES, head_init=head_init)
        head = made.model.get_submodule("head").weight
        assert bool(head.any()) == (head_init == "default")
        assert not torch.equal(head, before)
        assert "kept_classes" not in made.provenance

    def test_weights_of_other_classes_start_from_zero(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        folder, names = save_random_network(tmp_path, "vit"), ["fox", "gnu"]
        made = build_model(folder, num_classes=2, class_names=names, head_init=None)
        assert not made.model.get_submodule("head").weight.any()
        assert "kept_classes" not in made.provenance
        assert not caplog.records
        with refused("recipe.conflict", "model.head_init", folder):
            build_model(folder, num_classes=2, class_names=names, head_init="keep")

    def test_names_of_a_registry_are_no_classes_of_ours(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        folder = save_random_network(tmp_path, "vit")
        weights = resolve_weights(
            folder
        )  # as timm's ImageNet classifiers, which bring no config.json
        registered = dataclasses.replace(weights, from_config=False)
        monkeypatch.setattr("finetune.models.build.resolve", lambda *_, **__: registered)
        made = build_model(folder, num_classes=5, class_names=CLASS_NAMES, head_init=None)
        assert not made.model.get_submodule("head").weight.any()

    def test_weights_with_names_and_without_a_head(self, tmp_path: Path) -> None:
        folder = save_random_network(tmp_path, "vit")
        state = load_file(f"{folder}/model.safetensors")
        del state["head.weight"], state["head.bias"]
        save_file(state, f"{folder}/model.safetensors")
        made = build_model(folder, num_classes=5, class_names=CLASS_NAMES, head_init=None)
        assert not made.model.get_submodule("head").weight.any()


def frozen(made: BuiltModel) -> set[str]:
    return {name for name, p in made.model.named_parameters() if not p.requires_grad}


def all_frozen(module: nn.Module) -> bool:
    """True if a module computes with frozen parameters of its own."""
    own = list(module.parameters(recurse=False))
    return bool(own) and not any(p.requires_grad for p in own)


def some_trained(module: nn.Module) -> bool:
    return any(p.requires_grad for p in module.parameters(recurse=False))


class TestFreezing:
    @pytest.mark.parametrize("key", NETWORKS)
    def test_backbone(self, key: str) -> None:
        made = build_network(key, freeze="backbone")
        heads = tuple(f"{name}." for name in classifier_names(made.model))
        names = [name for name, _ in made.model.named_parameters()]
        assert frozen(made) == {name for name in names if not name.startswith(heads)}
        assert frozen(made)

    @pytest.mark.parametrize("blocks", [0, 1, 2])
    @pytest.mark.parametrize("key", ["vit", "distilled", "registers"])
    def test_first_blocks(self, key: str, blocks: int) -> None:
        made = build_network(key, freeze=blocks)
        stem = ("patch_embed.", "pos_embed", "cls_token", "dist_token", "reg_token")
        starts = stem + tuple(f"blocks.{index}." for index in range(blocks))
        names = [name for name, _ in made.model.named_parameters()]
        assert frozen(made) == {name for name in names if name.startswith(starts)}
        assert "pos_embed" in frozen(made)

    def test_blocks_of_a_convolutional_network(self) -> None:
        made = build_network("convnext", freeze=1)
        assert any(name.startswith("stages.0.blocks.0.") for name in frozen(made))
        assert not any(name.startswith(("stages.3.", "head.")) for name in frozen(made))

    @pytest.mark.parametrize("checkpointing", [False, True])
    @pytest.mark.parametrize("key", ["vit", "registers", "beit", "clip", "rope", "densenet"])
    def test_backward_ends_at_the_last_trained_block(self, key: str, checkpointing: bool) -> None:
        name, args, size, blocks = (
            {
                "clip": ("vit_base_patch32_clip_224", TINY_ARGS, 32, 1),  # a norm before its blocks
                # learned frequencies that all blocks share
                "rope": ("vit_small_patch16_rope_mixed_224", TINY_ARGS, 32, 1),
                # a change of resolution between its blocks
                "densenet": ("densenet121", {"block_config": (1, 1), "growth_rate": 8}, 32, 2),
            }.get(key)
            or (*NETWORKS[key][:3], 1)
        )
        settings = {"num_classes": 5, "pretrained": False, "image_size": size, "args": args}
        settings |= {"head_init": "default", "grad_checkpointing": checkpointing}
        model = build_model(name, freeze=blocks, **settings).model
        kept = {n: m for n, m in model.named_modules() if n and all_frozen(m)}
        moved = {n: m for n, m in model.named_modules() if some_trained(m)}
        assert kept
        assert moved
        calls, graphs, backward = Counter[str](), set[str](), set[str]()

        def forward_hook(name: str) -> Callable[..., None]:
            def note(module: nn.Module, inputs: Any, output: Any) -> None:
                calls[name] += 1
                if output.requires_grad:
                    graphs.add(name)
                    output.register_hook(lambda gradient: backward.add(name))

            return note

        for each, module in {**kept, **moved}.items():
            module.register_forward_hook(forward_hook(each))
        set_train_mode(model)
        model(random_images(size)).square().sum().backward()
        assert len(kept.keys() & calls.keys()) > 3  # BEiT takes some weights without a call
        assert not graphs & kept.keys(), "no graph, so no activations are held"
        assert not backward & kept.keys()
        assert backward == moved.keys() & graphs, "and all that is trained gets a gradient"
        assert all(calls[each] <= 1 for each in kept), "nor are they computed a second time"
        parameters = dict(model.named_parameters())
        assert {n for n, p in parameters.items() if p.grad is not None} == {
            n for n, p in parameters.items() if p.requires_grad
        }

    def test_what_lies_between_frozen_blocks_is_frozen(self) -> None:
        args = {"block_config": (1, 1, 1), "growth_rate": 8}
        settings = {"num_classes": 5, "pretrained": False, "image_size": 64, "args": args}
        made = build_model("densenet121", freeze=2, **settings)
        assert "features.transition1.conv.weight" in frozen(made)
        assert "features.transition2.conv.weight" not in frozen(made)

    def test_wrong_values(self) -> None:
        with refused("recipe.wrong_value", "model.freeze: 3 blocks, but the network has 2"):
            build_network("vit", freeze=3)
        with refused("recipe.unknown_name", "model.freeze", "'backbone'"):
            build_network("vit", freeze="backbon")

    def test_frozen_statistics_stay(self) -> None:
        made = build_network("resnet", freeze="backbone")
        before = {k: v.clone() for k, v in made.model.state_dict().items() if "running" in k}
        assert before
        set_train_mode(made.model)
        made.model(random_images(64))
        after = made.model.state_dict()
        assert all(torch.equal(after[k], v) for k, v in before.items())
        free = build_network("resnet")
        set_train_mode(free.model)
        free.model(random_images(64))
        after = free.model.state_dict()
        assert not any(torch.equal(after[k], v) for k, v in before.items())
