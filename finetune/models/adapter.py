"""Adapters of peft (LoRA, DoRA) in a network: added, proved, merged, and saved in peft's format."""

# C channels, H W pixels

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from finetune.errors import RecipeError, SetupError, nearest
from finetune.models.head import classifier_names
from finetune.text import counted

if TYPE_CHECKING:
    from peft import LoraConfig

__all__ = [
    "ADAPTER_FILES",
    "add_adapter",
    "load_plain",
    "merge_adapter",
    "plain_state",
    "save_adapter",
]

_log = logging.getLogger(__name__)

ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
# Words for layers of any network, as patterns of their names; the second also in transformers'.
_WORDS = {
    "attention": r".*(attn|attention).*",
    "mlp": r"(?!.*(attn|attention)).*(mlp|ffn|intermediate|output).*",
    "all": r".*",
}
_TOLERANCE = 1e-4  # of a layer's largest output: merged products sum in another order


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
    """Put an adapter into a network, in place; it and the classifier are then all that is trained.

    The logits stay what they were. Convolutions that are grouped or dilated, which peft cannot
    merge, are left out, with a notice.

    Args:
        model: a built network, in float32, on the CPU.
        image_size: (height, width) in pixels, for the proof that each layer can be merged.
        kind: "lora" or "dora".
        rank: of the update of each layer.
        alpha: the update is scaled by alpha / rank; None: 1.
        targets: "attention", "mlp", "all" or regular expressions for the end of layers' names.
        dropout: on the adapter's input.
    Raises: RecipeError for a target that is no layer, a rank above a layer's, or a layer whose
        weights the network reads past the adapter; SetupError without peft.
    Source: Hu et al. 2021 (LoRA), Liu et al. 2024 (DoRA), through peft.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise SetupError(
            "model.adapter: needs peft; install it with: pip install 'finetune[peft]'",
            code="setup.missing_package",
        ) from error
    heads = classifier_names(model)
    layers = _layers(model, heads, targets)
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
    wrong = _not_mergeable(model, image_size)
    if wrong:
        raise RecipeError(
            f"model.adapter.targets: {type(model).__name__} reads the weights of {wrong[0]} itself "
            f"({len(wrong)} of {counted(len(layers), 'layer')} are so), and an adapter there would "
            "be lost; name other layers",
            code="recipe.unsupported",
        )


def _layers(
    model: nn.Module, heads: Sequence[str], targets: Sequence[str]
) -> dict[str, nn.Linear | nn.Conv2d]:
    """The layers that targets name, without the classifier's. Raises: as `add_adapter`."""
    known = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | nn.Conv2d)
        and not any(f"{name}.".startswith(f"{head}.") for head in heads)
    }
    chosen: set[str] = set()
    for target in targets:
        pattern = re.compile(rf"(.*\.)?({_WORDS.get(target, target)})")
        found = {name for name in known if pattern.fullmatch(name)}
        if not found:
            ends = sorted({re.sub(r"^.*\d+\.", "", name) for name in known})
            raise RecipeError(
                f"model.adapter.targets: '{target}' is no layer of {type(model).__name__}"
                f"{nearest(target, ends)}; choose from {', '.join(ends[:8])}",
                code="recipe.unknown_name",
            )
        chosen |= found
    layers = {name: known[name] for name in known if name in chosen and _is_plain(known[name])}
    if len(layers) < len(chosen):
        what = counted(len(chosen) - len(layers), "grouped or dilated convolution")
        if not layers:
            raise RecipeError(
                f"model.adapter.targets: names {what} alone, which peft cannot merge; name others",
                code="recipe.unsupported",
            )
        _log.warning("model.adapter.targets: %s stay without one: peft cannot merge them", what)
    return layers


def _check_rank(layers: Mapping[str, nn.Linear | nn.Conv2d], rank: int) -> None:
    for name, layer in layers.items():
        widest = min(layer.weight.shape[0], layer.weight[0].numel())
        if rank > widest:
            raise RecipeError(
                f"model.adapter.rank: {rank} is more than {name} has ({widest}); lower it, or name "
                "other layers in model.adapter.targets",
                code="recipe.wrong_value",
            )


