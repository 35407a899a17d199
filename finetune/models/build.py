"""From a name to a network ready to train: weights, position embeddings, head, freezing."""

# K classes

from __future__ import annotations

import contextlib
import inspect
import logging
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

import timm
import torch
from timm.data.config import resolve_data_config
from timm.models import VisionTransformer
from torch import nn
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode

from finetune.errors import FinetuneError, RecipeError, WeightsError, nearest
from finetune.models.adapter import add_adapter
from finetune.models.head import as_names, freeze_parameters, keep_rows, zero_head
from finetune.models.saved import Built
from finetune.models.weights.load import load, stride
from finetune.models.weights.resize_posemb import METHODS
from finetune.models.weights.resolve import resolve
from finetune.models.weights.timm_config import (
    CONTROL_ARGS,
    LARGEST_SIDE,
    Weights,
    enormous,
    is_size,
)
from finetune.text import byte_size
from finetune.transforms.preprocessing import Preprocessing

__all__ = ["build"]

_log = logging.getLogger(__name__)

# Keys of build()'s `args` that are not timm's: they say how to read a file.
READING_ARGS = ("architecture", "pre_logits")
# Advice for keywords of timm that the recipe has elsewhere.
PLACES = {
    "pretrained": "set model.pretrained instead",
    "num_classes": "remove it: the classes come from the data",
    "in_chans": "remove it: images have three channels here",
    "model_name": "set model.name instead",
}
# Recipe key to timm's keywords, first the ones that match the ViT paper's dropout places.
DROPOUT_KEYWORDS = {
    "dropout": (("pos_drop_rate", "proj_drop_rate"), ("proj_drop_rate",), ("drop_rate",)),
    "attention_dropout": (("attn_drop_rate",),),
    "drop_path": (("drop_path_rate",),),
}


def build(
    name: str,
    *,
    num_classes: int | None = None,
    class_names: Sequence[str] | None = None,
    pretrained: bool = True,
    image_size: int | tuple[int, int] | None = None,
    posemb: str = "paper",
    head_init: str | None = "zeros",
    freeze: str | int = "none",
    adapter: Mapping[str, Any] | None = None,
    dropout: float = 0.0,
    attention_dropout: float = 0.0,
    drop_path: float = 0.0,
    grad_checkpointing: bool = False,
    args: Mapping[str, Any] | None = None,
    rename: Mapping[str, str] | None = None,
    multilabel: bool = False,
) -> Built:
    """Build a network from weights, ready to be fine-tuned or to predict.

    Args:
        name: see finetune.models.weights.resolve.resolve.
        num_classes: K for a new head; None keeps the weights' own classes and head.
        class_names: of the K classes; `head_init` needs them to find classes of the weights.
        pretrained: False builds the same network with random weights.
        image_size: pixels, or (height, width); None takes the weights' own.
        posemb: how position embeddings are resized, "paper" or "timm".
        head_init: of a new head: "zeros", "default" for timm's, "keep" or None; see `_set_head`.
        freeze: "none", "backbone" (all but the head), or a count: all embeddings and first blocks.
        adapter: arguments of `add_adapter`; it and the head are then all that is trained.
        dropout: where the ViT paper has it, if the network has these places; else before the head.
        attention_dropout, drop_path: on attention weights; of the last block, growing from 0.
        grad_checkpointing: recompute activations to save memory.
        args: further keyword arguments of timm.
        rename: regular expression to replacement, for weights with names of another network.
        multilabel: a new head gives an image any number of labels.
    Raises: WeightsError, or RecipeError for an argument that the network does not take.
    """
    _check(args := args or {}, posemb)
    weights = resolve(name, pretrained=pretrained, args=args, rename=rename)
    model_args, size = _arguments(weights, args, image_size)
    rates = {"dropout": dropout, "attention_dropout": attention_dropout, "drop_path": drop_path}
    keep = num_classes is None
    classes = _source_classes(weights) if num_classes is None else num_classes
    model, dropouts = _create(weights, model_args, rates, classes, size, args=args)
    _check_size(model, weights, size)
    create_args = {**model_args, **dropouts, "num_classes": classes}
    known = {} if keep else _set_head(model, weights, class_names or (), head_init, multilabel)
    model, resized = load(model, weights, create_args, posemb=posemb, keep_head=keep)
    freeze_parameters(model, freeze)
    if adapter is not None:
        add_adapter(model, size, **adapter)
    if grad_checkpointing:
        _checkpoint_gradients(model, weights.architecture)
    preprocessing = _preprocessing(weights.config, size)
    provenance = _provenance(model, weights, posemb=resized, dropout=dropouts, **known)
    head = _own_head(weights, classes) if keep else {"class_names": None, "multilabel": multilabel}
    return Built(model, weights.architecture, model_args, preprocessing, provenance, **head)


