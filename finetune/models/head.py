"""The classifier head of any timm network."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from finetune.errors import RecipeError

__all__ = ["as_name_tuple", "classifier_names", "copy_classifier_rows", "zero_head"]


def as_name_tuple(names: Any) -> tuple[str, ...]:
    """Convert timm's `classifier` or `first_conv` entry (None, one name, or a list) to a tuple."""
    if not names:
        return ()
    return (names,) if isinstance(names, str) else tuple(names)


def classifier_names(model: nn.Module) -> list[str]:
    """Return the names of the modules that compute the logits; distilled networks have several.

    The names come from timm's pretrained_cfg if the modules exist, because get_classifier() may
    return the parent of the last layer.
    """
    modules = {name: module for name, module in model.named_modules() if name}
    configured = as_name_tuple(getattr(model, "pretrained_cfg", {}).get("classifier"))
    if configured and all(name in modules for name in configured):
        return list(configured)
    get_classifier = getattr(model, "get_classifier", None)
    heads = get_classifier() if callable(get_classifier) else None
    ids = {id(module) for module in (heads if isinstance(heads, tuple | list) else (heads,))}
    return [name for name, module in modules.items() if id(module) in ids]


def _logit_layer_names(model: nn.Module) -> list[str]:
    """Return the name of the last linear or convolution layer of each classifier.

    Only the last layer may be set to zero: two consecutive zero layers get no gradient. Empty if
    any classifier has no such layer.
    """
    names = []
    for head in classifier_names(model):
        modules = model.get_submodule(head).named_modules(prefix=head)
        layers = [name for name, module in modules if isinstance(module, nn.Linear | nn.Conv2d)]
        if not layers:
            return []
        names.append(layers[-1])
    return names


def copy_classifier_rows(
    model: nn.Module, state: Mapping[str, Tensor], source_rows: Mapping[int, int]
) -> bool:
    """Copy classifier rows from a state dict whose classes may differ in order and number.

    Args:
        model: the network whose classifiers are changed in place.
        state: the source state dict, with the network's tensor names.
        source_rows: {row in the network: row in `state`}; all other rows become zero.
    Returns: False if the classifiers in `state` have other layers or shapes; the network is then
        unchanged.
    """
    layers = _logit_layer_names(model)
    heads = tuple(f"{name}." for name in classifier_names(model))
    own = {key: value for key, value in model.state_dict().items() if key.startswith(heads)}
    if not layers:
        return False
    for key, tensor in own.items():
        theirs, is_last = state.get(key), key.rpartition(".")[0] in layers
        start = 1 if is_last else 0  # the number of classes may differ
        if theirs is None or theirs.shape[start:] != tensor.shape[start:]:
            return False
        if is_last and len(theirs) <= max(source_rows.values()):
            return False
    for key, tensor in own.items():  # state_dict() tensors share memory with the parameters
        if key.rpartition(".")[0] in layers:
            tensor.zero_()
            tensor[list(source_rows)] = state[key][list(source_rows.values())].to(tensor.dtype)
        else:
            tensor.copy_(state[key])
    return True


def zero_head(model: nn.Module, architecture: str) -> None:
    """Set the weights and biases of every classifier to zero, so that the first loss is ln K."""
    layers = _logit_layer_names(model)
    if not layers:
        raise RecipeError(
            f"model.head_init: {architecture} has no linear or 1x1 classifier to set to zero; set "
            f"model.head_init=default",
            code="recipe.unsupported",
        )
    for name in layers:
        for parameter in model.get_submodule(name).parameters():
            nn.init.zeros_(parameter)
