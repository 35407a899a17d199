"""Extract pre-logits, the inputs of a network's classifier, and use them instead of images."""

# B batch, N tokens, D width, K classes, C channels, H W pixels

from __future__ import annotations

from functools import partial
from types import MethodType
from typing import Any

import torch
from timm.models import Beit, Eva, VisionTransformer
from torch import Tensor, nn

from finetune.errors import WeightsError
from finetune.formatting import pluralize
from finetune.models.freeze import set_train_mode
from finetune.models.head import classifier_names
from finetune.models.hooks import forward_hooks

__all__ = [
    "compute_layer_features",
    "compute_pre_logits",
    "enable_feature_input",
    "linear_classifier_names",
    "token_feature_slices",
    "token_features",
]

_RATE_ATTRIBUTES = ("p", "drop_prob", "prob")  # where dropout layers store their rate
# Relative to the largest pre-logit; larger than differences from summation order, smaller than
# those from dropout.
_TOLERANCE = 1e-4
_NUM_PROBE_BLOCKS = 4  # DINOv2's linear probe uses the class tokens of up to 4 last blocks


def compute_pre_logits(model: nn.Module, images_BCHW: Tensor) -> Tensor:
    """Compute the pre-logits of a timm network: the input of its last (classifier) layer.

    Returns: (B, D) float32.
    Raises: WeightsError for a network without pre-logits.
    """
    body, head = (getattr(model, name, None) for name in ("forward_features", "forward_head"))
    name = type(model).__name__
    if not callable(body) or not callable(head):
        raise WeightsError(
            f"{name}: feature extraction needs forward_features and forward_head, which this "
            "network does not have; use a timm network",
            code="weights.unsupported",
        )
    return _as_vectors(head(body(images_BCHW), pre_logits=True), name)


def _as_vectors(values: Any, name: str) -> Tensor:
    """Return a network's pre-logits as (B, D) float32. Raises: WeightsError for other shapes."""
    if isinstance(values, Tensor) and values.ndim == 4 and values.shape[2:] == (1, 1):
        values = values.flatten(1)
    if not isinstance(values, Tensor) or values.ndim != 2:
        kind = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
        raise WeightsError(
            f"{name}: its pre-logits are {kind}, not one vector per image; set global_pool, for "
            "example to avg, in the model's config.json",
            code="weights.unsupported",
        )
    return values.float()


def compute_layer_features(model: Any, images_BCHW: Tensor) -> Tensor:
    """Concatenate the pre-logits and the outputs of the last two blocks or stages.

    Args:
        model: a timm network with `forward_intermediates`.
        images_BCHW: preprocessed images.
    Returns: (B, number of features) float32. The first columns are the pre-logits; each of the
        outputs follows, as its mean over positions.
    """
    values, outputs = model.forward_intermediates(images_BCHW, indices=2)
    pre_logits_BD = _as_vectors(model.forward_head(values, pre_logits=True), type(model).__name__)
    means_BC = [output_BCHW.mean(dim=(2, 3)).float() for output_BCHW in outputs]
    return torch.cat([pre_logits_BD, *means_BC], dim=1)


def token_features(model: Any, images_BCHW: Tensor) -> Tensor:
    """Concatenate the pre-logits and the tokens that DINOv2's linear probe uses.

    Args:
        model: a network to which `limit_last_block_to_class_token` was not applied, because the
            features need all tokens of the last block.
        images_BCHW: preprocessed images.
    Returns: (B, number of features) float32. The first columns are the pre-logits. For a
        transformer with a class token, the class token after each of the last four blocks follows,
        in block order, then the mean of the last block's patch tokens; the final norm is applied to
        all of these. `token_feature_slices` names the columns.
    Raises: WeightsError for a network without pre-logits.
    """
    if not _has_class_token(model):
        return compute_pre_logits(model, images_BCHW)
    tokens_BND, intermediates = model.forward_intermediates(
        images_BCHW,
        indices=min(_NUM_PROBE_BLOCKS, len(model.blocks)),
        return_prefix_tokens=True,
        norm=True,
        output_fmt="NLC",
    )
    head_BD = _as_vectors(model.forward_head(tokens_BND, pre_logits=True), type(model).__name__)
    class_tokens_BD = [prefix_BND[:, 0] for _, prefix_BND in intermediates]
    return torch.cat([head_BD, *class_tokens_BD, intermediates[-1][0].mean(dim=1)], dim=1).float()


def token_feature_slices(model: Any, num_columns: int) -> dict[str, slice]:
    """Return the columns of `token_features` by name.

    Args:
        model: the network that computed the features.
        num_columns: total number of columns.
    Returns: {name: columns}: "pre-logits" and, for a transformer with a class token, the inputs of
        DINOv2's linear probe: the class token of the last block, or those of the last four blocks,
        each with and without the mean patch token.
    """
    if not _has_class_token(model):
        return {"pre-logits": slice(0, num_columns)}
    blocks, size = min(_NUM_PROBE_BLOCKS, len(model.blocks)), int(model.embed_dim)
    patches = num_columns - size  # first column of the mean patch token
    columns = {"pre-logits": slice(0, patches - blocks * size)}
    for count in (1, blocks):
        name = pluralize(count, "class token")
        columns[name] = slice(patches - count * size, patches)
        columns[f"{name}, patches"] = slice(patches - count * size, num_columns)
    return columns


