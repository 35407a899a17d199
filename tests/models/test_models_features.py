"""models/features.py: the classifier computes the same logits from features, or says why not."""

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
    def test_pre_logits_are_the_input_of_the_classifier(self, key: str) -> None:
        built = build_network(key, num_classes=5)
        model, classifier_inputs = built.model.eval(), []
        (name,) = classifier_names(model)
        head = model.get_submodule(name)
        head.register_forward_pre_hook(
            lambda module, inputs: classifier_inputs.append(inputs[0].flatten(1))
        )
        pixels = random_images(NETWORKS[key][2])
        model(pixels)
        features = compute_pre_logits(model, pixels)
        assert len(classifier_inputs) == 1, "computing pre-logits must not run the classifier"
        assert features.shape == (2, model.head_hidden_size)
        assert torch.equal(features, classifier_inputs[0])

    @torch.no_grad()
    def test_pre_logits_of_two_heads_are_the_mean_of_their_inputs(self) -> None:
        model, classifier_inputs = build_network("distilled").model.eval(), []
        for name in classifier_names(model):
            layer = model.get_submodule(name)
            layer.register_forward_pre_hook(
                lambda module, inputs: classifier_inputs.append(inputs[0])
            )
        pixels = random_images(32)
        model(pixels)
        assert len(classifier_inputs) == 2
        torch.testing.assert_close(
            compute_pre_logits(model, pixels), (classifier_inputs[0] + classifier_inputs[1]) / 2
        )

    @torch.no_grad()
    def test_pre_logits_include_a_representation_layer(self) -> None:
        args = {**SMALL_VIT_ARGS, "representation_size": 24}
        built = build_model(
            "vit_representation", num_classes=3, pretrained=False, image_size=32, args=args
        )
        model, pixels = built.model.eval(), random_images(32)
        layer = model.fc_norm
        features = compute_pre_logits(model, pixels)
        assert features.shape == (2, 24)
        tokens = model.forward_features(pixels)
        torch.testing.assert_close(features, torch.tanh(layer.fc(tokens[:, 0])))
        torch.testing.assert_close(model.head(features), model(pixels))

    def test_rejects_networks_without_pre_logits(self) -> None:
        with refused("weights.unsupported", "Linear", "forward_features"):
            compute_pre_logits(nn.Linear(2, 2), random_images(8))
        without_pool = build_network("vit", args={**NETWORKS["vit"][1], "global_pool": ""}).model
        with refused("weights.unsupported", "(2, 17, 32)", "global_pool"):
            compute_pre_logits(without_pool, random_images(32))


def feature_input_error(model: nn.Module, size: int, *, training: bool = True) -> str | None:
    return enable_feature_input(model, (size, size), training=training)


class TestEnableFeatureInput:
    @pytest.mark.parametrize("key", LINEAR)
    @torch.no_grad()
    def test_features_and_images_give_the_same_logits(self, key: str) -> None:
        size = NETWORKS[key][2]
        args = NETWORKS[key][1]
        # timm's Swin has a default drop path
        no_drop_path = {"drop_path_rate": 0.0} if key == "swin" else {}
        model = build_network(key, freeze="backbone", args={**args, **no_drop_path}).model
        randomize_head(model)
        names = list(model.state_dict())
        assert feature_input_error(model, size) is None
        pixels = random_images(size)
        model_copy = copy.deepcopy(model)
        for network in (model, model_copy):
            network.eval()
            expected = type(network).forward(network, pixels)
            assert expected.std() > 0
            assert torch.equal(network(pixels), expected)
            assert torch.equal(network(compute_pre_logits(network, pixels)), expected)
        assert list(model.state_dict()) == names
        features = compute_pre_logits(model, pixels)
        nn.init.zeros_(model_copy.get_submodule(classifier_names(model_copy)[0]).weight)
        assert not torch.equal(model_copy(features), model(features)), (
            "a copy uses its own classifier"
        )

    @torch.no_grad()
    def test_head_dropout_uses_the_same_random_state(self) -> None:
        args = {**NETWORKS["vit"][1], "drop_rate": 0.5}
        model = build_network("vit", freeze="backbone", args=args, head_init="default").model
        assert feature_input_error(model, 32) is None
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
            ("distilled", {}, "exactly one linear classifier"),
            ("conv_classifier", {}, "exactly one linear classifier"),
            ("vit", {"freeze": 2}, "parameters outside the classifier are trained"),
            ("vit", {"dropout": 0.1}, r"dropout before the classifier \(pos_drop\)"),
            ("vit", {"attention_dropout": 0.1}, r"before the classifier \(blocks\.0\.attn\.att"),
            ("vit", {"drop_path": 0.1}, r"before the classifier \(blocks\.1\.drop_path1\)"),
            ("swin", {}, r"before the classifier \(layers\.1\.blocks\.0\.drop_path1\)"),
        ],
    )
    def test_rejects_features_that_are_not_constant(
        self, key: str, settings: dict[str, Any], reason: str
    ) -> None:
        model = build_network(key, **{"freeze": "backbone", **settings}).model
        error = feature_input_error(model, NETWORKS[key][2])
        assert error is not None
        assert re.search(reason, error), error
        assert "forward" not in vars(model), "the model must not be modified"

    def test_dropout_does_not_matter_without_training(self) -> None:
        model = build_network("vit", dropout=0.1).model
        assert feature_input_error(model, 32, training=False) is None
        assert not model.training

    def test_rejects_batch_norm_that_updates_its_statistics(self) -> None:
        model = build_network("resnet", freeze="backbone").model
        assert feature_input_error(model, 64) is None
        without_parameters = build_network("resnet", freeze="backbone").model
        without_parameters.bn1.weight = without_parameters.bn1.bias = (
            None  # without parameters, nothing marks it as frozen
        )
        assert (
            feature_input_error(without_parameters, 64)
            == "batch norm updates its running statistics (bn1)"
        )

    def test_detects_dropout_that_is_not_a_layer(self) -> None:
        class WithFunctionalDropout(type(build_network("vit").model)):  # type: ignore[misc]
            def forward_features(self, x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
                features = super().forward_features(x, **kwargs)
                return nn.functional.dropout(features, 0.1, self.training)

        model = build_network("vit", freeze="backbone").model
        model.__class__ = WithFunctionalDropout
        assert (
            feature_input_error(model, 32)
            == "the network computes different features in training mode"
        )
        assert feature_input_error(model, 32, training=False) is None

    def test_rejects_logits_that_are_not_the_classifier_output(self) -> None:
        class WithScaledLogits(type(build_network("vit").model)):  # type: ignore[misc]
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return 2 * super().forward(x)

        model = build_network("vit", freeze="backbone").model
        model.__class__ = WithScaledLogits
        assert "are not the output of its classifier on the pre-logits" in str(
            feature_input_error(model, 32)
        )

    def test_rejects_features_that_are_not_one_vector(self) -> None:
        args = {**NETWORKS["vit"][1], "global_pool": ""}
        model = build_network("vit", freeze="backbone", args=args).model
        assert "not one vector per image" in str(feature_input_error(model, 32))


def test_linear_classifier_names() -> None:
    assert linear_classifier_names(build_network("vit").model) == ["head"]
    assert linear_classifier_names(build_network("convnext").model) == ["head.fc"]
    assert linear_classifier_names(build_network("distilled").model) == ["head", "head_dist"]
    assert linear_classifier_names(build_network("conv_classifier").model) == []
