"""Build a network by name: load weights, resize position embeddings, set up the head, freeze."""

# K classes

from __future__ import annotations

import dataclasses
import inspect
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, get_args

import timm
import torch
from timm.models import VisionTransformer
from torch import nn
from torch.func import functional_call
from torch.overrides import TorchFunctionMode

from finetune.errors import FinetuneError, RecipeError, WeightsError, did_you_mean
from finetune.log import logger
from finetune.model_checksums import json_sha256
from finetune.models.freeze import freeze_parameters
from finetune.models.head import as_name_tuple, copy_classifier_rows, zero_head
from finetune.models.lora import add_adapter
from finetune.models.save import BuiltModel
from finetune.models.weights.load import load_weights, token_stride
from finetune.models.weights.resize_posemb import RESIZE_METHODS
from finetune.models.weights.resolve import resolve_weights
from finetune.models.weights.timm_config import (
    CONTROL_ARGS,
    Weights,
    check_memory,
    has_huge_value,
    is_image_size,
)
from finetune.transforms.operations import MAX_IMAGE_SIDE
from finetune.transforms.preprocessing import resolve_preprocessing

__all__ = ["build_model"]


# Keys of build_model()'s `args` that timm does not know; they control how a weights file is read.
WEIGHTS_FILE_ARGS = ("architecture", "pre_logits")
# Advice for keyword arguments of timm.create_model() that model.args does not accept.
CONTROL_ARG_HINTS = {
    "pretrained": "set model.pretrained instead",
    "num_classes": "remove it: the classes come from the data",
    "in_chans": "remove it: images have three channels here",
    "model_name": "set model.name instead",
}
# {dropout key of the recipe: alternative sets of timm's keyword arguments, best first}. The first
# set for "dropout" applies dropout in the same places as the ViT paper.
DROPOUT_KEYWORDS = {
    "dropout": (("pos_drop_rate", "proj_drop_rate"), ("proj_drop_rate",), ("drop_rate",)),
    "attention_dropout": (("attn_drop_rate",),),
    "drop_path": (("drop_path_rate",),),
}
# In-place operations with which networks are initialized.
_INIT_FUNCTIONS = {
    *(torch.Tensor.add_, torch.Tensor.clamp_, torch.Tensor.erfinv_, torch.Tensor.fill_),
    *(torch.Tensor.mul_, torch.Tensor.normal_, torch.Tensor.uniform_, torch.Tensor.zero_),
}


def build_model(
    name: str,
    *,
    num_classes: int | None = None,
    class_names: Sequence[str] | None = None,
    pretrained: bool = True,
    image_size: int | tuple[int, int] | None = None,
    posemb: str = "auto",
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
) -> BuiltModel:
    """Build a network with pretrained weights, ready for fine-tuning or prediction.

    Args:
        name: name of the weights, see `finetune.models.weights.resolve.resolve_weights`.
        num_classes: K for a new head; None keeps the pretrained classes and head.
        class_names: names of the K classes; `head_init="keep"` matches them to the pretrained
            classes by name.
        pretrained: False builds the same network with random weights.
        image_size: image size in pixels, or (height, width); None for that of the weights.
        posemb: how to resize position embeddings: one of RESIZE_METHODS, or "auto" for the method
            that suits the weights.
        head_init: initialization of a new head: "zeros", "default" (timm's), "keep" or None; see
            `_init_head`.
        freeze: "none", "backbone" (all but the head), or a number n: all embeddings and the first
            n blocks.
        adapter: arguments of `add_adapter`; with an adapter, only it and the head are trained.
        dropout: dropout rate after the position embeddings and after all linear layers except qkv,
            as in the ViT paper; if the network does not support this, only in its blocks, or only
            before the head.
        attention_dropout: dropout rate on attention weights.
        drop_path: stochastic depth rate of the last block; rates increase from 0 over the blocks.
        grad_checkpointing: activation checkpointing: recompute activations to save memory.
        args: additional keyword arguments of timm.create_model(), and `architecture` and
            `pre_logits`, which control how a weights file is read.
        rename: {regular expression: replacement}, for weights with other tensor names than timm's.
        multilabel: True if a new head predicts any number of labels per image.
    Raises: WeightsError if the weights cannot be found, read or loaded; RecipeError for an argument
        that the network does not support.
    """
    _check_arguments(args := args or {}, posemb)
    weights = resolve_weights(name, pretrained=pretrained, args=args, rename=rename)
    posemb = weights.resize_method if posemb == "auto" else posemb
    model_args, size = _resolve_model_args(weights, args, image_size)
    rates = {"dropout": dropout, "attention_dropout": attention_dropout, "drop_path": drop_path}
    keep_head = num_classes is None
    classes = _pretrained_num_classes(weights) if num_classes is None else num_classes
    model, dropout_args = _create_model(weights, model_args, rates, classes, size, args=args)
    _check_image_size(model, weights, size)
    create_args = {**model_args, **dropout_args, "num_classes": classes}
    kept = {} if keep_head else _init_head(model, weights, class_names or (), head_init, multilabel)
    model, resized = load_weights(model, weights, create_args, posemb=posemb, keep_head=keep_head)
    if weights.file is not None:
        weights.file.check_unchanged(name, weights.provenance["sha256"])
    freeze_parameters(model, freeze)
    if adapter is not None:
        add_adapter(model, size, **adapter)
    if grad_checkpointing:
        _enable_grad_checkpointing(model, weights.architecture)
    preprocessing = resolve_preprocessing(weights.config, size)
    provenance = _provenance(model, weights, posemb=resized, dropout=dropout_args, **kept)
    head = (
        _pretrained_head(weights, classes)
        if keep_head
        else {"class_names": None, "multilabel": multilabel}
    )
    return BuiltModel(
        model, weights.architecture, model_args, preprocessing, provenance, posemb=posemb, **head
    )


