"""Near-duplicates among tiny images, such as digits of 8 x 8 pixels.

Features tell them apart badly, and their fine detail is noise. So each image is changed in the ways
in which copies are made, and compared with all others. Two images are copies if one of them, after
one change, is much nearer to the other than any third image is to either.

Source: dimension of the data: Facco et al. 2017, Estimating the intrinsic dimension of datasets by
a minimal neighborhood information.
"""

# N images, C columns, P pairs, T side in pixels, S side of a thumbnail, D pixels, k neighbors

from __future__ import annotations

import itertools
import math

import numpy as np
import torch
from PIL import Image
from PIL.Image import Resampling
from torch import Tensor
from torch.nn import functional

from finetune.doctor.image_scan import nearest_images
from finetune.progress import item_bar

__all__ = ["MAX_SIDE", "find_tiny_duplicates"]

MAX_SIDE = 16  # pixels; the time grows with the square of the number of images
# of the distances of a copy and of the nearest other image; measured: benchmarks/doctor.md
MAX_RATIO = 0.42
MAX_FALSE = 0.003  # fraction of the images whose nearest one may be so near by chance
_MIN_IMAGES, _USUAL_DIMENSION = 50, 7.0  # of digits; fewer images do not tell their dimension
_MAX_COPIES = 10  # of an image
_ROUNDING = 0.003  # distance of equal images after their pixels are rounded
_GAINS = (1.25, 1.6)  # of brightness, which clips pixels; other changes of it need no try
_MIN_CROP, _MIN_RESIZED = 0.6, 0.5  # of the side
_FILTERS = Resampling.BOX, Resampling.BILINEAR, Resampling.BICUBIC, Resampling.LANCZOS


@torch.inference_mode()
def find_tiny_duplicates(thumbnails_NSS: Tensor, side: int) -> tuple[Tensor, Tensor]:
    """Find pairs of copies.

    Args:
        thumbnails_NSS: gray images, uint8.
        side: of the images, in pixels.
    Returns: pairs (P, 2), the smaller index first; and how many pairs are as near by chance (P,).
    """
    # pixels that give these thumbnails if they are enlarged
    restore = torch.linalg.pinv(_resizing(side, thumbnails_NSS.shape[1], Resampling.BILINEAR))
    images_NTT = restore @ thumbnails_NSS.float() @ restore.T
    vectors_ND = _vectors(images_NTT)
    pairs, ratios = [torch.empty(0, 2, dtype=torch.int64)], [torch.empty(0)]
    num_images, dimension = len(images_NTT), _dimension(vectors_ND)
    if num_images > 2:
        limit = min(MAX_RATIO, MAX_FALSE ** (1 / dimension))
        changes = _changes(side)
        with item_bar(2 * len(changes), label="comparisons", unit="change") as bar:
            for targets_ND in (vectors_ND, _vectors(images_NTT.flip(2))):
                for gain, rows, columns in changes:
                    changed_NTT = (gain * rows @ images_NTT @ columns.T).clamp(0, 255)
                    found = _find_pairs(_vectors(changed_NTT), targets_ND, limit)
                    pairs.append(found[0].sort(dim=1).values)
                    ratios.append(found[1])
                    bar.update()
    pairs_P2, inverse = torch.cat(pairs).unique(dim=0, return_inverse=True)
    ratios_P = torch.full((len(pairs_P2),), torch.inf)
    ratios_P.scatter_reduce_(0, inverse, torch.cat(ratios), "amin")
    return pairs_P2, num_images / 2 * ratios_P**dimension


def _dimension(vectors_ND: Tensor) -> float:
    """Estimate the dimension of the images from their second and third neighbors.

    With m dimensions, a part x ** m of all nearest neighbors are nearer than x times the next one.
    The nearest neighbor itself may be a copy.
    """
    if len(vectors_ND) < _MIN_IMAGES:
        return _USUAL_DIMENSION
    squared_Nk = nearest_images(vectors_ND, 3).squared_Nk.clamp(min=_ROUNDING**2)
    median = float((squared_Nk[:, 1] / squared_Nk[:, 2]).median())
    return math.log(0.5) / math.log(min(median, 0.99))


