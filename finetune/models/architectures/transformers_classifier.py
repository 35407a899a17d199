"""Image classifiers of transformers (CvT, PVT, …), wrapped in one network registered with timm.

The network is built by transformers' own classes from its config.json; code from a Hub repository
never runs.
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

from finetune.errors import SetupError, WeightsError, install_hint
from finetune.models.weights.resize_posemb import resize_posemb, square_grid

__all__ = [
    "ARCHITECTURE",
    "CLASSIFIER_NAME",
    "DROPPED_CONFIG_KEYS",
    "TransformersClassifier",
    "classifier_classes",
    "convert_state_dict",
    "transformers_classifier",
]

ARCHITECTURE = "transformers_classifier"
# Name of the classifier module in transformers' networks.
CLASSIFIER_NAME = "classifier"
# Keys of a config.json that describe the file or its classes, not the architecture.
DROPPED_CONFIG_KEYS = (
    *("architectures", "auto_map", "_name_or_path", "dtype", "torch_dtype", "problem_type"),
    *("id2label", "label2id", "num_labels", "_num_labels"),
)

default_cfgs = generate_default_cfgs(
    {ARCHITECTURE: {"input_size": (3, 224, 224), "classifier": f"network.{CLASSIFIER_NAME}"}}
)


class TransformersClassifier(nn.Module):
    """Wraps an image classifier of transformers and adds timm's methods for the head.

    Args:
        transformers_config: content of a config.json, without the keys of DROPPED_CONFIG_KEYS.
        num_classes: K; 0 returns features instead of logits.
        in_chans: must be 3; timm passes it to every network.
        img_size: image size in pixels, for a network with a fixed image size.
    Raises: SetupError without transformers; WeightsError if transformers cannot build the network.
    """

    def __init__(
        self,
        transformers_config: Mapping[str, Any],
        num_classes: int = 1000,
        in_chans: int = 3,
        img_size: int | tuple[int, int] | None = None,
    ) -> None:
        super().__init__()
        assert in_chans == 3
        height, width = (img_size, img_size) if isinstance(img_size, int) else img_size or (0, 0)
        if height != width:
            raise WeightsError(
                f"image size {height} x {width} px: the position embeddings of this network need "
                f"square images; set model.image_size to one number",
                code="weights.unsupported",
            )
        own = {"image_size": height} if height else {}
        self.network = _create_network({**transformers_config, **own}, num_classes)
        self.num_classes = num_classes
        layers = [m for m in self.get_classifier().modules() if isinstance(m, nn.Linear)]
        self.num_features = layers[-1].in_features if layers else 0
        # without this argument, ViT and similar networks accept only their own image size
        accepted = inspect.signature(self.network.forward).parameters
        self._forward_kwargs = dict.fromkeys({"interpolate_pos_encoding"} & set(accepted), True)

    def forward(self, images_BCHW: Tensor) -> Tensor:
        """Compute logits: (B, 3, H, W) to (B, K)."""
        logits_BK: Tensor = self.network(pixel_values=images_BCHW, **self._forward_kwargs).logits
        return logits_BK

    def get_classifier(self) -> nn.Module:
        """Return the module that computes the logits."""
        return self.network.get_submodule(CLASSIFIER_NAME)

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Turn on activation checkpointing; `enable=False` does nothing."""
        assert self.network.supports_gradient_checkpointing or not enable
        if enable:
            self.network.gradient_checkpointing_enable()


@register_model
def transformers_classifier(pretrained: bool = False, **kwargs: Any) -> TransformersClassifier:
    """`TransformersClassifier`: any network of transformers' AutoModelForImageClassification."""
    return build_model_with_cfg(
        TransformersClassifier,
        ARCHITECTURE,
        pretrained,
        pretrained_filter_fn=_checkpoint_filter_fn,
        **kwargs,
    )


def _checkpoint_filter_fn(state: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Resize the position embeddings (for PVT, those of every stage) with timm's method."""
    own = model.state_dict()
    for name, tensor in state.items():
        target = own.get(name)
        if name.endswith("position_embeddings") and target is not None and tensor.ndim == 3:
            prefix = int(square_grid(target.shape[1]) is None)  # PVT: class token, last stage only
            grid = square_grid(target.shape[1] - prefix)
            if grid is not None:
                state[name] = resize_posemb(tensor, grid, method="timm", num_prefix_tokens=prefix)
    return state


def convert_state_dict(
    tensors: Mapping[str, Tensor], model_args: Mapping[str, Any], *, source: str
) -> dict[str, Tensor]:
    """Convert a transformers checkpoint to the state dict of TransformersClassifier.

    transformers loads the tensors, because it can also convert the tensor names of its earlier
    versions.

    Args:
        tensors: content of the weights file, {name: tensor}.
        model_args: `Weights.model_args` from `resolve_classifier`.
        source: name of the weights as the user gave it, named in error messages.
    Raises: WeightsError if tensors are missing or have the wrong shape.
    """
    kernel = tensors.get(f"{CLASSIFIER_NAME}.weight", tensors.get(f"{CLASSIFIER_NAME}.1.weight"))
    empty = _create_network(
        model_args["transformers_config"], 0 if kernel is None else kernel.shape[0]
    )
    try:
        network, info = type(empty).from_pretrained(
            None, config=empty.config, state_dict=dict(tensors), output_loading_info=True
        )
    except (RuntimeError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise WeightsError(
            f"{source}: the weights do not fit the network ({reason}); download them again",
            code="weights.wrong_shape",
        ) from error
    if missing := sorted(info["missing_keys"]):
        raise WeightsError(
            f"{source}: {len(missing)} tensors are missing: {', '.join(missing[:3])}; download "
            f"the file again",
            code="weights.missing_tensors",
        )
    return {f"network.{name}": tensor for name, tensor in network.state_dict().items()}


@functools.cache
def _import_transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise SetupError(
            f"transformers: not installed ({error}); {install_hint('transformers')}",
            code="setup.missing_package",
        ) from error
    return transformers


def classifier_classes() -> dict[str, Any]:
    """Return {model type: function that imports its image classifier class}."""
    library = _import_transformers()
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES

    names = MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES
    first = {kind: one if isinstance(one, str) else one[0] for kind, one in names.items()}
    return {kind: functools.partial(getattr, library, name) for kind, name in first.items()}


def _create_network(config: Mapping[str, Any], num_classes: int) -> Any:
    library = _import_transformers()
    own = {k: v for k, v in config.items() if k not in DROPPED_CONFIG_KEYS}
    kind = own.pop("model_type", None)
    try:
        settings = library.AutoConfig.for_model(kind, **own, num_labels=num_classes)
        network = library.AutoModelForImageClassification.from_config(settings, dtype=torch.float32)
    except Exception as error:  # transformers raises a different type for each wrong value
        reason = str(error).strip().partition("\n")[0]
        raise WeightsError(
            f"config.json: transformers cannot build '{kind}' from it ({reason}); download it "
            f"again",
            code="weights.wrong_config",
        ) from error
    if not hasattr(network, CLASSIFIER_NAME):
        raise WeightsError(
            f"{kind}: the network has no module '{CLASSIFIER_NAME}'; choose a network with a "
            f"single head",
            code="weights.unsupported",
        )
    return network
