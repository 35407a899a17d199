"""Batch norm in training: over the images of all processes, or by statistics that stay.

Neither changes the names, the weights or the evaluation of a network.
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

__all__ = ["choose_statistics", "counting_norms", "norms_with_statistics", "synchronise"]


def norms_with_statistics(model: nn.Module) -> list[nn.Module]:
    """Return the layers with running statistics: batch norms of every kind."""
    return [m for m in model.modules() if isinstance(getattr(m, "running_mean", None), Tensor)]


def counting_norms(model: nn.Module) -> list[nn.Module]:
    """Return the batch norms whose statistics training changes, as nothing of them is frozen."""
    counting = []
    for norm in norms_with_statistics(model):
        own = list(norm.parameters(recurse=False))
        is_frozen = own and not any(parameter.requires_grad for parameter in own)
        if not is_frozen and not getattr(norm, "keeps_statistics", False):
            counting.append(norm)
    return counting


def choose_statistics(model: nn.Module, section: ModelSection) -> None:
    """Carry out `model.freeze_bn`: batch norms train their weights alone.

    Args:
        model: of the section, frozen as it says; `set_train_mode` leaves the norms in evaluation.
        section: of the recipe; `sync_bn` is for `synchronise`, when training begins.
    Raises: RecipeError for either key if there is no batch norm that it could change.
    """
    for key in ("sync_bn", "freeze_bn"):
        if getattr(section, key) and not counting_norms(model):
            raise RecipeError(
                f"model.{key}: {section.name} has no batch norm in what is trained; remove the key",
                code="recipe.unsupported",
            )
    for norm in norms_with_statistics(model) if section.freeze_bn else ():
        norm.keeps_statistics = True  # type: ignore[assignment]


def synchronise(network: nn.Module) -> None:
    """Let batch norms take their statistics from the images of all processes, in training.

    Names, tensors and evaluation stay as they are. Every process must compute as many batches, at
    least one image each; their sizes may differ. It needs a process group.

    Args:
        network: on its device; its batch norms become torch's and timm's synchronised ones, which
            compute on a GPU alone: on a CPU a way of theirs to do so stands in.
    Source: Peng et al. 2018, "MegDet", section 3.3.
    """
    on_cpu = next(network.parameters()).device.type == "cpu"
    for module in convert_sync_batchnorm(network).modules():
        if on_cpu and isinstance(module, nn.SyncBatchNorm):
            with_act = isinstance(module, SyncBatchNormAct)
            module.__class__ = _CpuSyncBatchNormAct if with_act else _CpuSyncBatchNorm


class _CpuSyncBatchNorm(nn.SyncBatchNorm):
    """torch's synchronised batch norm, on a CPU."""

    def forward(self, input: Tensor) -> Tensor:
        """Normalise by the moments of all processes. Returns: the input's shape."""
        if not self.training:
            return super().forward(input)
        mean_C, var_C, count = _moments(input.detach())
        if self.running_mean is not None and self.running_var is not None:
            assert self.num_batches_tracked is not None, "it is there with the others"
            self.num_batches_tracked.add_(1)
            momentum = self.momentum
            share = 1 / float(self.num_batches_tracked) if momentum is None else momentum
            self.running_mean.lerp_(mean_C, share)
            self.running_var.lerp_(var_C * (count / (count - 1)), share)
        result: Tensor = _Normalise.apply(
            input, self.weight, self.bias, mean_C, var_C, count, self.eps
        )
        return result


class _CpuSyncBatchNormAct(SyncBatchNormAct, _CpuSyncBatchNorm):
    """timm's, which calls torch's and then its activation."""


def _moments(x: Tensor) -> tuple[Tensor, Tensor, float]:
    """Mean and variance of each channel, (C,), over all processes, and the number of values.

    Each process sends its own moments and their count; all combine them in the same order, so that
    they get the same bits.
    """
    channels = x.shape[1]
    dtype = torch.promote_types(x.dtype, torch.float32)
    unused_C = torch.zeros(channels, dtype=dtype)  # running statistics, whose dtype the result has
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


class _Normalise(torch.autograd.Function):
    """Batch norm by moments that all processes' images have made, and its gradient."""

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
        """Returns: x's shape."""
        ctx.save_for_backward(x, weight_C, mean_C, var_C)
        ctx.count, ctx.eps = count, eps
        return nn.functional.batch_norm(x, mean_C, var_C, weight_C, bias_C, eps=eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Returns: gradients of x, weight and bias; of these the process's own share, as DDP's."""
        x, weight_C, mean_C, var_C = ctx.saved_tensors
        as_constants = (weight_C, mean_C, var_C, None, None, False, ctx.eps, [True, True, True])
        grad_x, grad_weight_C, grad_bias_C = torch.ops.aten.native_batch_norm_backward(
            grad, x, *as_constants
        )
        # and what the moments, which are no constants, hand on to each value
        sums_2C = torch.stack([grad_weight_C, grad_bias_C])
        distributed.all_reduce(sums_2C)
        scale_C = (var_C + ctx.eps).rsqrt() / ctx.count
        one_C, other_C = sums_2C * (scale_C if weight_C is None else scale_C * weight_C)
        grad_x -= nn.functional.batch_norm(x, mean_C, var_C, one_C, other_C, eps=ctx.eps)
        grads_C = (grad_weight_C, grad_bias_C) if weight_C is not None else (None, None)
        return grad_x, *grads_C, None, None, None, None
