"""The classifier and the frozen part of any timm network."""

from __future__ import annotations

import re
from typing import Any

from timm.models import group_parameters
from torch import Tensor, nn

from finetune.errors import RecipeError, nearest

__all__ = ["as_names", "classifier_names", "freeze_parameters", "set_train_mode", "zero_head"]


# Part of the stem, also where timm's grouping forgets one (registers, before 1.0.28).
EMBEDDED_TOKENS = ("pos_embed", "cls_token", "dist_token", "reg_token")
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
    found = get_classifier() if callable(get_classifier) else None
    wanted = {id(module) for module in (found if isinstance(found, tuple | list) else (found,))}
    return [name for name, module in modules.items() if id(module) in wanted]


def zero_head(model: nn.Module, architecture: str) -> None:
    """Zero weights and biases of every classifier, so that the first loss is ln K."""
    heads = [model.get_submodule(name) for name in classifier_names(model)]
    layers = [[m for m in h.modules() if isinstance(m, nn.Linear | nn.Conv2d)] for h in heads]
    if not layers or not all(layers):
        raise RecipeError(
            f"model.head_init: {architecture} has no linear or 1x1 classifier to set to zero; "
            f"use head_init: default"
        )
    for *_, last in layers:  # the last of each alone: two zero layers in a row cannot learn
        nn.init.zeros_(last.weight)
        if last.bias is not None:
            nn.init.zeros_(last.bias)


def freeze_parameters(model: nn.Module, freeze: str | int) -> None:
    """Switch off gradients: "none", "backbone" (all but the head), or the first blocks.

    With a number, the patch, position and class-token embeddings are frozen too, and what lies
    between two frozen blocks: a block means little on top of what moves. So no gradient is computed
    below the last block that is trained.
    """
    if freeze == "none":
        return
    if isinstance(freeze, str) and freeze != "backbone":
        raise RecipeError(
            f"model.freeze: unknown '{freeze}'{nearest(freeze, ['none', 'backbone'])}; use none, "
            f"backbone, or a number of blocks"
        )
    frozen = {name for name, _ in model.named_parameters()}
    if isinstance(freeze, int):
        groups = _blocks(model)
        if not 0 <= freeze < len(groups):
            raise RecipeError(
                f"model.freeze: {freeze} of {max(len(groups) - 1, 0)} blocks; use a number between "
                f"0 (the embeddings alone) and that, or backbone"
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
    """Parameter names of the stem, then of each block, in order; what follows is left out."""
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
    """Whether timm counts a parameter to the block before it, like a change of resolution."""
    group_matcher: Any = model.group_matcher
    groups = group_matcher(coarse=False).values()
    rules = [rule for group in groups if isinstance(group, list | tuple) for rule in group]
    return any(mark == AFTER_BLOCKS and re.match(pattern, name) for pattern, mark in rules)


def set_train_mode(model: nn.Module) -> None:
    """Put the network into training mode, frozen batch norms excepted.

    A frozen layer must not change: batch norms whose weights are frozen keep their running
    statistics. Dropout in frozen blocks stays on, as it is part of the augmentation.
    """
    model.train()
    for module in model.modules():
        own = list(module.parameters(recurse=False))
        has_statistics = isinstance(getattr(module, "running_mean", None), Tensor)
        if has_statistics and own and not any(p.requires_grad for p in own):
            module.eval()
