"""Pre-logits, the features that a network's classifier reads, in the place of images."""

# B batch, N tokens, D width, K classes, C channels, H W pixels

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from timm.models import Beit, Eva, VisionTransformer
from torch import Tensor, nn

from finetune.errors import WeightsError
from finetune.models.head import classifier_names, set_train_mode
from finetune.text import counted

__all__ = ["accept_features", "last_layers", "pre_logits", "token_columns", "token_features"]

_RATES = ("p", "drop_prob", "prob")  # names of the rate in dropout layers of every kind
_TOLERANCE = 1e-4  # of the largest pre-logit: a device may sum in another order, dropout is more
_BLOCKS = 4  # whose class tokens DINOv2's linear probe may read


def pre_logits(model: nn.Module, images_BCHW: Tensor) -> Tensor:
    """Compute the input of a timm network's last layer, its representation layer included.

    Returns: (B, D) float32.
    Raises: WeightsError for a network that has none.
    """
    body, head = (getattr(model, name, None) for name in ("forward_features", "forward_head"))
    name = type(model).__name__
    if not callable(body) or not callable(head):
        raise WeightsError(
            f"{name}: has no forward_features and forward_head to take features from; use one of "
            "timm's networks",
            code="weights.unsupported",
        )
    return _one_vector(head(body(images_BCHW), pre_logits=True), name)


def _one_vector(values: Any, name: str) -> Tensor:
    """Return a network's pre-logits as (B, D) float32. Raises: as `pre_logits`."""
    if isinstance(values, Tensor) and values.ndim == 4 and values.shape[2:] == (1, 1):
        values = values.flatten(1)
    if not isinstance(values, Tensor) or values.ndim != 2:
        kind = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
        raise WeightsError(
            f"{name}: its pre-logits are {kind}, not one vector an image; set global_pool, for "
            "instance avg, in the model's config.json",
            code="weights.unsupported",
        )
    return values.float()


def token_features(model: Any, images_BCHW: Tensor) -> Tensor:
    """Compute pre-logits and, behind them, the tokens that DINOv2's linear probe reads.

    Args:
        model: its blocks give all their tokens (see `compute_class_token`, which ends that).
        images_BCHW: as the network takes them.
    Returns: (B, …) float32: the pre-logits; of a transformer with a class token also this token
        after each of the last four blocks, first block first, and the mean of the last block's
        patches, all through the last norm. `token_columns` says which columns are what.
    Raises: as `pre_logits`.
    """
    if not _has_class_token(model):
        return pre_logits(model, images_BCHW)
    tokens_BND, taken = model.forward_intermediates(
        images_BCHW,
        indices=min(_BLOCKS, len(model.blocks)),
        return_prefix_tokens=True,
        norm=True,
        output_fmt="NLC",
    )
    read_BD = _one_vector(model.forward_head(tokens_BND, pre_logits=True), type(model).__name__)
    classes_BD = [prefix_BND[:, 0] for _, prefix_BND in taken]
    return torch.cat([read_BD, *classes_BD, taken[-1][0].mean(dim=1)], dim=1).float()


def token_columns(model: Any, width: int) -> dict[str, slice]:
    """Return which columns of `token_features` are what.

    Args:
        model: the network that they are of.
        width: number of columns.
    Returns: "pre-logits", and the inputs of DINOv2's linear probe: class tokens of the last block
        and of the last four, with and without the patches' mean.
    """
    if not _has_class_token(model):
        return {"pre-logits": slice(0, width)}
    blocks, size = min(_BLOCKS, len(model.blocks)), int(model.embed_dim)
    patches = width - size  # the first column of the patches' mean
    columns = {"pre-logits": slice(0, patches - blocks * size)}
    for count in (1, blocks):
        name = counted(count, "class token")
        columns[name] = slice(patches - count * size, patches)
        columns[f"{name}, patches"] = slice(patches - count * size, width)
    return columns


def _has_class_token(model: Any) -> bool:
    """True for a transformer of timm's whose every block computes a class token."""
    known = isinstance(model, VisionTransformer | Eva | Beit)
    return known and model.cls_token is not None and len(model.blocks) > 0


def last_layers(model: nn.Module) -> list[str]:
    """Names of the linear classifiers: no pre-logit depends on them."""
    names = classifier_names(model)
    return [name for name in names if isinstance(model.get_submodule(name), nn.Linear)]


