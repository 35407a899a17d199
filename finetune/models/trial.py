"""Whether what we compute in place of one of timm's modules is what that module computes."""

# B batch, N tokens, D width

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["computes_alike"]

_TOKENS = 5
_TOLERANCE = 1e-4  # of the largest value: products of other shapes sum in another order


def computes_alike(module: nn.Module, forward: Callable[[Any, Tensor], Tensor], width: int) -> bool:
    """Try a copy of a module in both ways.

    Its weights are random: in those of the module itself a norm, or a small layer scale, could hide
    the difference until they are trained.

    Args:
        module: tokens (B, N, D) to tokens; left as it is.
        forward: the module and its tokens to the same result, or the first tokens of it.
        width: D of its tokens.
    """
    draws = torch.Generator().manual_seed(0)
    twin = copy.deepcopy(module).to("cpu", torch.float32).eval()
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.normal_(std=parameter.shape[-1] ** -0.5, generator=draws)
            if parameter.ndim == 1:
                parameter.mul_(parameter.shape[-1] ** 0.5)
    tokens_BND = torch.randn(2, _TOKENS, width, generator=draws)
    with torch.enable_grad():  # as in training
        found_BND = forward(twin, tokens_BND).detach()
    expected_BND = twin(tokens_BND)[:, : found_BND.shape[1]].detach()
    apart, largest = (found_BND - expected_BND).abs().max(), expected_BND.abs().max()
    return bool(apart <= _TOLERANCE * largest)
