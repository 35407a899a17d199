"""Image classifiers of transformers (CvT, PVT, …) as a network that is registered with timm.

It is built from its config.json by transformers' own classes, never by code from a repository.
"""

# B batch, K classes, C channels, H W pixels

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from typing import Any

import torch
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from torch import Tensor, nn

from finetune.errors import SetupError, WeightsError
from finetune.models.weights.resize_posemb import resize_grid, square_grid

__all__ = [
    "ARCHITECTURE",
    "CLASSIFIER",
    "DROPPED",
    "TransformersClassifier",
    "classes",
    "named",
    "transformers_classifier",
]

ARCHITECTURE = "transformers_classifier"
# The name of the classifier's place in transformers' networks of this kind.
CLASSIFIER = "classifier"
# Keys of a config.json that belong to the file and its old classes, not to the network.
DROPPED = (
    *("architectures", "auto_map", "_name_or_path", "dtype", "torch_dtype", "problem_type"),
    *("id2label", "label2id", "num_labels", "_num_labels"),
)

default_cfgs = generate_default_cfgs(
    {ARCHITECTURE: {"input_size": (3, 224, 224), "classifier": f"network.{CLASSIFIER}"}}
)


class TransformersClassifier(nn.Module):
    """An image classifier of transformers: images to logits, with timm's methods for the head.

    Args:
        transformers_config: the content of a config.json without its labels.
        num_classes: K; 0 returns features instead of logits.
        img_size: pixels, for a network that takes images of one size only.
    Raises: SetupError without transformers; WeightsError for a network that it cannot build.
    """

    def __init__(
        self,
        transformers_config: Mapping[str, Any],
        num_classes: int = 1000,
        in_chans: int = 3,
        img_size: int | tuple[int, int] | None = None,
    ) -> None:
        super().__init__()
        assert in_chans == 3  # timm passes it to every network
        height, width = (img_size, img_size) if isinstance(img_size, int) else img_size or (0, 0)
        if height != width:
            raise WeightsError(
                f"{height} x {width} px: its position embeddings need a square; use one side",
                code="weights.unsupported",
            )
        own = {"image_size": height} if height else {}
        self.network = _create({**transformers_config, **own}, num_classes)
        self.num_classes = num_classes
        layers = [m for m in self.get_classifier().modules() if isinstance(m, nn.Linear)]
        self.num_features = layers[-1].in_features if layers else 0
        # without it ViT and similar networks refuse other sizes
        accepted = inspect.signature(self.network.forward).parameters
        self._options = dict.fromkeys({"interpolate_pos_encoding"} & set(accepted), True)

    def forward(self, images_BCHW: Tensor) -> Tensor:
        """Compute logits: (B, 3, H, W) to (B, K)."""
        logits_BK: Tensor = self.network(pixel_values=images_BCHW, **self._options).logits
        return logits_BK

    def get_classifier(self) -> nn.Module:
        """Return the module that computes the logits."""
        return self.network.get_submodule(CLASSIFIER)

    def reset_classifier(self, num_classes: int) -> None:
        """Put a fresh classifier of K outputs in place of the last layer."""
        layers = {n: m for n, m in self.network.named_modules() if isinstance(m, nn.Linear)}
        last = [name for name in layers if name == CLASSIFIER or name.startswith(f"{CLASSIFIER}.")]
        if not last:
            raise WeightsError(
                f"{type(self.network).__name__}: no linear classifier to replace; choose another "
                f"network",
                code="weights.unsupported",
            )
        fresh = nn.Linear(layers[last[-1]].in_features, num_classes) if num_classes else None
        self.network.set_submodule(last[-1], fresh or nn.Identity())
        self.num_classes = num_classes

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute activations in the backward pass to save memory."""
        assert self.network.supports_gradient_checkpointing or not enable
        if enable:
            self.network.gradient_checkpointing_enable()


@register_model
def transformers_classifier(pretrained: bool = False, **kwargs: Any) -> TransformersClassifier:
    """Any network of transformers' AutoModelForImageClassification; `TransformersClassifier`."""
    return build_model_with_cfg(
        TransformersClassifier, ARCHITECTURE, pretrained, pretrained_filter_fn=_resized, **kwargs
    )


def _resized(state: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Resize position embeddings, in each stage for PVT, as timm does its own."""
    own = model.state_dict()
    for name, tensor in state.items():
        target = own.get(name)
        if name.endswith("position_embeddings") and target is not None and tensor.ndim == 3:
            prefix = int(square_grid(target.shape[1]) is None)  # PVT's class token: last stage
            grid = square_grid(target.shape[1] - prefix)
            if grid is not None:
                state[name] = resize_grid(tensor, grid, method="timm", num_prefix=prefix)
    return state


def named(
    tensors: Mapping[str, Tensor], model_args: Mapping[str, Any], *, source: str
) -> dict[str, Tensor]:
    """Rename the tensors of a file of transformers for TransformersClassifier.

    transformers itself loads them, since it knows their names in earlier versions.

    Args:
        tensors: as they are in the file.
        model_args: from `describe`.
        source: how the user wrote it, for messages.
    Raises: WeightsError if there are too few tensors, or of other shapes.
    """
    kernel = tensors.get(f"{CLASSIFIER}.weight", tensors.get(f"{CLASSIFIER}.1.weight"))
    empty = _create(model_args["transformers_config"], 0 if kernel is None else kernel.shape[0])
    try:
        network, info = type(empty).from_pretrained(
            None, config=empty.config, state_dict=dict(tensors), output_loading_info=True
        )
    except (RuntimeError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise WeightsError(
            f"{source}: the weights do not fit ({reason}); get them again",
            code="weights.wrong_shape",
        ) from error
    if missing := sorted(info["missing_keys"]):
        raise WeightsError(
            f"{source}: {len(missing)} tensors are missing: {', '.join(missing[:3])}; get it again",
            code="weights.missing_tensors",
        )
    return {f"network.{name}": tensor for name, tensor in network.state_dict().items()}


@functools.cache
def _library() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise SetupError(
            f"transformers: not installed ({error}); pip install 'finetune[transformers]'",
            code="setup.missing_package",
        ) from error
    return transformers


def classes() -> dict[str, Any]:
    """Functions that import the image classifier of transformers for each model type."""
    library = _library()
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES

    names = MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES
    first = {kind: one if isinstance(one, str) else one[0] for kind, one in names.items()}
    return {kind: functools.partial(getattr, library, name) for kind, name in first.items()}


def _create(config: Mapping[str, Any], num_classes: int) -> Any:
    library, own = _library(), {k: v for k, v in config.items() if k not in DROPPED}
    kind = own.pop("model_type", None)
    try:
        settings = library.AutoConfig.for_model(kind, **own, num_labels=num_classes)
        network = library.AutoModelForImageClassification.from_config(settings, dtype=torch.float32)
    except Exception as error:  # transformers raises a different type for each wrong value
        reason = str(error).strip().partition("\n")[0]
        raise WeightsError(
            f"transformers cannot build '{kind}' from its config.json ({reason}); get it again",
            code="weights.wrong_config",
        ) from error
    if not hasattr(network, CLASSIFIER):
        raise WeightsError(
            f"{kind}: has no '{CLASSIFIER}'; choose a network with one head",
            code="weights.unsupported",
        )
    return network
