"""Batch norm over two ranks against torch's own over all images, and statistics that stay."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from networks import built, images
from ranks import two_ranks
from refusals import refused
from timm.layers import BatchNormAct2d
from torch import Tensor, distributed, nn

from finetune.models.batch_norm import (
    choose_statistics,
    counting_norms,
    norms_with_statistics,
    synchronise,
)
from finetune.models.head import set_train_mode
from finetune.recipe.schema import ModelSection

SIZES = (5, 3)  # images of each rank
# sums in another order; in bf16 a gradient is rounded twice
TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-2}
LAYERS = {
    "torch's": lambda: nn.BatchNorm2d(6, momentum=0.3, eps=1e-3),
    "timm's": lambda: BatchNormAct2d(6, act_layer="silu"),
    "of vectors": lambda: nn.BatchNorm1d(6),
    "all batches alike": lambda: nn.BatchNorm2d(6, momentum=None),
    "without weights": lambda: nn.BatchNorm2d(6, affine=False),
    "without statistics": lambda: nn.BatchNorm2d(6, track_running_stats=False),
}


def through(layer: nn.Module, inputs: Tensor, factors: Tensor) -> list[Tensor]:
    """Two passes in training, and one in evaluation. Returns: outputs and gradients."""
    for _ in range(2):
        layer.train().zero_grad()
        given = inputs.clone().requires_grad_()
        output = layer(given)
        (output * factors).sum().backward()
    assert given.grad is not None
    results = [output.detach(), given.grad, layer.eval()(inputs).detach()]
    weights = [p.grad for p in layer.parameters() if p.grad is not None]
    return [*results, *weights, *layer.state_dict().values()]


def normalised_alike() -> None:
    """On one of two ranks: each layer on its own images, and torch's own on all of them."""
    distributed.init_process_group("gloo")
    rank = distributed.get_rank()
    draws = torch.Generator().manual_seed(0)
    formats = (torch.contiguous_format, torch.channels_last)
    kinds = itertools.product(LAYERS, TOLERANCES, formats)
    for name, dtype, memory_format in kinds:
        layer = LAYERS[name]().to(torch.promote_types(dtype, torch.float32))
        for parameter in layer.parameters():
            nn.init.normal_(parameter, generator=draws)
        ours = nn.Sequential(copy.deepcopy(layer), nn.Linear(1, 1))
        synchronise(ours)
        shape = (sum(SIZES), 6) if name == "of vectors" else (sum(SIZES), 6, 4, 3)
        inputs, factors = torch.randn(2, *shape, generator=draws).to(dtype)
        inputs += 3
        if len(shape) == 4:
            inputs = inputs.contiguous(memory_format=memory_format)
        expected = through(layer, inputs, factors)
        found = through(ours[0], inputs.split(SIZES)[rank], factors.split(SIZES)[rank])
        weights = len(list(layer.parameters()))
        assert len(found) == len(expected) == 3 + weights + len(layer.state_dict())
        for gradient in found[3 : 3 + weights]:
            distributed.all_reduce(gradient)
        for index, (one, two) in enumerate(zip(expected, found, strict=True)):
            if index == 2 and name == "without statistics":
                continue  # it normalises by what it is given, in evaluation, too
            whole = one.split(SIZES)[rank] if index < 3 else one
            scale = max(float(one.abs().max()), 1.0)
            torch.testing.assert_close(
                two.double() / scale,
                whole.double() / scale,
                rtol=0,
                atol=TOLERANCES[dtype],
                msg=lambda text, place=(name, dtype, index): f"{place}: {text}",
            )
    distributed.destroy_process_group()


def test_two_ranks_normalise_as_one() -> None:
    two_ranks(normalised_alike)


def chosen(key: str, *, freeze: str | int = "none", **asked: bool) -> nn.Module:
    model = built(key, freeze=freeze).model
    choose_statistics(model, ModelSection(name=key).model_copy(update=asked))
    return model


def names(model: nn.Module, norms: list[nn.Module]) -> set[str]:
    return {name for name, module in model.named_modules() if module in norms}


def moved(model: nn.Module) -> set[str]:
    """Names of the statistics that a pass in training changes."""
    before = {k: v.clone() for k, v in model.state_dict().items() if "running" in k}
    assert before
    set_train_mode(model)
    model(images(64)).sum().backward()
    return {key for key, value in before.items() if not torch.equal(value, model.state_dict()[key])}


def test_statistics_stay_and_weights_are_trained() -> None:
    model = chosen("resnet", freeze_bn=True)
    assert names(model, norms_with_statistics(model))
    assert not counting_norms(model)
    assert not moved(model)
    assert not moved(copy.deepcopy(model))
    assert model.get_submodule("bn1").weight.grad is not None
    assert moved(built("resnet").model)


def test_only_frozen_blocks_keep_their_statistics() -> None:
    model = chosen("resnet", freeze=2, sync_bn=True)
    frozen = names(model, norms_with_statistics(model)) - names(model, counting_norms(model))
    assert {name.split(".")[0] for name in frozen} == {"conv1", "bn1", "layer1", "layer2"}
    assert {name.split(".")[0] for name in moved(model)} == {"layer3", "layer4"}


@pytest.mark.parametrize("key", ["sync_bn", "freeze_bn"])
@pytest.mark.parametrize(
    "network, freeze", [("vit", "none"), ("convnext", 1), ("resnet", "backbone")]
)
def test_networks_without_batch_norms_to_train(key: str, network: str, freeze: str | int) -> None:
    with refused("recipe.unsupported", f"model.{key}"):
        chosen(network, freeze=freeze, **{key: True})
