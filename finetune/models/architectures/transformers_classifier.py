"""Image classifiers of transformers (CvT, PVT, …), wrapped in one network registered with timm.

The network is built by transformers' own classes from its config.json; code from a Hub repository
never runs.
"""

# B batch, K classes, C channels, H W pixels

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from timm.layers.pos_embed import resample_abs_pos_embed
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from torch import Tensor, nn
from torch.func import functional_call

from finetune.errors import SetupError, WeightsError, install_hint
from finetune.models.weights.resize_posemb import square_grid

__all__ = [
    "ARCHITECTURE",
    "TransformersClassifier",
    "classifier_types",
    "network_config",
    "transformers_classifier",
]

ARCHITECTURE = "transformers_classifier"
_PREFIX = "network."  # prefix of the tensor names of TransformersClassifier
# Keys of a config.json that are not about the network: they describe the file, the classes or the
# preprocessing, choose how transformers runs the network, or configure CLIP's unused text encoder.
_OTHER_KEYS = (
    *("auto_map", "_name_or_path", "transformers_version", "dtype", "torch_dtype"),
    *("problem_type", "id2label", "label2id", "num_labels", "_num_labels"),
    *("architecture", "num_classes", "num_features", "label_names", "model_args"),
    *("pretrained_cfg", "calibration", "checksums", "image_processor_type"),
    *("attn_implementation", "experts_implementation", "quantization_config", "text_config"),
)

default_cfgs = generate_default_cfgs({ARCHITECTURE: {"input_size": (3, 224, 224)}})


class TransformersClassifier(nn.Module):
    """Wraps an image classifier of transformers and adds timm's methods for the head.

    Args:
        transformers_config: content of a config.json, from `network_config`.
        num_classes: K; 0 returns features instead of logits.
        in_chans: number of image channels, always 3; timm passes it to every network.
        img_size: image size in pixels; None for the image size in the configuration.
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
        self.network = _create_network(transformers_config, num_classes)
        self.num_classes = num_classes
        arguments = inspect.signature(self.network.forward).parameters
        self._takes_patches = "spatial_shapes" in arguments  # SigLIP2
        # transformers itself cannot train PP-LCNet: it takes no labels and returns no `logits`
        self.supports_pipeline = "labels" in arguments and not self._takes_patches
        # the layers whose shapes depend on the number of classes
        with torch.device("meta"):
            other = _create_network(transformers_config, num_classes + 1)
        own = self.network.state_dict()
        changed = [
            k for k, v in other.state_dict().items() if k not in own or own[k].shape != v.shape
        ]
        heads = list(dict.fromkeys(name.rpartition(".")[0] for name in changed))
        self._head_names = tuple(_PREFIX + name for name in heads)
        self.num_features = getattr(other.get_submodule(heads[0]), "in_features", 0) if heads else 0
        if img_size is not None:
            self._set_image_size((img_size, img_size) if isinstance(img_size, int) else img_size)

    def forward(self, images_BCHW: Tensor) -> Tensor:
        """Compute logits: (B, 3, H, W) to (B, K)."""
        if not self._takes_patches:
            logits_BK: Tensor = self.network(pixel_values=images_BCHW)[0]
            return logits_BK
        size = self.network.config.vision_config.patch_size
        patches_BChpwp = images_BCHW.unflatten(3, (-1, size)).unflatten(2, (-1, size))
        height, width = patches_BChpwp.shape[2], patches_BChpwp.shape[4]
        patches_BND = patches_BChpwp.permute(0, 2, 4, 3, 5, 1).flatten(3).flatten(1, 2)
        shapes_B2 = torch.tensor([[height, width]]).expand(len(patches_BND), 2)
        logits_BK = self.network(pixel_values=patches_BND, spatial_shapes=shapes_B2)[0]
        return logits_BK

    def get_classifier(self) -> nn.Module | tuple[nn.Module, ...]:
        """Return the module that computes the logits, or all of them for a distilled network."""
        heads = tuple(map(self.get_submodule, self._head_names))
        return heads[0] if len(heads) == 1 else heads

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Turn on activation checkpointing; `enable=False` does nothing."""
        assert self.network.supports_gradient_checkpointing or not enable
        if enable:
            self.network.gradient_checkpointing_enable()

    def save_pretrained(
        self, folder: Path, state_dict: Mapping[str, Tensor], class_names: Sequence[str]
    ) -> None:
        """Write config.json and model.safetensors in transformers' format.

        Args:
            folder: an existing folder.
            state_dict: weights with the names of this module, without those of an adapter.
            class_names: class names in the order of the logits.
        """
        config = self.network.config
        config.id2label = dict(enumerate(class_names))
        config.label2id = {name: index for index, name in enumerate(class_names)}
        tensors = {name.removeprefix(_PREFIX): tensor for name, tensor in state_dict.items()}
        with _quiet():
            self.network.save_pretrained(folder, state_dict=tensors)

    def convert_state_dict(
        self, tensors: Mapping[str, Tensor], *, source: str
    ) -> dict[str, Tensor]:
        """Convert the tensors of a transformers checkpoint to a state dict of this module.

        transformers loads the tensors, because it can also convert the tensor names of its earlier
        versions. If the checkpoint has no tensors for the head, the result has none either.

        Args:
            tensors: content of the weights file, {name: tensor}.
            source: name of the weights as the user gave it, for error messages.
        Raises: WeightsError if tensors are missing or have the wrong shape.
        """
        try:
            with _quiet():
                network, info = type(self.network).from_pretrained(
                    None,
                    config=self.network.config,
                    state_dict=dict(tensors),
                    ignore_mismatched_sizes=True,
                    output_loading_info=True,
                )
            for name, theirs, own in sorted(info["mismatched_keys"]):
                raise ValueError(f"{name}: {tuple(theirs)} for {tuple(own)}")
        except (RuntimeError, ValueError) as error:
            raise WeightsError(
                f"{source}: the weights do not fit the network ({_first_line(error)}); download "
                f"them again",
                code="weights.wrong_shape",
            ) from error
        state = {_PREFIX + name: tensor for name, tensor in network.state_dict().items()}
        heads = tuple(f"{name}." for name in self._head_names)
        new_heads = [name for name in state if name.startswith(heads)]
        missing = {_PREFIX + name for name in info["missing_keys"]}
        if missing.issuperset(new_heads):
            missing.difference_update(new_heads)
            state = {name: tensor for name, tensor in state.items() if name not in new_heads}
        if missing:
            raise WeightsError(
                f"{source}: {len(missing)} tensors are missing: {', '.join(sorted(missing)[:3])}; "
                f"download the file again",
                code="weights.missing_tensors",
            )
        return state

    def _set_image_size(self, image_size: tuple[int, int]) -> None:
        """Rebuild the network for an image size that it does not accept as configured."""
        config = copy.deepcopy(self.network.config)
        vision_config = getattr(config, "vision_config", config)
        own = getattr(vision_config, "image_size", None)
        if own is None or self._accepts(image_size):
            return
        height, width = image_size
        if height != width:
            raise WeightsError(
                f"image size {height} x {width} px: the position embeddings of this network need "
                f"square images; set model.image_size to one number",
                code="weights.unsupported",
            )
        vision_config.image_size = [height, width] if isinstance(own, list | tuple) else height
        self.network = type(self.network)(config)

    @torch.no_grad()
    def _accepts(self, image_size: tuple[int, int]) -> bool:
        """True if a forward pass on the meta device succeeds at this image size."""
        tensors = (*self.named_parameters(), *self.named_buffers())
        state = {name: tensor.to("meta") for name, tensor in tensors}
        self.eval()
        try:
            with torch.device("cpu"):  # networks cache tensors of their own, such as indices
                functional_call(self, state, torch.zeros(1, 3, *image_size, device="meta"))
        except Exception:  # transformers' networks raise many types for unsupported sizes
            return False
        finally:
            self.train()
        return True


