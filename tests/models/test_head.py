"""models/head.py and freeze.py: a zero head and frozen parts for every kind of network."""

from __future__ import annotations

import dataclasses
import json
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
    forget_checksums,
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
    def test_initial_logits_are_zero_and_the_loss_is_ln_k(self, key: str) -> None:
        built = build_network(key)
        output = compute_logits(built.model, random_images(NETWORKS[key][2]))
        assert output.shape == (2, 5)
        assert torch.equal(output, torch.zeros(2, 5))
        loss = nn.functional.cross_entropy(output, torch.tensor([0, 3]))
        assert abs(float(loss) - math.log(5)) < 1e-6

    @pytest.mark.parametrize("key", NETWORKS)
    def test_head_gets_gradients(self, key: str) -> None:
        built = build_network(key)
        set_train_mode(built.model)
        output = built.model(random_images(NETWORKS[key][2], 4))
        nn.functional.cross_entropy(output, torch.tensor([0, 1, 2, 3])).backward()
        heads = classifier_names(built.model)
        assert heads
        for name in heads:
            gradients = [
                parameter.grad for parameter in built.model.get_submodule(name).parameters()
            ]
            assert gradients
            assert all(
                gradient is not None and bool(gradient.abs().sum() > 0) for gradient in gradients
            )

    def test_both_heads_of_a_distilled_network_are_zero(self) -> None:
        built = build_network("distilled")
        assert classifier_names(built.model) == ["head", "head_dist"]
        for name in classifier_names(built.model):
            head = built.model.get_submodule(name)
            assert head.weight.shape == (5, 32)
            assert not head.weight.any()
            assert not head.bias.any()

    def test_default_head_init_is_random(self) -> None:
        built = build_network("vit", head_init="default")
        assert built.model.get_submodule("head").weight.any()

    def test_rejects_head_init_without_a_head(self) -> None:
        with refused("recipe.unsupported", "model.head_init", "test_vit"):
            build_model("test_vit", num_classes=0, pretrained=False)

    def test_keeps_the_head_without_num_classes(self, tmp_path: Path) -> None:
        folder = save_random_network(tmp_path, "vit")
        weight = load_file(f"{folder}/model.safetensors")["head.weight"]
        original = build_model(folder)
        assert torch.equal(original.model.get_submodule("head").weight, weight)
        assert original.class_names == CLASS_NAMES
        # A given num_classes, even if equal, means another task.
        replaced = build_model(folder, num_classes=5)
        assert not replaced.model.get_submodule("head").weight.any()
        assert replaced.class_names is None


def rename_classes(folder: str, names: list[str]) -> None:
    path = forget_checksums(Path(folder)) / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "label_names": names}))


