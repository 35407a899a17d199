"""Freeze the backbone or its first blocks; frozen batch norms stay in evaluation mode."""

from __future__ import annotations

import re
from typing import Any

from timm.models import group_parameters
from torch import nn

from finetune.errors import RecipeError
from finetune.models.batch_norm import batch_norm_layers, unfrozen_batch_norm_layers
from finetune.models.head import classifier_names

__all__ = ["freeze_parameters", "set_train_mode"]

# Parameters that always belong to the stem; timm's group_matcher() omits some of them (register
# tokens before timm 1.0.28, learned RoPE).
EMBEDDING_NAMES = ("pos_embed", "cls_token", "dist_token", "reg_token", "rope.freqs")
MATCH_PREV_GROUP = (99999,)  # timm's group_matcher(): these layers join the previous group


def freeze_parameters(model: nn.Module, freeze: str | int) -> None:
    """Turn off gradients of the backbone or of the first blocks.

    A number of blocks also freezes the patch, position and class-token embeddings and the layers
    between frozen blocks (such as downsampling), so autograd computes no gradient below the first
    trained block.

    Args:
        model: any timm network.
        freeze: "none", "backbone" (all but the head), or a number of blocks.
    Raises: RecipeError for more blocks than the network has.
    """
    if freeze == "none":
        return
    assert freeze == "backbone" or isinstance(freeze, int)
    frozen = {name for name, _ in model.named_parameters()}
    if isinstance(freeze, int):
        groups = _block_parameter_names(model)
        if not 0 <= freeze < len(groups):
            raise RecipeError(
                f"model.freeze: {freeze} blocks, but the network has {max(len(groups) - 1, 0)}; "
                "use a number from 0 (only the embeddings) to the number of blocks, or backbone",
                code="recipe.wrong_value",
            )
        frozen = {name for group in groups[: freeze + 1] for name in group}
        names = [name for name, _ in model.named_parameters()]
        blocks = [name for group in groups[1 : freeze + 1] for name in group]
        last = max((names.index(name) for name in blocks), default=0)
        patterns = _previous_group_patterns(model)
        frozen |= {
            name for name in names[:last] if any(re.match(pattern, name) for pattern in patterns)
        }
    heads = tuple(f"{name}." for name in classifier_names(model))
    for name, parameter in model.named_parameters():
        if name in frozen and not name.startswith(heads):
            parameter.requires_grad_(False)


def _block_parameter_names(model: nn.Module) -> list[list[str]]:
    """Return the parameter names of the stem, then of each block.

    Layers after the blocks are left out. The list is empty for a network without group_matcher().
    """
    group_matcher = getattr(model, "group_matcher", None)
    if group_matcher is None:
        return []
    # timm assigns the layers after the blocks to the last block; we assign them to none
    matcher = {
        key: [rule for rule in rules if rule[1] != MATCH_PREV_GROUP]
        if isinstance(rules, list | tuple)
        else rules
        for key, rules in group_matcher(coarse=False).items()
    }
    groups = group_parameters(model, matcher)
    blocks = [groups[index] for index in sorted(groups)][:-1]
    tokens = [name for name, _ in model.named_parameters() if name in EMBEDDING_NAMES]
    return [[*blocks[0], *tokens], *blocks[1:]] if blocks else []


def _previous_group_patterns(model: nn.Module) -> list[str]:
    """Return the regexes of parameters that timm groups with the block before them.

    These are, for example, the parameters of downsampling layers.
    """
    group_matcher: Any = model.group_matcher
    groups = group_matcher(coarse=False).values()
    rules = [rule for group in groups if isinstance(group, list | tuple) for rule in group]
    return [pattern for pattern, mark in rules if mark == MATCH_PREV_GROUP]


def set_train_mode(model: nn.Module) -> None:
    """Put the network into training mode, except frozen batch norms.

    Batch norms with frozen weights, and all batch norms with `model.freeze_bn`, stay in evaluation
    mode, so their running statistics do not change. Dropout in frozen blocks stays active, since it
    acts as augmentation.
    """
    model.train()
    unfrozen = unfrozen_batch_norm_layers(model)
    for norm in batch_norm_layers(model):
        norm.train(norm in unfrozen)