@register_model
def transformers_classifier(pretrained: bool = False, **kwargs: Any) -> TransformersClassifier:
    """`TransformersClassifier`: any network of transformers' AutoModelForImageClassification."""
    return build_model_with_cfg(
        TransformersClassifier,
        ARCHITECTURE,
        pretrained,
        pretrained_filter_fn=_resize_position_embeddings,
        **kwargs,
    )


def _resize_position_embeddings(state: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Resize position embeddings as transformers does: bicubic, without antialiasing.

    Their shape is (1, N, D) or (N, D), with N = 0 to 2 prefix tokens + the patches of a square.
    """
    own = model.state_dict()
    for name, tensor in state.items():
        target = own.get(name)
        if "position_embedding" not in name or target is None or target.shape == tensor.shape:
            continue
        num_tokens = target.shape[-2]
        for num_prefix in range(3):
            if (grid := square_grid(num_tokens - num_prefix)) is not None:
                resized_1ND = resample_abs_pos_embed(
                    tensor.reshape(1, *tensor.shape[-2:]),
                    list(grid),
                    num_prefix_tokens=num_prefix,
                    antialias=False,
                )
                state[name] = resized_1ND.reshape(target.shape)
    return state


def network_config(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of an untrusted config.json that define the network."""
    return {k: v for k, v in content.items() if k not in _OTHER_KEYS and v is not None}


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


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Turn off the messages and progress bars of transformers; its errors are raised."""
    logging = _import_transformers().logging
    verbosity, has_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if has_bars:
            logging.enable_progress_bar()


def classifier_types() -> list[str]:
    """Return the model types of transformers that have an image classifier."""
    _import_transformers()
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES

    return list(MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES)


def _create_network(config: Mapping[str, Any], num_classes: int) -> Any:
    library = _import_transformers()
    kind = config.get("model_type")
    # if a model type has several classifiers, `architectures` names the one to build
    own = {"architectures": [], **config, "num_labels": num_classes}
    own.pop("model_type", None)
    try:
        with _quiet():
            settings = library.AutoConfig.for_model(kind, **own)
            network = library.AutoModelForImageClassification.from_config(
                settings, dtype=torch.float32
            )
    except ImportError as error:
        raise SetupError(f"{kind}: {_first_line(error)}", code="setup.missing_package") from error
    except Exception as error:  # transformers raises a different type for each wrong value
        raise WeightsError(
            f"config.json: transformers cannot build '{kind}' from it ({_first_line(error)}); "
            f"download it again",
            code="weights.wrong_config",
        ) from error
    if "input_ids" in inspect.signature(network.forward).parameters:
        raise WeightsError(
            f"{kind}: the network needs text tokens besides the image; choose another network",
            code="weights.unsupported",
        )
    return network


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