class TestKeepHeadClasses:
    """Weights whose config.json names classes of the data; CLASS_NAMES are ant to elk."""

    @pytest.mark.parametrize("key", NETWORKS)
    def test_reorders_the_head_by_class_names(self, key: str, tmp_path: Path) -> None:
        folder, size = save_random_network(tmp_path, key), NETWORKS[key][2]
        x = random_images(size)
        expected = compute_logits(build_model(folder).model, x)
        names = CLASS_NAMES[::-1]
        reordered = build_model(folder, num_classes=5, class_names=names, head_init=None)
        assert reordered.provenance["kept_classes"] == 5
        torch.testing.assert_close(compute_logits(reordered.model, x), expected.flip(1))
        assert len(set(expected[0].tolist())) == 5  # all logits differ

    @pytest.mark.parametrize(
        "names, kept",
        [(["crane", "crane", "dog"], [0, 1, 2]), (["dog", "crane", "crane"], [2, None, None])],
    )
    def test_classes_of_one_name_are_kept_only_in_the_same_order(
        self, names: list[str], kept: list[int | None], tmp_path: Path
    ) -> None:
        folder, x = save_random_network(tmp_path, "vit"), random_images(NETWORKS["vit"][2])
        rename_classes(folder, ["crane", "crane", "dog", "emu", "fox"])
        names = names + (["emu", "fox"] if kept[0] == 0 else [])
        before = compute_logits(build_model(folder).model, x)
        built = build_model(folder, num_classes=len(names), class_names=names, head_init="keep")
        after = compute_logits(built.model, x)
        for index, row in enumerate(kept):
            expected = torch.zeros_like(after[:, 0]) if row is None else before[:, row]
            torch.testing.assert_close(after[:, index], expected)

    @pytest.mark.parametrize("key", ["vit", "distilled", "conv_classifier", "byobnet"])
    def test_keeps_the_rows_of_known_classes(
        self, key: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        folder, x = save_random_network(tmp_path, key), random_images(NETWORKS[key][2])
        logits_before = compute_logits(build_model(folder).model, x)
        names = ["fox", "cat", "gnu", "ant", "hen", "ibis", "jay", "kiwi"]
        built = build_model(folder, num_classes=8, class_names=names, head_init="keep")
        logits_after = compute_logits(built.model, x)
        torch.testing.assert_close(logits_after[:, [1, 3]], logits_before[:, [2, 0]])
        assert not logits_after[:, [0, 2, 4, 5, 6, 7]].any()
        assert built.provenance["kept_classes"] == 2
        (warning,) = (record.getMessage() for record in caplog.records)
        assert "2 of the 8" in warning
        assert "fox, gnu, hen, ibis, jay, …" in warning

    def test_rows_before_that_of_the_first_class_are_skipped(self, tmp_path: Path) -> None:
        """Google's Inception networks have a row for the background."""
        folder, x = save_random_network(tmp_path, "vit"), random_images(NETWORKS["vit"][2])
        content = json.loads((Path(folder) / "config.json").read_text())
        content["pretrained_cfg"] |= {"label_offset": 1, "num_classes": 4}
        content |= {"label_names": CLASS_NAMES[1:], "num_classes": 4}
        content.pop("checksums", None)
        before = compute_logits(build_model(folder).model, x)
        (Path(folder) / "config.json").write_text(json.dumps(content))
        for names in (CLASS_NAMES[1:], CLASS_NAMES[:0:-1]):
            built = build_model(folder, num_classes=4, class_names=names, head_init="keep")
            columns = [CLASS_NAMES.index(name) for name in names]
            torch.testing.assert_close(compute_logits(built.model, x), before[:, columns])

    @pytest.mark.parametrize("head_init", ["zeros", "default"])
    def test_head_init_replaces_the_head_on_request(self, head_init: str, tmp_path: Path) -> None:
        folder = save_random_network(tmp_path, "vit")
        head_before = build_model(folder).model.get_submodule("head").weight
        built = build_model(folder, num_classes=5, class_names=CLASS_NAMES, head_init=head_init)
        head = built.model.get_submodule("head").weight
        assert bool(head.any()) == (head_init == "default")
        assert not torch.equal(head, head_before)
        assert "kept_classes" not in built.provenance

    def test_head_of_other_classes_starts_from_zero(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        folder, names = save_random_network(tmp_path, "vit"), ["fox", "gnu"]
        built = build_model(folder, num_classes=2, class_names=names, head_init=None)
        assert not built.model.get_submodule("head").weight.any()
        assert "kept_classes" not in built.provenance
        assert not caplog.records
        with refused("recipe.conflict", "model.head_init", folder):
            build_model(folder, num_classes=2, class_names=names, head_init="keep")

    def test_does_not_keep_classes_of_registry_weights(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        folder = save_random_network(tmp_path, "vit")
        # like timm's ImageNet classifiers, which have no config.json
        weights = resolve_weights(folder)
        registered = dataclasses.replace(weights, from_config=False)
        monkeypatch.setattr("finetune.models.build.resolve_weights", lambda *_, **__: registered)
        built = build_model(folder, num_classes=5, class_names=CLASS_NAMES, head_init=None)
        assert not built.model.get_submodule("head").weight.any()

    def test_weights_with_class_names_but_no_head(self, tmp_path: Path) -> None:
        folder = save_random_network(tmp_path, "vit")
        forget_checksums(Path(folder))
        state = load_file(f"{folder}/model.safetensors")
        del state["head.weight"], state["head.bias"]
        save_file(state, f"{folder}/model.safetensors")
        built = build_model(folder, num_classes=5, class_names=CLASS_NAMES, head_init=None)
        assert not built.model.get_submodule("head").weight.any()


def frozen_names(built: BuiltModel) -> set[str]:
    return {
        name for name, parameter in built.model.named_parameters() if not parameter.requires_grad
    }


def is_fully_frozen(module: nn.Module) -> bool:
    """True if a module has parameters of its own and all are frozen."""
    parameters = list(module.parameters(recurse=False))
    return bool(parameters) and not any(parameter.requires_grad for parameter in parameters)


def is_partly_trained(module: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters(recurse=False))


class TestFreezing:
    @pytest.mark.parametrize("key", NETWORKS)
    def test_backbone(self, key: str) -> None:
        built = build_network(key, freeze="backbone")
        heads = tuple(f"{name}." for name in classifier_names(built.model))
        names = [name for name, _ in built.model.named_parameters()]
        assert frozen_names(built) == {name for name in names if not name.startswith(heads)}
        assert frozen_names(built)

    @pytest.mark.parametrize("blocks", [0, 1, 2])
    @pytest.mark.parametrize("key", ["vit", "distilled", "registers"])
    def test_first_blocks(self, key: str, blocks: int) -> None:
        built = build_network(key, freeze=blocks)
        stem = ("patch_embed.", "pos_embed", "cls_token", "dist_token", "reg_token")
        starts = stem + tuple(f"blocks.{index}." for index in range(blocks))
        names = [name for name, _ in built.model.named_parameters()]
        assert frozen_names(built) == {name for name in names if name.startswith(starts)}
        assert "pos_embed" in frozen_names(built)

    def test_blocks_of_a_convolutional_network(self) -> None:
        built = build_network("convnext", freeze=1)
        assert any(name.startswith("stages.0.blocks.0.") for name in frozen_names(built))
        assert not any(name.startswith(("stages.3.", "head.")) for name in frozen_names(built))

    @pytest.mark.parametrize("checkpointing", [False, True])
    @pytest.mark.parametrize("key", ["vit", "registers", "beit", "clip", "rope", "densenet"])
    def test_backward_stops_at_the_first_trained_block(self, key: str, checkpointing: bool) -> None:
        timm_name, args, size, num_frozen = (
            {
                "clip": ("vit_base_patch32_clip_224", TINY_ARGS, 32, 1),  # a norm before the blocks
                # learned frequencies that all blocks share
                "rope": ("vit_small_patch16_rope_mixed_224", TINY_ARGS, 32, 1),
                # changes the resolution between its blocks
                "densenet": ("densenet121", {"block_config": (1, 1), "growth_rate": 8}, 32, 2),
            }.get(key)
            or (*NETWORKS[key][:3], 1)
        )
        settings = {"num_classes": 5, "pretrained": False, "image_size": size, "args": args}
        settings |= {"head_init": "default", "grad_checkpointing": checkpointing}
        model = build_model(timm_name, freeze=num_frozen, **settings).model
        frozen_modules = {
            name: module
            for name, module in model.named_modules()
            if name and is_fully_frozen(module)
        }
        trained_modules = {
            name: module for name, module in model.named_modules() if is_partly_trained(module)
        }
        assert frozen_modules
        assert trained_modules
        num_calls, in_graph, got_gradient = Counter[str](), set[str](), set[str]()

        def forward_hook(timm_name: str) -> Callable[..., None]:
            def record(module: nn.Module, inputs: Any, output: Any) -> None:
                num_calls[timm_name] += 1
                if output.requires_grad:
                    in_graph.add(timm_name)
                    output.register_hook(lambda gradient: got_gradient.add(timm_name))

            return record

        for name, module in {**frozen_modules, **trained_modules}.items():
            module.register_forward_hook(forward_hook(name))
        set_train_mode(model)
        model(random_images(size)).square().sum().backward()
        # BEiT reads some weights without calling their module
        assert len(frozen_modules.keys() & num_calls.keys()) > 3
        assert not in_graph & frozen_modules.keys(), "no graph, so no stored activations"
        assert not got_gradient & frozen_modules.keys()
        assert got_gradient == trained_modules.keys() & in_graph, (
            "every trained module gets a gradient"
        )
        assert all(num_calls[name] <= 1 for name in frozen_modules), (
            "frozen modules are not recomputed"
        )
        parameters = dict(model.named_parameters())
        assert {name for name, parameter in parameters.items() if parameter.grad is not None} == {
            name for name, parameter in parameters.items() if parameter.requires_grad
        }

    def test_freezes_layers_between_frozen_blocks(self) -> None:
        args = {"block_config": (1, 1, 1), "growth_rate": 8}
        settings = {"num_classes": 5, "pretrained": False, "image_size": 64, "args": args}
        built = build_model("densenet121", freeze=2, **settings)
        assert "features.transition1.conv.weight" in frozen_names(built)
        assert "features.transition2.conv.weight" not in frozen_names(built)

    def test_rejects_more_blocks_than_the_network_has(self) -> None:
        with refused("recipe.wrong_value", "model.freeze: 3 blocks, but the network has 2"):
            build_network("vit", freeze=3)

    def test_frozen_batch_norm_statistics_stay(self) -> None:
        built = build_network("resnet", freeze="backbone")
        statistics = {
            name: tensor.clone()
            for name, tensor in built.model.state_dict().items()
            if "running" in name
        }
        assert statistics
        set_train_mode(built.model)
        built.model(random_images(64))
        after = built.model.state_dict()
        assert all(torch.equal(after[name], tensor) for name, tensor in statistics.items())
        unfrozen = build_network("resnet")
        set_train_mode(unfrozen.model)
        unfrozen.model(random_images(64))
        after = unfrozen.model.state_dict()
        assert not any(torch.equal(after[name], tensor) for name, tensor in statistics.items())
