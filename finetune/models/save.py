"""Save a built network in timm's hub format, or in transformers' format."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor, nn

from finetune.model_checksums import add_checksums
from finetune.models.architectures.transformers_classifier import TransformersClassifier
from finetune.models.lora import base_state_dict
from finetune.models.weights.timm_config import MULTILABEL_PROBLEM_TYPE
from finetune.recipe.training_keys import TRAINING_ONLY_ARGS
from finetune.transforms.preprocessing import Preprocessing

__all__ = ["BuiltModel", "save_model"]


@dataclass(frozen=True)
class BuiltModel:
    """A network with everything needed to save it.

    Attributes:
        model: the network, on the CPU in float32; frozen parameters have requires_grad=False.
        architecture: timm's name, without a tag.
        model_args: keyword arguments of timm.create_model() that define the architecture (dropout
            rates are not included).
        preprocessing: the preprocessing of the weights, at the image size of the network.
        provenance: source, revision, sha256, how position embeddings were resized, …
        class_names: names of the pretrained classes; None for a new head, or if the weights have no
            class names.
        temperature: divisor of the logits before softmax; None for a new head, or if the weights
            are not calibrated.
        multilabel: True if the network predicts any number of labels per image.
        thresholds: threshold of each class, which is predicted if sigmoid(logit) is at least this.
            None for a new head, or if the weights are not calibrated.
        validation_scores: the entry of config.json, see `evaluation.validation_scores`; None if
            there is none, or for a new head.
        posemb: method that resizes the position embeddings to another image size, one of
            RESIZE_METHODS.
        pipeline: a `Pipeline` or `ExportedPipeline` with the evaluation transforms of an exported
            file, which cannot be changed; otherwise None, and they come from `preprocessing`.
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
    validation_scores: Mapping[str, Any] | None = None
    posemb: str = "timm"
    pipeline: Any = None

    @property
    def network_args(self) -> dict[str, Any]:
        """What defines the network besides its weights, as JSON: the sha256 of a file omits it."""
        posemb = self.provenance.get("posemb")
        args = {**self.model_args, "architecture": self.architecture, "posemb": posemb}
        return dict(json.loads(json.dumps(args)))


def save_model(
    folder: str | Path,
    built: BuiltModel,
    state_dict: Mapping[str, Tensor],
    *,
    class_names: Sequence[str],
    preprocessing: Preprocessing,
    temperature: float | None = None,
    multilabel: bool = False,
    thresholds: Sequence[float] | None = None,
    validation_scores: Mapping[str, Any] | None = None,
) -> None:
    """Write config.json and model.safetensors.

    For networks of timm, `timm.create_model("local-dir:FOLDER", pretrained=True)` gives the same
    logits; for networks of transformers, `AutoModelForImageClassification.from_pretrained(FOLDER)`.

    Args:
        folder: an existing temporary folder, which the caller then moves into place; may have an
            adapter already.
        built: the result of build_model().
        state_dict: the trained weights, with the tensor names of the base model; an adapter must be
            merged.
        class_names: class names in the order of the logits.
        preprocessing: preprocessing that was used in evaluation.
        temperature: temperature fitted on the val split, above 0; None if it was not fitted.
        multilabel: True if an image can have any number of labels.
        thresholds: one threshold per class, fitted on the val split; None if they were not fitted.
        validation_scores: scores of the validation images, see `evaluation.validation_scores`.
    """
    folder = Path(folder)
    own = base_state_dict(built.model, built.model.state_dict())
    assert {k: v.shape for k, v in state_dict.items()} == {k: v.shape for k, v in own.items()}
    assert len(class_names) == getattr(built.model, "num_classes", len(class_names))
    assert temperature is None or 0 < temperature < math.inf
    tensors = {k: v.detach().cpu().contiguous().clone() for k, v in state_dict.items()}
    config = _hub_config(built, class_names, preprocessing)
    if isinstance(built.model, TransformersClassifier):
        built.model.save_pretrained(folder, tensors, class_names)
        del config["model_args"]
        config = json.loads((folder / "config.json").read_text(encoding="utf-8")) | config
        if built.model.supports_pipeline:
            # the processor of transformers that reads pretrained_cfg, as timm does
            config["image_processor_type"] = "TimmWrapperImageProcessor"
    else:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    if temperature is not None:
        config["calibration"] = {"temperature": float(temperature), "split": "val"}
    if multilabel:
        config["problem_type"] = MULTILABEL_PROBLEM_TYPE
    if thresholds is not None:
        config["calibration"] = {"thresholds": list(thresholds), "split": "val"}
    if validation_scores is not None:
        config["validation_scores"] = dict(validation_scores)
    text = json.dumps(add_checksums(config, folder), indent=2, ensure_ascii=False) + "\n"
    (folder / "config.json").write_text(text, encoding="utf-8")


def _hub_config(
    built: BuiltModel, class_names: Sequence[str], preprocessing: Preprocessing
) -> dict[str, Any]:
    source = dict(getattr(built.model, "pretrained_cfg", {}))
    # timm and transformers ignore keys that they do not know
    posemb = {"posemb": built.posemb} if hasattr(built.model, "pos_embed") else {}
    keys = ["architecture", "fixed_input_size", "first_conv", "classifier"]
    if built.provenance.get("pretrained"):
        keys += ["tag", "license"]  # of the pretrained weights
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
        "model_args": {k: v for k, v in built.model_args.items() if k not in TRAINING_ONLY_ARGS},
        **posemb,
        "pretrained_cfg": pretrained_cfg,
    }