def _is_plain(layer: nn.Linear | nn.Conv2d) -> bool:
    return isinstance(layer, nn.Linear) or (layer.groups == 1 and set(layer.dilation) == {1})


def _adapted(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Names and modules of the layers with an adapter, as peft made them."""
    if not hasattr(model, "peft_config"):
        return
    from peft.tuners.tuners_utils import BaseTunerLayer

    for name, module in model.named_modules():
        if isinstance(module, BaseTunerLayer):
            yield name, module


@torch.no_grad()
def _not_mergeable(model: nn.Module, image_size: tuple[int, int]) -> list[str]:
    """Names of the layers that compute otherwise when their adapter is merged, or never run.

    The adapters have random values meanwhile: as they begin, their product is zero.
    """
    layers, draws, right = dict(_adapted(model)), torch.Generator().manual_seed(0), set()
    handles = []
    for name, layer in layers.items():

        def compare(module: Any, inputs: Any, output: Tensor, name: str = name) -> None:
            twin = copy.deepcopy(module)
            twin._forward_hooks.clear()
            twin.merge()
            error = (twin.get_base_layer()(*inputs) - output).abs().max()
            if error <= _TOLERANCE * output.abs().max():
                right.add(name)

        layer.lora_B["default"].weight.normal_(std=0.1, generator=draws)
        handles.append(layer.register_forward_hook(compare))
    training = model.training
    model.eval()
    try:
        model(torch.randn(1, 3, *image_size, generator=draws))
    finally:
        for handle in handles:
            handle.remove()
        for layer in layers.values():
            layer.lora_B["default"].weight.zero_()
        model.train(training)
    return [name for name in layers if name not in right]


def merge_adapter(model: nn.Module) -> dict[str, Tensor]:
    """Add an adapter to the weights, in place; the network goes on to give the same logits.

    Returns: the weights by the names of the network without an adapter; all of them if it has none.
    """
    for _, layer in _adapted(model):
        layer.merge()
    return plain_state(model, model.state_dict())


def plain_state(model: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a network's tensors without its adapter's, by the names that they have without it.

    Args:
        model: with an adapter or without one.
        state: its tensors, by its own names.
    """
    inside = {f"{name}.": f"{name}.base_layer." for name, _ in _adapted(model)}
    plain = {}
    for key, value in state.items():
        layer = next((name for name in inside if key.startswith(name)), None)
        if layer is None:
            plain[key] = value
        elif key.startswith(inside[layer]):
            plain[layer + key.removeprefix(inside[layer])] = value
    return plain


def load_plain(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Load tensors by the names that a network has without an adapter; one that it has stays."""
    own = model.state_dict()
    theirs = {id(tensor): state[key] for key, tensor in plain_state(model, own).items()}
    model.load_state_dict({key: theirs.get(id(tensor), tensor) for key, tensor in own.items()})


def save_adapter(folder: Path, model: nn.Module, *, base: str) -> None:
    """Write an adapter and the classifier in peft's format, for `PeftModel.from_pretrained`.

    Args:
        model: has an adapter, merged or not.
        base: the name of the weights that it belongs to.
    """
    from peft import get_peft_model_state_dict

    heads = classifier_names(model)
    peft_config: Mapping[str, LoraConfig] = model.peft_config  # type: ignore[assignment]
    config = copy.copy(peft_config["default"])
    config.base_model_name_or_path, config.modules_to_save = base, heads
    config.inference_mode = True
    own = model.state_dict()
    tensors = get_peft_model_state_dict(model, state_dict=own, save_embedding_layers=False)
    tensors |= {key: own[key] for key in own if key.startswith(tuple(f"{h}." for h in heads))}
    kept = {f"base_model.model.{key}": t.detach().cpu().contiguous() for key, t in tensors.items()}
    folder.mkdir()
    config.save_pretrained(str(folder))
    save_file(kept, folder / ADAPTER_FILES[1], metadata={"format": "pt"})