def _own_head(weights: Weights, num_classes: int) -> dict[str, Any]:
    """The facts of `Built` about the weights' own head."""
    is_trained = weights.state is not None
    return {
        "class_names": _own_names(weights, num_classes),
        "temperature": weights.temperature if is_trained else None,
        "multilabel": weights.multilabel,
        "thresholds": weights.thresholds if is_trained else None,
    }


def _set_head(
    model: nn.Module,
    weights: Weights,
    class_names: Sequence[str],
    head_init: str | None,
    multilabel: bool,
) -> dict[str, int]:
    """Give a new head the values that training starts from.

    Args:
        class_names: of the K classes, as far as they are known.
        head_init: "keep": the rows of the classes that the weights' config.json names, and zeros
            for the others; None: so where it names any, else "zeros"; "default": as timm made it.
        multilabel: as for `build`; of the other kind of weights the rows mean something else.
    Returns: the number of classes kept, for the provenance; empty if none is.
    Raises: RecipeError if there are none for "keep".
    """
    source = weights.provenance["source"]
    if head_init in (None, "keep") and weights.state is not None and weights.from_config:
        theirs = (weights.class_names or ()) if multilabel is weights.multilabel else ()
        known = {name: index for index, name in enumerate(theirs)}
        rows = {index: known[name] for index, name in enumerate(class_names) if name in known}
        if rows and keep_rows(model, weights.state, rows):
            _log.warning("model.head_init: %s", _kept(source, rows, class_names))
            return {"kept_classes": len(rows)}
    if head_init == "keep" and weights.state is not None:
        raise RecipeError(
            f"model.head_init: {source} names none of the classes of the data, or has another "
            "head or data.task, so none is kept; remove the key",
            code="recipe.conflict",
        )
    if head_init != "default":
        zero_head(model, weights.architecture)
    return {}


def _kept(name: str, rows: Mapping[int, int], class_names: Sequence[str]) -> str:
    """The notice about a head that was kept."""
    new = [class_name for index, class_name in enumerate(class_names) if index not in rows]
    if not new:
        return f"the head of {name} is kept: it knows all {len(rows)} classes"
    listed = ", ".join(new[:5]) + (", …" if new[5:] else "")
    return (
        f"{name} knows {len(rows)} of the {len(class_names)} classes: their rows of its head are "
        f"kept; new, from zero: {listed}"
    )


def _provenance(model: nn.Module, weights: Weights, **done: Any) -> dict[str, Any]:
    """The origin of the weights, and the changes to them and to the network."""
    parameters = list(model.parameters())
    return {
        **weights.provenance,
        "architecture": weights.architecture,
        "pretrained": weights.state is not None,
        **done,
        "parameters": sum(p.numel() for p in parameters),
        "trainable_parameters": sum(p.numel() for p in parameters if p.requires_grad),
    }


# --- creating ------------------------------------------------------------------------------------


def _check(args: Mapping[str, Any], posemb: str) -> None:
    """Refuse an unknown resizing and what is no argument of a network, these all at once."""
    if posemb not in METHODS:
        raise RecipeError(
            f"model.posemb: unknown '{posemb}'; use one of: {', '.join(METHODS)}",
            code="recipe.unknown_name",
        )
    problems: list[tuple[str, str]] = []  # the code is that of the first
    for key, value in args.items():
        name, code = f"model.args.{key}", "recipe.wrong_value"
        if value is None:
            problems.append((f"{name}: has no value; write a space after the colon", code))
        elif key in CONTROL_ARGS:
            advice = PLACES.get(key, "remove the key")
            text = f"{name}: is no argument of a network; {advice}"
            problems.append((text, "recipe.unknown_key"))
        elif key == "img_size" and not is_size(value):
            problems.append((f"{name}: {value!r}, expected pixels, or [height, width]", code))
        elif key != "img_size" and enormous(value):
            text = f"{name}: {value!r}; no network is that large, make it less"
            problems.append((text, code))
    if problems:
        raise RecipeError("\n".join(text for text, _ in problems), code=problems[0][1])