def _has_class_token(model: Any) -> bool:
    """True for a timm transformer whose blocks all process a class token."""
    is_supported = isinstance(model, VisionTransformer | Eva | Beit)
    return is_supported and model.cls_token is not None and len(model.blocks) > 0


def linear_classifier_names(model: nn.Module) -> list[str]:
    """Return the names of the classifiers that are linear layers; they read the pre-logits."""
    names = classifier_names(model)
    return [name for name in names if isinstance(model.get_submodule(name), nn.Linear)]


def enable_feature_input(
    model: nn.Module, image_size: tuple[int, int], *, training: bool
) -> str | None:
    """Patch a network's forward to accept cached pre-logits as well as images.

    Afterwards `model(features_BD)` returns the same logits as `model(images_BCHW)`, but runs only
    the classifier and the dropout right before it. Parameter names do not change, and deep copies
    and wrappers (DDP, EMA) of the network keep working.

    Args:
        model: a float32 network; not changed if the function returns a reason.
        image_size: (height, width) in pixels.
        training: True if the network will train on features; then every layer before the classifier
            must be frozen and deterministic. The network is left in training mode if True, else in
            evaluation mode.
    Returns: None on success; otherwise the reason why logits cannot be computed from pre-logits.
    """
    names = classifier_names(model)
    if len(names) != 1 or linear_classifier_names(model) != names:
        return "the network does not have exactly one linear classifier"
    head_prefix = (f"{names[0]}.",)
    if training and any(
        parameter.requires_grad and not name.startswith(head_prefix)
        for name, parameter in model.named_parameters()
    ):
        return "parameters outside the classifier are trained"
    device = next(model.parameters()).device
    noise = torch.randn(2, 3, *image_size, generator=torch.Generator().manual_seed(0)).to(device)
    model.eval()
    try:
        with torch.no_grad():
            expected_BD = compute_pre_logits(model, noise)
    except WeightsError as error:
        return str(error)
    head = _find_head_modules(model, noise, names[0], expected_BD)
    if head is None:
        return "the network's logits are not the output of its classifier on the pre-logits"
    if training and (reason := _why_features_vary(model, noise, head, expected_BD)) is not None:
        return reason

    def forward(self: nn.Module, values: Tensor) -> Tensor:
        if values.ndim != 2:
            logits: Tensor = type(self).forward(self, values)
            return logits
        for name in head:
            values = self.get_submodule(name)(values)
        return values

    # a bound method: copying the network binds it to the copy
    model.forward = MethodType(forward, model)
    return None


@torch.no_grad()
def _run_with_hooks(
    model: nn.Module, images_BCHW: Tensor, names: list[str]
) -> tuple[Tensor, dict[str, tuple[Tensor, Tensor]]]:
    """Run a network and record (input, output) of the named modules.

    Returns: the logits, and the records by module name, in the order in which the modules ran.
    """
    recorded: dict[str, tuple[Tensor, Tensor]] = {}

    def record(name: str, module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        recorded[name] = (inputs[0], output)

    with forward_hooks(model, {name: partial(record, name) for name in names}):
        logits: Tensor = model(images_BCHW)
    return logits, recorded


def _find_head_modules(
    model: nn.Module, images_BCHW: Tensor, classifier: str, expected_BD: Tensor
) -> list[str] | None:
    """Return the names of the modules between pre-logits and logits, in forward order.

    Returns None if other code between pre-logits and logits also changes the values.
    """
    dropouts = [name for name, module in model.named_modules() if _is_active_dropout(module)]
    logits, recorded = _run_with_hooks(model, images_BCHW, [*dropouts, classifier])
    if classifier not in recorded:
        return None
    features, output = recorded.pop(classifier)
    if not _shares_memory(output, logits) or not _is_close(features.float(), expected_BD):
        return None
    # in evaluation mode dropout returns its input
    before = [name for name, (_, out) in recorded.items() if _shares_memory(out, features)]
    return [*before[-1:], classifier]


def _why_features_vary(
    model: nn.Module, images_BCHW: Tensor, head: list[str], expected_BD: Tensor
) -> str | None:
    """Return why the pre-logits of an image change between training steps; None if they do not."""
    set_train_mode(model)
    for name, module in model.named_modules():
        if name not in head and _is_active_dropout(module):
            return f"the network has dropout before the classifier ({name})"
        if isinstance(getattr(module, "running_mean", None), Tensor) and module.training:
            return f"batch norm updates its running statistics ({name})"
    _, recorded = _run_with_hooks(model, images_BCHW, [head[0]])
    if not _is_close(recorded[head[0]][0].float(), expected_BD):
        return "the network computes different features in training mode"
    return None


def _is_active_dropout(module: nn.Module) -> bool:
    """True for a dropout or drop path layer whose rate is not 0."""
    is_dropout = "drop" in type(module).__name__.lower()
    return is_dropout and any(bool(getattr(module, rate, 0)) for rate in _RATE_ATTRIBUTES)


def _shares_memory(one: Tensor, other: Tensor) -> bool:
    """True if both tensors use the same memory, so nothing was computed between them."""
    return one.shape == other.shape and one.data_ptr() == other.data_ptr()


def _is_close(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape:
        return False
    return bool((one - other).abs().max() <= _TOLERANCE * other.abs().max())
