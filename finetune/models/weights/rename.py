"""Rename the tensors of another implementation to timm's names with regular expressions."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

from torch import Tensor

from finetune.errors import WeightsError

__all__ = ["match_by_shape", "rename_tensors"]

# Suffixes of tensor names that have the same meaning in every PyTorch network.
_KNOWN_SUFFIXES = {"weight", "bias", "running_mean", "running_var", "num_batches_tracked"}


def rename_tensors(
    state: Mapping[str, Tensor], patterns: Mapping[str, str], *, source: str
) -> dict[str, Tensor]:
    """Rename tensors: apply each pattern in turn to every name with re.sub.

    Args:
        state: {name: tensor}.
        patterns: {regular expression: replacement}.
        source: name of the weights as the user gave it, for messages.
    Raises: WeightsError for a pattern that matches no name, two tensors with the same new name, or
        a new name of another kind (for example a weight renamed to a bias).
    """
    names = {name: name for name in state}
    for pattern, replacement in patterns.items():
        after = {old: re.sub(pattern, replacement, new) for old, new in names.items()}
        if not any(re.search(pattern, new) for new in names.values()):
            shown = ", ".join(list(names.values())[:3])
            raise WeightsError(
                f"{source}: model.rename: '{pattern}' matches no tensor name ({shown}, …); correct "
                f"or remove it",
                code="weights.wrong_rename",
            )
        names = after
    result: dict[str, Tensor] = {}
    before: dict[str, str] = {}
    for old, new in names.items():
        if new in result:
            raise WeightsError(
                f"{source}: model.rename: both {before[new]} and {old} become {new}; make the "
                f"patterns more specific",
                code="weights.wrong_rename",
            )
        result[new], before[new] = state[old], old
        if problem := _rename_problem(old, new, state[old]):
            raise WeightsError(
                f"{source}: model.rename: {old} cannot become {new}: {problem}; correct the "
                f"patterns",
                code="weights.wrong_rename",
            )
    return result


def _rename_problem(old: str, new: str, tensor: Tensor) -> str | None:
    """Return the reason why a tensor cannot have this new name; None if it can."""
    old_kind, new_kind = (name.rpartition(".")[2] for name in (old, new))
    if old_kind != new_kind and {old_kind, new_kind} <= _KNOWN_SUFFIXES:
        return f"a {old_kind} is not a {new_kind}"
    if new_kind == "running_var" and bool((tensor < 0).any()):
        return "a variance cannot be negative"
    return None


def match_by_shape(
    state: Mapping[str, Tensor],
    model_state: Mapping[str, Tensor],
    *,
    head_names: Collection[str] = (),
) -> list[tuple[str, str]]:
    """Pair the n-th tensor of the weights with the n-th of the network, if all shapes match.

    A weight never pairs with a bias, even if their shapes are equal.

    Args:
        state: the weights, in file order.
        model_state: the network's state dict.
        head_names: names of the network's classifiers; their number of classes may differ.
    Returns: pairs (name in the weights, name in the network); [] if any pair does not match.
    """
    if len(state) != len(model_state):
        return []
    pairs = list(zip(state, model_state, strict=True))
    for theirs, ours in pairs:
        start = 1 if ours.rpartition(".")[0] in head_names else 0
        one, other = state[theirs].shape, model_state[ours].shape
        fits = len(one) == len(other) and one[start:] == other[start:]
        if not fits or _rename_problem(theirs, ours, state[theirs]):
            return []
    return pairs