def accept_features(model: nn.Module, image_size: tuple[int, int], *, training: bool) -> str | None:
    """Let a network take its own pre-logits in the place of images, if they decide its logits.

    Afterwards `model(features_BD)` gives what `model(images_BCHW)` would, from the classifier and
    the dropout right before it alone; images are taken as before. Names, copies and wrappers of
    the network stay as they are.

    Args:
        model: in float32; nothing is changed where the answer is no.
        image_size: (height, width) in pixels.
        training: also while it trains, so nothing before the classifier may learn or be random.
            The network is left in training mode then, else in evaluation mode.
    Returns: None, or the reason why it cannot.
    """
    names = classifier_names(model)
    if len(names) != 1 or last_layers(model) != names:
        return "the network has no single linear classifier"
    after = (f"{names[0]}.",)
    if training and any(
        parameter.requires_grad and not name.startswith(after)
        for name, parameter in model.named_parameters()
    ):
        return "more than the classifier is trained"
    device = next(model.parameters()).device
    noise = torch.randn(2, 3, *image_size, generator=torch.Generator().manual_seed(0)).to(device)
    model.eval()
    try:
        with torch.no_grad():
            expected_BD = pre_logits(model, noise)
    except WeightsError as error:
        return str(error)
    head = _head(model, noise, names[0], expected_BD)
    if head is None:
        return "the network's logits are not its classifier on its pre-logits"
    if training and (reason := _why_varying(model, noise, head, expected_BD)) is not None:
        return reason

    def forward(self: nn.Module, values: Tensor) -> Tensor:
        if values.ndim != 2:
            logits: Tensor = type(self).forward(self, values)
            return logits
        for name in head:
            values = self.get_submodule(name)(values)
        return values

    # bound to the network, so that a copy's is bound to the copy
    model.forward = MethodType(forward, model)
    return None


@torch.no_grad()
def _run_with_hooks(
    model: nn.Module, images_BCHW: Tensor, names: list[str]
) -> tuple[Tensor, dict[str, tuple[Tensor, Tensor]]]:
    """Run a network. Returns: its logits, and (input, output) of each named module that ran."""
    ends: dict[str, tuple[Tensor, Tensor]] = {}
    handles = []
    for name in names:

        def record(
            module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor, name: str = name
        ) -> None:
            ends[name] = (inputs[0], output)

        handles.append(model.get_submodule(name).register_forward_hook(record))
    try:
        logits: Tensor = model(images_BCHW)
    finally:
        for handle in handles:
            handle.remove()
    return logits, ends


def _head(
    model: nn.Module, images_BCHW: Tensor, classifier: str, expected_BD: Tensor
) -> list[str] | None:
    """Names of the modules from pre-logits to logits; None if modules alone do not decide them."""
    dropouts = [name for name, module in model.named_modules() if _is_random(module)]
    logits, ends = _run_with_hooks(model, images_BCHW, [*dropouts, classifier])
    if classifier not in ends:
        return None
    features, output = ends.pop(classifier)
    if not _is_same_memory(output, logits) or not _close(features.float(), expected_BD):
        return None
    # outside of training dropout returns its input
    before = [name for name, (_, out) in ends.items() if _is_same_memory(out, features)]
    return [*before[-1:], classifier]


def _why_varying(
    model: nn.Module, images_BCHW: Tensor, head: list[str], expected_BD: Tensor
) -> str | None:
    """The reason why pre-logits would change between steps of training; None if they do not."""
    set_train_mode(model)
    for name, module in model.named_modules():
        if name not in head and _is_random(module):
            return f"there is dropout before the classifier ({name})"
        if isinstance(getattr(module, "running_mean", None), Tensor) and module.training:
            return f"batch norm goes on counting ({name})"
    _, ends = _run_with_hooks(model, images_BCHW, [head[0]])
    if not _close(ends[head[0]][0].float(), expected_BD):
        return "the network computes otherwise while it trains"
    return None


def _is_random(module: nn.Module) -> bool:
    """True for a dropout layer of any kind whose rate is not 0."""
    drops = "drop" in type(module).__name__.lower()
    return drops and any(bool(getattr(module, rate, 0)) for rate in _RATES)


def _is_same_memory(one: Tensor, other: Tensor) -> bool:
    """True if nothing was computed between them."""
    return one.shape == other.shape and one.data_ptr() == other.data_ptr()


def _close(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape:
        return False
    return bool((one - other).abs().max() <= _TOLERANCE * other.abs().max())
