"""Classify one image for the demo, with the model's input and attention rollout."""

# C channels, H W pixels, h w the model's input size in pixels, K classes

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from finetune.data.decode import decode_image, hwc_to_chw
from finetune.inference import Classifier
from finetune.models.interpretability import attention_rollout
from finetune.transforms.pipeline import Pipeline

__all__ = ["TOP_K", "DemoPrediction", "DemoPredictor", "decode_upload"]

TOP_K = 5


@dataclass(frozen=True, eq=False)
class DemoPrediction:
    """The result for one image.

    Attributes:
        top: class names with their confidences, the most probable first.
        input_HWC: the model's input before normalization, (h, w, 3), uint8.
        attention_HW: attention rollout, one value per patch; None if the model has no global
            attention.
        thresholds: thresholds of the classes in `top`; None for a single-label model.
        is_unknown: True if the image is probably of no known class.
    """

    top: list[tuple[str, float]]
    input_HWC: np.ndarray
    attention_HW: np.ndarray | None
    thresholds: list[float] | None = None
    is_unknown: bool = False


def decode_upload(path: str | Path, decode_size: int | None = None) -> np.ndarray:
    """Decode an uploaded file as training does.

    Args:
        path: the file.
        decode_size: see `decode_image`.
    Returns: the pixels, (H, W, 3), uint8.
    Raises: DataError if the file cannot be decoded; the message omits the name of the file,
        because the server chose it.
    """
    return decode_image(path, decode_size=decode_size, name="")


class DemoPredictor:
    """Classify images for the demo page; safe to call from several threads.

    Args:
        classifier: the model to use, with its pipeline.
    """

    def __init__(self, classifier: Classifier) -> None:
        self.classifier = classifier
        pipeline = classifier.pipeline
        self._display_pipeline = Pipeline(
            pipeline.transform_spec,
            image_size=pipeline.image_size,
            mean=(0.0, 0.0, 0.0),
            std=(1.0, 1.0, 1.0),
            interpolation=pipeline.interpolation,
            train=False,
        )

    @torch.inference_mode()
    def predict(self, path: str | Path) -> DemoPrediction:
        """Classify one file.

        Raises: DataError if the file is not a readable image, see `decode_upload`; RecipeError if
            the pipeline does not accept the size of the image.
        """
        device, size = self.classifier.device, self.classifier.pipeline.decode_size
        pixels_BCHW = hwc_to_chw(decode_upload(path, size))[None]
        images_BCHW = self.classifier.pipeline(pixels_BCHW, device=device)
        input_CHW = self._display_pipeline(pixels_BCHW, device=device)[0]
        input_HWC = (input_CHW * 255).round().clamp(0, 255).to(torch.uint8).permute(1, 2, 0)
        attention_BHW = attention_rollout(self.classifier.network, images_BCHW)
        logits_BK = self.classifier.network(images_BCHW)
        top, thresholds = self._top_classes(logits_BK)
        return DemoPrediction(
            top=top,
            thresholds=thresholds,
            is_unknown=any(self.classifier.is_unknown(logits_BK)),
            input_HWC=input_HWC.cpu().numpy(),
            attention_HW=None if attention_BHW is None else attention_BHW[0].cpu().numpy(),
        )

    def _top_classes(
        self, logits_BK: torch.Tensor
    ) -> tuple[list[tuple[str, float]], list[float] | None]:
        """Return `top` (the best five classes, and every predicted label) and `thresholds`."""
        classifier = self.classifier
        confidences_K = classifier.confidences(logits_BK)[0]
        # same order as Classifier.predict: ties by class index
        sorted_K = confidences_K.sort(descending=True, stable=True)
        pairs = list(zip(sorted_K.values.tolist(), sorted_K.indices.tolist(), strict=True))
        selected, thresholds = pairs[:TOP_K], classifier.thresholds
        if thresholds is not None:
            selected += [pair for pair in pairs[TOP_K:] if pair[0] >= thresholds[pair[1]]]
        top = [(classifier.class_names[index], confidence) for confidence, index in selected]
        return top, None if thresholds is None else [thresholds[index] for _, index in selected]
