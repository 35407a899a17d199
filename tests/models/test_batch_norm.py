"""Batch norm over two ranks equals torch's over all images; frozen statistics stay."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from networks import build_network, random_images
from ranks import run_two_ranks
from refusals import refused
from timm.layers import BatchNormAct2d
from torch import Tensor, distributed, nn

from finetune.models.batch_norm import (
    batch_norm_layers,
    configure_batch_norm,
    convert_to_sync_batch_norm,
    unfrozen_batch_norm_layers,
)
from finetune.models.freeze import set_train_mode
from finetune.recipe.schema import ModelSection

SIZES = (5, 3)  # number of images per rank
# sums in another order; bf16 rounds a gradient twice
TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-2}
LAYERS = {
    "torch": lambda: nn.BatchNorm2d(6, momentum=0.3, eps=1e-3),
    "timm": lambda: BatchNormAct2d(6, act_layer="silu"),
    "BatchNorm1d": lambda: nn.BatchNorm1d(6),
    "cumulative average": lambda: nn.BatchNorm2d(6, momentum=None),
    "without weights": lambda: nn.BatchNorm2d(6, affine=False),
    "without statistics": lambda: nn.BatchNorm2d(6, track_running_stats=False),
}


def run_layer(layer: nn.Module, inputs: Tensor, factors: Tensor) -> list[Tensor]:
    """Run two training passes and one evaluation pass. Returns: outputs, gradients, state."""
    for _ in range(2):
        layer.train().zero_grad()
        layer_inputs = inputs.clone().requires_grad_()
        output = layer(layer_inputs)
        (output * factors).sum().backward()
    assert layer_inputs.grad is not None
    results = [output.detach(), layer_inputs.grad, layer.eval()(inputs).detach()]
    weight_gradients = [
        parameter.grad for parameter in layer.parameters() if parameter.grad is not None
    ]
    return [*results, *weight_gradients, *layer.state_dict().values()]


def compare_on_rank() -> None:
    """On each of two ranks, compare every layer on its images with torch's layer on all images."""
    distributed.init_process_group("gloo")
    rank = distributed.get_rank()
    generator = torch.Generator().manual_seed(0)
    formats = (torch.contiguous_format, torch.channels_last)
    cases = itertools.product(LAYERS, TOLERANCES, formats)
    for name, dtype, memory_format in cases:
        layer = LAYERS[name]().to(torch.promote_types(dtype, torch.float32))
        for parameter in layer.parameters():
            nn.init.normal_(parameter, generator=generator)
        ours = nn.Sequential(copy.deepcopy(layer), nn.Linear(1, 1))
        convert_to_sync_batch_norm(ours)
        shape = (sum(SIZES), 6) if name == "BatchNorm1d" else (sum(SIZES), 6, 4, 3)
        inputs, factors = torch.randn(2, *shape, generator=generator).to(dtype)
        inputs += 3
        if len(shape) == 4:
            inputs = inputs.contiguous(memory_format=memory_format)
        expected_results = run_layer(layer, inputs, factors)
        actual_results = run_layer(ours[0], inputs.split(SIZES)[rank], factors.split(SIZES)[rank])
        num_weights = len(list(layer.parameters()))
        assert (
            len(actual_results)
            == len(expected_results)
            == 3 + num_weights + len(layer.state_dict())
        )
        for gradient in actual_results[3 : 3 + num_weights]:
            distributed.all_reduce(gradient)
        for index, (expected, actual) in enumerate(
            zip(expected_results, actual_results, strict=True)
        ):
            if index == 2 and name == "without statistics":
                continue  # without statistics it normalizes by its own batch in evaluation, too
            own_part = expected.split(SIZES)[rank] if index < 3 else expected
            scale = max(float(expected.abs().max()), 1.0)
            torch.testing.assert_close(
                actual.double() / scale,
                own_part.double() / scale,
                rtol=0,
                atol=TOLERANCES[dtype],
                msg=lambda text, case=(name, dtype, index): f"{case}: {text}",
            )
    distributed.destroy_process_group()


def test_two_ranks_normalize_like_one() -> None:
    run_two_ranks(compare_on_rank)


def build_configured(key: str, *, freeze: str | int = "none", **settings: bool) -> nn.Module:
    model = build_network(key, freeze=freeze).model
    configure_batch_norm(model, ModelSection(name=key).model_copy(update=settings))
    return model


def layer_names(model: nn.Module, norms: list[nn.Module]) -> set[str]:
    return {name for name, module in model.named_modules() if module in norms}


def updated_statistics(model: nn.Module) -> set[str]:
    """Return the names of the statistics that a training pass changes."""
    statistics_before = {
        name: tensor.clone() for name, tensor in model.state_dict().items() if "running" in name
    }
    assert statistics_before
    set_train_mode(model)
    model(random_images(64)).sum().backward()
    return {
        key
        for key, value in statistics_before.items()
        if not torch.equal(value, model.state_dict()[key])
    }


def test_freeze_bn_freezes_statistics_but_trains_weights() -> None:
    model = build_configured("resnet", freeze_bn=True)
    assert layer_names(model, batch_norm_layers(model))
    assert not unfrozen_batch_norm_layers(model)
    assert not updated_statistics(model)
    assert not updated_statistics(copy.deepcopy(model))
    assert model.get_submodule("bn1").weight.grad is not None
    assert updated_statistics(build_network("resnet").model)


def test_only_frozen_blocks_keep_their_statistics() -> None:
    model = build_configured("resnet", freeze=2, sync_bn=True)
    frozen = layer_names(model, batch_norm_layers(model)) - layer_names(
        model, unfrozen_batch_norm_layers(model)
    )
    assert {name.split(".")[0] for name in frozen} == {"conv1", "bn1", "layer1", "layer2"}
    assert {name.split(".")[0] for name in updated_statistics(model)} == {"layer3", "layer4"}


@pytest.mark.parametrize("key", ["sync_bn", "freeze_bn"])
@pytest.mark.parametrize(
    "network, freeze", [("vit", "none"), ("convnext", 1), ("resnet", "backbone")]
)
def test_rejects_networks_without_trainable_batch_norm(
    key: str, network: str, freeze: str | int
) -> None:
    with refused("recipe.unsupported", f"model.{key}"):
        build_configured(network, freeze=freeze, **{key: True})