def _pretrained_head(weights: Weights, num_classes: int) -> dict[str, Any]:
    """Return the fields of `BuiltModel` that describe the pretrained head, as a dict."""
    is_trained = weights.state is not None
    return {
        "class_names": _pretrained_class_names(weights, num_classes),
        "temperature": weights.temperature if is_trained else None,
        "multilabel": weights.multilabel,
        "thresholds": weights.thresholds if is_trained else None,
        "validation_scores": weights.validation_scores if is_trained else None,
    }


def _init_head(
    model: nn.Module,
    weights: Weights,
    class_names: Sequence[str],
    head_init: str | None,
    multilabel: bool,
) -> dict[str, Any]:
    """Initialize a new head.

    Args:
        class_names: names of the K classes; empty if they are not known.
        head_init: "zeros" sets the head to zero. "keep" copies the pretrained row of each class
            that the weights' config.json also names, and sets the other rows to zero. None is
            "keep" if any class name matches, else "zeros". "default" keeps timm's initialization.
        multilabel: same as for `build_model`; rows are copied only if the weights have the same
            task.
    Returns: {"kept_classes": number of copied classes, "kept_rows_sha256": sha256 of the copied row
        of each class} for the provenance; empty if no row was copied.
    Raises: RecipeError if `head_init` is "keep" and no class can be copied.
    """
    source = weights.provenance["source"]
    if head_init in (None, "keep") and weights.state is not None and weights.from_config:
        old_names = (weights.class_names or ()) if multilabel is weights.multilabel else ()
        counts = Counter(old_names)  # several classes may have one name
        offset = int(weights.config.get("label_offset") or 0)  # rows before that of class 0
        old_row = {name: row for row, name in enumerate(old_names, offset) if counts[name] == 1}
        rows = {index: old_row[name] for index, name in enumerate(class_names) if name in old_row}
        if list(class_names) == list(old_names):
            rows = {index: index + offset for index in range(len(class_names))}
        if rows and copy_classifier_rows(model, weights.state, rows):
            logger.warning("model.head_init: %s", _kept_rows_message(source, rows, class_names))
            return {"kept_classes": len(rows), "kept_rows_sha256": json_sha256(rows)}
    if head_init == "keep" and weights.state is not None:
        raise RecipeError(
            f"model.head_init: keep finds no row to copy: {source} has none of the data's classes, "
            "was trained for another data.task, or has a head of another shape; remove the key",
            code="recipe.conflict",
        )
    if head_init != "default":
        zero_head(model, weights.architecture)
    return {}


def _kept_rows_message(name: str, rows: Mapping[int, int], class_names: Sequence[str]) -> str:
    """Format the log message about the rows of the pretrained head that were kept."""
    new_names = [class_name for index, class_name in enumerate(class_names) if index not in rows]
    if not new_names:
        return f"kept the head of {name}: it has all {len(rows)} classes"
    listed = ", ".join(new_names[:5]) + (", …" if new_names[5:] else "")
    return (
        f"{name} has {len(rows)} of the {len(class_names)} classes; kept its head rows for them; "
        f"the other classes start from zero: {listed}"
    )


