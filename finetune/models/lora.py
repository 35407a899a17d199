"""LoRA and DoRA adapters with peft: add them, check that they can be merged, merge and save."""

# C channels, H W pixels

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from finetune.errors import RecipeError, SetupError, did_you_mean, install_hint
from finetune.formatting import pluralize
from finetune.log import logger
from finetune.models.head import classifier_names

if TYPE_CHECKING:
    from peft import LoraConfig

__all__ = [
    "ADAPTER_FILES",
    "add_adapter",
    "base_state_dict",
    "load_base_state_dict",
    "merge_adapter",
    "save_adapter",
]


ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
# Regular expressions for the named targets; "mlp" also matches the layer names of transformers.
_TARGET_PATTERNS = {
    "attention": r".*(attn|attention).*",
    "mlp": r"(?!.*(attn|attention)).*(mlp|ffn|intermediate|output).*",
    "all": r".*",
}
_TOLERANCE = 1e-4  # relative to a layer's largest output; merging changes the summation order


def add_adapter(
    model: nn.Module,
    image_size: tuple[int, int],
    *,
    kind: str,
    rank: int,
    alpha: float | None,
    targets: Sequence[str],
    dropout: float,
) -> None:
    """Add an adapter to a network in place; only the adapter and the classifier stay trainable.

    The logits do not change. Grouped and dilated convolutions are skipped with a warning, because
    peft cannot merge their adapters.

    Args:
        model: a float32 network on the CPU.
        image_size: (height, width) in pixels, for the check that each layer can be merged.
        kind: "lora" or "dora".
        rank: rank of each layer's update.
        alpha: strength of the updates, which are scaled by alpha / rank; None for a scale of 1.
        targets: "attention", "mlp", "all" or regular expressions that match the end of layer names.
        dropout: dropout rate on the adapter's input.
    Raises: RecipeError for a target that matches no layer, a rank above the full rank of a layer,
        or a layer whose weights the network reads directly, bypassing the adapter; SetupError
        without peft.
    Source: Hu et al. 2021 (LoRA), Liu et al. 2024 (DoRA), through peft.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise SetupError(
            f"model.adapter: peft is not installed; {install_hint('peft')}",
            code="setup.missing_package",
        ) from error
    heads = classifier_names(model)
    layers = _find_target_layers(model, heads, targets)
    _check_rank(layers, rank)
    config = LoraConfig(
        r=rank,
        lora_alpha=rank if alpha is None else alpha,  # type: ignore[arg-type]
        lora_dropout=dropout,
        use_dora=kind == "dora",
        target_modules=list(layers),
    )
    inject_adapter_in_model(config, model)
    for head in heads:
        model.get_submodule(head).requires_grad_(True)
    wrong = _find_unmergeable_layers(model, image_size)
    if wrong:
        raise RecipeError(
            f"model.adapter.targets: {type(model).__name__} bypasses the adapter of {wrong[0]} and "
            f"reads its weights directly ({len(wrong)} of {pluralize(len(layers), 'layer')}); "
            "choose other layers",
            code="recipe.unsupported",
        )


def _find_target_layers(
    model: nn.Module, heads: Sequence[str], targets: Sequence[str]
) -> dict[str, nn.Linear | nn.Conv2d]:
    """Return the layers that match the targets, except classifiers and layers peft cannot merge.

    Raises: RecipeError if a target matches no layer, or if peft can merge no matching layer.
    """
    known = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | nn.Conv2d)
        and not any(f"{name}.".startswith(f"{head}.") for head in heads)
    }
    chosen: set[str] = set()
    for target in targets:
        pattern = re.compile(rf"(.*\.)?({_TARGET_PATTERNS.get(target, target)})")
        found = {name for name in known if pattern.fullmatch(name)}
        if not found:
            ends = sorted({re.sub(r"^.*\d+\.", "", name) for name in known})
            raise RecipeError(
                f"model.adapter.targets: '{target}' matches no layer of {type(model).__name__}"
                f"{did_you_mean(target, ends) or '.'} Choose from {', '.join(ends[:8])}",
                code="recipe.unknown_name",
            )
        chosen |= found
    layers = {name: known[name] for name in known if name in chosen and _can_merge(known[name])}
    if len(layers) < len(chosen):
        what = pluralize(len(chosen) - len(layers), "grouped or dilated convolution")
        if not layers:
            raise RecipeError(
                f"model.adapter.targets: they match only {what}, which peft cannot merge; choose "
                "other layers",
                code="recipe.unsupported",
            )
        logger.warning("model.adapter.targets: %s get no adapter: peft cannot merge them", what)
    return layers


def _check_rank(layers: Mapping[str, nn.Linear | nn.Conv2d], rank: int) -> None:
    for name, layer in layers.items():
        full_rank = min(layer.weight.shape[0], layer.weight[0].numel())
        if rank > full_rank:
            raise RecipeError(
                f"model.adapter.rank: {rank} is above the full rank of {name} ({full_rank}); lower "
                "it, or choose other layers in model.adapter.targets",
                code="recipe.wrong_value",
            )


def _can_merge(layer: nn.Linear | nn.Conv2d) -> bool:
    return isinstance(layer, nn.Linear) or (layer.groups == 1 and set(layer.dilation) == {1})


def _adapter_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield (name, peft module) of each layer that has an adapter."""
    if not hasattr(model, "peft_config"):
        return
    from peft.tuners.tuners_utils import BaseTunerLayer

    for name, module in model.named_modules():
        if isinstance(module, BaseTunerLayer):
            yield name, module