def _arguments(
    weights: Weights, args: Mapping[str, Any], image_size: int | tuple[int, int] | None
) -> tuple[dict[str, Any], tuple[int, int]]:
    """timm's keyword arguments, and the (height, width) that the network is built for."""
    own = {k: v for k, v in args.items() if k not in READING_ARGS}
    model_args = {**weights.model_args, **own}
    model_args.pop("num_classes", None)
    size = image_size if image_size is not None else model_args.get("img_size")
    if size is None:
        size = tuple(weights.config.get("input_size", (3, 224, 224)))[-2:]
    height, width = (size, size) if isinstance(size, int) else size
    if max(height, width) > LARGEST_SIDE:
        limit = f"expected at most {LARGEST_SIDE} pixels a side"
        raise RecipeError(
            f"model.image_size: {height} x {width}, {limit}", code="recipe.wrong_size"
        )
    if weights.config.get("fixed_input_size") or "img_size" in model_args:
        model_args["img_size"] = [int(height), int(width)]
    return model_args, (int(height), int(width))


def _source_classes(weights: Weights) -> int:
    """The number of classes of the weights' own head; 0 when they come without one."""
    if weights.state is not None:
        for name in as_names(weights.config.get("classifier")):
            weight = weights.state.get(f"{name}.weight")
            if weight is not None:
                return weight.shape[0] - int(weights.config.get("label_offset") or 0)
    return int(weights.config.get("num_classes") or 0)


def _own_names(weights: Weights, num_classes: int) -> list[str] | None:
    names = weights.class_names
    if names is not None and len(names) != num_classes:
        raise WeightsError(
            f"{weights.provenance.get('source')}: config.json: label_names: {len(names)} names, "
            f"but the head has {num_classes} classes; give one each, or remove the key",
            code="weights.wrong_config",
        )
    return names


def _create(
    weights: Weights,
    model_args: Mapping[str, Any],
    rates: Mapping[str, float],
    num_classes: int,
    size: tuple[int, int],
    *,
    args: Mapping[str, Any],
) -> tuple[nn.Module, dict[str, Any]]:
    """Create the network with random weights.

    Returns: it, and timm's keyword arguments for its dropout.
    Raises: RecipeError naming the argument that the network does not take; WeightsError where
        the weights' own config.json is at fault.
    """
    places = {key: list(DROPOUT_KEYWORDS[key]) for key, rate in rates.items() if rate}
    while True:
        extra = {kw: rates[key] for key, options in places.items() for kw in options[0]}
        kwargs = {**model_args, **extra, "num_classes": num_classes}
        try:
            if args or weights.from_config:
                _check_memory(weights, kwargs)
            model = timm.create_model(
                weights.architecture, pretrained_cfg=weights.pretrained_cfg, **kwargs
            )
        except WeightsError:
            raise
        except Exception as error:  # a network may raise anything on values it cannot use
            key = next((k for k, o in places.items() if _unexpected(error) in o[0]), None)
            if key is None:
                raise _cannot_create(weights, args, size, error) from error
            places[key].pop(0)
            if not places[key]:
                raise RecipeError(
                    f"model.{key}: {weights.architecture} has no such dropout; set it to 0",
                    code="recipe.unsupported",
                ) from error
        else:
            return model, extra


class _Uninitialized(TorchDispatchMode):
    """Leaves out what is done in place to tensors without memory: drawing first values, slowly."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func._schema.name.endswith("_") and args[0].is_meta:
            return args[0]
        return func(*args, **(kwargs or {}))


def _check_memory(weights: Weights, kwargs: Mapping[str, Any]) -> None:
    """Refuse sizes that this machine cannot hold, before memory is asked for."""
    needed, available = 0, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    # not every network can be made without memory
    with torch.device("meta"), _Uninitialized(), contextlib.suppress(RuntimeError):
        model = timm.create_model(
            weights.architecture, pretrained_cfg=weights.pretrained_cfg, **kwargs
        )
        needed = sum(tensor.nbytes for tensor in model.state_dict().values())
    if needed > available:
        raise WeightsError(
            f"{weights.provenance['source']}: its tensors take {byte_size(needed)}, and this "
            f"machine has {byte_size(available)}; make the network smaller",
            code="weights.too_large",
        )


def _unexpected(error: Exception) -> str | None:
    """The keyword argument that a call did not take."""
    match = re.search(r"unexpected keyword argument '(\w+)'", str(error))
    return match[1] if match and isinstance(error, TypeError) else None


def _cannot_create(
    weights: Weights, args: Mapping[str, Any], size: tuple[int, int], error: Exception
) -> FinetuneError:
    """The error that names whose values timm refuses: the weights', the recipe's, or its size."""
    own_error = _failure(weights, None) if weights.from_config else None
    if own_error is not None:
        return WeightsError(
            f"{weights.provenance.get('source')}: config.json: timm cannot build "
            f"{weights.architecture} from its values ({_reason(own_error)}); get it again",
            code="weights.wrong_config",
        )
    if unexpected := _unexpected(error):
        return _unknown_argument(weights.architecture, unexpected, error)
    own = {k: v for k, v in args.items() if k not in READING_ARGS}
    if own and _failure(weights, size) is None:
        return RecipeError(
            f"model.args: timm refused {own} for {weights.architecture} ({_reason(error)}); "
            f"correct them",
            code="recipe.wrong_value",
        )
    return RecipeError(
        f"model: {weights.architecture} cannot be built at {size[0]}x{size[1]} px "
        f"({_reason(error)}); check model.image_size",
        code="recipe.wrong_size",
    )


def _failure(weights: Weights, size: tuple[int, int] | None) -> Exception | None:
    """The error that timm raises on the weights' own values and a size; None if it has none."""
    own, _ = _arguments(weights, {}, size)
    own |= {"num_classes": _source_classes(weights), "pretrained_cfg": weights.pretrained_cfg}
    failure: Exception | None = None
    for device in ("meta", "cpu"):  # not every network can be made without memory
        try:
            with torch.device(device), _Uninitialized():
                timm.create_model(weights.architecture, **own)
            return None
        except Exception as error:  # see _create
            failure = error
    return failure


