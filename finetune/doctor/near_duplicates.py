"""Near-duplicates: copies of a photo that were cropped, re-encoded, resized, mirrored or recolored.

Neighbors in feature space, and among small gray images, are candidates. Each candidate is confirmed
on gray images: the best of 62 crops of one image starts a registration of position and size on the
other; then both must correlate, also in their fine detail, in which similar scenes differ. Where
all images look alike, the limit rises to what random images are not expected to reach. Tiny images
are compared in another way, see `tiny_images.py`.
"""

# N images, P pairs, D width, k neighbors, S side of a thumbnail, T side of a coarse one

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.cluster.hierarchy import DisjointSet
from scipy.ndimage import convolve1d
from torch import Tensor
from torch.nn import functional

from finetune.doctor.image_scan import THUMBNAIL_SIDE, Neighbors, PixelFacts, nearest_images
from finetune.doctor.tiny_images import MAX_SIDE, find_tiny_duplicates
from finetune.progress import item_bar

__all__ = ["find_near_duplicates", "merge_groups", "wrong_probabilities"]

NUM_NEIGHBORS, NUM_PIXEL_NEIGHBORS = 3, 2  # candidates for each image
MIN_COARSE_CORRELATION = 0.82
MIN_CORRELATION, MIN_DETAIL_CORRELATION = 0.76, 0.82  # measured: benchmarks/doctor.md
TAIL_CORRELATION = 0.88  # of pairs whose detail shows how often similar images reach the limit
MIN_OVERLAP = 0.6  # share of the image's area
NUM_RANDOM_PAIRS = 1024
MIN_IMAGES_TO_CALIBRATE = 50
TAIL_WINDOW = 0.3  # in Fisher's z: width of the three windows below the limit
EXPECTED_FALSE_PAIRS = 0.01  # per image, if its nearest image were one of N random images
_S, _T = THUMBNAIL_SIDE, 8
_CROP_SIZES = ((1.0, 1), (0.9, 3), (0.8, 4), (0.7, 6))  # side, positions per axis
_REGISTRATION_STEPS = 5


@torch.inference_mode()
def find_near_duplicates(
    neighbors: Sequence[Neighbors], facts: Collection[PixelFacts]
) -> tuple[list[list[int]], NDArray[np.float64]]:
    """Find groups of images that show the same photo.

    Args:
        neighbors: the nearest images by the features of each network; at least one.
        facts: what is known of the pixels of each image.
    Returns: groups of two or more image indices, ascending, the surest group first; and the
        probability of each group that it is wrong. Each image is confirmed as a copy of at least
        one other of its group.
    """
    thumbnails_NSS = torch.from_numpy(np.stack([each.thumbnail_SS for each in facts]))
    side = int(np.median([max(each.height, each.width) for each in facts]))
    if side <= MAX_SIDE:
        pairs_P2, num_wrong_P = find_tiny_duplicates(thumbnails_NSS, side)
        groups, best_scores = _group(pairs_P2, -num_wrong_P)
        share = np.minimum(-best_scores / np.arange(1, len(groups) + 1), 1.0)
        return groups, np.minimum.accumulate(share[::-1])[::-1]
    candidates = [_nearest_pairs(each, NUM_NEIGHBORS) for each in neighbors]
    by_pixels = nearest_images(_shrink(thumbnails_NSS), NUM_PIXEL_NEIGHBORS)
    candidates.append(_nearest_pairs(by_pixels, NUM_PIXEL_NEIGHBORS))
    pairs_P2 = torch.unique(torch.cat(candidates), dim=0)
    correlation_P, detail_P = _compare(thumbnails_NSS, pairs_P2, MIN_COARSE_CORRELATION)
    min_detail = _min_detail_correlation(thumbnails_NSS)
    confirmed = (correlation_P >= MIN_CORRELATION) & (detail_P >= min_detail)
    groups, best_scores = _group(pairs_P2[confirmed], detail_P[confirmed])
    similar = detail_P[correlation_P >= TAIL_CORRELATION].numpy()
    return groups, wrong_probabilities(similar, min_detail, best_scores)


