"""The certificate of an exported model with preprocessing: its agreement with `Classifier`.

The exported model and `Classifier` get the same pixels, of images of many sizes. Both probabilities
are compared before the file is kept.
"""

# H W pixels, K classes

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from finetune.commands.export_formats import ExportedModel, check_exported, wrong_export
from finetune.data.decode import hwc_to_chw
from finetune.inference import Classifier
from finetune.models.save import BuiltModel
from finetune.transforms.pipeline import Pipeline
from finetune.transforms.preprocessing_module import PreprocessingModule

__all__ = ["ImageClassifier", "certify", "vary_sizes"]

_TIE = 1e-6  # classes whose probabilities differ by less are both the top-1
# (height, width) to which images are resized, among them extreme aspect ratios and single pixels
_SIZES = ((17, 900), (900, 17), (480, 640), (641, 479), (1, 1), (1, 33), (1201, 1600), (97, 97))


class ImageClassifier(nn.Module):
    """From a uint8 image (1, H, W, 3) of any size to probabilities (1, K).

    Args:
        built: the model; its temperature divides the logits before the softmax.
        pipeline: the evaluation transforms.
    Raises: RecipeError if the transforms cannot be exported.
    """

    def __init__(self, built: BuiltModel, pipeline: Pipeline) -> None:
        super().__init__()
        self.preprocessing = PreprocessingModule(
            pipeline.transform_spec,
            image_size=pipeline.image_size,
            mean=built.preprocessing.mean,
            std=built.preprocessing.std,
            interpolation=pipeline.interpolation,
        )
        self.network = built.model
        self.temperature, self.multilabel = built.temperature or 1.0, built.multilabel

    def forward(self, image_1HW3: Tensor) -> Tensor:
        logits_1K: Tensor = self.network(self.preprocessing(image_1HW3))
        return logits_1K.sigmoid() if self.multilabel else (logits_1K / self.temperature).softmax(1)


def vary_sizes(images: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Return the images (H, W, 3) uint8, then an odd crop and an enlarged or squashed copy of each.

    Image i is resized to size i of a fixed list, which contains extreme aspect ratios.
    """
    varied = list(images)
    for index, image in enumerate(images):
        height, width = image.shape[:2]
        top, left = (height // 3, 0) if index % 2 else (0, width // 3)
        varied.append(np.ascontiguousarray(image[top : height - top // 2, left:]))
        resized_height, resized_width = _SIZES[index % len(_SIZES)]
        varied.append(np.array(Image.fromarray(image).resize((resized_width, resized_height))))
    return varied


def certify(
    exported: ExportedModel,
    classifier: Classifier,
    images: Sequence[np.ndarray],
    name: str,
    *,
    advice: str = "use --no-preprocessing",
) -> dict[str, Any]:
    """Compare the probabilities of an exported model with those of a classifier.

    Args:
        images: (H, W, 3) uint8 RGB.
        name: name of the export, for error messages.
        advice: what to do about a difference, for error messages.
    Returns: a dict with keys "top1_agreement" (0 to 1), "max_difference" (of a probability),
        "num_images", "num_sizes", "latency_ms" (median of all images).
    Raises: WeightsError if the top-1 class of an image differs, a probability differs by more than
        MAX_DIFFERENCE, or the exported model fails.
    """
    max_difference, latencies = 0.0, []
    for pixels_HW3 in images:
        height, width = pixels_HW3.shape[:2]
        image_name = f"an image of {height}x{width}"
        image_1HW3 = torch.from_numpy(np.array(pixels_HW3))[None]
        prepared = classifier.pipeline(hwc_to_chw(image_1HW3[0].numpy())[None])
        expected_1K = classifier.confidences(classifier.logits(prepared)).cpu()
        start = time.perf_counter()
        actual_1K = check_exported(
            exported, image_1HW3, expected_1K, name, image_name, advice=advice
        )
        latencies.append(time.perf_counter() - start)
        max_difference = max(max_difference, float((actual_1K - expected_1K).abs().max()))
        if expected_1K[0, actual_1K.argmax()] < expected_1K.max() - _TIE:
            problem = f"{name}: the most probable class differs from the model's, for {image_name}"
            raise wrong_export(problem, advice)
    return {
        "top1_agreement": 1.0,
        "max_difference": max_difference,
        "num_images": len(images),
        "num_sizes": len({image.shape[:2] for image in images}),
        "latency_ms": round(1000 * statistics.median(latencies), 3),
    }
