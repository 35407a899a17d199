"""A module is tried in two ways before one of them takes the other's place."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from finetune.models.fast_blocks import computes_alike

WIDTH = 8


class Scaled(nn.Module):
    """A layer, a norm, and a factor for each channel that can hide both."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(0.5)
        self.scale = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, tokens_BND: Tensor) -> Tensor:
        result: Tensor = tokens_BND + self.scale * self.drop(self.linear(tokens_BND))
        return result


def alike(module: Any, tokens_BND: Tensor) -> Tensor:
    seen_BND = nn.functional.linear(tokens_BND, module.linear.weight, module.linear.bias)
    result: Tensor = tokens_BND + module.scale * module.drop(seen_BND)
    return result


def first(module: Any, tokens_BND: Tensor) -> Tensor:
    return alike(module, tokens_BND[:, :1])


def without_bias(module: Any, tokens_BND: Tensor) -> Tensor:
    result: Tensor = tokens_BND + module.scale * (tokens_BND @ module.linear.weight.mT)
    return result


@pytest.mark.parametrize("grad", [True, False])
def test_weights_do_not_hide_a_difference(grad: bool) -> None:
    with torch.set_grad_enabled(grad):
        assert computes_alike(Scaled(), alike, WIDTH)
        assert computes_alike(Scaled(), first, WIDTH)
        assert not computes_alike(Scaled(), without_bias, WIDTH)


def test_a_module_that_was_changed_is_found_out() -> None:
    changed = Scaled()
    changed.register_forward_hook(lambda module, inputs, output: 1.1 * output)
    assert not computes_alike(changed, alike, WIDTH)


def test_it_leaves_no_trace() -> None:
    module = Scaled().train()
    module.linear.eval()
    weights = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    state = torch.get_rng_state()
    assert computes_alike(module, alike, WIDTH)
    assert [one.training for one in module.modules()] == [True, False, True]
    assert all(torch.equal(weights[name], tensor) for name, tensor in module.state_dict().items())
    assert all(parameter.grad is None for parameter in module.parameters())
    assert torch.equal(torch.get_rng_state(), state)
