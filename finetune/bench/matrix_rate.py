"""The matrix products of a training step, and how fast this machine computes them alone."""

# M rows (images times tokens or pixels), K width going in, N width coming out

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from finetune.bench.timer import synchronise

__all__ = ["Product", "matrix_rate", "products"]

_SECONDS = 0.03  # for which each product is repeated
_LEAST = 3  # repetitions of each, however long they take
_QUEUED = 20  # products in a row where they are queued: waiting for each would measure the waiting


@dataclass(frozen=True)
class Product:
    """A product of matrices as a layer's forward pass makes it: (M, K) times (K, N).

    Attributes:
        rows, inner, columns: M, K and N.
        with_input, with_weight: True if the backward pass computes the gradient of the input, or
            that of the weight; each is a product of as many operations.
    """

    rows: int
    inner: int
    columns: int
    with_input: bool
    with_weight: bool

    @property
    def operations(self) -> int:
        """Of the forward product and of the gradients that are made."""
        one = 2 * self.rows * self.inner * self.columns
        return one * (1 + self.with_input + self.with_weight)


def products(network: nn.Module, step: Callable[[], Any]) -> Counter[Product]:
    """List the products of the linear layers and convolutions of one real training step.

    Those of attention, between activations, are not among them, nor the few of a class token's
    queries, keys and values: the rate is of the shapes that make up most of the work.

    Returns: how often each occurs; a network without such layers has none.
    """
    counts: Counter[Product] = Counter()

    def count(layer: Any, inputs: tuple[Any, ...], output: Any) -> None:
        tensor = inputs[0]
        backward = torch.is_grad_enabled() and output.requires_grad
        kinds = (backward and tensor.requires_grad, backward and layer.weight.requires_grad)
        if isinstance(layer, nn.Linear):
            rows = tensor.numel() // max(layer.in_features, 1)
            counts[Product(rows, layer.in_features, layer.out_features, *kinds)] += 1
        else:
            columns = layer.out_channels // layer.groups
            rows = output.numel() // layer.out_channels
            inner = layer.weight[0].numel()
            counts[Product(rows, inner, columns, *kinds)] += layer.groups

    with ExitStack() as stack:
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        for layer in network.modules():
            if isinstance(layer, nn.Linear | nn.Conv2d):
                stack.callback(layer.register_forward_hook(count).remove)
        step()
    return counts


def matrix_rate(
    counts: Counter[Product], *, dtype: torch.dtype, device: torch.device
) -> float | None:
    """Measure how fast this machine makes these products, each alone on matrices in the cache.

    Returns: operations a second over all products, each as often as it occurs; None for none.
    """
    seconds = operations = 0.0
    for product, times in counts.items():
        operations += times * product.operations
        seconds += times * _seconds(product, dtype, device)
    return operations / seconds if seconds else None


def _seconds(product: Product, dtype: torch.dtype, device: torch.device) -> float:
    """The time of a layer's products, forward and backward."""

    def filled(*shape: int) -> Tensor:
        return torch.randn(shape, device=device).to(dtype)

    inputs_MK = filled(product.rows, product.inner)
    weight_NK = filled(product.columns, product.inner)
    total = _shortest(lambda: nn.functional.linear(inputs_MK, weight_NK), device)
    if product.with_input or product.with_weight:
        gradient_MN = filled(product.rows, product.columns)
    if product.with_input:
        total += _shortest(lambda: gradient_MN @ weight_NK, device)
    if product.with_weight:
        total += _shortest(lambda: gradient_MN.t() @ inputs_MK, device)
    return total


def _shortest(multiply: Callable[[], Tensor], device: torch.device) -> float:
    """Seconds of one product: the shortest of several, on a GPU the best mean of a row."""
    in_a_row = 1 if device.type == "cpu" else _QUEUED
    seconds: list[float] = []
    with torch.no_grad():
        multiply()
        synchronise(device)
        started = time.perf_counter()
        while len(seconds) < _LEAST or time.perf_counter() - started < _SECONDS:
            before = time.perf_counter()
            for _ in range(in_a_row):
                multiply()
            synchronise(device)
            seconds.append((time.perf_counter() - before) / in_a_row)
    return min(seconds)
