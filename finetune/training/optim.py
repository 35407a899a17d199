"""The optimizer and its parameter groups: weight decay and layer-wise learning rate decay."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from timm.optim import (
    Muon,
    create_optimizer_v2,
    get_optimizer_class,
    get_optimizer_info,
    list_optimizers,
    param_groups_layer_decay,
    param_groups_weight_decay,
)
from torch import nn
from torch.optim import SGD, Adagrad, Adam, Optimizer

from finetune.errors import RecipeError, SetupError, did_you_mean
from finetune.models.head import as_name_tuple, classifier_names

__all__ = ["build_optimizer", "param_groups", "supports_found_inf"]

# Learned embeddings and tokens with two or more dimensions, which weight decay skips.
_EMBEDDING_NAMES = frozenset(
    {
        *("pos_embed", "pos_embed_window", "pos_embed_win", "absolute_pos_embed"),
        *("position_embeddings", "relative_position_bias_table", "rel_pos_h", "rel_pos_w"),
        *("attention_biases", "cls_token", "class_token", "dist_token", "reg_token"),
        *("register_tokens", "mask_token", "latent"),
    }
)
# timm optimizers whose state holds lists of tensors, or a dtype: no checkpoint can store it.
_UNSAVEABLE = ("adafactorbv", "kron")
# Optimizer arguments that have their own key in the recipe.
_RECIPE_KEYS = ("lr", "momentum", "betas", "weight_decay")


def param_groups(
    model: nn.Module,
    *,
    lr: float,
    weight_decay: float,
    decay: str = "matrices",
    layer_decay: float | None = None,
    hybrid: bool = False,
) -> list[dict[str, Any]]:
    """Group the trainable parameters by weight decay and by learning-rate scale.

    Args:
        model: the network; frozen parameters (requires_grad False) are excluded.
        lr: learning rate of groups with scale 1.
        weight_decay: weight decay of the decayed parameters; the others get 0.
        decay: "matrices" excludes biases, norms, position embeddings, class tokens, bias tables and
            the names in the model's `no_weight_decay()`; "all" decays every parameter.
        layer_decay: learning-rate factor per layer below the head, whose scale is 1; None for scale
            1 in all layers.
        hybrid: True for Muon, which orthogonalizes updates of weight matrices. The first
            convolution, the classifier, position embeddings and tokens are then in groups with
            "use_fallback": True, for which timm's Muon is AdamW.
    Returns: parameter groups with keys "params", "weight_decay", "lr" and "lr_scale".
    Raises: RecipeError if nothing is trainable.
    Source: BEiT, optim_factory.py, through timm.optim.param_groups_layer_decay.
    """
    groups: list[dict[str, Any]]
    rules: dict[str, Any] = {
        "weight_decay": weight_decay,
        "weight_decay_exclude_1d": decay == "matrices",
        "no_weight_decay_list": list(_no_decay_names(model)) if decay == "matrices" else (),
        "fallback_list": _fallback_patterns(model) if hybrid else (),
    }
    if layer_decay is None:
        groups = param_groups_weight_decay(model, **rules)
    else:
        groups = param_groups_layer_decay(model, layer_decay=layer_decay, **rules)
    groups = [group for group in groups if group["params"]]
    if not groups:
        raise RecipeError(
            "model.freeze: no parameter is left to train; freeze fewer blocks or train the head",
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
    """Build an optimizer by its timm name.

    `sgd` is torch.optim.SGD with plain momentum, as in the ViT paper; timm's own `sgd` uses
    Nesterov momentum, which is `args={"nesterov": True}` here.

    Args:
        model: the network; `param_groups` groups its trainable parameters.
        name: name of a timm optimizer, from timm.optim.list_optimizers(). Second-order optimizers,
            and those whose state is not made of tensors, are not supported.
        lr: learning rate; `set_lr` changes it at every step.
        momentum: momentum of optimizers that have one.
        betas: betas of optimizers that have them; None for the optimizer's default.
        weight_decay: weight decay of the decayed parameters; the others get 0.
        decay: parameters that get weight decay: "matrices" or "all"; see `param_groups`.
        layer_decay: learning-rate factor per layer below the head; None for the same learning rate
            in all layers.
        args: further arguments of the optimizer class.
        sharded: True if FSDP will shard the network.
    Raises: RecipeError for an unknown name or argument, or a value that the optimizer rejects;
        SetupError if it needs a package or a device that is missing.
    """
    extra = dict(args or {})
    _check_name(name)
    info = get_optimizer_info(name)
    try:
        optimizer_class = get_optimizer_class(name, bind_defaults=False)
    except (ImportError, AssertionError) as error:
        raise SetupError(
            f"optim.name: '{name}' cannot be used here ({error}); install the package that it "
            "needs, or choose another optimizer",
            code="setup.missing_package",
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
    extra = _fused_argument(optimizer_class, extra, sharded=sharded) | extra
    groups = param_groups(
        model,
        lr=lr,
        weight_decay=weight_decay,
        decay=decay,
        layer_decay=layer_decay,
        hybrid=optimizer_class is Muon,
    )
    try:
        return create_optimizer_v2(groups, opt=name, lr=lr, momentum=momentum, **extra)
    except (TypeError, ValueError, AssertionError, RuntimeError) as error:
        raise RecipeError(
            f"optim: '{name}' rejects its arguments: {error}; see: finetune recipes help optim",
            code="recipe.wrong_value",
        ) from error


def _fused_argument(optimizer_class: Any, args: dict[str, Any], *, sharded: bool) -> dict[str, Any]:
    """Return {"fused": True} if the optimizer supports it and `args` does not set foreach.

    With FSDP's sharded parameters, only torch's fused Adam kernels work.
    """
    has_fused = "fused" in inspect.signature(optimizer_class).parameters and "foreach" not in args
    is_adam = isinstance(optimizer_class, type) and issubclass(optimizer_class, Adam)
    return {"fused": True} if has_fused and (is_adam or not sharded) else {}


def supports_found_inf(optimizer: Optimizer) -> bool:
    """True if the optimizer itself skips the step, on the device, when its `found_inf` is 1."""
    # AdamW is a subclass of Adam.
    is_supported = isinstance(optimizer, SGD | Adagrad | Adam)
    return is_supported and all(group.get("fused") for group in optimizer.param_groups)


def _no_decay_names(model: nn.Module) -> Iterator[str]:
    """Yield names of parameters with two or more dimensions that get no weight decay."""
    yield from getattr(model, "no_weight_decay", set)()
    for name, _ in model.named_parameters():
        parts = name.split(".")
        if parts[-1] == "weight" and len(parts) > 1:
            parts.pop()  # "pos_embed.weight" of an embedding layer
        if parts[-1] in _EMBEDDING_NAMES or parts[-1] == "bias":
            yield name


def _fallback_patterns(model: nn.Module) -> list[str]:
    """Return patterns of the parameters that Muon should not orthogonalize.

    Source: Jordan et al. 2024, Muon: only hidden layers; embeddings and output layers use AdamW.
    """
    first_layers = as_name_tuple(getattr(model, "pretrained_cfg", {}).get("first_conv"))
    layers = [*first_layers, *classifier_names(model)]
    return [*(f"{name}.*" for name in layers), *_no_decay_names(model)]


def _check_name(name: str) -> None:
    """Raise RecipeError unless the name is a supported first-order optimizer of timm."""
    names = [str(known) for known in list_optimizers()]
    supported = [known for known in names if not any(kind in known for kind in _UNSAVEABLE)]
    if name not in names:
        raise RecipeError(
            f"optim.name: unknown '{name}'{did_you_mean(name, supported) or '.'} Most names of "
            "timm.optim.list_optimizers() are supported.",
            code="recipe.unknown_name",
        )
    if get_optimizer_info(name).second_order:
        raise RecipeError(
            f"optim.name: '{name}' needs second derivatives, which training does not compute; "
            "choose another optimizer",
            code="recipe.wrong_value",
        )
    if name not in supported:
        raise RecipeError(
            f"optim.name: '{name}' has a state that checkpoints cannot store; choose another "
            "optimizer",
            code="recipe.wrong_value",
        )


def _check_args(name: str, optimizer_class: Any, args: Mapping[str, Any]) -> None:
    """Raise RecipeError naming every argument that the optimizer class does not accept."""
    parameters = inspect.signature(optimizer_class).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    known = [key for key in parameters if key not in ("params", *_RECIPE_KEYS)]
    problems = []
    for key in args:
        if key in _RECIPE_KEYS:
            problems.append(f"optim.args.{key}: write optim.{key} instead")
        elif not takes_any and key not in known:
            problems.append(
                f"optim.args.{key}: '{name}' has no such argument{did_you_mean(key, known) or '.'} "
                f"Valid arguments: {', '.join(known)}."
            )
    if problems:
        raise RecipeError("\n".join(problems), code="recipe.unknown_key")
