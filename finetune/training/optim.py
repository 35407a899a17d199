"""Parameter groups, the optimiser by its name, and the learning rate of a step.

The learning rate is a pure function of the step, so a resumed run, or one with another number of
processes, follows the same curve without any scheduler state.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from finetune.errors import RecipeError, SetupError, nearest

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

__all__ = ["build_optimizer", "can_mask", "lr_at", "param_groups", "set_lr"]

# Learned tables and tokens that have two or more axes but are no matrices of a linear map.
_TABLES = frozenset(
    {
        *("pos_embed", "pos_embed_window", "pos_embed_win", "absolute_pos_embed"),
        *("position_embeddings", "relative_position_bias_table", "rel_pos_h", "rel_pos_w"),
        *("attention_biases", "cls_token", "class_token", "dist_token", "reg_token"),
        *("register_tokens", "mask_token", "latent"),
    }
)
# Optimisers of timm's that keep lists of tensors, or a dtype among their numbers.
_NOT_KEPT = ("adafactorbv", "kron")
# Arguments of an optimiser that have a key of their own in a recipe.
_OWN_KEYS = ("lr", "momentum", "betas", "weight_decay")


def lr_at(
    step: int,
    *,
    lr: float,
    schedule: str,
    steps: int,
    warmup_steps: int = 0,
    warmup_lr: float = 0.0,
    min_lr: float = 0.0,
    step_every: int | None = None,
    step_factor: float = 0.1,
) -> float:
    """Learning rate of one optimiser step.

    Steps 0 … warmup_steps-1 rise in a straight line from `warmup_lr`; step `warmup_steps` is the
    first at the full `lr`. Linear and cosine decay start there and would reach `min_lr` at step
    `steps`, one past the last. When the warm-up takes all steps, only the rise is ever used.
    "step" multiplies by `step_factor` every `step_every` steps counted from step 0, the warm-up
    included, and never goes below `min_lr`.

    Args:
        step: 0-based index of the optimiser step; beyond `steps` the last value stays.
        lr: the highest learning rate.
        schedule: "constant", "linear", "cosine", or "step", which needs `step_every`.
        steps: optimiser steps of the whole run.
        warmup_steps: optimiser steps of the linear warm-up, 0 for none; at most `steps`.
        warmup_lr: learning rate of step 0 when there is a warm-up.
        min_lr: where the decay ends; "constant" does not use it.
        step_every: optimiser steps between two drops of "step".
        step_factor: what a drop multiplies by.
    Source: vision_transformer, vit_jax/utils.py, create_learning_rate_schedule (its linear decay
        ends at min_lr = 1e-5, its cosine at 0, its warm-up starts at 0).
    """
    if step < warmup_steps:
        return warmup_lr + (lr - warmup_lr) * (step / warmup_steps)
    if schedule == "constant":
        return lr
    if schedule == "step":
        return max(min_lr, lr * step_factor ** (step // (step_every or 1)))
    decay_steps = steps - warmup_steps
    progress = min(1.0, (step - warmup_steps) / decay_steps) if decay_steps else 1.0
    remaining = (
        1.0 - progress if schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    )
    return min_lr + (lr - min_lr) * remaining


def set_lr(optimizer: Optimizer, lr: float) -> None:
    """Give every group its share of the learning rate: `lr` times the group's "lr_scale"."""
    for group in optimizer.param_groups:
        group_lr = lr * group.get("lr_scale", 1.0)
        if hasattr(group["lr"], "fill_"):  # a tensor, as capturable optimisers keep it
            group["lr"].fill_(group_lr)
        else:
            group["lr"] = group_lr


def param_groups(
    model: nn.Module,
    *,
    lr: float,
    weight_decay: float,
    decay: str = "matrices",
    layer_decay: float | None = None,
) -> list[dict[str, Any]]:
    """Group the trainable parameters by weight decay and by learning-rate scale.

    Args:
        model: frozen parameters (requires_grad False) are left out.
        weight_decay: of the parameters that are decayed; the others get 0.
        decay: "matrices" spares biases, norms, position embeddings, class tokens, bias tables and
            whatever the model's `no_weight_decay()` names; "all" decays every parameter.
        layer_decay: learning-rate factor per layer below the head, whose scale is 1; None: none.
    Returns: groups with "params", "weight_decay", "lr" and "lr_scale".
    Raises: RecipeError if nothing is trainable.
    Source: BEiT, optim_factory.py, through timm.optim.param_groups_layer_decay.
    """
    from timm.optim import param_groups_layer_decay, param_groups_weight_decay

    groups: list[dict[str, Any]]
    rules: dict[str, Any] = {
        "weight_decay": weight_decay,
        "no_weight_decay_list": list(_spared(model)) if decay == "matrices" else (),
    }
    if layer_decay is None:
        if decay == "all":
            trainable = [p for p in model.parameters() if p.requires_grad]
            groups = [{"params": trainable, "weight_decay": weight_decay}]
        else:
            groups = param_groups_weight_decay(model, **rules)
    else:
        rules["weight_decay_exclude_1d"] = decay == "matrices"
        groups = param_groups_layer_decay(model, layer_decay=layer_decay, **rules)
    groups = [group for group in groups if group["params"]]
    if not groups:
        raise RecipeError(
            "model.freeze: leaves no parameter to train; freeze fewer blocks or train the head",
            code="recipe.conflict",
        )
    for group in groups:
        scale = float(group.setdefault("lr_scale", 1.0))
        group["lr"] = lr * scale
    return groups


