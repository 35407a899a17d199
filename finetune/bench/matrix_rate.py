"""List the matrix multiplications of a training step, and measure their speed in isolation."""

# M rows (images times tokens or pixels), K input width, N output width

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from finetune.bench.timer import synchronize
from finetune.models.hooks import forward_hooks

__all__ = ["MatMul", "layer_seconds", "list_matmuls", "matrix_rate"]

_MEASURED_SECONDS = 0.03  # repeat each product for this long
_MIN_REPEATS = 3  # minimum number of repetitions
# On a GPU, launch this many products before waiting: waiting for each would measure the wait.
_QUEUED_MATMULS = 20


@dataclass(frozen=True)
class MatMul:
    """The matrix product of a layer's forward pass: (M, K) times (K, N).

    Attributes:
        rows, inner, columns: M, K and N.
        has_input_grad, has_weight_grad: True if the backward pass computes the gradient of the
            input, or of the weight. Each of the two gradients takes the same number of operations
            as the forward product.
    """

    rows: int
    inner: int
    columns: int
    has_input_grad: bool
    has_weight_grad: bool

    @property
    def operations(self) -> int:
        """Operations of the forward product and the computed gradients."""
        one = 2 * self.rows * self.inner * self.columns
        return one * (1 + self.has_input_grad + self.has_weight_grad)


def list_matmuls(network: nn.Module, step: Callable[[], Any]) -> Counter[MatMul]:
    """List the matrix products of linear layers and convolutions in one real training step.

    Products of two activations (as in attention) and products that compute only the class token are
    not included, because the others make up most of the work.

    Returns: number of occurrences of each product; empty for a network without such layers.
    """
    counts: Counter[MatMul] = Counter()

    def count(layer: Any, inputs: tuple[Any, ...], output: Any) -> None:
        tensor = inputs[0]
        backward = torch.is_grad_enabled() and output.requires_grad
        kinds = (backward and tensor.requires_grad, backward and layer.weight.requires_grad)
        if isinstance(layer, nn.Linear):
            rows = tensor.numel() // max(layer.in_features, 1)
            counts[MatMul(rows, layer.in_features, layer.out_features, *kinds)] += 1
        else:
            columns = layer.out_channels // layer.groups
            rows = output.numel() // layer.out_channels
            inner = layer.weight[0].numel()
            counts[MatMul(rows, inner, columns, *kinds)] += layer.groups

    layers = {
        name: count
        for name, layer in network.named_modules()
        if isinstance(layer, nn.Linear | nn.Conv2d)
    }
    with torch.compiler.set_stance("force_eager"), forward_hooks(network, layers):
        step()
    return counts


def matrix_rate(
    counts: Counter[MatMul], *, dtype: torch.dtype, device: torch.device
) -> float | None:
    """Measure how fast this machine computes the products in isolation, with matrices in cache.

    Returns: operations per second over all products, weighted by `counts`; None if `counts` is
        empty.
    """
    seconds = operations = 0.0
    for product, times in counts.items():
        operations += times * product.operations
        seconds += times * layer_seconds(product, dtype, device)
    return operations / seconds if seconds else None


def layer_seconds(product: MatMul, dtype: torch.dtype, device: torch.device) -> float:
    """Return the seconds of a layer's forward product and its gradients' products."""

    def filled(*shape: int) -> Tensor:
        return torch.randn(shape, device=device).to(dtype)

    inputs_MK = filled(product.rows, product.inner)
    weight_NK = filled(product.columns, product.inner)
    total = _time_matmul(lambda: nn.functional.linear(inputs_MK, weight_NK), device)
    if product.has_input_grad or product.has_weight_grad:
        gradient_MN = filled(product.rows, product.columns)
    if product.has_input_grad:
        total += _time_matmul(lambda: gradient_MN @ weight_NK, device)
    if product.has_weight_grad:
        total += _time_matmul(lambda: gradient_MN.t() @ inputs_MK, device)
    return total


def _time_matmul(multiply: Callable[[], Tensor], device: torch.device) -> float:
    """Return the seconds of one product: the minimum over repetitions.

    On a GPU, a repetition is the mean of several products in a row.
    """
    in_a_row = 1 if device.type == "cpu" else _QUEUED_MATMULS
    seconds: list[float] = []
    with torch.no_grad():
        multiply()
        synchronize(device)
        started = time.perf_counter()
        while len(seconds) < _MIN_REPEATS or time.perf_counter() - started < _MEASURED_SECONDS:
            before = time.perf_counter()
            for _ in range(in_a_row):
                multiply()
            synchronize(device)
            seconds.append((time.perf_counter() - before) / in_a_row)
    return min(seconds)
