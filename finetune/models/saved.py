"""A built network, saved in timm's hub format."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor, nn

from finetune.errors import FinetuneError
from finetune.models.adapter import plain_state
from finetune.models.weights.timm_config import MULTILABEL
from finetune.transforms.preprocessing import Preprocessing

__all__ = ["TRAINING_ONLY", "Built", "save_model"]

# Left out of config.json: whoever loads the model did not ask for the training run's dropout.
TRAINING_ONLY = {
    "drop_rate",
    "pos_drop_rate",
    "patch_drop_rate",
    "proj_drop_rate",
    "attn_drop_rate",
    "drop_path_rate",
}


@dataclass(frozen=True)
class Built:
    """A network and everything needed to save it so that timm alone can load it.

    Attributes:
        model: on the CPU, in float32, frozen parts with requires_grad False.
        architecture: timm's name, without a tag.
        model_args: timm's keyword arguments without the training-only ones (dropout).
        preprocessing: the weights' own, at the size the network was built for.
        provenance: source, revision, sha256, what happened to the position embeddings, …
        class_names: when the weights carry them and the head was kept.
        temperature: divides the logits before the softmax, when the weights carry one and the
            head was kept.
        multilabel: the weights are of a network that gives an image any number of labels.
        thresholds: of each class, from which sigmoid(logit) on it is said; as the temperature.
    """

    model: nn.Module
    architecture: str
    model_args: dict[str, Any]
    preprocessing: Preprocessing
    provenance: dict[str, Any]
    class_names: list[str] | None
    temperature: float | None = None
    multilabel: bool = False
    thresholds: list[float] | None = None


def save_model(
    folder: str | Path,
    built: Built,
    state_dict: Mapping[str, Tensor],
    *,
    class_names: Sequence[str],
    preprocessing: Preprocessing,
    temperature: float | None = None,
    multilabel: bool = False,
    thresholds: Sequence[float] | None = None,
) -> None:
    """Write config.json and model.safetensors in timm's hub format.

    `timm.create_model("local-dir:FOLDER", pretrained=True)` then gives the same logits.

    Args:
        folder: an existing folder; the caller publishes it atomically.
        built: what build() gave.
        state_dict: the trained weights, by the names of `built.model`, an adapter merged.
        class_names: in the order of the logits.
        preprocessing: what evaluation used.
        temperature: as fitted on the val split, above 0; None when it was not.
        multilabel: an image has any number of labels.
        thresholds: of each class, as fitted on the val split; None when they were not.
    Raises: FinetuneError if a tensor or the number of classes is not the network's, or if the
        temperature is not above 0.
    """
    folder = Path(folder)
    own = plain_state(built.model, built.model.state_dict())
    if {k: v.shape for k, v in state_dict.items()} != {k: v.shape for k, v in own.items()}:
        wrong = [k for k, v in state_dict.items() if k not in own or own[k].shape != v.shape]
        wrong += [k for k in own if k not in state_dict]
        raise FinetuneError(
            f"{folder}: not the network's tensors: {', '.join(wrong[:3])}; save the unwrapped "
            f"network's state dict"
        )
    num_classes = int(getattr(built.model, "num_classes", len(class_names)))
    if len(class_names) != num_classes:
        raise FinetuneError(
            f"{folder}: {len(class_names)} class names for {num_classes} classes; give one each"
        )
    if temperature is not None and not (math.isfinite(temperature) and temperature > 0):
        raise FinetuneError(f"{folder}: temperature {temperature}; expected a number above 0")
    tensors = {k: v.detach().cpu().contiguous().clone() for k, v in state_dict.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = _saved_config(built, class_names, preprocessing)
    if temperature is not None:
        # beside timm's keys: timm and transformers leave alone what they do not know
        config["calibration"] = {"temperature": float(temperature), "split": "val"}
    if multilabel:
        config["problem_type"] = MULTILABEL
    if thresholds is not None:
        config["calibration"] = {"thresholds": list(thresholds), "split": "val"}
    text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
    (folder / "config.json").write_text(text, encoding="utf-8")


def _saved_config(
    built: Built, class_names: Sequence[str], preprocessing: Preprocessing
) -> dict[str, Any]:
    source = dict(getattr(built.model, "pretrained_cfg", {}))
    keys = ["architecture", "fixed_input_size", "first_conv", "classifier"]
    if built.provenance.get("pretrained"):
        keys += ["tag", "license"]  # of the weights that it comes from
    pretrained_cfg = {key: source[key] for key in keys if source.get(key) is not None}
    pretrained_cfg |= {
        "custom_load": False,
        "num_classes": len(class_names),
        "input_size": [3, *preprocessing.image_size],
        "mean": list(preprocessing.mean),
        "std": list(preprocessing.std),
        "interpolation": preprocessing.interpolation,
        "crop_pct": preprocessing.crop_pct,
        "crop_mode": preprocessing.crop_mode,
    }
    return {
        "architecture": built.architecture,
        "num_classes": len(class_names),
        "num_features": getattr(built.model, "num_features", None),
        "label_names": list(class_names),
        "model_args": {k: v for k, v in built.model_args.items() if k not in TRAINING_ONLY},
        "pretrained_cfg": pretrained_cfg,
    }
