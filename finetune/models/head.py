"""The classifier and the frozen part of any timm network."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from timm.models import group_parameters
from torch import Tensor, nn

from finetune.errors import RecipeError, nearest
from finetune.models.batch_norm import counting_norms, norms_with_statistics

__all__ = [
    "as_names",
    "classifier_names",
    "freeze_parameters",
    "keep_rows",
    "set_train_mode",
    "zero_head",
]


# Part of the stem, also where timm's grouping forgets one (registers before 1.0.28, learned RoPE).
EMBEDDED_TOKENS = ("pos_embed", "cls_token", "dist_token", "reg_token", "rope.freqs")
AFTER_BLOCKS = (99999,)  # timm's mark in group_matcher()


def as_names(classifier: Any) -> tuple[str, ...]:
    """timm's `classifier`: nothing, one name or several."""
    if not classifier:
        return ()
    return (classifier,) if isinstance(classifier, str) else tuple(classifier)


def classifier_names(model: nn.Module) -> list[str]:
    """Names of the modules that give the logits: one, or more in distilled networks.

    timm's configuration names the last layer itself, get_classifier() sometimes what holds it.
    """
    modules = {name: module for name, module in model.named_modules() if name}
    configured = as_names(getattr(model, "pretrained_cfg", {}).get("classifier"))
    if configured and all(name in modules for name in configured):
        return list(configured)
    get_classifier = getattr(model, "get_classifier", None)
    heads = get_classifier() if callable(get_classifier) else None
    ids = {id(module) for module in (heads if isinstance(heads, tuple | list) else (heads,))}
    return [name for name, module in modules.items() if id(module) in ids]


def _logit_layers(model: nn.Module) -> list[str]:
    """Names of the layers that give the logits; empty if a classifier has no linear or 1x1 one.

    Of each classifier it is the last one alone: two zero layers in a row cannot learn.
    """
    names = []
    for head in classifier_names(model):
        modules = model.get_submodule(head).named_modules(prefix=head)
        layers = [name for name, module in modules if isinstance(module, nn.Linear | nn.Conv2d)]
        if not layers:
            return []
        names.append(layers[-1])
    return names


def keep_rows(model: nn.Module, state: Mapping[str, Tensor], rows: Mapping[int, int]) -> bool:
    """Copy the classifiers of other weights, for classes in another order or number.

    Args:
        model: its classifiers are changed.
        state: the weights, by the network's names.
        rows: class of the network to class of the weights; the rows of all others become zero.
    Returns: False if the weights have other classifiers; then nothing is changed.
    """
    layers = _logit_layers(model)
    heads = tuple(f"{name}." for name in classifier_names(model))
    own = {key: value for key, value in model.state_dict().items() if key.startswith(heads)}
    if not layers:
        return False
    for key, tensor in own.items():
        theirs, is_last = state.get(key), key.rpartition(".")[0] in layers
        start = 1 if is_last else 0  # the number of classes may be another
        if theirs is None or theirs.shape[start:] != tensor.shape[start:]:
            return False
        if is_last and len(theirs) <= max(rows.values()):
            return False
    for key, tensor in own.items():  # these share the network's memory
        if key.rpartition(".")[0] in layers:
            tensor.zero_()
            tensor[list(rows)] = state[key][list(rows.values())].to(tensor.dtype)
        else:
            tensor.copy_(state[key])
    return True


def zero_head(model: nn.Module, architecture: str) -> None:
    """Zero weights and biases of every classifier, so that the first loss is ln K."""
    layers = _logit_layers(model)
    if not layers:
        raise RecipeError(
            f"model.head_init: {architecture} has no linear or 1x1 classifier to set to zero; use "
            f" head_init: default",
            code="recipe.unsupported",
        )
    for name in layers:
        for parameter in model.get_submodule(name).parameters():
            nn.init.zeros_(parameter)


def freeze_parameters(model: nn.Module, freeze: str | int) -> None:
    """Switch off gradients: "none", "backbone" (all but the head), or the first blocks.

    A number also freezes the patch, position and class-token embeddings and the layers between two
    frozen blocks: a frozen block means little on inputs that change. So no gradient is computed
    below the first block that is trained.
    """
    if freeze == "none":
        return
    if isinstance(freeze, str) and freeze != "backbone":
        raise RecipeError(
            f"model.freeze: unknown '{freeze}'{nearest(freeze, ['none', 'backbone'])}; use none, "
            f"backbone, or a number of blocks",
            code="recipe.unknown_name",
        )
    frozen = {name for name, _ in model.named_parameters()}
    if isinstance(freeze, int):
        groups = _blocks(model)
        if not 0 <= freeze < len(groups):
            raise RecipeError(
                f"model.freeze: {freeze} of {max(len(groups) - 1, 0)} blocks; use a number between "
                f"0 (the embeddings alone) and that, or backbone",
                code="recipe.wrong_value",
            )
        frozen = {name for group in groups[: freeze + 1] for name in group}
        names = [name for name, _ in model.named_parameters()]
        blocks = [name for group in groups[1 : freeze + 1] for name in group]
        last = max((names.index(name) for name in blocks), default=0)
        frozen |= {name for name in names[:last] if _is_between(model, name)}
    heads = tuple(f"{name}." for name in classifier_names(model))
    for name, parameter in model.named_parameters():
        if name in frozen and not name.startswith(heads):
            parameter.requires_grad_(False)


def _blocks(model: nn.Module) -> list[list[str]]:
    """Parameter names of the stem, then of each block, in order; later layers are left out."""
    group_matcher = getattr(model, "group_matcher", None)
    if group_matcher is None:
        return []
    # timm adds what follows the blocks to the last of them; here it belongs to none.
    matcher = {
        key: [rule for rule in rules if rule[1] != AFTER_BLOCKS]
        if isinstance(rules, list | tuple)
        else rules
        for key, rules in group_matcher(coarse=False).items()
    }
    groups = group_parameters(model, matcher)
    blocks = [groups[index] for index in sorted(groups)][:-1]
    tokens = [name for name, _ in model.named_parameters() if name in EMBEDDED_TOKENS]
    return [[*blocks[0], *tokens], *blocks[1:]] if blocks else []


def _is_between(model: nn.Module, name: str) -> bool:
    """True if timm counts a parameter to the block before it, like a change of resolution."""
    group_matcher: Any = model.group_matcher
    groups = group_matcher(coarse=False).values()
    rules = [rule for group in groups if isinstance(group, list | tuple) for rule in group]
    return any(mark == AFTER_BLOCKS and re.match(pattern, name) for pattern, mark in rules)


def set_train_mode(model: nn.Module) -> None:
    """Put the network into training mode, frozen batch norms excepted.

    A frozen layer must not change: batch norms whose weights are frozen keep their running
    statistics, as all do with `model.freeze_bn`. Dropout in frozen blocks stays on, as it is
    part of the augmentation.
    """
    model.train()
    counting = counting_norms(model)
    for norm in norms_with_statistics(model):
        norm.train(norm in counting)