def _reason(error: Exception) -> str:
    lines = str(error).splitlines() or [""]
    kind = type(error).__name__
    return f"{kind}: {lines[0]}" if isinstance(error, KeyError) else lines[0] or kind


def _unknown_argument(architecture: str, argument: str, error: Exception) -> RecipeError:
    names: list[str] = []
    trace = error.__traceback__
    while trace is not None:  # the innermost frame created the network: its parameters are known
        owner = trace.tb_frame.f_locals.get("model_cls")
        if callable(owner):
            names = list(inspect.signature(owner).parameters)
        trace = trace.tb_next
    key = "image_size" if argument == "img_size" else f"args.{argument}"
    return RecipeError(
        f"model.{key}: {architecture} takes no argument '{argument}'"
        f"{nearest(argument, names) or '; remove it'}",
        code="recipe.unknown_key",
    )


def _check_size(model: nn.Module, weights: Weights, size: tuple[int, int]) -> None:
    """Refuse an image size, (height, width), that is not for this network."""
    _check_divisible(model, size, weights.architecture)
    own_size = tuple(weights.config.get("input_size", (3, *size)))[-2:]
    if size != own_size and not isinstance(model, VisionTransformer):  # whole patches do for that
        _check_computes(model, size, weights.architecture)


def _check_divisible(model: nn.Module, size: tuple[int, int], architecture: str) -> None:
    step = stride(model)
    if step is None or getattr(model.patch_embed, "dynamic_img_pad", False):
        return
    for pixels, patch in zip(size, step, strict=True):
        if pixels % patch or not pixels:
            below, above = pixels // patch * patch, (pixels // patch + 1) * patch
            near = f"{below} or {above}" if below else f"{above}"
            raise RecipeError(
                f"model.image_size: {pixels} px is not divided by the patch of {patch} px of "
                f"{architecture}; use {near}",
                code="recipe.wrong_size",
            )


@torch.no_grad()
def _check_computes(model: nn.Module, size: tuple[int, int], architecture: str) -> None:
    """Refuse a size that the network cannot compute, such as one that its windows do not divide."""
    training = model.training
    model.eval()
    try:
        for device in ("meta", "cpu"):  # not every network computes without memory
            tensors = (*model.named_parameters(), *model.named_buffers())
            try:
                state = {name: tensor.to(device) for name, tensor in tensors}
                functional_call(model, state, torch.zeros(1, 3, *size, device=device))
                return
            except Exception as error:  # a network may raise anything on a size it cannot use
                failure = error
    finally:
        model.train(training)
    raise RecipeError(
        f"model.image_size: {architecture} cannot compute {size[0]}x{size[1]} px "
        f"({_reason(failure)}); use its own, or a multiple of 32 pixels",
        code="recipe.wrong_size",
    ) from failure


def _checkpoint_gradients(model: nn.Module, architecture: str) -> None:
    try:
        model.set_grad_checkpointing(True)  # type: ignore[operator]
    except (AttributeError, AssertionError) as error:
        raise RecipeError(
            f"model.grad_checkpointing: {architecture} does not support it; set it to false",
            code="recipe.unsupported",
        ) from error


def _preprocessing(config: Mapping[str, Any], size: tuple[int, int]) -> Preprocessing:
    data = resolve_data_config({}, pretrained_cfg=dict(config) or {"input_size": (3, *size)})
    return Preprocessing(
        image_size=size,
        mean=tuple(data["mean"]),
        std=tuple(data["std"]),
        interpolation=data["interpolation"],
        crop_pct=float(data["crop_pct"]),
        crop_mode=data["crop_mode"],
    )