def _group(pairs_P2: Tensor, scores_P: Tensor) -> tuple[list[list[int]], NDArray[np.float64]]:
    """Merge pairs that overlap. Returns: groups, the surest first, and their highest scores."""
    surest = scores_P.argsort(descending=True, stable=True)
    pairs, scores = pairs_P2[surest].tolist(), scores_P[surest].tolist()
    groups = merge_groups(pairs)
    # the surest pair of each image comes last, and counts
    in_order = zip(reversed(pairs), reversed(scores), strict=True)
    best = {row: score for pair, score in in_order for row in pair}
    return groups, np.array([max(best[row] for row in group) for group in groups])


def merge_groups(groups: Sequence[Sequence[int]]) -> list[list[int]]:
    """Merge groups that overlap; the order is that of their first parts."""
    merged = DisjointSet(itertools.chain.from_iterable(groups))
    for first, *others in groups:
        for row in others:
            merged.merge(first, row)
    return [sorted(group) for group in merged.subsets()]


def wrong_probabilities(
    detail_P: NDArray[np.float32], min_detail: float, best: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Estimate the probability that groups are wrong, from the pairs just below the limit.

    The correlation of similar images that are no copies, transformed as by Fisher, has a tail that
    falls at least exponentially. It is fitted to windows below the limit, and extrapolated above
    it. Copies just below the limit raise the last window, so the faster of two decays counts.

    Args:
        detail_P: correlation of detail of the compared pairs.
        min_detail: the limit above which a pair is confirmed.
        best: highest correlation of detail in each group.
    Returns: the expected share of wrong ones among pairs that correlate as well as the best of the
        group.
    """
    excess_P, excess = (
        (np.arctanh(np.minimum(each, 0.9999)) - math.atanh(min_detail)) / TAIL_WINDOW
        for each in (detail_P, best)
    )
    farthest, far, near = np.histogram(excess_P, [-3, -2, -1, 0])[0]
    # without an end of the tail in sight, all confirmed pairs may be wrong
    decay = min(far / max(farthest, 1), near / max(far, 1), 0.9)
    window_P, window = (np.maximum(each, -3).astype(np.int64) for each in (excess_P, excess))
    num_pairs = np.bincount(window_P[excess_P >= 0], minlength=window.max(initial=0) + 1)
    expected_wrong = far * decay ** (np.arange(len(num_pairs)) + 2.0)
    share = np.minimum(expected_wrong / np.maximum(num_pairs, 1), 1.0)
    return np.minimum.accumulate(share)[window]  # a higher correlation is at least as sure


def _nearest_pairs(neighbors: Neighbors, num_neighbors: int) -> Tensor:
    """Return pairs (P, 2) of each image and its most similar neighbors, the smaller index first."""
    best = neighbors.similarities_Nk.topk(min(num_neighbors, neighbors.indices_Nk.shape[1])).indices
    nearest = neighbors.indices_Nk.gather(1, best)
    rows = torch.arange(len(nearest))[:, None].expand_as(nearest)
    return torch.stack([rows, nearest], dim=2).flatten(0, 1).sort(dim=1).values


def _shrink(thumbnails_NSS: Tensor) -> Tensor:
    """Return coarse pixels (N, T * T) without brightness and contrast."""
    full = _CROP_MATRICES[0][0]
    shrunk = [(full @ chunk.float() @ full.T).flatten(1) for chunk in thumbnails_NSS.split(1024)]
    return _standardize(torch.cat(shrunk), 1)


def _compare(thumbnails_NSS: Tensor, pairs_P2: Tensor, min_coarse: float) -> tuple[Tensor, Tensor]:
    """Register the images of each pair, and correlate them.

    Copies may be crops of each other, so both orders are tried.

    Args:
        min_coarse: coarse correlation from which a pair is registered.
    Returns: correlation (P,) of the images and of their detail (P,), -1 where not registered.
    """
    results_P2 = torch.full((len(pairs_P2), 2), -1.0)
    with item_bar(2 * len(pairs_P2), label="comparisons", unit="pair") as bar:
        for order in (pairs_P2, pairs_P2.flip(1)):
            for rows in order[:, 0].argsort(stable=True).split(1024):
                whole, position = order[rows, 0].unique_consecutive(return_inverse=True)
                wholes = thumbnails_NSS[whole].float()
                parts = thumbnails_NSS[order[rows, 1]].float()
                coarse, crop, is_mirrored = _find_crop(wholes, position, parts)
                near = coarse >= min_coarse
                parts = torch.where(is_mirrored[near, None, None], parts[near].flip(2), parts[near])
                new = _register(wholes[position[near]], parts, crop[near])
                old = results_P2[rows[near]]
                results_P2[rows[near]] = torch.where(new[:, 1:] > old[:, 1:], new, old)
                bar.update(len(rows))
    return results_P2[:, 0], results_P2[:, 1]


def _min_detail_correlation(thumbnails_NSS: Tensor) -> float:
    """Return the correlation of detail above which a pair is a duplicate.

    Random pairs, transformed as by Fisher, are taken to have an exponential tail. It is fitted to
    two quantiles that are low enough not to contain duplicates.
    """
    num_images = len(thumbnails_NSS)
    if num_images < MIN_IMAGES_TO_CALIBRATE:
        return MIN_DETAIL_CORRELATION
    generator = torch.Generator().manual_seed(0)
    first = torch.randint(num_images, (NUM_RANDOM_PAIRS,), generator=generator)
    shift = torch.randint(1, num_images, (NUM_RANDOM_PAIRS,), generator=generator)
    pairs_P2 = torch.stack([first, (first + shift) % num_images], dim=1)
    _, detail_P = _compare(thumbnails_NSS, pairs_P2, -1.0)
    median, upper = torch.atanh(detail_P.clamp(max=0.999)).quantile(torch.tensor([0.5, 0.75]))
    scale = (upper - median) / math.log(2)
    limit = upper + scale * math.log(0.25 * num_images / EXPECTED_FALSE_PAIRS)
    return max(MIN_DETAIL_CORRELATION, float(torch.tanh(limit)))


def _find_crop(
    wholes_NSS: Tensor, position_P: Tensor, parts_PSS: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Find the crop of an image that correlates most with another image or its mirror image.

    Args:
        position_P: indices of the pairs' first images in `wholes_NSS`.
    Returns: correlation (P,), crop (P, 4) as center x, size x, center y, size y in half images, and
        whether the other image is mirrored (P,).
    """
    crops = []
    for matrices in _CROP_MATRICES:
        rows = torch.einsum("yts,nsv->nytv", matrices, wholes_NSS)
        crops.append(torch.einsum("nytv,xuv->nyxtu", rows, matrices).flatten(1, 2).flatten(2))
    full = _CROP_MATRICES[0][0]
    small = full @ parts_PSS @ full.T
    candidates = _standardize(torch.stack([small.flatten(1), small.flip(2).flatten(1)], dim=2), 1)
    correlations = _standardize(torch.cat(crops, dim=1), 2)[position_P] @ candidates
    best, index = correlations.flatten(1).max(dim=1)
    return best, _CROPS[index // 2], index % 2 == 1


def _standardize(values: Tensor, dim: int) -> Tensor:
    values = values - values.mean(dim, keepdim=True)
    return values / (values.norm(dim=dim, keepdim=True) + 1e-3)


def _register(whole_PSS: Tensor, part_PSS: Tensor, crop_P4: Tensor) -> Tensor:
    """Fit position and size of a crop to another image, and compare the two.

    Gauss-Newton steps on the squared differences, with the contrast as a fifth parameter.

    Returns: correlation of the images and of their detail (P, 2); -1 if they overlap too little.
    """
    target = _SMOOTH @ part_PSS @ _SMOOTH.T
    smooth_whole = _SMOOTH @ whole_PSS @ _SMOOTH.T
    x, y = _GRID, _GRID[:, None]
    for _ in range(_REGISTRATION_STEPS):
        warped, mask = _warp(smooth_whole, crop_P4)
        along_y, along_x = (slope * (_S / 2) for slope in torch.gradient(warped, dim=(1, 2)))
        columns = (warped, along_x, along_x * x, along_y, along_y * y)
        jacobian = _center(torch.stack([column.flatten(1) for column in columns], 1), mask[:, None])
        residual = _center(target.flatten(1), mask)[:, :, None]
        normal = jacobian @ jacobian.mT
        damping = 1e-3 * normal.diagonal(dim1=1, dim2=2).mean(1) + 1e-3
        normal = normal + damping[:, None, None] * torch.eye(5)
        step = torch.linalg.solve(normal, jacobian @ residual)[..., 0]
        step = (step[:, 1:] / step[:, :1].clamp(min=0.2)).clamp(-0.1, 0.1)
        size = crop_P4[:, 1::2]
        center = crop_P4[:, ::2] + size * step[:, ::2]
        crop_P4 = torch.stack([center, size * (1 + step[:, 1::2])], 2).flatten(1)
    warped, mask = _warp(whole_PSS, crop_P4)
    inner = -functional.max_pool2d(-mask.view(-1, 1, _S, _S), 5, stride=1, padding=2).flatten(1)
    correlation = _correlate(warped, part_PSS, mask)
    detail = _correlate(_detail(warped), _detail(part_PSS), inner)
    results = torch.stack([correlation, detail], dim=1)
    return results.where((mask.mean(1) >= MIN_OVERLAP)[:, None], torch.tensor(-1.0))


def _warp(images_PSS: Tensor, crop_P4: Tensor) -> tuple[Tensor, Tensor]:
    """Resample a crop of each image. Returns: (P, S, S), and 1 for pixels inside it (P, S * S)."""
    x, y = (crop_P4[:, i, None] + crop_P4[:, i + 1, None] * _GRID for i in (0, 2))
    grid = torch.stack(torch.broadcast_tensors(x[:, None, :], y[:, :, None]), dim=3)
    mask = (grid.abs() <= 1).all(dim=3).flatten(1).float()
    warped = functional.grid_sample(
        images_PSS[:, None], grid, mode="bilinear", padding_mode="border", align_corners=False
    )
    return warped[:, 0], mask


def _center(values: Tensor, mask: Tensor) -> Tensor:
    """Subtract the mean over the mask, and set the rest to 0; pixels are the last dimension."""
    mean = (values * mask).sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)
    return (values - mean) * mask


def _correlate(first_PSS: Tensor, second_PSS: Tensor, mask: Tensor) -> Tensor:
    """Return the correlation (P,) of the pixels in the mask; 0 for a blank image."""
    first, second = (_center(values.flatten(1), mask) for values in (first_PSS, second_PSS))
    norms = first.norm(dim=1) * second.norm(dim=1)
    return (first * second).sum(1) / norms.clamp(min=_S * _S)  # a standard deviation of 1 of 255


def _detail(images_PSS: Tensor) -> Tensor:
    """Return a band-pass filtered image: it lacks noise and smooth gradients.

    The square root weakens strong edges; two horizons or frames alone are no duplicates.
    """
    detail = _SMOOTH @ images_PSS @ _SMOOTH.T - _BLUR @ images_PSS @ _BLUR.T
    return detail.sign() * detail.abs().sqrt()


def _smoothing_matrix(repeats: int) -> Tensor:
    """Return a matrix (S, S) that filters with [1, 2, 1] / 4; edge pixels are repeated."""
    matrix = np.eye(_S, dtype=np.float32)
    for _ in range(repeats):
        matrix = convolve1d(matrix, [0.25, 0.5, 0.25], axis=0, mode="nearest")
    return torch.from_numpy(matrix)


def _crop_matrices(size: float, num_positions: int) -> Tensor:
    """Return matrices (positions, T, S) that average a crop of a row to T pixels."""
    starts = torch.linspace(0, (1 - size) * _S, num_positions)
    edges = starts[:, None] + torch.arange(_T + 1) * (size * _S / _T)
    pixels = torch.arange(_S)
    low, high = edges[:, :-1, None], edges[:, 1:, None]
    covered = (torch.minimum(high, pixels + 1) - torch.maximum(low, pixels)).clamp(min=0)
    return covered / covered.sum(2, keepdim=True)


_GRID = (torch.arange(_S) + 0.5) / _S * 2 - 1
_SMOOTH, _BLUR = _smoothing_matrix(1), _smoothing_matrix(4)
_CROP_MATRICES = [_crop_matrices(size, count) for size, count in _CROP_SIZES]
_CROPS = torch.tensor(
    [
        (x, size, y, size)
        for size, count in _CROP_SIZES
        for y in torch.linspace(size - 1, 1 - size, count).tolist()
        for x in torch.linspace(size - 1, 1 - size, count).tolist()
    ]
)
