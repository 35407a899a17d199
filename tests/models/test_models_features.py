"""models/features.py: the same logits from features, by the classifier alone, or the reason."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
from networks import NETWORKS, SMALL_VIT_ARGS, build_network, random_images, randomize_head
from refusals import refused
from torch import nn

from finetune.models.build import build_model
from finetune.models.features import (
    compute_pre_logits,
    enable_feature_input,
    linear_classifier_names,
)
from finetune.models.freeze import set_train_mode
from finetune.models.head import classifier_names

ONE_HEAD = [key for key in NETWORKS if key != "distilled"]
LINEAR = [key for key in ONE_HEAD if key != "conv_classifier"]


class TestPreLogits:
    @pytest.mark.parametrize("key", ONE_HEAD)
    @torch.no_grad()
    def test_they_are_what_the_classifier_sees(self, key: str) -> None:
        made = build_network(key, num_classes=5)
        model, seen = made.model.eval(), []
        (name,) = classifier_names(model)
        head = model.get_submodule(name)
        head.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].flatten(1)))
        pixels = random_images(NETWORKS[key][2])
        model(pixels)
        features = compute_pre_logits(model, pixels)
        assert len(seen) == 1, "pre-logits do not run the classifier"
        assert features.shape == (2, model.head_hidden_size)
        assert torch.equal(features, seen[0])

    @torch.no_grad()
    def test_a_network_with_two_heads_gives_the_mean_of_what_they_see(self) -> None:
        model, seen = build_network("distilled").model.eval(), []
        for name in classifier_names(model):
            layer = model.get_submodule(name)
            layer.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
        pixels = random_images(32)
        model(pixels)
        assert len(seen) == 2
        torch.testing.assert_close(compute_pre_logits(model, pixels), (seen[0] + seen[1]) / 2)

    @torch.no_grad()
    def test_a_representation_layer_is_part_of_them(self) -> None:
        args = {**SMALL_VIT_ARGS, "representation_size": 24}
        made = build_model(
            "vit_representation", num_classes=3, pretrained=False, image_size=32, args=args
        )
        model, pixels = made.model.eval(), random_images(32)
        layer = model.fc_norm
        features = compute_pre_logits(model, pixels)
        assert features.shape == (2, 24)
        tokens = model.forward_features(pixels)
        torch.testing.assert_close(features, torch.tanh(layer.fc(tokens[:, 0])))
        torch.testing.assert_close(model.head(features), model(pixels))

    def test_a_network_without_them_is_refused(self) -> None:
        with refused("weights.unsupported", "Linear", "forward_features"):
            compute_pre_logits(nn.Linear(2, 2), random_images(8))
        without_pool = build_network("vit", args={**NETWORKS["vit"][1], "global_pool": ""}).model
        with refused("weights.unsupported", "(2, 17, 32)", "global_pool"):
            compute_pre_logits(without_pool, random_images(32))


def accepted(model: nn.Module, size: int, *, training: bool = True) -> str | None:
    return enable_feature_input(model, (size, size), training=training)


class TestAcceptFeatures:
    @pytest.mark.parametrize("key", LINEAR)
    @torch.no_grad()
    def test_features_and_images_lead_to_the_same_logits(self, key: str) -> None:
        size = NETWORKS[key][2]
        args = NETWORKS[key][1]
        without = {"drop_path_rate": 0.0} if key == "swin" else {}  # timm's own has some
        model = build_network(key, freeze="backbone", args={**args, **without}).model
        randomize_head(model)
        names = list(model.state_dict())
        assert accepted(model, size) is None
        pixels = random_images(size)
        copied = copy.deepcopy(model)
        for network in (model, copied):
            network.eval()
            expected = type(network).forward(network, pixels)
            assert expected.std() > 0
            assert torch.equal(network(pixels), expected)
            assert torch.equal(network(compute_pre_logits(network, pixels)), expected)
        assert list(model.state_dict()) == names
        features = compute_pre_logits(model, pixels)
        nn.init.zeros_(copied.get_submodule(classifier_names(copied)[0]).weight)
        assert not torch.equal(copied(features), model(features)), "a copy has its own classifier"

    @torch.no_grad()
    def test_dropout_of_the_head_is_drawn_alike(self) -> None:
        args = {**NETWORKS["vit"][1], "drop_rate": 0.5}
        model = build_network("vit", freeze="backbone", args=args, head_init="default").model
        assert accepted(model, 32) is None
        pixels = random_images(32)
        features = compute_pre_logits(model.eval(), pixels)
        set_train_mode(model)
        torch.manual_seed(1)
        expected = type(model).forward(model, pixels)
        torch.manual_seed(1)
        assert torch.equal(model(features), expected)
        assert not torch.equal(model(features), expected)

    @pytest.mark.parametrize(
        "key, settings, reason",
        [
            ("distilled", {}, "no single linear classifier"),
            ("conv_classifier", {}, "no single linear classifier"),
            ("vit", {"freeze": 2}, "more than the classifier is trained"),
            ("vit", {"dropout": 0.1}, r"dropout before the classifier \(pos_drop\)"),
            ("vit", {"attention_dropout": 0.1}, r"before the classifier \(blocks\.0\.attn\.att"),
            ("vit", {"drop_path": 0.1}, r"before the classifier \(blocks\.1\.drop_path1\)"),
            ("swin", {}, r"before the classifier \(layers\.1\.blocks\.0\.drop_path1\)"),
        ],
    )
    def test_what_varies_is_refused(self, key: str, settings: dict[str, Any], reason: str) -> None:
        model = build_network(key, **{"freeze": "backbone", **settings}).model
        answer = accepted(model, NETWORKS[key][2])
        assert answer is not None
        assert re.search(reason, answer), answer
        assert "forward" not in vars(model), "nothing is changed"

    def test_dropout_does_not_matter_where_nothing_is_trained(self) -> None:
        model = build_network("vit", dropout=0.1).model
        assert accepted(model, 32, training=False) is None
        assert not model.training

    def test_statistics_that_go_on_counting_are_refused(self) -> None:
        model = build_network("resnet", freeze="backbone").model
        assert accepted(model, 64) is None
        again = build_network("resnet", freeze="backbone").model
        again.bn1.weight = again.bn1.bias = None  # nothing of it says that it is frozen
        assert accepted(again, 64) == "batch norm updates its running statistics (bn1)"

    def test_dropout_that_is_no_layer_is_noticed(self) -> None:
        class Dropping(type(build_network("vit").model)):  # type: ignore[misc]
            def forward_features(self, x: torch.Tensor, **rest: Any) -> torch.Tensor:
                values = super().forward_features(x, **rest)
                return nn.functional.dropout(values, 0.1, self.training)

        model = build_network("vit", freeze="backbone").model
        model.__class__ = Dropping
        assert accepted(model, 32) == "the network computes other features in training mode"
        assert accepted(model, 32, training=False) is None

    def test_logits_that_are_more_than_the_classifiers_are_refused(self) -> None:
        class Louder(type(build_network("vit").model)):  # type: ignore[misc]
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return 2 * super().forward(x)

        model = build_network("vit", freeze="backbone").model
        model.__class__ = Louder
        assert "are not the output of its classifier on the pre-logits" in str(accepted(model, 32))

    def test_a_network_that_has_no_pre_logits_is_refused(self) -> None:
        args = {**NETWORKS["vit"][1], "global_pool": ""}
        model = build_network("vit", freeze="backbone", args=args).model
        assert "not one vector per image" in str(accepted(model, 32))


def test_the_last_layers_are_the_linear_ones() -> None:
    assert linear_classifier_names(build_network("vit").model) == ["head"]
    assert linear_classifier_names(build_network("convnext").model) == ["head.fc"]
    assert linear_classifier_names(build_network("distilled").model) == ["head", "head_dist"]
    assert linear_classifier_names(build_network("conv_classifier").model) == []
