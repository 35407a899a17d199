"""Classify one picture, with the network's input and its attention rollout."""

# C channels, H W pixels, h w the model's input size in pixels, K classes

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from finetune.commands.predict import Classifier
from finetune.data.decode import decode, planes
from finetune.errors import DataError
from finetune.models.attention import attention_rollout
from finetune.transforms.pipeline import Pipeline

__all__ = ["TOP", "Reader", "Reading", "pixels_of"]

TOP = 5


@dataclass(frozen=True, eq=False)
class Reading:
    """The result for one picture.

    Attributes:
        top: class names with their confidences, the most probable first.
        seen_HWC: uint8 (h, w, 3), the network's input before it is normalised.
        looked_HW: the attention rollout over the patches; None for a network without it.
        thresholds: of the classes in `top`, from which on they are labels of the picture; None
            where it has one.
    """

    top: list[tuple[str, float]]
    seen_HWC: np.ndarray
    looked_HW: np.ndarray | None
    thresholds: list[float] | None = None


def pixels_of(path: str | Path, size: int | None = None) -> np.ndarray:
    """Decode one file as training does.

    Args:
        path: of the file.
        size: of `decode`.
    Returns: (H, W, 3) uint8.
    Raises: DataError without the file's name, which the server chose.
    """
    try:
        return decode(path, size=size, name="file")
    except DataError as error:
        raise DataError(str(error).removeprefix("file: "), code=error.code) from None


class Reader:
    """Reads pictures with a classifier; may be called from several threads.

    Args:
        classifier: its network and pipeline are used as they are.
    """

    def __init__(self, classifier: Classifier) -> None:
        self.classifier = classifier
        pipeline = classifier.pipeline
        self._plain = Pipeline(
            pipeline.sentence,
            image_size=pipeline.image_size,
            mean=(0.0, 0.0, 0.0),
            std=(1.0, 1.0, 1.0),
            interpolation=pipeline.interpolation,
            train=False,
        )

    @torch.inference_mode()
    def read(self, path: str | Path) -> Reading:
        """Classify one file.

        Raises: DataError, without the name of the file, if it is no picture that can be read;
            RecipeError if its size does not go through the pipeline.
        """
        device, size = self.classifier.device, self.classifier.pipeline.decode_size
        pixels_BCHW = planes(pixels_of(path, size))[None]
        images_BCHW = self.classifier.pipeline(pixels_BCHW, device=device)
        seen_CHW = self._plain(pixels_BCHW, device=device)[0]
        seen_HWC = (seen_CHW * 255).round().clamp(0, 255).to(torch.uint8).permute(1, 2, 0)
        looked_BHW = attention_rollout(self.classifier.network, images_BCHW)
        top, thresholds = self._top(images_BCHW)
        return Reading(
            top=top,
            thresholds=thresholds,
            seen_HWC=seen_HWC.cpu().numpy(),
            looked_HW=None if looked_BHW is None else looked_BHW[0].cpu().numpy(),
        )

    def _top(self, images_BCHW: torch.Tensor) -> tuple[list[tuple[str, float]], list[float] | None]:
        """The best classes and, where the picture may have several, all its labels."""
        classifier = self.classifier
        confidences_K = classifier.confidences(classifier.network(images_BCHW))[0]
        # as Classifier.predict orders them: equal classes by their index
        ranked = confidences_K.sort(descending=True, stable=True)
        pairs = list(zip(ranked.values.tolist(), ranked.indices.tolist(), strict=True))
        best, thresholds = pairs[:TOP], classifier.thresholds
        if thresholds is not None:
            best += [pair for pair in pairs[TOP:] if pair[0] >= thresholds[pair[1]]]
        top = [(classifier.class_names[index], confidence) for confidence, index in best]
        return top, None if thresholds is None else [thresholds[index] for _, index in best]