@torch.no_grad()
def _find_unmergeable_layers(model: nn.Module, image_size: tuple[int, int]) -> list[str]:
    """Return the names of adapted layers that never run, or whose output changes when merged.

    During the check the adapters have random weights, because the initial LoRA update is zero.
    """
    layers = dict(_adapter_layers(model))
    generator = torch.Generator().manual_seed(0)
    mergeable = set()
    handles: dict[str, RemovableHandle] = {}
    for name, layer in layers.items():

        def compare(module: Any, inputs: Any, output: Tensor, name: str = name) -> None:
            handles[name].remove()  # the copy must not have this hook
            merged = copy.deepcopy(module)
            merged.merge()
            error = (merged.get_base_layer()(*inputs) - output).abs().max()
            if error <= _TOLERANCE * output.abs().max():
                mergeable.add(name)

        layer.lora_B["default"].weight.normal_(std=0.1, generator=generator)
        handles[name] = layer.register_forward_hook(compare)
    training = model.training
    model.eval()
    try:
        model(torch.randn(1, 3, *image_size, generator=generator))
    finally:
        for handle in handles.values():
            handle.remove()
        for layer in layers.values():
            layer.lora_B["default"].weight.zero_()
        model.train(training)
    return [name for name in layers if name not in mergeable]


def merge_adapter(model: nn.Module) -> dict[str, Tensor]:
    """Merge an adapter into the weights, in place; the logits do not change.

    Returns: the state dict of the base model with the merged weights; for a model without an
        adapter, its whole state dict.
    """
    for _, layer in _adapter_layers(model):
        layer.merge()
    return base_state_dict(model, model.state_dict())


def base_state_dict(model: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the base model's part of a state dict: without adapter tensors, with original names.

    Args:
        model: a network with or without an adapter.
        state: a state dict of `model`.
    """
    base_prefixes = {f"{name}.": f"{name}.base_layer." for name, _ in _adapter_layers(model)}
    base_state = {}
    for key, value in state.items():
        layer = next((name for name in base_prefixes if key.startswith(name)), None)
        if layer is None:
            base_state[key] = value
        elif key.startswith(base_prefixes[layer]):
            base_state[layer + key.removeprefix(base_prefixes[layer])] = value
    return base_state


def load_base_state_dict(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Load a state dict of the base model; adapter tensors, if any, do not change."""
    own = model.state_dict()
    theirs = {id(tensor): state[key] for key, tensor in base_state_dict(model, own).items()}
    model.load_state_dict({key: theirs.get(id(tensor), tensor) for key, tensor in own.items()})


def save_adapter(
    folder: Path, model: nn.Module, *, base_model_name: str, revision: str | None = None
) -> None:
    """Write an adapter and the classifier in peft's format, for `PeftModel.from_pretrained`.

    Args:
        folder: the folder to create.
        model: a network with an adapter, merged or not.
        base_model_name: name of the base model's weights, for `base_model_name_or_path`.
        revision: commit of the base model on the Hub; None if it is not from there.
    """
    from peft import get_peft_model_state_dict

    heads = classifier_names(model)
    peft_config: Mapping[str, LoraConfig] = model.peft_config  # type: ignore[assignment]
    config = copy.copy(peft_config["default"])
    config.base_model_name_or_path, config.modules_to_save = base_model_name, heads
    config.revision, config.inference_mode = revision, True
    own = model.state_dict()
    tensors = get_peft_model_state_dict(model, state_dict=own, save_embedding_layers=False)
    tensors |= {key: own[key] for key in own if key.startswith(tuple(f"{h}." for h in heads))}
    saved = {f"base_model.model.{key}": t.detach().cpu().contiguous() for key, t in tensors.items()}
    folder.mkdir()
    config.save_pretrained(str(folder))
    save_file(saved, folder / ADAPTER_FILES[1], metadata={"format": "pt"})