def _provenance(model: nn.Module, weights: Weights, **changes: Any) -> dict[str, Any]:
    """Return the origin of the weights, the `changes` made to them, and parameter counts."""
    parameters = list(model.parameters())
    config = {"args": weights.model_args, "config": weights.config, "names": weights.class_names}
    return {
        **weights.provenance,
        "architecture": weights.architecture,
        "pretrained": weights.state is not None,
        "config_sha256": json_sha256(config),
        **changes,
        "parameters": sum(p.numel() for p in parameters),
        "trainable_parameters": sum(p.numel() for p in parameters if p.requires_grad),
    }


# --- create the network --------------------------------------------------------------------------


def _check_arguments(args: Mapping[str, Any], posemb: str) -> None:
    """Check `posemb` and `args`; one RecipeError lists all problems of `args`."""
    if posemb not in ("auto", *RESIZE_METHODS):
        raise RecipeError(
            f"model.posemb: unknown '{posemb}'; use one of: auto, {', '.join(RESIZE_METHODS)}",
            code="recipe.unknown_name",
        )
    problems: list[tuple[str, str]] = []  # (message, error code); the first code is raised
    for key, value in args.items():
        name, code = f"model.args.{key}", "recipe.wrong_value"
        if value is None:
            problems.append(
                (f"{name}: no value; write a space after the colon, as in `key: value`", code)
            )
        elif key in CONTROL_ARGS:
            advice = CONTROL_ARG_HINTS.get(key, "remove the key")
            text = f"{name}: this is not an argument of the network; {advice}"
            problems.append((text, "recipe.unknown_key"))
        elif key == "img_size" and not is_image_size(value):
            problems.append((f"{name}: {value!r}; expected pixels or [height, width]", code))
        elif key != "img_size" and has_huge_value(value):
            text = f"{name}: {value!r} is too large for any network; use a smaller value"
            problems.append((text, code))
    if problems:
        raise RecipeError("\n".join(text for text, _ in problems), code=problems[0][1])


def _resolve_model_args(
    weights: Weights, args: Mapping[str, Any], image_size: int | tuple[int, int] | None
) -> tuple[dict[str, Any], tuple[int, int]]:
    """Return timm's keyword arguments, and the image size (height, width) of the network."""
    timm_args = {k: v for k, v in args.items() if k not in WEIGHTS_FILE_ARGS}
    model_args = {**weights.model_args, **timm_args}
    model_args.pop("num_classes", None)
    size = image_size if image_size is not None else model_args.get("img_size")
    # as in timm: a network of any size gets the images of the pretrained configuration
    is_any_size = model_args.get("dynamic_img_size") and "img_size" not in args
    if size is None or (image_size is None and is_any_size):
        size = tuple(weights.config.get("input_size", (3, 224, 224)))[-2:]
    height, width = (size, size) if isinstance(size, int) else size
    if max(height, width) > MAX_IMAGE_SIDE:
        limit = f"expected at most {MAX_IMAGE_SIDE} pixels per side"
        raise RecipeError(
            f"model.image_size: {height} x {width}; {limit}", code="recipe.wrong_size"
        )
    if weights.config.get("fixed_input_size") or "img_size" in model_args:
        model_args["img_size"] = [int(height), int(width)]
    return model_args, (int(height), int(width))


def _pretrained_num_classes(weights: Weights) -> int:
    """Return the number of classes of the pretrained head; 0 if the weights have no head."""
    if weights.state is not None:
        for name in as_name_tuple(weights.config.get("classifier")):
            weight = weights.state.get(f"{name}.weight")
            if weight is not None:
                return weight.shape[0] - int(weights.config.get("label_offset") or 0)
    return int(weights.config.get("num_classes") or 0)


def _pretrained_class_names(weights: Weights, num_classes: int) -> list[str] | None:
    names = weights.class_names
    if names is not None and len(names) != num_classes:
        raise WeightsError(
            f"{weights.provenance.get('source')}: config.json: label_names: {len(names)} names, "
            f"but the head has {num_classes} classes; give one name per class, or remove the key",
            code="weights.wrong_config",
        )
    return names


