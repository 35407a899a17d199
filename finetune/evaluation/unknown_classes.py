"""A score for images of no known class: virtual-logit matching (ViM), fitted on validation images.

The features of known classes are near a subspace. The score is the distance of an image's features
from it, scaled to be comparable with a logit, minus the energy of the logits. It needs no second
forward pass. Source: Wang et al. 2022, ViM: Out-of-distribution with virtual-logit matching. There
the subspace is fitted on the training images; here on every second validation image, which avoids
another pass over the training images. The others give the threshold, by split conformal prediction.
"""

# N images, B batch, D width, R dimensions of the subspace

from __future__ import annotations

import math
import threading
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from finetune.errors import WeightsError
from finetune.evaluation.conformal import conformal_quantile
from finetune.evaluation.metrics import gather_rows
from finetune.evaluation.validation_scores import decode_array, encode_array
from finetune.models.head import classifier_names
from finetune.transforms.sample_rng import to_device

if TYPE_CHECKING:
    from accelerate import Accelerator

__all__ = [
    "FALSE_UNKNOWN_RATE",
    "MIN_IMAGES",
    "PreLogitsRecorder",
    "UnknownClassScore",
    "UnknownClassScoreFitter",
    "fit_unknown_class_score",
]

FALSE_UNKNOWN_RATE = 0.05  # promised share of images of known classes that are marked as unknown
MIN_IMAGES = 100  # validation images; half of them allow the quantile of 5 %
_MAX_IMAGES = 4000  # of a larger split, every n-th image is used
_MAX_FITTED = 1000  # images that the subspace is fitted to; an SVD of 1,000 × 1,280 takes a second
_MAX_RANK = 32  # a quarter of the width separates unknown classes as well, but needs more memory


@dataclass(frozen=True, eq=False)
class UnknownClassScore:
    """The fitted score.

    Attributes:
        mean_D: mean of the features, float32.
        subspace_DR: orthonormal axes of the subspace, rounded to float16.
        scale: factor of the distance from the subspace.
        threshold: an image is of no known class if its score is above this.
    """

    mean_D: Tensor
    subspace_DR: Tensor
    scale: float
    threshold: float

    def compute(self, features_BD: Tensor, energies_B: Tensor) -> Tensor:
        """Compute the scores of images.

        Args:
            features_BD: pre-logits, on the CPU.
            energies_B: logsumexp of the logits without temperature, on the CPU.
        Returns: (B,) float32.
        """
        distance_B = _distances(features_BD.float(), self.mean_D, self.subspace_DR)
        return self.scale * distance_B - energies_B

    def to_config(self) -> dict[str, Any]:
        """Return the entry of config.json, with little-endian arrays as base64."""
        return {
            "mean": encode_array(self.mean_D.numpy(), "<f4"),
            "subspace": encode_array(self.subspace_DR.numpy(), "<f2"),
            "scale": self.scale,
            "threshold": self.threshold,
        }

    @classmethod
    def from_config(cls, entry: Any, *, width: int, source: str) -> UnknownClassScore:
        """Read the entry of an untrusted config.json.

        Args:
            entry: the result of `to_config`.
            width: D.
            source: name of the model as the user gave it, for messages.
        Raises: WeightsError if the entry is not valid.
        """
        try:
            mean_D = torch.from_numpy(decode_array(entry["mean"], "<f4")).reshape(width)
            subspace_DR = torch.from_numpy(decode_array(entry["subspace"], "<f2"))
            score = cls(
                mean_D,
                subspace_DR.reshape(width, -1),
                float(entry["scale"]),
                float(entry["threshold"]),
            )
            numbers = torch.tensor([score.scale, score.threshold])
            is_valid = bool(torch.cat([mean_D, subspace_DR, numbers]).isfinite().all())
        except (KeyError, TypeError, ValueError, RuntimeError):
            is_valid = False
        if not is_valid:
            raise WeightsError(
                f"{source}: config.json: validation_scores.unknown_class does not fit the network; "
                f"compute it again: finetune eval {source} --fit-temperature",
                code="weights.wrong_config",
            )
        return score