def _changes(side: int) -> list[tuple[float, Tensor, Tensor]]:
    """Return changes: a gain of brightness, and matrices (T, T) for rows and columns of pixels."""
    whole = torch.eye(side)
    changes = [(gain, whole, whole) for gain in (1.0, *_GAINS)]
    for size in range(math.ceil(_MIN_CROP * side), side):
        enlarge = _resizing(size, side, Resampling.BICUBIC)
        crops = [enlarge @ whole[start : start + size] for start in range(side - size + 1)]
        changes += [(1.0, rows, columns) for rows in crops for columns in crops]
    for size in range(math.ceil(_MIN_RESIZED * side), side, math.ceil(side / 8)):
        for shrink, enlarge_by in itertools.product(_FILTERS, _FILTERS[1:]):
            matrix = _resizing(size, side, enlarge_by) @ _resizing(side, size, shrink)
            changes.append((1.0, matrix, matrix))
    return changes


def _resizing(before: int, after: int, resampling: Resampling) -> Tensor:
    """Return the matrix (after, before) with which Pillow resizes a column of pixels."""
    matrix = Image.fromarray(np.eye(before, dtype=np.float32))
    return torch.from_numpy(np.array(matrix.resize((before, after), resampling)))


def _vectors(images_NTT: Tensor) -> Tensor:
    """Return smoothed pixels (N, T * T) without brightness and contrast.

    Without smoothing, the noise of JPEG would count as much as the strokes of a digit.
    """
    kernel = torch.tensor([0.25, 0.5, 0.25])
    padded = functional.pad(images_NTT[:, None], (1, 1, 1, 1), mode="replicate")
    pixels_ND = functional.conv2d(padded, kernel.outer(kernel)[None, None]).flatten(1)
    return functional.normalize(pixels_ND - pixels_ND.mean(1, keepdim=True), eps=1e-3)


def _find_pairs(changed_ND: Tensor, targets_ND: Tensor, limit: float) -> tuple[Tensor, Tensor]:
    """Find the pairs (P, 2) of a changed image and its target, and their ratios (P,)."""
    ratios_Nk, indices_Nk = _find_gaps(changed_ND, targets_ND, torch.arange(len(changed_ND)))
    row_P, place_P = (ratios_Nk < limit).nonzero(as_tuple=True)
    column_P = indices_Nk[row_P, place_P]
    # the changed image must be nearer to the target than other changed images, too
    columns_C, inverse_P = column_P.unique(return_inverse=True)
    ratios_Ck, indices_Ck = _find_gaps(targets_ND, changed_ND, columns_C)
    is_row_Pk = indices_Ck[inverse_P] == row_P[:, None]
    back_P = ratios_Ck[inverse_P].where(is_row_Pk, torch.inf).amin(1)
    worse_P = torch.maximum(ratios_Nk[row_P, place_P], back_P)
    is_near_P = worse_P < limit
    return torch.stack([row_P, column_P], dim=1)[is_near_P], worse_P[is_near_P]


def _find_gaps(queries_ND: Tensor, others_ND: Tensor, rows_C: Tensor) -> tuple[Tensor, Tensor]:
    """Find the largest gap in the distances of each row's neighbors, beginning with each neighbor.

    An image may have several copies, which are all before the gap.

    Returns: ratio of the distances before and after the gap (C, k), and the neighbors (C, k).
    """
    ratios, indices = [], []
    for rows_B in rows_C.split(512):
        distances_BN = torch.cdist(queries_ND[rows_B], others_ND) + _ROUNDING
        distances_BN[torch.arange(len(rows_B)), rows_B] = torch.inf
        near = distances_BN.topk(min(_MAX_COPIES + 1, len(others_ND) - 1), largest=False)
        ratios_Bk = near.values[:, :-1] / near.values[:, 1:]
        ratios.append(ratios_Bk.flip(1).cummin(1).values.flip(1))
        indices.append(near.indices[:, :-1])
    return torch.cat(ratios), torch.cat(indices)
