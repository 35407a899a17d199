"""Batch norm in training: synchronized over all processes, or with frozen statistics.

Neither changes parameter names, weights or evaluation.
"""

# C channels, P processes; inputs are (B, C, …)

from __future__ import annotations

from typing import Any

import torch
from timm.layers import SyncBatchNormAct, convert_sync_batchnorm
from torch import Tensor, distributed, nn
from torch.autograd.function import once_differentiable

from finetune.errors import RecipeError
from finetune.recipe.schema import ModelSection

__all__ = [
    "batch_norm_layers",
    "configure_batch_norm",
    "convert_to_sync_batch_norm",
    "unfrozen_batch_norm_layers",
]


def batch_norm_layers(model: nn.Module) -> list[nn.Module]:
    """Return all layers with running statistics: batch norms of any class."""
    return [m for m in model.modules() if isinstance(getattr(m, "running_mean", None), Tensor)]


def unfrozen_batch_norm_layers(model: nn.Module) -> list[nn.Module]:
    """Return the batch norms that update their running statistics in training."""
    unfrozen = []
    for norm in batch_norm_layers(model):
        parameters = list(norm.parameters(recurse=False))
        is_frozen = parameters and not any(parameter.requires_grad for parameter in parameters)
        if not is_frozen and not getattr(norm, "has_frozen_statistics", False):
            unfrozen.append(norm)
    return unfrozen


def configure_batch_norm(model: nn.Module, section: ModelSection) -> None:
    """Apply `model.freeze_bn` (batch norms keep their statistics) and check `model.sync_bn`.

    Args:
        model: the network built from `section`, with `model.freeze` already applied. With
            `freeze_bn`, its batch norms are marked, and `set_train_mode` keeps marked ones in
            evaluation mode.
        section: the recipe's model section; `convert_to_sync_batch_norm` applies `sync_bn` when
            training starts.
    Raises: RecipeError if either key is set and the network has no unfrozen batch norm.
    """
    for key in ("sync_bn", "freeze_bn"):
        if getattr(section, key) and not unfrozen_batch_norm_layers(model):
            raise RecipeError(
                f"model.{key}: {section.name} has no batch norm in its trained layers; remove the "
                f"key",
                code="recipe.unsupported",
            )
    for norm in batch_norm_layers(model) if section.freeze_bn else ():
        norm.has_frozen_statistics = True  # type: ignore[assignment]


def convert_to_sync_batch_norm(network: nn.Module) -> None:
    """Replace batch norms by SyncBatchNorm, whose training statistics cover all processes.

    Parameter names, tensors and evaluation do not change. Requires a process group. Every process
    must run the same number of batches, with at least one image each; batch sizes may differ.

    Args:
        network: the network on its final device. On a GPU its batch norms become torch's or timm's
            SyncBatchNorm; on a CPU, where these do not run, the equivalents from this module.
    Source: Peng et al. 2018, "MegDet", section 3.3.
    """
    on_cpu = next(network.parameters()).device.type == "cpu"
    for module in convert_sync_batchnorm(network).modules():
        if on_cpu and isinstance(module, nn.SyncBatchNorm):
            with_act = isinstance(module, SyncBatchNormAct)
            module.__class__ = _CpuSyncBatchNormAct if with_act else _CpuSyncBatchNorm


class _CpuSyncBatchNorm(nn.SyncBatchNorm):
    """SyncBatchNorm that also trains on a CPU."""

    def forward(self, input: Tensor) -> Tensor:
        """Normalize with the mean and variance over all processes. Returns: the input's shape."""
        if not self.training:
            return super().forward(input)
        mean_C, var_C, count = _gather_moments(input.detach())
        if self.running_mean is not None and self.running_var is not None:
            assert self.num_batches_tracked is not None, (
                "num_batches_tracked exists if running_mean does"
            )
            self.num_batches_tracked.add_(1)
            momentum = self.momentum
            update = 1 / float(self.num_batches_tracked) if momentum is None else momentum
            self.running_mean.lerp_(mean_C, update)
            self.running_var.lerp_(var_C * (count / (count - 1)), update)
        result: Tensor = _SyncBatchNormFunction.apply(
            input, self.weight, self.bias, mean_C, var_C, count, self.eps
        )
        return result


class _CpuSyncBatchNormAct(SyncBatchNormAct, _CpuSyncBatchNorm):
    """timm's SyncBatchNormAct on a CPU: _CpuSyncBatchNorm, then the activation."""


def _gather_moments(x: Tensor) -> tuple[Tensor, Tensor, float]:
    """Return mean (C,), variance (C,) and number of values per channel, over all processes.

    Every process gathers the moments of all processes and combines them in rank order, so the
    results are bit-identical on all of them.
    """
    channels = x.shape[1]
    dtype = torch.promote_types(x.dtype, torch.float32)
    # running statistics are not used here, but their dtype becomes that of the moments
    unused_C = torch.zeros(channels, dtype=dtype)
    mean_C, var_C = torch.batch_norm_update_stats(x, unused_C, unused_C, 1.0)
    count = mean_C.new_tensor([x.numel() // channels])
    own = torch.cat([mean_C, var_C, count]).double()
    gathered = [torch.empty_like(own) for _ in range(distributed.get_world_size())]
    distributed.all_gather(gathered, own)
    means_PC, vars_PC, counts_P1 = torch.stack(gathered).split([channels, channels, 1], dim=1)
    total = counts_P1.sum()
    shares_P1 = counts_P1 / total
    mean_C = (shares_P1 * means_PC).sum(0)
    var_C = (shares_P1 * (vars_PC + (means_PC - mean_C).square())).sum(0)
    return mean_C.to(dtype), var_C.to(dtype), float(total)


class _SyncBatchNormFunction(torch.autograd.Function):
    """Batch norm with mean and variance over all processes, with its own backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight_C: Tensor | None,
        bias_C: Tensor | None,
        mean_C: Tensor,
        var_C: Tensor,
        count: float,
        eps: float,
    ) -> Tensor:
        """Normalize x. Returns: the shape of x."""
        ctx.save_for_backward(x, weight_C, mean_C, var_C)
        ctx.count, ctx.eps = count, eps
        return nn.functional.batch_norm(x, mean_C, var_C, weight_C, bias_C, eps=eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of x, weight and bias.

        The gradients of weight and bias are local to this process; DDP averages them.
        """
        x, weight_C, mean_C, var_C = ctx.saved_tensors
        args = (weight_C, mean_C, var_C, None, None, False, ctx.eps, [True, True, True])
        grad_x, grad_weight_C, grad_bias_C = torch.ops.aten.native_batch_norm_backward(
            grad, x, *args
        )
        # native_batch_norm_backward treats mean and variance as constants: add their gradients
        sums_2C = torch.stack([grad_weight_C, grad_bias_C])
        distributed.all_reduce(sums_2C)
        scale_C = (var_C + ctx.eps).rsqrt() / ctx.count
        slope_C, offset_C = sums_2C * (scale_C if weight_C is None else scale_C * weight_C)
        grad_x -= nn.functional.batch_norm(x, mean_C, var_C, slope_C, offset_C, eps=ctx.eps)
        grads_C = (grad_weight_C, grad_bias_C) if weight_C is not None else (None, None)
        return grad_x, *grads_C, None, None, None, None