class PreLogitsRecorder:
    """Records the input of a network's classifier in every forward pass of this thread.

    Args:
        network: any network.

    Attributes:
        width: D; 0 if the network has not exactly one linear classifier, so nothing is recorded.
    """

    def __init__(self, network: nn.Module) -> None:
        names = classifier_names(network)
        self.width, self._hook, self._recorded = 0, None, threading.local()
        classifier = network.get_submodule(names[0]) if len(names) == 1 else None
        if isinstance(classifier, nn.Linear):
            self.width = classifier.in_features
            self._hook = classifier.register_forward_pre_hook(self._record)

    def _record(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        self._recorded.values = inputs[0]

    def last(self) -> Tensor:
        """Return the pre-logits of the last forward pass, (B, D), float32, on its device."""
        values: Tensor = self._recorded.values
        return values.float()

    def remove(self) -> None:
        """Remove the hook from the network."""
        if self._hook is not None:
            self._hook.remove()


class UnknownClassScoreFitter:
    """A metric that keeps features and logits on the device, and then fits the score.

    Update it right after each forward pass, inside a `with` block.

    Args:
        network: the network that is evaluated.
        num_images: size of the whole split, over all processes.
    """

    def __init__(self, network: nn.Module, num_images: int) -> None:
        self._recorder = PreLogitsRecorder(network)
        self._stride = max(1, -(-num_images // _MAX_IMAGES))
        # of this process: index, energy, largest logit, features
        self._rows = [torch.zeros(0, 3 + self._recorder.width)]

    def __enter__(self) -> UnknownClassScoreFitter:
        return self

    def __exit__(self, *_: object) -> None:
        self._recorder.remove()

    def update(self, logits_BK: Tensor, labels_B: Tensor, indices: NDArray[np.int64]) -> None:
        """Keep a batch; `indices` are the positions of the images in the split."""
        if not self._recorder.width:
            return
        kept = np.flatnonzero(indices % self._stride == 0)
        # float32 represents indices below 16 million exactly
        positions_B = to_device(indices.astype(np.float32), logits_BK.device)
        logits_BK = logits_BK.float()
        columns = (positions_B, logits_BK.logsumexp(1), logits_BK.amax(1))
        features_BD = self._recorder.last()[: len(labels_B)]
        rows = torch.cat([torch.stack(columns, dim=1), features_BD], dim=1)
        self._rows.append(rows[to_device(kept, rows.device)])

    def compute(self, accelerator: Accelerator) -> UnknownClassScore | None:
        """Fit the score over all processes; each of them must call this.

        Returns: None for fewer than `MIN_IMAGES` images, or if the network has not exactly one
            linear classifier.
        """
        table = gather_rows([rows.cpu() for rows in self._rows], accelerator)
        if len(table) < MIN_IMAGES:
            return None
        return fit_unknown_class_score(table[:, 3:], table[:, 1], table[:, 2])


def fit_unknown_class_score(
    features_ND: Tensor, energies_N: Tensor, largest_N: Tensor
) -> UnknownClassScore:
    """Fit the subspace to every second image, and the scale and the threshold to the others.

    Args:
        features_ND: pre-logits of at least 40 images of known classes, float32.
        energies_N: logsumexp of the logits without temperature, float32.
        largest_N: largest logit.
    """
    fitted_ND, held_out_ND = features_ND[::2], features_ND[1::2]
    fitted_ND = fitted_ND[:: -(-len(fitted_ND) // _MAX_FITTED)]
    mean_D = fitted_ND.mean(0)
    rank = max(1, min(_MAX_RANK, features_ND.shape[1] // 4, len(fitted_ND) // 2))
    axes_RD = torch.linalg.svd(fitted_ND - mean_D, full_matrices=False).Vh[:rank]
    subspace_DR = axes_RD.T.half().contiguous()
    distance = float(_distances(held_out_ND, mean_D, subspace_DR).mean())
    # the mean distance becomes as large as the mean largest logit
    scale = float(largest_N[1::2].mean()) / max(distance, 1e-12)
    score = UnknownClassScore(mean_D, subspace_DR, scale, math.inf)
    scores_N = score.compute(held_out_ND, energies_N[1::2]).double().numpy()
    threshold = conformal_quantile(scores_N, 1 - FALSE_UNKNOWN_RATE)
    return replace(score, threshold=threshold)


def _distances(features_BD: Tensor, mean_D: Tensor, subspace_DR: Tensor) -> Tensor:
    """Compute the distances of the features from the subspace, (B,)."""
    centered_BD, axes_DR = features_BD - mean_D, subspace_DR.float()
    return (centered_BD - (centered_BD @ axes_DR) @ axes_DR.T).norm(dim=1)