def _create_model(
    weights: Weights,
    model_args: Mapping[str, Any],
    dropout_rates: Mapping[str, float],
    num_classes: int,
    image_size: tuple[int, int],
    *,
    args: Mapping[str, Any],
) -> tuple[nn.Module, dict[str, Any]]:
    """Create the network with random weights.

    Returns: the network, and the keyword arguments that set its dropout rates.
    Raises: RecipeError naming the argument that the network does not support; WeightsError if the
        config.json of the weights has a value that timm rejects.
    """
    kwargs = {**model_args, "num_classes": num_classes}
    rates = {key: rate for key, rate in dropout_rates.items() if rate}
    dropout_args: dict[str, Any] = {}
    try:
        # create it on the meta device first, to learn its size and its constructor's arguments
        is_checked = bool(rates or args or weights.from_config)
        network = _create_on_meta(weights, kwargs) if is_checked else None
    except FinetuneError:  # from TransformersClassifier
        raise
    except Exception as error:  # timm's networks raise many types for invalid arguments
        raise _creation_error(weights, args, image_size, error) from error
    if network is not None:
        check_memory(network, weights.provenance["source"])
        for key, rate in rates.items():
            dropout_args |= _dropout_arguments(key, rate, network, weights.architecture)
    try:
        model = timm.create_model(
            weights.architecture, pretrained_cfg=weights.pretrained_cfg, **kwargs, **dropout_args
        )
    except Exception as error:  # see above
        raise _creation_error(weights, args, image_size, error) from error
    return model, dropout_args


class _SkipInit(TorchFunctionMode):
    """Skip the initialization of meta tensors: it changes nothing, but takes most of the time."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function in _INIT_FUNCTIONS and args[0].is_meta:
            return args[0]
        return function(*args, **(kwargs or {}))


def _create_on_meta(weights: Weights, kwargs: Mapping[str, Any]) -> nn.Module:
    """Create a network on the meta device, or with real tensors if that fails."""
    try:
        with torch.device("meta"), _SkipInit():
            return timm.create_model(
                weights.architecture, pretrained_cfg=weights.pretrained_cfg, **kwargs
            )
    except RuntimeError:  # some networks compute with values while they are created
        return timm.create_model(
            weights.architecture, pretrained_cfg=weights.pretrained_cfg, **kwargs
        )


def _constructor_arguments(network: nn.Module) -> list[str]:
    """Return the names of a network's constructor arguments, including those of base classes."""
    names: list[str] = []
    for network_class in type(network).__mro__:
        if "__init__" in vars(network_class):
            parameters = inspect.signature(network_class.__init__).parameters.values()  # type: ignore[misc]
            names += [parameter.name for parameter in parameters]
            for parameter in parameters:  # timm's NaFlexVit also takes the fields of its `cfg`
                for kind in filter(dataclasses.is_dataclass, get_args(parameter.annotation)):
                    names += [field.name for field in dataclasses.fields(kind)]
            if all(parameter.kind is not parameter.VAR_KEYWORD for parameter in parameters):
                break  # the arguments of the base class are not passed on
    return names


def _dropout_arguments(
    key: str, rate: float, network: nn.Module, architecture: str
) -> dict[str, float]:
    """Return the constructor arguments that apply the recipe's dropout rate to this network.

    Args:
        key: the recipe's key, one of DROPOUT_KEYWORDS.
    Raises: RecipeError if the network has no such argument.
    """
    accepted = _constructor_arguments(network)
    for names in DROPOUT_KEYWORDS[key]:
        if set(names) <= set(accepted):
            return dict.fromkeys(names, rate)
    raise RecipeError(
        f"model.{key}: {architecture} does not support it; set it to 0",
        code="recipe.unsupported",
    )


def _unexpected_keyword(error: Exception) -> str | None:
    """Return the name of the keyword argument that a TypeError rejects, or None."""
    match = re.search(r"unexpected keyword argument '(\w+)'", str(error))
    return match[1] if match and isinstance(error, TypeError) else None