def build_optimizer(
    model: nn.Module,
    *,
    name: str,
    lr: float,
    momentum: float = 0.9,
    betas: Sequence[float] | None = None,
    weight_decay: float = 0.0,
    decay: str = "matrices",
    layer_decay: float | None = None,
    args: Mapping[str, Any] | None = None,
    sharded: bool = False,
) -> Optimizer:
    """Make an optimiser by timm's name for it.

    `sgd` here is torch.optim.SGD with plain momentum, as the ViT paper uses it; timm's own `sgd`
    has Nesterov momentum, which is `args={"nesterov": True}` here.

    Args:
        model: its trainable parameters are grouped by `param_groups`.
        name: one of timm.optim.list_optimizers(), of first order and with a state of tensors.
        lr: learning rate; `set_lr` changes it at every step.
        momentum: for the optimisers that have one.
        betas: for the optimisers that have them; None: the optimiser's own.
        weight_decay, decay, layer_decay: see `param_groups`.
        args, sharded: further arguments of the class; whether FSDP will spread the network.
    Raises: RecipeError for an unknown name or argument, or a value that the optimiser refuses;
        SetupError if it needs a package or a device that is not there.
    """
    from timm.optim import create_optimizer_v2, get_optimizer_class, get_optimizer_info

    extra = dict(args or {})
    _check_name(name)
    info = get_optimizer_info(name)
    try:
        optimizer_class = get_optimizer_class(name, bind_defaults=False)
    except (ImportError, AssertionError) as error:
        raise SetupError(
            f"optim.name: '{name}' cannot be used here: {error}", code="setup.missing_package"
        ) from error
    _check_args(name, optimizer_class, extra)
    if betas is not None:
        if not info.has_betas:
            raise RecipeError(
                f"optim.betas: '{name}' has no betas; remove the key", code="recipe.conflict"
            )
        extra["betas"] = tuple(betas)
    if name == "sgd":
        extra.setdefault("nesterov", False)
    extra = _fused(optimizer_class, extra, sharded=sharded) | extra
    groups = param_groups(
        model, lr=lr, weight_decay=weight_decay, decay=decay, layer_decay=layer_decay
    )
    try:
        return create_optimizer_v2(groups, opt=name, lr=lr, momentum=momentum, **extra)
    except (TypeError, ValueError, AssertionError, RuntimeError) as error:
        raise RecipeError(
            f"optim: '{name}' refuses its arguments: {error}; see: finetune recipes help optim",
            code="recipe.wrong_value",
        ) from error


def _fused(optimizer_class: Any, given: dict[str, Any], *, sharded: bool) -> dict[str, Any]:
    """Return the argument for torch's fused kernel, where there is one and none is excluded.

    Of what FSDP shards, torch's fused kernels compute Adam's steps alone.
    """
    from torch.optim import Adam

    has_one = "fused" in inspect.signature(optimizer_class).parameters and "foreach" not in given
    is_adam = isinstance(optimizer_class, type) and issubclass(optimizer_class, Adam)
    return {"fused": True} if has_one and (is_adam or not sharded) else {}


def can_mask(optimizer: Optimizer) -> bool:
    """True if the optimiser skips a step, on its device, where its `found_inf` is 1."""
    able = getattr(optimizer, "_step_supports_amp_scaling", False)
    return bool(able) and all(group.get("fused") for group in optimizer.param_groups)


def _spared(model: nn.Module) -> Iterator[str]:
    """Names of the parameters with two or more axes that weight decay spares."""
    yield from getattr(model, "no_weight_decay", set)()
    for name, _ in model.named_parameters():
        parts = name.split(".")
        if parts[-1] == "weight" and len(parts) > 1:
            parts.pop()  # "pos_embed.weight" of an embedding layer
        if parts[-1] in _TABLES or parts[-1] == "bias":
            yield name


def _check_name(name: str) -> None:
    """Raise RecipeError unless timm has a first-order optimiser of that name."""
    from timm.optim import get_optimizer_info, list_optimizers

    names = [str(known) for known in list_optimizers()]
    kept = [known for known in names if not any(kind in known for kind in _NOT_KEPT)]
    if name not in names:
        raise RecipeError(
            f"optim.name: unknown '{name}'{nearest(name, kept) or '.'} Nearly any name of "
            "timm.optim.list_optimizers() is possible.",
            code="recipe.unknown_name",
        )
    if get_optimizer_info(name).second_order:
        raise RecipeError(
            f"optim.name: '{name}' needs second derivatives, which a run has not",
            code="recipe.wrong_value",
        )
    if name not in kept:
        raise RecipeError(
            f"optim.name: '{name}' has a state that no checkpoint can hold; name another",
            code="recipe.wrong_value",
        )


def _check_args(name: str, optimizer_class: Any, args: Mapping[str, Any]) -> None:
    """Raise RecipeError naming every argument that the optimiser's class does not take."""
    parameters = inspect.signature(optimizer_class).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    known = [key for key in parameters if key not in ("params", *_OWN_KEYS)]
    problems = []
    for key in args:
        if key in _OWN_KEYS:
            problems.append(f"optim.args.{key}: write optim.{key} instead")
        elif not takes_any and key not in known:
            problems.append(
                f"optim.args.{key}: '{name}' has no such argument{nearest(key, known) or '.'} "
                f"It takes: {', '.join(known)}."
            )
    if problems:
        raise RecipeError("\n".join(problems), code="recipe.unknown_key")