def _creation_error(
    weights: Weights, args: Mapping[str, Any], image_size: tuple[int, int], error: Exception
) -> FinetuneError:
    """Convert an error of timm: find out whether config.json, model.args or image size is wrong."""
    try:
        own_network = _create_without_args(weights, None)
    except Exception as own_error:  # see _create_model
        own_network = None
        if weights.from_config:
            return WeightsError(
                f"{weights.provenance.get('source')}: config.json: timm cannot build "
                f"{weights.architecture} from its values ({_first_line(own_error)}); download it "
                "again",
                code="weights.wrong_config",
            )
    if unexpected := _unexpected_keyword(error):
        known = [] if own_network is None else _constructor_arguments(own_network)
        key = "image_size" if unexpected == "img_size" else f"args.{unexpected}"
        return RecipeError(
            f"model.{key}: {weights.architecture} has no argument '{unexpected}'"
            f"{did_you_mean(unexpected, known) or '; remove it'}",
            code="recipe.unknown_key",
        )
    timm_args = {k: v for k, v in args.items() if k not in WEIGHTS_FILE_ARGS}
    try:
        _create_without_args(weights, image_size)
        is_size_supported = True
    except Exception:  # see _create_model
        is_size_supported = False
    if timm_args and is_size_supported:
        return RecipeError(
            f"model.args: timm rejected {timm_args} for {weights.architecture} "
            f"({_first_line(error)}); correct them",
            code="recipe.wrong_value",
        )
    return RecipeError(
        f"model: timm cannot build {weights.architecture} for {image_size[0]}x{image_size[1]} px "
        f"({_first_line(error)}); check model.image_size",
        code="recipe.wrong_size",
    )


def _create_without_args(weights: Weights, image_size: tuple[int, int] | None) -> nn.Module:
    """Create the network without `model.args`."""
    own, _ = _resolve_model_args(weights, {}, image_size)
    return _create_on_meta(weights, {**own, "num_classes": _pretrained_num_classes(weights)})


def _first_line(error: Exception) -> str:
    lines = str(error).splitlines() or [""]
    kind = type(error).__name__
    return f"{kind}: {lines[0]}" if isinstance(error, KeyError) else lines[0] or kind


def _check_image_size(model: nn.Module, weights: Weights, image_size: tuple[int, int]) -> None:
    """Raise RecipeError if the network does not support the image size (height, width)."""
    _check_patch_size(model, image_size, weights.architecture)
    own_size = tuple(weights.config.get("input_size", (3, *image_size)))[-2:]
    if image_size != own_size and not isinstance(
        model, VisionTransformer
    ):  # a VisionTransformer supports every multiple of its patch size
        # small images take less time on the CPU; large ones could need more memory than there is
        devices = ("cpu", "meta") if max(image_size) <= min(own_size) else ("meta", "cpu")
        _check_forward(model, image_size, weights.architecture, devices)


def _check_patch_size(model: nn.Module, image_size: tuple[int, int], architecture: str) -> None:
    strides = token_stride(model)
    if strides is None or getattr(model.patch_embed, "dynamic_img_pad", False):
        return
    for pixels, patch in zip(image_size, strides, strict=True):
        if pixels % patch or not pixels:
            below, above = pixels // patch * patch, (pixels // patch + 1) * patch
            near = f"{below} or {above}" if below else f"{above}"
            raise RecipeError(
                f"model.image_size: {pixels} px is not a multiple of the patch size of "
                f"{architecture}, {patch} px; use {near}",
                code="recipe.wrong_size",
            )


@torch.no_grad()
def _check_forward(
    model: nn.Module, image_size: tuple[int, int], architecture: str, devices: Sequence[str]
) -> None:
    """Raise RecipeError if the forward pass fails at this size, for example in window attention."""
    training = model.training
    model.eval()
    try:
        for device in devices:  # a network may be on the meta device, or unable to run there
            tensors = (*model.named_parameters(), *model.named_buffers())
            try:
                state = {name: tensor.to(device) for name, tensor in tensors}
                with torch.device("cpu"):  # networks cache tensors of their own, such as indices
                    functional_call(model, state, torch.zeros(1, 3, *image_size, device=device))
                return
            except Exception as error:  # timm's networks raise many types for unsupported sizes
                failure = error
    finally:
        model.train(training)
    raise RecipeError(
        f"model.image_size: the forward pass of {architecture} fails at "
        f"{image_size[0]}x{image_size[1]} px "
        f"({_first_line(failure)}); use its default size, or a multiple of 32 pixels",
        code="recipe.wrong_size",
    ) from failure


def _enable_grad_checkpointing(model: nn.Module, architecture: str) -> None:
    try:
        model.set_grad_checkpointing(True)  # type: ignore[operator]
    except (AttributeError, AssertionError) as error:
        raise RecipeError(
            f"model.grad_checkpointing: {architecture} does not support this; set it to false",
            code="recipe.unsupported",
        ) from error
